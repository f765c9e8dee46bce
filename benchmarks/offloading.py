"""InfiniGen and offload over an emulated link against the full cache, at a long context.

Everything is a ratio within one run, in float32 on the bundled model. Two points are emulated:
an H100 on PCI Express 5 and a GH200 on NVLink-C2C, each serving Llama-3.1-8B at the same context
and batch. `python benchmarks/offloading.py [--context 4096] [--batch 4] [--rounds 5]`
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from typing import Any

import torch
from common import prefill, steps
from tqdm import tqdm

from kvlib.attachment import attach
from kvlib.caches import KVCache, make_cache
from kvlib.emulation import bandwidth_for, target_ratios
from kvlib.hardware import MACHINES
from kvlib.link import Link, Move
from kvlib.models import load
from kvlib.shapes import SHAPES

CAP, SKIP, CHUNK, STEPS = 0.2, 2, 512, 4
REAL = "real"  # on a CPU nothing moves: the strategy's own work alone
POINTS = {"H100 + PCIe 5": "h100-sxm", "GH200 + NVLink-C2C": "gh200"}
KNOBS: dict[str, dict[str, Any]] = {
    "full": {},
    "offload": {},
    "infinigen": {"alpha": math.inf, "cap": CAP, "skip_layers": SKIP},
}


def filled(model: Any, strategy: str, context: int, batch: int) -> KVCache:
    """A cache of `batch` equal rows of random tokens; they cost one row's prefill."""
    ids = torch.randint(100, 40000, (1, context), generator=torch.Generator().manual_seed(0))
    cache = make_cache(strategy, model, **KNOBS[strategy])
    prefill(model, cache, ids, CHUNK)
    return cache.fork([0] * batch)


def linked_steps(model: Any, cache: KVCache, link: Link, count: int = STEPS) -> list[float]:
    """Seconds of `count` decode steps over a link; the first one, which finds it idle, is dropped.

    The trace is that of the others.
    """
    cache.tiers.link = link
    return steps(model, cache, len(cache.timeline.seen), count, warm=lambda: link.trace.clear())


def compare(model: Any, context: int, batch: int, rounds: int) -> None:
    """Interleaved rounds of every strategy over every link, then the table."""
    taken: dict[tuple[str, str], list[float]] = {}
    moves: dict[str, list[list[Move]]] = {name: [] for name in POINTS}  # a list a run
    with torch.inference_mode(), attach(model):
        caches = {s: filled(model, s, context, batch) for s in tqdm(KNOBS, "prefill", leave=False)}
        links = emulated(model, caches["full"], context, batch)
        runs = [(s, name) for s in KNOBS for name in links if s != "full" or name == REAL]
        for strategy, name in tqdm(runs * rounds, "rounds", leave=False):
            cache, link = caches[strategy], links[name]
            link.reset()
            taken.setdefault((strategy, name), []).extend(linked_steps(model, cache, link))
            if strategy == "infinigen" and name != REAL:
                check_bytes(cache, link)
                moves[name].append(list(link.trace))
    middle = {run: statistics.median(seconds) for run, seconds in taken.items()}
    report(middle, links, moves, len(caches["full"].layers))


def emulated(model: Any, full: KVCache, context: int, batch: int) -> dict[str, Link]:
    """The links by name; each emulated one has its target machine's first ratio."""
    resident = statistics.median(linked_steps(model, full, Link.real(), 8))
    kv, links = full.nbytes()["kv"], {REAL: Link.real()}
    for name, machine in POINTS.items():
        target = target_ratios(MACHINES[machine], SHAPES["llama-3.1-8b"], context, batch, CAP)
        links[name] = Link.emulated(bandwidth_for(target.rho1, kv, resident))
    return links


def check_bytes(cache: KVCache, link: Link) -> None:
    """Every move is as large as predicted: whole on the first layers, the cap on the others."""
    heads, size = cache.layers[0].shape
    rows, depth = len(cache.timeline.seen), len(cache.layers)
    token = 2 * heads * size * cache.layers[0].dtype.itemsize * rows
    for place, move in enumerate(link.trace):
        stored = cache.timeline.seen[0] - STEPS + place // depth
        late = stored + (move.layer == 0)  # layer 0 looks ahead to the next step
        tokens = late if move.layer < SKIP else math.floor(CAP * stored + 1e-9)
        assert move.nbytes == tokens * token, (move, tokens * token)


def check_bandwidth(link: Link) -> None:
    """Print what an emulated link really delivers, beside what was asked."""
    data = torch.zeros(int(link.bandwidth / 200))  # 20 ms each
    start = time.perf_counter()
    for _ in range(10):
        link.fetch([data], data.device, 0).wait()
    reached = 10 * data.nbytes / (time.perf_counter() - start)
    error = abs(reached / link.bandwidth - 1)
    line("bandwidth's error", error, 0.1)


def report(
    middle: dict[tuple[str, str], float],
    links: dict[str, Link],
    moves: dict[str, list[list[Move]]],
    depth: int,
) -> None:
    """Print what was reached at each point."""
    full, alone = middle["full", REAL], middle["infinigen", REAL]
    print(f"\nfull: {1e3 * full:.0f} ms a step; infinigen by a link that costs nothing: "
          f"{alone / full:.2f}×")  # fmt: skip
    print("bytes of every transfer as predicted: yes (anything else is an error)")
    for name in POINTS:
        ours, whole = middle["infinigen", name], middle["offload", name]
        every = list(itertools.chain(*moves[name]))
        wire = sum(m.end - m.start for m in every) * depth / len(every)
        print(f"{name}, here {links[name].bandwidth / 1e9:.2f} GB/s: offload {1e3 * whole:.0f} ms, "
              f"infinigen {1e3 * ours:.0f} ms, its link busy for {1e3 * wire:.0f} ms")  # fmt: skip
        check_bandwidth(links[name])
        line("infinigen ÷ its bound", ours / max(alone, wire), 1.3)
        if name.startswith("H100"):
            line("infinigen ÷ offload", ours / whole, 0.5)
        else:
            line("infinigen ÷ everything resident", ours / full, 1.5)
        report_hidden(moves[name])


def report_hidden(runs: list[list[Move]]) -> None:
    """How much of a transfer is hidden where the computation beside it is at least as long.

    Between the arrival of one layer's data and the need for the next one's lies that computation.
    """
    pairs = [pair for run in runs for pair in itertools.pairwise(run)]
    hidden = [
        late.hidden
        for early, late in pairs
        if late.end - late.start <= late.needed - max(early.needed, early.end)
    ]
    if not hidden:
        print("  no transfer is as short as the computation beside it")
        return
    share = sum(h >= 0.8 for h in hidden) / len(hidden)
    print(f"  {len(hidden)} of {len(pairs)} transfers are no longer than the computation beside "
          f"them; at least 0.8 is hidden of {share:.3f} of these, target 1")  # fmt: skip


def line(name: str, value: float, most: float) -> None:
    verdict = "met" if value <= most else "NOT met"
    print(f"  {name:32s} {value:5.2f}  target ≤ {most}: {verdict}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(2)
    compare(load("smollm2").model, options.context, options.batch, options.rounds)
