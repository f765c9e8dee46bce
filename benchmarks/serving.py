"""Throughput of the local engine against transformers' `generate` on the same requests.

Everything is a ratio within one run, on the bundled model; all requests arrive at once.
`python benchmarks/serving.py [--concurrency 1 4 16] [--prompt 128] [--new 64] [--rounds 2]`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from kvlib.engines.local import LocalEngine
from kvlib.models import load
from kvlib.workloads import arrivals, fixed, requests

STRATEGIES: dict[str, dict[str, Any]] = {"full": {}, "paged": {}}
TARGETS = {1: 1.0}  # of the speed of `generate`, by concurrency; from 4 on MANY
MANY = 1.3


def speeds(
    loaded: Any, concurrency: int, prompt: int, new: int, rounds: int
) -> dict[str, list[float]]:
    """Output tokens per second of each engine in interleaved rounds; the first one warms up."""
    model = loaded.model
    engines: dict[str, Callable[[list[Any]], int]] = {"generate": lambda asked: plain(model, asked)}
    for strategy, knobs in STRATEGIES.items():
        engine = LocalEngine(model, strategy, max_batch=concurrency, **knobs)
        engines[strategy] = lambda asked, e=engine: sum(len(r.tokens) for r in e.run(asked))
    reached: dict[str, list[float]] = {name: [] for name in engines}
    for turn in tqdm(range(rounds + 1), f"concurrency {concurrency}", leave=False):
        shape = fixed(concurrency, prompt, new if turn else 4)
        when = arrivals(concurrency, "together", seed=turn)
        asked = requests(loaded.tokenizer, shape, when, seed=turn)
        for name, run in engines.items():
            start = time.perf_counter()
            tokens = run(asked)
            reached[name].append(tokens / (time.perf_counter() - start))
    return {name: values[1:] for name, values in reached.items()}


@torch.inference_mode()
def plain(model: Any, asked: list[Any]) -> int:
    """All requests as one batch of `generate`; the number of tokens."""
    ids = torch.tensor([request.prompt for request in asked])
    new = asked[0].max_new_tokens
    out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return int(out[:, ids.shape[1] :].numel())


def report(kind: str, options: argparse.Namespace) -> None:
    """Print one dtype's table."""
    loaded = load("smollm2", kind)
    print(f"\n{kind}, {options.prompt} tokens in, {options.new} out")
    for concurrency in options.concurrency:
        reached = speeds(loaded, concurrency, options.prompt, options.new, options.rounds)
        middle = {name: statistics.median(values) for name, values in reached.items()}
        shown = ", ".join(f"{name} {speed:.0f}" for name, speed in middle.items())
        print(f"  concurrency {concurrency:3d}: {shown} tokens/s")
        target = TARGETS.get(concurrency, MANY)
        for name in STRATEGIES:
            ratio = middle[name] / middle["generate"]
            verdict = "met" if ratio >= target else "NOT met"
            print(f"    {name + ' ÷ generate':18s} {ratio:5.2f}  target ≥ {target}: {verdict}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    settings = parser.parse_args()
    torch.set_num_threads(2)
    for dtype in ("float32", "bfloat16"):
        report(dtype, settings)
