"""The memory formulas: bytes against hand-made numbers, and against what the kernels allocate."""

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from kvlib import kernels, memory
from kvlib.shapes import SHAPES, Count, Shape

LLAMA = SHAPES["llama-3.1-8b"]
TINY = replace(SHAPES["smollm2-135m"], layers=2, vocab=64)

tokens_ = st.integers(1, 1 << 20)
batches = st.integers(1, 128)
any_shape = st.sampled_from(sorted(SHAPES)).map(SHAPES.__getitem__)
dtypes = st.sampled_from(sorted(memory.DTYPE_BYTES))
prefills = st.sampled_from(memory.PREFILLS)
strategies = st.sampled_from(memory.STRATEGIES)
unhurried = settings(deadline=None)  # other work on the machine may slow a single example


def test_bytes_by_hand() -> None:
    assert memory.kv_bytes(LLAMA, 1) == 131_072
    assert memory.kv_bytes(LLAMA, 1000, batch=3, dtype="float32", layers=2) == 49_152_000
    assert memory.weight_bytes(LLAMA) == 16_060_522_496
    # 10 of 100 tokens and a staging slot, 2 layers, 3 KV heads, 64 wide: keys, values, score, place
    assert memory.h2o_bytes(TINY, 100, 0.1, batch=4) == 4 * 11 * 2 * 3 * (2 * 64 * 2 + 8)
    assert memory.h2o_bytes(TINY, 100, 10, batch=4) == memory.h2o_bytes(TINY, 100, 0.1, batch=4)
    assert memory.eager_scratch(TINY, 2048) == 9 * 2048**2 * 8
    assert memory.eager_scratch(TINY, 2048, chunk=256) == 9 * 256 * 2048 * 8
    lse = 2 * 9 * 2048 * 4
    part = 2 * 3 * 2048 * (64 * 2 + 4)
    assert memory.flash_scratch(TINY, 2048, 2) == lse + part
    tile = 256 * (512 + 2 + 64) * 4
    assert memory.flash_scratch(TINY, 2048, 2, threads=3) == lse + part + 3 * tile
    assert memory.flash_scratch(replace(TINY, kv_heads=9), 2048, 2) == lse
    mass = memory.column_mass_scratch(TINY, 2048, query_tile=96, key_tile=512)
    assert mass == 3 * 2048 * 4 + (2048 + 96) * 65 * 4 + 32 * 512 * (3 * 4 + 1)
    # 100 tokens kept and a chunk of 200: keys, values, score and place; output; scores and softmax
    chunked = {"dtype": "float32", "budget": 0.1, "chunk": 200}
    assert memory.layer_prefill_peak(TINY, 1000, "chunked", "h2o", **chunked) == (
        300 * 3 * (2 * 64 * 4 + 8) + 200 * 9 * 64 * 4 + 9 * 200 * 300 * 8
    )


