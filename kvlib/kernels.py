"""The arithmetic of attention on plain tensors: prefill, and the column mass.

The *column mass* of a key is the attention that it receives: the sum of its column of the
softmax matrix over all queries, and over the query heads of its KV head's group. H2O's scores
are running sums of it. It does not need the matrix: with the log-sum-exp of each row, which a
flash kernel returns, any tile of the matrix can be rebuilt and summed.

Shapes: B rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, T queries, S keys, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

QUERY_TILE = 768  # rows of a rebuilt tile: queries × heads of a group
KEY_TILE = 1024


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
    return join(out, lse, before, lse_before)


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: outputs [..., D], log-sum-exps [...]."""
    total = torch.logaddexp(lse, other_lse)
    out = out * (lse - total).exp()[..., None] + other * (other_lse - total).exp()[..., None]
    return out.to(other.dtype), total


def flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's flash kernel with its log-sum-exp: ([B, Hq, T, D], lse float32 [B, Hq, T]).

    Each KV head is broadcast over its group, never repeated in memory.
    """
    batch, heads, tokens, size = query.shape
    group = heads // key.shape[1]
    if group == 1:
        return flash_kernel(query, key, value, scale, causal)
    out = query.new_empty(batch, tokens, heads, size).transpose(1, 2)  # as models want it
    lse = query.new_empty(batch, heads, tokens, dtype=torch.float32)
    for head in range(key.shape[1]):
        part = slice(head * group, (head + 1) * group)
        keys, values = (t[:, head : head + 1].expand(-1, group, -1, -1) for t in (key, value))
        out[:, part], lse[:, part] = flash_kernel(query[:, part], keys, values, scale, causal)
    return out, lse


def flash_kernel(
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


@torch.no_grad()
def column_mass(query: Tensor, key: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Attention that each key receives from the T newest tokens, [B, Hkv, S] float32.

    Rebuilds exp(q·k·scale − lse) tile by tile in float32: O(tile) memory, no matrix. The −lse is
    one more column of the product.
    query [B, Hq, T, D], key [B, Hkv, S, D], lse [B, Hq, T].
    """
    batch, heads, tokens, size = query.shape
    kv_heads, stored = key.shape[1:3]
    group, past = heads // kv_heads, stored - tokens
    tile = max(1, QUERY_TILE // group)
    mass = query.new_zeros((batch, kv_heads, stored), dtype=torch.float32)
    wide = mass.new_ones((stored, size + 1))
    asking = mass.new_empty((group, min(tile, tokens), size + 1))
    space = mass.new_empty(asking[..., 0].numel() * min(KEY_TILE, stored))
    for b, head in itertools.product(range(batch), range(kv_heads)):
        wide[:, :size] = key[b, head]
        part = slice(head * group, (head + 1) * group)
        for rows in _tiles(tokens, tile):
            queries = asking[:, : rows.stop - rows.start]
            torch.mul(query[b, part, rows], scale, out=queries[..., :size])
            torch.neg(lse[b, part, rows], out=queries[..., size])
            flat = queries.reshape(-1, size + 1)  # [G·t, D + 1]
            for columns in _tiles(past + rows.stop, KEY_TILE):
                keys = wide[columns]
                weights = space[: len(flat) * len(keys)].view(len(flat), len(keys))
                torch.mm(flat, keys.T, out=weights).exp_()  # exp(q·k·scale − lse)
                if columns.stop > past + rows.start + 1:
                    _hide_future(weights, rows, columns, past)
                mass[b, head, columns] += weights.sum(0)
    return mass


def _tiles(length: int, size: int) -> Iterator[slice]:
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def _hide_future(weights: Tensor, rows: slice, columns: slice, past: int) -> None:
    """Zero the entries of keys newer than their query; weights [G·t, columns]."""
    asking = torch.arange(past + rows.start, past + rows.stop, device=weights.device)
    asked = torch.arange(columns.start, columns.stop, device=weights.device)
    future = asked > asking[:, None]
    weights.view(-1, *future.shape).masked_fill_(future, 0)
