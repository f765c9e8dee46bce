"""The memory that a model and its cache take, as formulas: weights, caches, prefill.

Sizes are bytes. The formulas take Python ints, which stay exact ints, or arrays that broadcast
together, which come back as float64 (exact up to 2**53 bytes). They run without torch.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from kvlib.shapes import Count, Shape, check_choice, check_positive, count

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PREFILLS = ("eager", "chunked", "flash")
BUDGET = 0.3  # of H2O and InfiniGen, in the study that is reproduced
STRATEGIES = ("full", "paged", "h2o", "infinigen", "offload")


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element: 4 for "float32", 2 for "bfloat16" and "float16"."""
    check_choice("dtype", dtype, DTYPE_BYTES)
    return DTYPE_BYTES[dtype]


def _least(a: Count, b: Count) -> Count:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def _most(a: Count, b: Count) -> Count:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def weight_bytes(shape: Shape, dtype: str = "bfloat16") -> int:
    """Bytes of the weights: parameters · b, with b the bytes of one element."""
    return int(shape.held(dtype_bytes(dtype)))


def kv_bytes(
    shape: Shape,
    tokens: npt.ArrayLike,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
    layers: int | None = None,
) -> Count:
    """Bytes of all keys and values: 2 · layers · Hkv · D · b · tokens · batch."""
    depth = shape.layers if layers is None else count("layers", layers)
    token = 2 * shape.kv_heads * shape.head_dim * dtype_bytes(dtype)
    return depth * token * count("tokens", tokens) * count("batch", batch)


def kept_tokens(tokens: npt.ArrayLike, budget: npt.ArrayLike) -> Count:
    """Tokens that a budget keeps, at least 1: ceil(budget · tokens), or min(tokens, budget).

    A float is a share in (0, 1], an int a number of tokens: 1.0 keeps all, 1 keeps one.
    """
    whole, limit = count("tokens", tokens), np.asarray(budget)
    if limit.dtype.kind != "f":
        return _least(whole, count("budget", budget))
    if not ((limit > 0) & (limit <= 1)).all():
        wrong = limit[~((limit > 0) & (limit <= 1))].flat[0]
        raise ValueError(f"a budget as a share must lie in (0, 1], got {wrong:g}")
    return count("kept", np.maximum(1, np.ceil(limit * whole - 1e-9)))  # 0.1 · 30 is 3, not 4


def h2o_bytes(
    shape: Shape,
    tokens: npt.ArrayLike,
    budget: npt.ArrayLike,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
    staging: int = 1,
) -> Count:
    """Bytes of an H2O cache: layers · Hkv · slots · batch · (2 · D · b + 4 + 4).

    slots = kept tokens + `staging` for the token being decoded; each slot of each KV head carries
    a float32 score and an int32 position.
    """
    slots = (kept_tokens(tokens, budget) + staging) * count("batch", batch)
    return shape.layers * shape.kv_heads * slots * (2 * shape.head_dim * dtype_bytes(dtype) + 4 + 4)


def eager_scratch(
    shape: Shape, tokens: npt.ArrayLike, batch: npt.ArrayLike = 1, chunk: int | None = None
) -> Count:
    """Bytes of one layer's materialised attention: batch · Hq · T · S · 8.

    S = tokens, T = min(chunk, tokens): the scores and their softmax, float32 in every dtype.
    """
    keys = count("tokens", tokens)
    queries = keys if chunk is None else _least(keys, count("chunk", chunk))
    return count("batch", batch) * shape.heads * queries * keys * 8


def flash_scratch(
    shape: Shape,
    tokens: npt.ArrayLike,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
    *,
    scored: bool = False,
    threads: int = 0,
) -> Count:
    """Bytes beside the output of flash attention over a whole prompt of T tokens.

    The lse, batch · Hq · T · 4, and the larger of what comes one after the other: the output and
    lse of one KV head's group, batch · G · T · (D · b + 4) where G > 1, with a float32 tile of
    256 queries × 512 keys for each of PyTorch's CPU `threads`; and the column mass, if `scored`.
    """
    queries, rows = count("tokens", tokens), count("batch", batch)
    group = shape.heads // shape.kv_heads
    part = group * (shape.head_dim * dtype_bytes(dtype) + 4) if group > 1 else 0
    tile = _least(queries, 256) * (_least(queries, 512) + 2 + shape.head_dim) * 4
    work = rows * part * queries + threads * tile
    if scored:
        work = _most(work, column_mass_scratch(shape, tokens, batch))
    return rows * shape.heads * queries * 4 + work