def allocated(call: Callable[[], Any]) -> int:
    """The most bytes that PyTorch holds at once during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("kv_heads", [3, 9])
@pytest.mark.parametrize("tokens", [1100, 2048])
def test_scratch_is_what_the_kernels_allocate(tokens: int, kv_heads: int) -> None:
    shape = replace(TINY, kv_heads=kv_heads)
    query = torch.randn(1, 9, tokens, 64)
    key, value = torch.randn(2, 1, kv_heads, tokens, 64)
    output, threads = query.numel() * 4, torch.get_num_threads()

    def scored() -> tuple[torch.Tensor, ...]:
        out, lse = kernels.flash_prefill(query, key, value, 0.1)
        return out, kernels.column_mass(query, key, lse, 0.1)

    def eager() -> object:
        position = torch.arange(tokens).expand(1, kv_heads, tokens)
        return kernels.explicit_prefill(query, key, value, 0.1, position, tokens)

    def flash() -> object:
        return kernels.flash_prefill(query, key, value, 0.1)

    for call, formula in (
        (flash, memory.flash_scratch(shape, tokens, 1, "float32", threads=threads)),
        (scored, memory.flash_scratch(shape, tokens, 1, "float32", scored=True, threads=threads)),
        (eager, memory.eager_scratch(shape, tokens)),
    ):
        assert allocated(call) - output == pytest.approx(formula, rel=0.05)


def test_the_formulas_know_the_kernels_tiles() -> None:
    known = inspect.signature(memory.column_mass_scratch).parameters
    assert known["query_tile"].default == kernels.QUERY_TILE
    assert known["key_tile"].default == kernels.KEY_TILE
    for chunk in (None, 100):
        explicit = kernels.explicit_scratch(4, 9, chunk or 700, 700)
        assert memory.eager_scratch(TINY, 700, 4, chunk) == explicit


def test_scalars_give_ints_and_arrays_broadcast() -> None:
    assert type(memory.kv_bytes(LLAMA, np.int64(7))) is int
    assert type(memory.h2o_bytes(LLAMA, 100, np.float64(0.25))) is int
    tokens, batch, budget = (
        np.array([[100], [1000]]),
        np.array([1, 2, 4]),
        np.array([0.1, 0.5, 1.0]),
    )
    table = memory.h2o_bytes(LLAMA, tokens, budget, batch)
    assert isinstance(table, np.ndarray)
    assert table[1, 2] == memory.h2o_bytes(LLAMA, 1000, 1.0, 4)
    for prefill in memory.PREFILLS:
        peaks = memory.predict_prefill_peak(LLAMA, tokens, prefill, "h2o", batch=batch, budget=0.3)
        one = memory.predict_prefill_peak(LLAMA, 1000, prefill, "h2o", batch=4, budget=0.3)
        assert isinstance(peaks, np.ndarray)
        assert peaks[1, 2] == one


def test_kept_tokens() -> None:
    assert [memory.kept_tokens(n, 0.1) for n in (1, 30, 31, 100)] == [1, 3, 4, 10]
    assert [memory.kept_tokens(n, 16) for n in (1, 16, 17)] == [1, 16, 16]
    assert memory.kept_tokens(50, 1.0) == 50
    assert memory.kept_tokens(50, 1) == 1


@unhurried
@given(any_shape, tokens_, tokens_, batches, batches, dtypes)
def test_more_tokens_or_rows_never_take_less(
    shape: Shape, n: int, m: int, b: int, c: int, dtype: str
) -> None:
    (n, m), (b, c) = sorted((n, m)), sorted((b, c))
    formulas: list[Callable[[int, int], Count]] = [
        lambda t, r: memory.kv_bytes(shape, t, r, dtype),
        lambda t, r: memory.h2o_bytes(shape, t, 0.3, r, dtype),
        lambda t, r: memory.h2o_bytes(shape, t, 64, r, dtype),
        lambda t, r: memory.eager_scratch(shape, t, r),
        lambda t, r: memory.eager_scratch(shape, t, r, chunk=512),
        lambda t, r: memory.flash_scratch(shape, t, r, dtype, threads=2),
        lambda t, r: memory.flash_scratch(shape, t, r, dtype, scored=True),
        lambda t, r: memory.layer_prefill_peak(shape, t, "chunked", "h2o", batch=r, budget=0.3),
        lambda t, r: memory.column_mass_scratch(shape, t, r),
    ]
    assert all(formula(n, b) <= formula(m, c) for formula in formulas)


@unhurried
@given(any_shape, tokens_, st.floats(0.01, 1), st.floats(0.01, 1), batches)
def test_h2o_grows_with_its_budget(shape: Shape, n: int, p: float, q: float, batch: int) -> None:
    p, q = sorted((p, q))
    small, large = (memory.h2o_bytes(shape, n, share, batch) for share in (p, q))
    assert small <= large <= memory.h2o_bytes(shape, n, n, batch)


@unhurried
@given(any_shape, st.integers(512, 1 << 20), batches, dtypes)
def test_flash_needs_less_than_eager(shape: Shape, n: int, batch: int, dtype: str) -> None:
    eager = memory.eager_scratch(shape, n, batch)
    assert memory.flash_scratch(shape, n, batch, dtype) <= eager
    assert memory.eager_scratch(shape, n, batch, chunk=512) <= eager


@unhurried
@given(any_shape, st.floats(0.1, 20), prefills, strategies, st.integers(1, 8))
def test_longest_prefill_is_the_last_that_fits(
    shape: Shape, spare: float, prefill: str, strategy: str, batch: int
) -> None:
    capacity = memory.weight_bytes(shape) + spare * 2**30
    n = memory.longest_prefill(shape, capacity, prefill, strategy, batch=batch, budget=0.3)

    def peak(tokens: int) -> Count:
        return memory.predict_prefill_peak(
            shape, tokens, prefill, strategy, batch=batch, budget=0.3
        )

    assert n >= 1
    assert peak(n) <= capacity < peak(n + 1)


def test_what_does_not_fit_and_what_flash_gains() -> None:
    assert memory.longest_prefill(SHAPES["llama-3.1-70b"], 80e9) == 0
    eager, flash = (memory.longest_prefill(LLAMA, 80e9, p) for p in ("eager", "flash"))
    assert eager < 20_000 < 128_000 < flash


BAD_CALLS: list[Callable[[], object]] = [
    lambda: memory.kv_bytes(LLAMA, 0),
    lambda: memory.kv_bytes(LLAMA, -5),
    lambda: memory.kv_bytes(LLAMA, math.nan),
    lambda: memory.kv_bytes(LLAMA, math.inf),
    lambda: memory.kv_bytes(LLAMA, 1.5),
    lambda: memory.kv_bytes(LLAMA, [[4, 0], [1, 2]]),
    lambda: memory.kv_bytes(LLAMA, 8, batch=0),
    lambda: memory.kv_bytes(LLAMA, 8, layers=0),
    lambda: memory.kv_bytes(LLAMA, 8, dtype="fp8"),
    lambda: memory.h2o_bytes(LLAMA, 8, 0),
    lambda: memory.h2o_bytes(LLAMA, 8, 0.0),
    lambda: memory.h2o_bytes(LLAMA, 8, 1.5),
    lambda: memory.h2o_bytes(LLAMA, 8, math.nan),
    lambda: memory.eager_scratch(LLAMA, 8, chunk=0),
    lambda: memory.flash_scratch(LLAMA, 8, dtype="fp8"),
    lambda: memory.column_mass_scratch(LLAMA, 8, query_tile=0),
    lambda: memory.predict_prefill_peak(LLAMA, 8, "lazy"),
    lambda: memory.predict_prefill_peak(LLAMA, 8, strategy="magic"),
    lambda: memory.longest_prefill(LLAMA, 0),
    lambda: memory.longest_prefill(LLAMA, math.nan),
]


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_bad_input_is_refused_in_one_line(number: int) -> None:
    with pytest.raises(ValueError, match="must") as error:
        BAD_CALLS[number]()
    assert "\n" not in str(error.value)
