"""The arithmetic of decode on plain tensors: one query a row, over contiguous storage or blocks.

Shapes: B rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, S keys, D head size.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlib.kernels import flash_kernel, join

if TYPE_CHECKING:
    from kvlib.caches.view import Pages

PAGE_TILE = 4096  # tokens gathered from blocks at a time


def decode_weights(
    query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One query a row, with its weights: [B, Hq, 1, D] → ([B, Hq, 1, D], [B, Hkv, G, S] float32).

    The group's query heads are the rows of one small product. CPUs are slow at those in half
    precision, and reading the keys as float32 costs less than it saves.
    hidden [B, Hkv or 1, S] bool: slots that must not be seen.
    """
    wide = torch.float32 if query.device.type == "cpu" else query.dtype
    grouped = _group(query, key.shape[1]).to(wide)
    scores = torch.matmul(grouped, key.to(wide).mT).float() * scale  # [B, Hkv, G, S]
    if hidden is not None:
        scores.masked_fill_(hidden[:, :, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights.to(value.dtype), value)
    return out.view(query.shape), weights


def decode(
    query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None
) -> Tensor:
    """One query a row, [B, Hq, 1, D] → [B, Hq, 1, D], by whichever kernel is faster here."""
    if flash_decodes(query.device, query.dtype, query.shape[1] // key.shape[1], query.shape[3]):
        return decode_flash(query, key, value, scale, hidden)
    return decode_weights(query, key, value, scale, hidden)[0]


def decode_flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None
) -> Tensor:
    """The flash kernel with the group's query heads as its queries; K and V are never repeated."""
    grouped = _group(query, key.shape[1])
    if hidden is None:
        return flash_kernel(grouped, key, value, scale, False)[0].reshape(query.shape)
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill_(hidden, -torch.inf)[:, :, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, mask.expand(*grouped.shape[:3], -1), scale=scale
    )
    return out.reshape(query.shape)


def decode_pages(query: Tensor, pages: Pages, scale: float) -> Tensor:
    """One query a row over keys and values in blocks, [B, Hq, 1, D] → [B, Hq, 1, D].

    Rows of like length are gathered together, PAGE_TILE tokens at a time, so that the scratch is
    bounded and stays in the processor's cache. On a GPU the flash-attn package, where it is
    installed and takes blocks of this size, reads the blocks where they are.
    """
    if reads_blocks(query, pages):
        return _flash_attn(query, pages, scale)
    out, space = torch.empty_like(query), page_space(pages)
    order = sorted(range(len(pages.count)), key=lambda b: pages.count[b])
    while order:
        longest = pages.count[order[-1]]
        many = max(1, PAGE_TILE // longest)
        rows, order = order[-many:], order[:-many]
        if len(rows) == 1:
            out[rows] = _decode_row(query[rows], pages, rows, longest, scale, space)
            continue
        key, value = pages.rows(rows, 0, longest, space)
        counts = torch.tensor([pages.count[b] for b in rows], device=query.device)
        hidden = torch.arange(longest, device=query.device) >= counts[:, None, None]
        uneven = pages.count[rows[0]] < longest
        out[rows] = decode(query[rows], key, value, scale, hidden if uneven else None)
    return out


def reads_blocks(query: Tensor, pages: Pages) -> bool:
    """Can flash-attn attend to these blocks? They must be multiples of 256, in half precision."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.device.type == "cuda" and half and pages.key.shape[1] % 256 == 0
    return fits and importlib.util.find_spec("flash_attn") is not None


def _flash_attn(query: Tensor, pages: Pages, scale: float) -> Tensor:
    from flash_attn import flash_attn_with_kvcache

    lengths = torch.tensor(pages.count, dtype=torch.int32, device=query.device)
    out: Tensor = flash_attn_with_kvcache(
        query.transpose(1, 2),  # [B, 1, Hq, D]
        pages.key,
        pages.value,
        cache_seqlens=lengths,
        block_table=pages.table.int(),
        softmax_scale=scale,
    )
    return out.transpose(1, 2)


def page_space(pages: Pages) -> tuple[Tensor, Tensor]:
    """Room for the blocks of PAGE_TILE tokens, or of all: two [blocks, block·Hkv·D]."""
    block = pages.key.shape[1]
    blocks = min(pages.table.numel(), max(1, PAGE_TILE // block) + pages.table.shape[0])
    empty = pages.key.new_empty
    size = pages.key[0].numel()
    return empty(blocks, size), empty(blocks, size)


def _decode_row(
    query: Tensor,
    pages: Pages,
    row: Sequence[int],
    count: int,
    scale: float,
    space: Sequence[Tensor],
) -> Tensor:
    """One row in segments of PAGE_TILE tokens, joined by their log-sum-exps."""
    out, lse = None, None
    block = pages.key.shape[1]
    step = max(block, PAGE_TILE // block * block)
    for first in range(0, count, step):
        key, value = pages.rows(row, first, min(first + step, count), space)
        part = flash_kernel(_group(query, key.shape[1]), key, value, scale, False)
        out, lse = part if out is None or lse is None else join(out, lse, *part)
    assert out is not None
    return out.reshape(query.shape)


@functools.cache
def flash_decodes(device: torch.device, dtype: torch.dtype, group: int, size: int) -> bool:
    """Does the flash kernel decode faster than plain products do? Which one wins differs by CPU."""
    query = torch.ones(1, 4 * group, 1, size, dtype=dtype, device=device)
    stored = torch.ones(1, 4, 2048, size, dtype=dtype, device=device)

    def best(kernel: Callable[..., object]) -> float:
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            kernel(query, stored, stored, 1.0, None)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - start)
        return min(taken)

    return best(decode_flash) < best(decode_weights)


def _group(query: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, 1, D] → [B, Hkv, G, D]."""
    batch, heads, _, size = query.shape
    return query.reshape(batch, kv_heads, heads // kv_heads, size)
