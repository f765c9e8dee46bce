"""The attention and mask functions registered with transformers.

They are exact and causal by the true positions that the cache layer keeps; the arithmetic is in
`kernels` and `decode_kernels`.
Shapes: B rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, T queries, S keys, D size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlib import decode_kernels, kernels
from kvlib.caches.view import Pages

if TYPE_CHECKING:
    from kvlib.caches.base import KVLayer
    from kvlib.caches.cache import KVCache
    from kvlib.caches.view import View

NAME = "kvlib"  # under which transformers knows this attention and its mask
WINDOW_TILE = 256  # queries at a time where a sliding window rules out the flash kernel

# Keyword arguments of attention modules that ask for nothing when they have these values.
IGNORED = frozenset({"position_ids", "position_embeddings", "use_cache", "cache_position"})
NEUTRAL: tuple[object, ...] = (None, False)


@dataclass
class Binding:
    """Ties an attached model's attention modules to the cache of the current forward."""

    cache: KVCache | None = None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: query [B, Hq, T, D] → ([B, T, Hq, D], None).

    Causality and padding come from the cache's true positions; `attention_mask` is not used.
    Raises ValueError for any extra (sinks, softcap, …) that it does not implement.
    """
    refuse_extras(extras, dropout)
    layer = bound_layer(module)
    assert layer.view is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    one = query.shape[2] == 1 and min(layer.timeline.lengths) == 1
    way = decode if one else prefill
    layer.window = sliding_window
    out, mass = way(layer, layer.view, query, key, value, scale, sliding_window)
    layer.conclude(query.detach(), scale, None if mass is None else mass.detach())
    return out.transpose(1, 2), None


def mask_untouched(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """The mask function registered with transformers: the 2D padding mask as it came."""
    return attention_mask


def refuse_extras(extras: dict[str, Any], dropout: float) -> None:
    """ValueError that names what the model asks of attention and kvlib does not do."""
    asked = [k for k, v in extras.items() if k not in IGNORED and not _is_neutral(v)]
    if dropout:
        asked.append("dropout")
    if asked:
        raise ValueError(
            f"this model's attention uses {', '.join(sorted(asked))}, which kvlib does not "
            "implement; its results would be wrong"
        )


def _is_neutral(value: object) -> bool:
    return any(value is neutral for neutral in NEUTRAL)


def bound_layer(module: nn.Module) -> KVLayer:
    """The cache layer that belongs to this attention module in the current forward."""
    binding = getattr(module, "kv_binding", None)
    if binding is None:
        raise RuntimeError(
            "this model is not attached, but shares its config with one that is: "
            "attach it too, or load it separately"
        )
    if binding.cache is None:
        raise ValueError(
            "an attached model needs a kvlib cache: pass past_key_values=kvlib.make_cache(…)"
        )
    layer: KVLayer = binding.cache.layers[module.layer_idx]
    return layer


def decode(
    layer: KVLayer,
    view: View,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """One new token a row: query [B, Hq, 1, D] → output [B, Hq, 1, D], mass [B, Hkv, S] or None."""
    if isinstance(view, Pages):
        if window is None or max(layer.timeline.seen) <= window:
            return decode_kernels.decode_pages(query, view, scale), None
        view = view.gathered()
        key, value = view.key, view.value
    hidden = hidden_slots(layer, view, window)
    if not layer.wants_mass:
        return decode_kernels.decode(query, key, value, scale, hidden), None
    out, weights = decode_kernels.decode_weights(query, key, value, scale, hidden)
    return out, weights.sum(2)


def hidden_slots(layer: KVLayer, view: View, window: int | None) -> Tensor | None:
    """Slots that a row's newest token may not see, [B, Hkv or 1, S] bool; None if all are seen."""
    hidden = None if view.is_uniform else view.empties()
    if window is not None and max(layer.timeline.seen) > window:
        newest = layer.per_row([s - 1 for s in layer.timeline.seen])
        outside = view.position <= newest - window
        hidden = outside if hidden is None else outside | hidden
    return hidden


def prefill(
    layer: KVLayer,
    view: View,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """T new columns a row: query [B, Hq, T, D] → output [B, Hq, T, D], mass [B, Hkv, S] or None.

    Rows of unequal length are done one by one over their real tokens, so pads cost nothing.
    """
    tokens, lengths = query.shape[2], layer.timeline.lengths
    if view.is_uniform and min(lengths) == tokens:
        return attend(layer, view, slice(None), query, key, value, scale, window)
    out = torch.zeros_like(query)
    mass = query.new_zeros(key.shape[:3], dtype=torch.float32) if layer.wants_mass else None
    for b, (new, stored) in enumerate(zip(lengths, view.count, strict=True)):
        if not new:
            continue
        row, first = slice(b, b + 1), tokens - new
        out[row, :, first:], row_mass = attend(
            layer, view, row, query[row, :, first:], key[row, :, :stored], value[row, :, :stored],
            scale, window,
        )  # fmt: skip
        if mass is not None and row_mass is not None:
            mass[row, :, :stored] = row_mass
    return out, mass


def attend(
    layer: KVLayer,
    view: View,
    rows: slice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Rows without pads: the T queries are the newest of the S stored tokens, slots S-T … S-1."""
    tokens, stored = query.shape[2], key.shape[2]
    windowed = window is not None and max(layer.timeline.seen[rows]) > window
    if layer.kernel == "flash" and not windowed:
        out, lse = kernels.flash_prefill(query, key, value, scale)
        mass = kernels.column_mass(query, key, lse, scale) if layer.wants_mass else None
        return out, mass
    tile = tokens if layer.kernel == "eager" else WINDOW_TILE
    position = view.position[rows, :, :stored]
    scratch = kernels.explicit_scratch(query.shape[0], query.shape[1], min(tile, tokens), stored)
    with layer.tiers.device.borrow(scratch):
        return kernels.explicit_prefill(query, key, value, scale, position, tile, window)
