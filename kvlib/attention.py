"""Attention as the caches need it: exact, causal by true positions, with the column mass.

The *column mass* of a key is the attention that it receives: the sum of its column of the
softmax matrix over all queries, and over the query heads of its KV head's group. H2O's scores
are running sums of it. It does not need the matrix: with the log-sum-exp of each row, which a
flash kernel returns, any tile of the matrix can be rebuilt and summed.

Shapes: B rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from kvlib.caches.base import KVLayer
    from kvlib.caches.cache import KVCache

NAME = "kvlib"  # under which transformers knows this attention and its mask
QUERY_TILE = 768  # rows of a rebuilt tile: queries × heads of a group
KEY_TILE = 1024
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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lengths = layer.timeline.lengths
    if query.shape[2] == 1 and min(lengths) == 1:
        out, mass = decode(layer, query, key, value, scale, sliding_window)
    else:
        out, mass = prefill(layer, query, key, value, scale, sliding_window)
    layer.observe(None if mass is None else mass.detach())
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


# -- decode: one query a row ----------------------------------------------------------------


def decode(
    layer: KVLayer, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """One new token a row: query [B, Hq, 1, D] → output [B, Hq, 1, D], mass [B, Hkv, S] or None.

    The group's query heads are columns of one small product with K, in K's own layout.
    """
    batch, heads, _, size = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, size)
    scores = torch.matmul(key, grouped.transpose(2, 3))  # [B, Hkv, S, G]
    scores = scores.transpose(2, 3).to(torch.float32, memory_format=torch.contiguous_format)
    scores *= scale
    hidden = hidden_slots(layer, window)
    if hidden is not None:
        scores.masked_fill_(hidden[:, :, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1)  # [B, Hkv, G, S]
    out = torch.matmul(weights.to(value.dtype), value)
    return out.view(batch, heads, 1, size), weights.sum(2) if layer.wants_mass else None


def hidden_slots(layer: KVLayer, window: int | None) -> Tensor | None:
    """Slots that a row's newest token may not see, [B, Hkv or 1, S] bool; None if all are seen."""
    hidden = None if layer.is_uniform else layer.empties()
    if window is not None and max(layer.timeline.seen) > window:
        newest = layer.per_row([s - 1 for s in layer.timeline.seen])
        outside = layer.positions <= newest - window
        hidden = outside if hidden is None else outside | hidden
    return hidden


# -- prefill: many queries a row --------------------------------------------------------------


