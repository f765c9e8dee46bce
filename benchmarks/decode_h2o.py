"""Decode with H2O at a long context against the full cache and transformers' DynamicCache.

Everything is a ratio within one run. `python benchmarks/decode_h2o.py [--context 4096]`
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import prefill, repeated, steps
from torch import nn
from tqdm import tqdm
from transformers import DynamicCache

from kvlib.attachment import attach
from kvlib.attention import Binding, attention_forward
from kvlib.caches import KVCache, make_cache
from kvlib.hardware import Machine
from kvlib.models import load

BATCH, BUDGET, CHUNK = 4, 0.2, 512


def fill(model: Any, cache: Any, ids: torch.Tensor) -> Any:
    """A cache of BATCH rows that cost one row's prefill."""
    prefill(model, cache, ids, CHUNK)
    return repeated(cache, BATCH)


def attention_step(model: Any, cache: KVCache) -> float:
    """Seconds that one step spends in attention and cache, over all layers, with random inputs."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    size, kind = model.config.head_dim, next(model.parameters()).dtype
    query = torch.randn(BATCH, heads, 1, size).to(kind)
    key = torch.randn(BATCH, kv_heads, 1, size).to(kind)
    module: Any = nn.Module()
    module.kv_binding = Binding(cache)
    cache.advance(BATCH, 1, query.device)
    start = time.perf_counter()
    for index in range(len(cache.layers)):
        module.layer_idx = index
        stored = cache.update(key, key, index)
        attention_forward(module, query, *stored, None, size**-0.5)
    return time.perf_counter() - start


def compare(model: Any, context: int, rounds: int) -> dict[str, list[float]]:
    """Step times of each strategy, in interleaved rounds, and of full's attention alone."""
    ids = torch.randint(100, 40000, (1, context), generator=torch.Generator().manual_seed(0))
    dynamic = fill(model, DynamicCache(), ids)
    with attach(model):
        full = fill(model, make_cache("full", model), ids)
        h2o = fill(model, make_cache("h2o", model, budget=BUDGET), ids)
    kernels = full.fork(range(BATCH))  # attention alone runs on a copy: full stays as it is
    kept_bytes(model, h2o, context)
    taken: dict[str, list[float]] = {"full": [], "h2o": [], "dynamic": [], "attention": []}
    for _ in tqdm(range(rounds), "rounds", leave=False):
        taken["dynamic"] += steps(model, dynamic, BATCH, 4)
        with attach(model):
            taken["full"] += steps(model, full, BATCH, 4)
            taken["h2o"] += steps(model, h2o, BATCH, 4)
            taken["attention"] += [attention_step(model, kernels) for _ in range(3)]
    return taken


def kept_bytes(model: Any, h2o: KVCache, context: int) -> None:
    """Print H2O's KV bytes just after the prompt against those of the prompt's tokens."""
    config, kind = model.config, next(model.parameters()).dtype
    token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    slots = h2o.nbytes()["kv"] / (token * BATCH * kind.itemsize)
    spare = slots - math.ceil(BUDGET * context - 1e-9)
    print(f"  KV bytes of H2O ÷ the prompt's  {slots / context:.4f}")
    line("KV slots beyond the budget", spare, "0 to 1", lambda x: 0 <= x <= 1)


def report(kind: str, context: int, rounds: int, copy: float) -> None:
    """Print one dtype's table."""
    model = load("smollm2", kind).model
    print(f"{kind}, context {context:,}, batch {BATCH}, budget {BUDGET}")
    taken = compare(model, context, rounds)
    middle = {name: statistics.median(values) for name, values in taken.items()}
    print(*(f"  {n:9s} {1e3 * s:8.1f} ms a step" for n, s in middle.items()), sep="\n")
    goal = middle["full"] - 0.65 * middle["attention"]
    line("TPOT of H2O ÷ its target", middle["h2o"] / goal, "≤ 1.05", lambda x: x <= 1.05)
    line(
        "full's speed ÷ DynamicCache's", middle["dynamic"] / middle["full"], "≥ 1", lambda x: x >= 1
    )
    config = model.config
    read = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    rate = read * BATCH * context * getattr(torch, kind).itemsize / middle["attention"]
    print(f"  full's attention reads {rate / 1e9:.1f} GB/s; a copy moves {copy / 1e9:.1f} GB/s")


def line(name: str, value: float, target: str, test: Callable[[float], bool]) -> None:
    print(f"  {name:31s} {value:6.2f}  target {target}: {'met' if test(value) else 'NOT met'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(2)
    bandwidth = Machine.measure(1.0).bandwidth
    with torch.inference_mode():
        for dtype in ("float32", "bfloat16"):
            report(dtype, options.context, options.rounds, bandwidth)
