"""Inter-token latency of running requests while long prompts arrive, with chunks and without.

Some requests generate; at equal distances another one comes with a long text to read. Without
chunks they wait for all of it, with chunks for one at a time. On the bundled model; both get the
same requests, and what counts is the ratio within a round, with a 95 % interval over the rounds.
`python benchmarks/itl.py [--running 4] [--new 160] [--long 3] [--prompt 1500] [--chunk 256]
[--rounds 5] [--strategies full paged]`
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
from tqdm import tqdm

from kvlib.engines.base import Request
from kvlib.engines.local import LocalEngine
from kvlib.intervals import paired_ratio
from kvlib.metrics import percentile
from kvlib.models import Loaded, load
from kvlib.workloads import requests

SHORT = 64  # tokens to read of the requests that run
AFTER = 4  # tokens that a long prompt is answered with


def workload(loaded: Loaded, options: argparse.Namespace, every: float, seed: int) -> list[Request]:
    """The running requests, then the long ones, `every` so many seconds."""
    lengths = [(SHORT, options.new)] * options.running + [(options.prompt, AFTER)] * options.long
    late = [every * (n + 1) for n in range(options.long)]
    return requests(loaded.tokenizer, lengths, [0.0] * options.running + late, seed)


def spread(engine: LocalEngine, loaded: Loaded, options: argparse.Namespace) -> float:
    """Seconds between long prompts with which all come while the others run; warms up as well."""
    alone = workload(loaded, options, 0.0, seed=options.rounds)[: options.running]
    seconds: float = engine.run(alone)[0].e2el / (options.long + 1)
    return seconds


def latencies(engine: LocalEngine, asked: list[Request], running: int) -> dict[str, float]:
    """ITL of the running requests and TTFT of the long ones, in seconds."""
    results = engine.run(asked)
    assert results[0].stamps[-1] > results[-1].arrival, "the last long prompt met no one"
    gaps = [gap for result in results[:running] for gap in result.itl]
    return {
        "ITL p50": percentile(gaps, 50),
        "ITL p99": percentile(gaps, 99),
        "TTFT": statistics.median(result.ttft for result in results[running:]),
    }


def compare(loaded: Loaded, strategy: str, options: argparse.Namespace) -> None:
    """Print one strategy's latencies and their ratios."""
    most, found = options.running + options.long, defaultdict[tuple[str, bool], list[float]](list)
    engine = LocalEngine(loaded.model, strategy, max_batch=most, packed=True)
    every = spread(engine, loaded, options)
    for turn in tqdm(range(options.rounds), f"{strategy}, rounds", leave=False):
        asked = workload(loaded, options, every, seed=turn)
        for whole in (False, True) if turn % 2 else (True, False):
            engine.chunk = options.prompt if whole else options.chunk
            for figure, seconds in latencies(engine, asked, options.running).items():
                found[figure, whole].append(seconds)
    print(f"\n{strategy}: a long prompt every {every:.1f} s; ms, medians of the rounds")
    for figure in dict.fromkeys(figure for figure, _ in found):
        both = [found[figure, which] for which in (False, True)]
        middle = [f"{1e3 * statistics.median(values):7.1f}" for values in both]
        ratio = paired_ratio(both[1], both[0]).text()
        print(f"  {figure:8s} chunks {middle[0]}, whole {middle[1]}, whole ÷ chunks {ratio}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=4)
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--long", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=["full", "paged"])
    settings = parser.parse_args()
    torch.set_num_threads(2)
    bundled = load("smollm2")
    for name in settings.strategies:
        compare(bundled, name, settings)
