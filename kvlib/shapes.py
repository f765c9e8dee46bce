"""Model shapes, and the memory that a model and its cache take.

Sizes are bytes. The memory formulas take Python ints, which stay exact ints, or arrays that
broadcast together, which come back as float64 (exact up to 2**53 bytes). They run without torch.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Count = int | npt.NDArray[np.float64]
T = TypeVar("T")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MODEL_TYPES = ("llama", "qwen3", "mistral", "opt")
PREFILLS = ("eager", "chunked", "flash")
STRATEGIES = ("full", "paged", "h2o", "infinigen", "offload")


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element: 4 for "float32", 2 for "bfloat16" and "float16"."""
    check_choice("dtype", dtype, DTYPE_BYTES)
    return DTYPE_BYTES[dtype]


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def _count(name: str, value: npt.ArrayLike) -> Count:
    """An int or a float64 array of whole numbers of 1 or more; anything else is refused."""
    array = np.asarray(value, dtype=np.float64)
    bad = ~((array >= 1) & (array == np.floor(array)) & np.isfinite(array))
    if bad.any():
        raise ValueError(f"{name} must be a whole number, 1 or more, got {array[bad].flat[0]:g}")
    return array if array.ndim else int(array)


def _least(a: Count, b: Count) -> Count:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def _most(a: Count, b: Count) -> Count:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only model, enough to count parameters and bytes.

    positions: longest context. tied: the output head shares the embedding's matrix.
    rope_theta: None where positions are learned. The biases are those of the linear layers.
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int
    tied: bool
    rope_theta: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        check_choice("model type", self.model_type, MODEL_TYPES)
        for item in fields(self):
            if item.type == "int":
                _count(item.name, getattr(self, item.name))
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide among {self.kv_heads} KV heads")

    @property
    def learned_positions(self) -> bool:
        """Whether positions are a table of parameters (OPT) instead of rotations."""
        return self.model_type == "opt"

    @property
    def gated(self) -> bool:
        """Whether the MLP has three matrices (gate, up, down) or two (OPT)."""
        return self.model_type != "opt"

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied output head counted once."""
        norm = self.hidden * (2 if self.model_type == "opt" else 1)  # LayerNorm adds a bias
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        if self.learned_positions:
            tables += (self.positions + 2) * self.hidden  # OPT starts counting at 2
        return tables + self.layers * (self._attention + self._mlp + 2 * norm) + norm

    @property
    def _attention(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = queries + 2 * keys + self.hidden if self.attention_bias else 0
        norms = 2 * self.head_dim if self.model_type == "qwen3" else 0
        return 2 * self.hidden * (queries + keys) + bias + norms

    @property
    def _mlp(self) -> int:
        inner = 2 if self.gated else 1
        bias = inner * self.intermediate + self.hidden if self.mlp_bias else 0
        return (inner + 1) * self.hidden * self.intermediate + bias

    @staticmethod
    def from_config(config: Any, name: str = "") -> Shape:
        """Read a transformers config of one of `MODEL_TYPES`; others raise ValueError."""
        check_choice("model type", config.model_type, MODEL_TYPES)
        opt = config.model_type == "opt"
        projected = opt and config.word_embed_proj_dim != config.hidden_size
        if projected or (opt and not config.do_layer_norm_before):
            raise ValueError("OPT is supported with layer norm first and no embedding projection")
        rope = getattr(config, "rope_parameters", None) or {}
        heads = config.num_attention_heads
        bias = bool(opt and config.enable_bias)
        return Shape(
            name=name or config.model_type,
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=config.ffn_dim if opt else config.intermediate_size,
            vocab=config.vocab_size,
            positions=config.max_position_embeddings,
            tied=bool(config.tie_word_embeddings),
            rope_theta=rope.get("rope_theta"),
            attention_bias=bias or bool(getattr(config, "attention_bias", False)),
            mlp_bias=bias or bool(getattr(config, "mlp_bias", False)),
        )


def _load() -> dict[str, Shape]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: Shape(name=name, **row) for name, row in table.items()}


SHAPES = _load()


def find_shape(name: str) -> Shape:
    """A public model's shape by name, such as "llama-3.1-8b"; ValueError offers the nearest."""
    return look_up("shape", SHAPES, name)


def look_up(kind: str, table: Mapping[str, T], name: str) -> T:
    key = name.strip().rstrip("/").rstrip().casefold()
    if key in table:
        return table[key]
    near = difflib.get_close_matches(key, table, n=3, cutoff=0.4) or sorted(table)
    raise ValueError(f"no {kind} is called {name!r}; perhaps {', '.join(near)}")


def weight_bytes(shape: Shape, dtype: str = "bfloat16") -> int:
    """Bytes of the weights: parameters · b, with b the bytes of one element."""
    return shape.parameters * dtype_bytes(dtype)


def kv_bytes(
    shape: Shape,
    tokens: npt.ArrayLike,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
    layers: int | None = None,
) -> Count:
    """Bytes of all keys and values: 2 · layers · Hkv · D · b · tokens · batch."""
    count = shape.layers if layers is None else _count("layers", layers)
    token = 2 * shape.kv_heads * shape.head_dim * dtype_bytes(dtype)
    return count * token * _count("tokens", tokens) * _count("batch", batch)


