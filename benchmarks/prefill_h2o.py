"""H2O's prefill with flash attention: time and scratch against flash alone, scores against eager.

Everything is a ratio within one run. `python benchmarks/prefill_h2o.py [--tokens 4096 8192]`
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from kvlib.kernels import column_mass, explicit_prefill, flash_prefill
from kvlib.peak import peak_rss

HEADS, KV_HEADS, SIZE = 9, 3, 64  # SmolLM2-135M
SCALE = SIZE**-0.5
BUDGET = 0.2


def inputs(tokens: int, dtype: str) -> tuple[torch.Tensor, ...]:
    """Query [1, 9, T, 64], key and value [1, 3, T, 64]."""
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    kind = getattr(torch, dtype)
    return tuple(torch.randn(1, h, tokens, SIZE, dtype=kind) for h in heads)


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    return flash_prefill(query, key, value, SCALE)


def flash_h2o(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    out, lse = flash_prefill(query, key, value, SCALE)
    return out, lse, column_mass(query, key, lse, SCALE)


def eager_h2o(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    tokens = query.shape[2]
    position = torch.arange(tokens, dtype=torch.int32).expand(1, KV_HEADS, tokens)
    return explicit_prefill(query, key, value, SCALE, position, tokens)


WAYS: dict[str, Callable[..., Any]] = {"flash": flash, "h2o": flash_h2o, "eager": eager_h2o}


def scratch(way: str, tokens: int, dtype: str) -> int:
    """Bytes that one call adds at its peak beyond what it returns; run in a fresh process."""
    torch.set_num_threads(2)
    WAYS[way](*inputs(128, dtype))
    data = inputs(tokens, dtype)
    ctypes.CDLL(None).malloc_trim(0)  # else freed pages are used again, and not counted
    with peak_rss() as grown:
        result = WAYS[way](*data)
    return grown[0] - sum(t.numel() * t.element_size() for t in result)


def times(tokens: int, dtype: str, rounds: int) -> dict[str, float]:
    """Median seconds of flash alone and of H2O's two passes, interleaved."""
    data = inputs(tokens, dtype)
    taken: dict[str, list[float]] = {"flash": [], "h2o": []}
    for _ in tqdm(range(rounds + 1), f"{dtype} {tokens}", leave=False):
        for way, seconds in taken.items():
            start = time.perf_counter()
            WAYS[way](*data)
            seconds.append(time.perf_counter() - start)
    return {way: statistics.median(seconds[1:]) for way, seconds in taken.items()}


def agreement(tokens: int, dtype: str) -> tuple[float, int, float]:
    """Largest relative score difference, differing keeps, and their largest relative gap."""
    data = inputs(tokens, dtype)
    ours, eager = flash_h2o(*data)[2][0].double(), eager_h2o(*data)[1][0].double()
    keep = int(BUDGET * tokens)
    bounds = eager.topk(keep).values[:, -1:]
    kept = [torch.zeros_like(x).scatter(1, x.topk(keep).indices, 1).bool() for x in (ours, eager)]
    differ = kept[0] ^ kept[1]
    gap = ((eager - bounds).abs() / bounds)[differ]
    worst = ((ours - eager).abs() / eager.clamp(min=1)).max().item()
    return worst, int(differ.sum()) // 2, gap.max().item() if differ.any() else 0.0


def report(tokens: int, dtype: str, rounds: int) -> None:
    """Print one dtype's table."""
    taken = times(tokens, dtype, rounds)
    ratio = taken["h2o"] / taken["flash"]
    print(f"{dtype}, {tokens:,} tokens")
    print(f"  time, H2O ÷ flash alone        {ratio:6.2f}   target ≤ 2.0: {met(ratio <= 2)}")
    used = {}
    for way, length in (("h2o", tokens // 2), ("h2o", tokens), ("eager", tokens)):
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            used[way, length] = fresh.apply(scratch, (way, length, dtype))
    full, half = used["h2o", tokens] / 2**20, used["h2o", tokens // 2] / 2**20
    growth = full / half
    print(f"  scratch beyond outputs, MiB    {full:6.1f}   target ≤ 16: {met(full <= 16)}")
    print(f"  scratch when tokens double     {growth:6.2f}   target ≤ 2.2: {met(growth <= 2.2)}")
    print(f"  scratch of eager, MiB          {used['eager', tokens] / 2**20:6.0f}")
    worst, differ, gap = agreement(tokens, dtype)
    print(f"  largest score difference       {worst:.1e} target ≤ 1e-5: {met(worst <= 1e-5)}")
    share = 1 - differ / (KV_HEADS * int(BUDGET * tokens))
    print(f"  keep-set shared, budget {BUDGET}     {share:.4f} {differ} differ")
    print(f"  largest gap of those to the cut {gap:.1e} target ≤ 1e-5 (ties): {met(gap <= 1e-5)}")


def met(yes: bool) -> str:
    return "met" if yes else "NOT met"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(2)
    for kind in ("float32", "bfloat16"):
        for length in options.tokens:
            report(length, kind, options.rounds)
