"""How long the cost model takes: a recommendation, a move of a slider, a prediction.

Each is given beside the time that Python needs to start and to import numpy, in the same run.
`python benchmarks/cost_model.py [--rounds 7]`
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvlib import explorer
from kvlib.costs import STRATEGIES, Case, step_time
from kvlib.hardware import find_machine
from kvlib.shapes import find_shape

ASKED = ["recommend", "--model", "llama-3.1-8b", "--machine", "h100-sxm"]
ASKED += ["--context", "8192", "--concurrency", "16"]
MANY = 100_000  # predictions at once


def median_time(call: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call, after one that is thrown away."""
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def python(*arguments: str) -> Callable[[], object]:
    """A call of this interpreter."""
    command = [sys.executable, *arguments]
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(arguments).rounds
    start = median_time(python("-c", "import numpy"), rounds)
    advice = median_time(python("-m", "kvlib", *ASKED), rounds)
    print(f"python -m kvlib recommend  {advice:.2f} s, {advice / start:.1f} x starting Python")
    moves = iter(range(10_000))
    move = median_time(
        lambda: explorer.html(explorer.Choice(concurrency=1 + next(moves) % 64)), 20 * rounds
    )
    print(f"a slider of the explorer   {1e3 * move:.1f} ms, {move / start:.4f} x")
    shape, machine = find_shape("llama-3.1-8b"), find_machine("h100-sxm")
    tokens = np.arange(1.0, MANY + 1)
    cases = [Case(shape, machine, strategy, 0.3) for strategy in STRATEGIES]
    one = median_time(lambda: [step_time(case, tokens, 8) for case in cases], rounds)
    print(f"{len(cases) * MANY:,} decode steps      {1e3 * one:.0f} ms, {one / start:.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