def kept_tokens(tokens: npt.ArrayLike, budget: npt.ArrayLike) -> Count:
    """Tokens that a budget keeps, at least 1: ceil(budget · tokens), or min(tokens, budget).

    A float is a share in (0, 1], an int a number of tokens: 1.0 keeps all, 1 keeps one.
    """
    count, limit = _count("tokens", tokens), np.asarray(budget)
    if limit.dtype.kind != "f":
        return _least(count, _count("budget", budget))
    if not ((limit > 0) & (limit <= 1)).all():
        wrong = limit[~((limit > 0) & (limit <= 1))].flat[0]
        raise ValueError(f"a budget as a share must lie in (0, 1], got {wrong:g}")
    return _count("kept", np.maximum(1, np.ceil(limit * count - 1e-9)))  # 0.1 · 30 is 3, not 4


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
    slots = (kept_tokens(tokens, budget) + staging) * _count("batch", batch)
    return shape.layers * shape.kv_heads * slots * (2 * shape.head_dim * dtype_bytes(dtype) + 4 + 4)


def eager_scratch(
    shape: Shape,
    tokens: npt.ArrayLike,
    batch: npt.ArrayLike = 1,
    dtype: str = "bfloat16",
    chunk: int | None = None,
) -> Count:
    """Bytes of one layer's materialised attention: batch · Hq · T · S · (b + 4 + cast).

    S = tokens, T = min(chunk, tokens): the scores, their float32 softmax, and where b is not 4
    the copy of that cast back to the dtype.
    """
    keys, b = _count("tokens", tokens), dtype_bytes(dtype)
    queries = keys if chunk is None else _least(keys, _count("chunk", chunk))
    entry = b + 4 + (0 if dtype == "float32" else b)
    return _count("batch", batch) * shape.heads * queries * keys * entry


def flash_scratch(
    shape: Shape,
    tokens: npt.ArrayLike,
    batch: npt.ArrayLike = 1,
    tile: int = 512,
    workers: int = 1,
) -> Count:
    """Bytes beside the output of flash attention: workers · t · (t + D) · 4 + batch · Hq · T · 4.

    t = min(tile, tokens): each worker's float32 tile of scores and of output, then the lse.
    """
    queries = _count("tokens", tokens)
    edge = _least(queries, _count("tile", tile))
    tiles = _count("workers", workers) * edge * (edge + shape.head_dim) * 4
    return tiles + _count("batch", batch) * shape.heads * queries * 4


def column_mass_scratch(
    shape: Shape,
    tokens: npt.ArrayLike,
    batch: npt.ArrayLike = 1,
    tile: int = 128,
    copies: int = 2,
) -> Count:
    """Bytes of the second pass that sums columns: batch · S · 4 · (copies · Hq · t + Hkv).

    t = min(tile, tokens): `copies` float32 buffers [B, Hq, t, S] (scores, weights) and the sums
    [B, Hkv, S].
    """
    keys = _count("tokens", tokens)
    edge = _least(keys, _count("tile", tile))
    rows = _count("copies", copies) * shape.heads * edge + shape.kv_heads
    return _count("batch", batch) * keys * 4 * rows


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
    """Peak device bytes of a prefill: weights + cache + residual + max(attention, MLP).

    Per token that is in work (T = tokens, or `chunk` when chunked): residual 2 · hidden, attention
    2 · (Hq + Hkv) · D plus its scratch, MLP 3 · intermediate (2 without a gate), each · b · batch.
    """
    check_choice("prefill", prefill, PREFILLS)
    check_choice("strategy", strategy, STRATEGIES)
    chunked = prefill == "chunked"
    keys = _count("tokens", tokens)
    width = _least(keys, _count("chunk", chunk)) if chunked else keys
    live = width * _count("batch", batch) * dtype_bytes(dtype)
    if prefill == "flash":
        scratch = flash_scratch(shape, tokens, batch)
        scratch = scratch + (column_mass_scratch(shape, tokens, batch) if strategy == "h2o" else 0)
    else:
        scratch = eager_scratch(shape, tokens, batch, dtype, chunk if chunked else None)
    attention = live * 2 * (shape.heads + shape.kv_heads) * shape.head_dim + scratch
    mlp = live * (3 if shape.gated else 2) * shape.intermediate
    cache = _prefill_cache(shape, tokens, strategy, batch, dtype, budget, chunked)
    return weight_bytes(shape, dtype) + cache + live * 2 * shape.hidden + _most(attention, mlp)


def _prefill_cache(
    shape: Shape,
    tokens: npt.ArrayLike,
    strategy: str,
    batch: npt.ArrayLike,
    dtype: str,
    budget: npt.ArrayLike,
    chunked: bool,
) -> Count:
    """Device bytes of the cache at the peak of a prefill that evicts at the prompt's end.

    H2O evicts layer by layer: the last layer still whole beside what all keep, or, when chunks had
    to wait for the end, all layers whole beside the first one's kept part. What lives on the host
    passes through the device two layers at a time: one computes, one is on its way.
    """
    whole, layer = (kv_bytes(shape, tokens, batch, dtype, n) for n in (None, 1))
    if strategy in ("full", "paged"):
        return whole
    if strategy in ("infinigen", "offload"):
        return 2 * layer
    kept = h2o_bytes(shape, tokens, budget, batch, dtype)
    return whole + kept // shape.layers if chunked else layer + kept


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
