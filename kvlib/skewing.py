"""Skewing: the rotation that gathers a head's queries in few columns, learned once a model.

InfiniGen scores keys by few of their columns, so those columns should hold most of the query.
From the singular value decomposition of a sample's queries, Q = U S Vᵀ, it takes A = V: as A is
orthogonal, (q A)·(k A) = q·k, and the columns of Q A come in order of their energy.
Source: Lee et al., InfiniGen, OSDI 2024, https://www.usenix.org/conference/osdi24/presentation/lee
It has one A a head; here it is one a KV head, for all query heads that share the head's keys.

Shapes: L layers, B rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, T tokens, D head size.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvlib.attention import NAME
from kvlib.projection import attention_modules, find_hidden, find_rope, project_query

TOLERANCE = 1e-4  # to which a stored matrix must be orthogonal


def skew_of(model: PreTrainedModel, ids: Tensor, folder: Path, digest: str) -> Tensor:
    """The model's skew [L, Hkv, D, D] float32, on its device: column j is the j-th direction.

    model   attached or not; it runs only where the file is not there yet
    ids     the sample [B, T], without pads
    folder  where skew-<digest>.safetensors is kept; delete it to learn from another sample
    digest  names the model's weights

    Raises ValueError for a stored file that is damaged or of another model, which is left as it
    is, and for a model whose attention modules are not known to `project_query`.
    """
    path = folder / f"skew-{digest}.safetensors"
    if not path.exists():
        save(learn_model(model, ids), path, digest)
    return load(path, skew_shape(model), digest).to(model.device)


def learn(query: Tensor, kv_heads: int) -> Tensor:
    """One layer's skew [Hkv, D, D] float32 from queries [B, Hq, T, D], as attention gets them.

    V comes from the eigenvectors of QᵀQ = V S² Vᵀ, which is D×D however many tokens there are.
    """
    grouped = query.double().unflatten(1, (kv_heads, -1))  # [B, Hkv, G, T, D]
    stacked = grouped.transpose(0, 1).flatten(1, 3)
    directions: Tensor = torch.linalg.eigh(stacked.mT @ stacked).eigenvectors
    return directions.flip(-1).float()  # eigh's order is ascending


@torch.no_grad()
def learn_model(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Run the model once over ids [B, T]: every layer's skew, [L, Hkv, D, D] float32 on the CPU."""
    from kvlib.caches import make_cache  # here, so that a strategy can import this module

    _, kv_heads, _, _ = skew_shape(model)
    skews: list[Tensor] = []

    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query = project_query(module, find_hidden(args, kwargs), find_rope(args, kwargs))
        skews.append(learn(query, kv_heads).cpu())

    modules = attention_modules(model)
    hooks = [m.register_forward_pre_hook(observe, with_kwargs=True) for m in modules]
    attached = model.config._attn_implementation == NAME
    try:  # without the output head, whose logits would be the largest tensor
        model.get_decoder()(
            input_ids=ids.to(model.device),
            past_key_values=make_cache("full", model) if attached else None,
            use_cache=attached,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(skews)


def skew_shape(model: PreTrainedModel) -> tuple[int, int, int, int]:
    """(L, Hkv, D, D) of a model."""
    config = model.config.get_text_config()
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, kv_heads, size, size


# -- the file -------------------------------------------------------------------------------


def save(skew: Tensor, path: Path, digest: str) -> None:
    """Write a skew with its model's digest; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".skew-")
    os.close(descriptor)
    temporary = Path(name)
    try:
        save_file({"skew": skew.contiguous()}, temporary, {"digest": digest})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, shape: tuple[int, ...], digest: str) -> Tensor:
    """A stored skew, float32 on the CPU.

    Raises ValueError that says which file to delete where it is cut short or damaged, of another
    model by its digest, of another shape, or not orthogonal.
    """
    advice = f"delete {path} and it is learned anew"
    try:
        with safe_open(path, "pt") as file:
            owner = (file.metadata() or {}).get("digest")
            skew: Tensor = file.get_tensor("skew")
    except SafetensorError as error:
        raise ValueError(f"the skew file is damaged ({error}): {advice}") from error
    if owner != digest:
        raise ValueError(f"this skew file is of another model, {owner} and not {digest}: {advice}")
    if skew.shape != shape or skew.dtype != torch.float32:
        found = f"{skew.dtype} {list(skew.shape)}"
        raise ValueError(f"the skew file holds {found}, the model has {list(shape)}: {advice}")
    if not (skew.mT @ skew - torch.eye(shape[-1])).abs().max() <= TOLERANCE:  # NaN fails too
        raise ValueError(f"the skew file's matrices are not orthogonal: {advice}")
    return skew