def column_mass_scratch(
    shape: Shape,
    tokens: npt.ArrayLike,
    batch: npt.ArrayLike = 1,
    query_tile: int = 768,
    key_tile: int = 1024,
) -> Count:
    """Bytes of the second pass that sums columns: batch · Hkv · S · 4, and one head's work.

    That is a float32 copy of its keys, S · (D + 1) · 4, and of a tile of queries, r · (D + 1) · 4,
    the tile's weights, r · c · 4, and the mask of its queries, r / G · c; with
    r = G · min(query_tile / G, S) rows and c = min(key_tile, S) columns.
    """
    keys, group = count("tokens", tokens), shape.heads // shape.kv_heads
    queries = _least(keys, max(1, count("query_tile", query_tile) // group))
    columns = _least(keys, count("key_tile", key_tile))
    copies = (keys + group * queries) * (shape.head_dim + 1) * 4
    tile = queries * columns * (4 * group + 1)
    return count("batch", batch) * shape.kv_heads * keys * 4 + copies + tile


def prefill_scratch(
    shape: Shape,
    tokens: npt.ArrayLike,
    prefill: str = "flash",
    strategy: str = "full",
    *,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
    budget: npt.ArrayLike = 1.0,
    chunk: int = 512,
    threads: int = 0,
) -> Count:
    """Bytes of one layer's attention beside its cache and output, at their most in a prefill.

    Chunked, H2O evicts after each chunk and attends over what it keeps and the chunk.
    """
    check_choice("prefill", prefill, PREFILLS)
    check_choice("strategy", strategy, STRATEGIES)
    if prefill == "flash":
        scored = strategy == "h2o"
        return flash_scratch(shape, tokens, batch, dtype, scored=scored, threads=threads)
    held = _held(tokens, prefill, strategy, budget, chunk)
    return eager_scratch(shape, held, batch, chunk if prefill == "chunked" else None)


def _width(tokens: npt.ArrayLike, prefill: str, chunk: int) -> Count:
    """Tokens in work at once."""
    whole = count("tokens", tokens)
    return _least(whole, count("chunk", chunk)) if prefill == "chunked" else whole


def _held(
    tokens: npt.ArrayLike, prefill: str, strategy: str, budget: npt.ArrayLike, chunk: int
) -> Count:
    """Tokens of one layer at the peak of a prefill."""
    if (prefill, strategy) != ("chunked", "h2o"):
        return count("tokens", tokens)
    return _least(count("tokens", tokens), kept_tokens(tokens, budget) + count("chunk", chunk))


def layer_prefill_peak(
    shape: Shape,
    tokens: npt.ArrayLike,
    prefill: str = "flash",
    strategy: str = "full",
    *,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
    budget: npt.ArrayLike = 1.0,
    chunk: int = 512,
    threads: int = 0,
) -> Count:
    """Bytes that one layer's attention adds to its inputs: its cache, its output, its scratch.

    A slot of the cache carries an int32 position, of H2O a float32 score, too.
    """
    width = _width(tokens, prefill, chunk)
    slot = 2 * shape.head_dim * dtype_bytes(dtype) + (8 if strategy == "h2o" else 4)
    cache = _held(tokens, prefill, strategy, budget, chunk) * shape.kv_heads * slot
    output = width * shape.heads * shape.head_dim * dtype_bytes(dtype)
    scratch = prefill_scratch(
        shape, tokens, prefill, strategy,
        batch=batch, dtype=dtype, budget=budget, chunk=chunk, threads=threads,
    )  # fmt: skip
    return count("batch", batch) * (cache + output) + scratch


def predict_prefill_peak(
    shape: Shape,
    tokens: npt.ArrayLike,
    prefill: str = "flash",
    strategy: str = "full",
    *,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
    budget: npt.ArrayLike = 1.0,
    chunk: int = 512,
) -> Count:
    """Peak device bytes of a prefill: weights + cache + activations, of all tokens or a chunk."""
    width = _width(tokens, prefill, chunk)
    scratch = prefill_scratch(
        shape, tokens, prefill, strategy, batch=batch, dtype=dtype, budget=budget, chunk=chunk
    )
    cache = _prefill_cache(shape, tokens, strategy, batch, dtype, budget, width)
    return weight_bytes(shape, dtype) + cache + activations(shape, width, scratch, batch, dtype)


def activations(
    shape: Shape,
    tokens: npt.ArrayLike,
    scratch: Count = 0,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
) -> Count:
    """Bytes of the activations of `tokens` tokens in work, with `scratch` bytes of attention.

    Per token and row: residual 2 · hidden, and the larger of attention, 2 · (Hq + Hkv) · D beside
    its scratch, and MLP, 3 · intermediate (2 without a gate), each · b.
    """
    live = count("tokens", tokens) * count("batch", batch) * dtype_bytes(dtype)
    attention = live * 2 * (shape.heads + shape.kv_heads) * shape.head_dim + scratch
    mlp = live * (3 if shape.gated else 2) * shape.intermediate
    return live * 2 * shape.hidden + _most(attention, mlp)


def _prefill_cache(
    shape: Shape,
    tokens: npt.ArrayLike,
    strategy: str,
    batch: npt.ArrayLike,
    dtype: str,
    budget: npt.ArrayLike,
    width: Count,
) -> Count:
    """Device bytes of the cache at the peak of a prefill, `width` tokens at a time.

    H2O evicts layer by layer: the last layer's `width` tokens stand beside what all layers keep.
    What lives on the host passes through the device two layers at a time: one computes, one is
    on its way.
    """
    layer = partial(kv_bytes, shape, batch=batch, dtype=dtype, layers=1)
    if strategy in ("full", "paged"):
        return shape.layers * layer(tokens)
    if strategy in ("infinigen", "offload"):
        return 2 * layer(tokens)
    return layer(width) + h2o_bytes(shape, tokens, budget, batch, dtype)


def longest_prefill(
    shape: Shape,
    capacity: float,
    prefill: str = "flash",
    strategy: str = "full",
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    budget: float | int = 1.0,
    chunk: int = 512,
) -> int:
    """The most tokens whose `predict_prefill_peak` is at most `capacity` bytes; 0 if none fit."""
    check_positive("capacity", capacity)

    peak = partial(
        predict_prefill_peak,
        shape,
        prefill=prefill,
        strategy=strategy,
        batch=batch,
        dtype=dtype,
        budget=budget,
        chunk=chunk,
    )
    low, high = 0, 1
    while peak(high) <= capacity:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= capacity else (low, middle)
    return low