def prefill(
    layer: KVLayer, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """T new columns a row: query [B, Hq, T, D] → output [B, Hq, T, D], mass [B, Hkv, S] or None.

    Rows of unequal length are done one by one over their real tokens, so pads cost nothing.
    """
    tokens, lengths = query.shape[2], layer.timeline.lengths
    if layer.is_uniform and min(lengths) == tokens:
        return attend(layer, slice(None), query, key, value, scale, window)
    out = torch.zeros_like(query)
    mass = query.new_zeros(key.shape[:3], dtype=torch.float32) if layer.wants_mass else None
    for b, (new, stored) in enumerate(zip(lengths, layer.count, strict=True)):
        if not new:
            continue
        row, first = slice(b, b + 1), tokens - new
        out[row, :, first:], row_mass = attend(
            layer, row, query[row, :, first:], key[row, :, :stored], value[row, :, :stored],
            scale, window,
        )  # fmt: skip
        if mass is not None and row_mass is not None:
            mass[row, :, :stored] = row_mass
    return out, mass


def attend(
    layer: KVLayer,
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
        out, lse = flash_prefill(query, key, value, scale)
        mass = column_mass(query, key, lse, scale) if layer.wants_mass else None
        return out, mass
    tile = tokens if layer.kernel == "eager" else WINDOW_TILE
    position = layer.positions[rows, :, :stored]
    scratch = explicit_scratch(query.shape[0], query.shape[1], min(tile, tokens), stored)
    with layer.tiers.device.borrow(scratch):
        return explicit_prefill(query, key, value, scale, position, tile, window)


def explicit_scratch(batch: int, heads: int, tile: int, stored: int) -> int:
    """Bytes of the scores and their softmax, both float32, that `explicit_prefill` holds."""
    return 2 * 4 * batch * heads * tile * stored


def explicit_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    position: Tensor,
    tile: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with `tile` rows of the matrix materialised at a time; always with the mass.

    position [B, Hkv, S]: true position of each key; the queries are the last T of them.
    tile = T is what the published H2O and InfiniGen do.
    """
    batch, heads, tokens, size = query.shape
    kv_heads, stored = key.shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, tokens, size)
    out = torch.empty_like(grouped)
    mass = query.new_zeros((batch, kv_heads, stored), dtype=torch.float32)
    past = stored - tokens
    for part in _tiles(tokens, tile):
        scores = torch.matmul(grouped[:, :, :, part].float(), key[:, :, None].float().mT)
        scores *= scale  # [B, Hkv, G, t, S]
        order = torch.arange(tokens, device=query.device)
        scores[..., past:].masked_fill_(order > order[part, None], -torch.inf)
        if window is not None:
            oldest = position[:, :, past:][:, :, part, None] - window
            scores.masked_fill_((position[:, :, None] <= oldest)[:, :, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        del scores
        mass += weights.sum(dim=(2, 3))
        out[:, :, :, part] = torch.matmul(weights.to(value.dtype), value[:, :, None])
    return out.view(batch, heads, tokens, size), mass


def flash_prefill(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of the last T of S tokens: ([B, Hq, T, D], lse [B, Hq, T]).

    The keys before the queries are attended in a pass of their own, which needs no mask
    whatever their order; the two passes are joined by their log-sum-exps.
    """
    past = key.shape[2] - query.shape[2]
    out, lse = flash(query, key[:, :, past:], value[:, :, past:], scale, causal=True)
    if not past:
        return out, lse
    before, lse_before = flash(query, key[:, :, :past], value[:, :, :past], scale, causal=False)
    total = torch.logaddexp(lse, lse_before)
    out = out * (lse - total).exp()[..., None] + before * (lse_before - total).exp()[..., None]
    return out.to(query.dtype), total


def flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's flash kernel with its log-sum-exp: ([B, Hq, T, D], lse float32 [B, Hq, T]).

    Each KV head is broadcast over its group, never repeated in memory.
    """
    batch, heads, tokens, size = query.shape
    group = heads // key.shape[1]
    if group == 1:
        return _flash_kernel(query, key, value, scale, causal)
    out = query.new_empty(batch, tokens, heads, size).transpose(1, 2)  # as models want it
    lse = query.new_empty(batch, heads, tokens, dtype=torch.float32)
    for head in range(key.shape[1]):
        part = slice(head * group, (head + 1) * group)
        keys, values = (t[:, head : head + 1].expand(-1, group, -1, -1) for t in (key, value))
        out[:, part], lse[:, part] = _flash_kernel(query[:, part], keys, values, scale, causal)
    return out, lse


def _flash_kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, lse
    if query.dtype == torch.float32:  # CUDA's flash kernel takes half precision only
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : query.shape[2]]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, lse


def column_mass(query: Tensor, key: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Attention that each key receives from the T newest tokens, [B, Hkv, S] float32.

    Rebuilds exp(q·k·scale − lse) tile by tile in float32: O(tile) memory, no matrix.
    query [B, Hq, T, D], key [B, Hkv, S, D], lse [B, Hq, T].
    """
    batch, heads, tokens, size = query.shape
    kv_heads, stored = key.shape[1:3]
    group, past = heads // kv_heads, stored - tokens
    queries = query.reshape(batch * kv_heads, group, tokens, size)
    keys = key.reshape(batch * kv_heads, stored, size)
    lses = lse.reshape(batch * kv_heads, group, tokens)
    mass = query.new_zeros((batch * kv_heads, stored), dtype=torch.float32)
    for head in range(batch * kv_heads):
        wide = _with_column(keys[head].float(), torch.ones((), device=key.device))  # [S, D + 1]
        for rows in _tiles(tokens, max(1, QUERY_TILE // group)):
            scaled = queries[head, :, rows].float() * scale
            tile = _with_column(scaled, -lses[head, :, rows]).flatten(0, 1)  # [G·t, D + 1]
            for columns in _tiles(past + rows.stop, KEY_TILE):
                weights = torch.mm(tile, wide[columns].T).exp_()  # exp(q·k·scale − lse)
                if columns.stop > past + rows.start + 1:
                    _hide_future(weights, rows, columns, past)
                mass[head, columns] += weights.sum(0)
    return mass.view(batch, kv_heads, stored)


def _with_column(vectors: Tensor, column: Tensor) -> Tensor:
    """[…, D] → […, D + 1]: one more component, so that a product with it adds the column."""
    return torch.cat([vectors, column.expand(vectors.shape[:-1])[..., None]], dim=-1)


def _tiles(length: int, size: int) -> Iterator[slice]:
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def _hide_future(weights: Tensor, rows: slice, columns: slice, past: int) -> None:
    """Zero the entries of keys newer than their query; weights [G·t, columns]."""
    asking = torch.arange(past + rows.start, past + rows.stop, device=weights.device)
    asked = torch.arange(columns.start, columns.stop, device=weights.device)
    future = asked > asking[:, None]
    weights.view(-1, *future.shape).masked_fill_(future, 0)
