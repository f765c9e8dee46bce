"""Runs a grid of points, stores each row at once, resumes, and estimates its time first.

A *point* is a dict of JSON scalars. A *measurement* is a module-level function
`measure(**point)` that returns dicts `{metric, value, unit, source}`, with further columns
such as `kernel` where it likes. `python -m kvlib.study verify` measures everything anew and
holds it against the figures at hand.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import timeit
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from kvlib import provenance
from kvlib.isolate import ChildError, in_child
from kvlib.provenance import Point, Scalar, canonical, duration, label, setting
from kvlib.store import Row, Store, new_row, table

Measure = Callable[..., list[dict[str, Any]]]
DRIFT = 1.2  # probe time after / before a point beyond which the machine was disturbed
OUT_OF_MEMORY = {"DeviceOutOfMemory", "OutOfMemoryError", "MemoryError"}


class Refused(ValueError):  # noqa: N818
    """A point predicted not to fit: stored as `refused`, its predicted bytes as a value."""

    def __init__(self, message: str, nbytes: int | None = None) -> None:
        super().__init__(message)
        self.nbytes = nbytes


class MeasurementError(RuntimeError):
    """A measurement failed otherwise than by a known status."""


class OriginalError(Exception):
    """What a measurement raised, with its traceback as text: it may be from another process."""


@dataclass(frozen=True)
class Profile:
    """How much a run may take."""

    name: str
    model: str
    device: str
    repeats: int
    seconds_per_minute: float  # measuring time for each minute of a laptop run

    def limit(self, notebook: str) -> float:
        """Seconds for a notebook's measurements, e.g. of "05" or "05_output_length"."""
        return MINUTES[int(notebook[:2])] * self.seconds_per_minute


MINUTES = (1, 5, 11, 11, 11, 4, 10, 5, 5, 4, 2, 2, 1, 1)  # of a laptop run, by notebook
PROFILES = {
    "smoke": Profile("smoke", "smollm2", "cpu", 1, 4),
    "laptop": Profile("laptop", "smollm2", "cpu", 5, 60),
    "laptop-full": Profile("laptop-full", "smollm2", "cpu", 9, 900),
    "gpu": Profile("gpu", "meta-llama/Llama-3.1-8B-Instruct", "cuda", 5, 600),
}


def profile(name: str) -> Profile:
    """The profile of that name."""
    if name not in PROFILES:
        raise ValueError(f"unknown profile {name!r}: choose from {', '.join(PROFILES)}")
    return PROFILES[name]


def grid(repeats: int = 1, seed: int = 0, **axes: Sequence[Scalar]) -> list[dict[str, Scalar]]:
    """All combinations of the axes, `repeats` times, each repeat with a seed of its own."""
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [p | {"repeat": r, "seed": seed + r} for r in range(repeats) for p in combinations]


def run(
    name: str,
    points: Iterable[Point],
    measure: Measure,
    *,
    folder: str | Path,
    rows: str = "stored",
    estimate: Callable[[Point], float] | None = None,
    limit_seconds: float | None = None,
    min_repeats: int = 3,
    timeout: float | None = 900.0,
    isolate: bool = True,
    timed: bool = False,
    force: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Rows of the points, one value a row, from `folder/data/NAME.jsonl`.

    `rows="stored"` measures nothing: it returns what is there, of this machine or another.
    `rows="measure"` measures the points that this machine lacks under the present sources (all
    with `force`), each in a process of its own if `isolate`, which alone `timeout` can end.
    `timed` brackets a point with a probe for disturbance. A plan longer than `limit_seconds`
    sheds repeats, then points. The frame's `attrs`: see `store.table`.
    """
    if rows not in ("stored", "measure"):
        raise ValueError(f"rows must be 'stored' or 'measure', not {rows!r}")
    wanted: list[Point] = [json.loads(p) for p in dict.fromkeys(map(canonical, points))]
    store, sources = Store(folder, name), provenance.source_hash(measure.__module__)
    if rows == "stored":
        store.load()
        return table(name, wanted, store.choose(wanted, sources), sources, [])
    job = _Job(name, measure, sources, isolate, timed, timeout, provenance.origin())
    with store.exclusive():
        store.load()
        store.compact()
        pending = [p for p in wanted if force or store.current(p, sources) is None]
        cost = estimate or _costs(pending, store)
        pending, dropped = shed(pending, cost, limit_seconds, min_repeats, _levels(wanted))
        if progress and pending:
            needed = f"{len(pending)} points to measure, {duration(sum(map(cost, pending)))}"
            print(f"{name}: {needed}", file=sys.stderr, flush=True)
        pending.sort(key=lambda p: p.get("repeat") or 0)  # interleaves the strategies
        for point in tqdm(pending, name, unit="point", leave=False, disable=not progress):
            store.add(job.row(point))
        store.compact()
    done = [row for p in wanted if (row := store.current(p, sources))]
    return table(name, wanted, done, sources, dropped)


def shed(
    points: Sequence[Point],
    cost: Callable[[Point], float],
    limit: float | None,
    min_repeats: int = 3,
    levels: Iterable[int] = (),
) -> tuple[list[Point], list[str]]:
    """The points that fit into `limit` seconds, and in words what was dropped.

    Repeats go first, the last one of all points together, until `min_repeats` of the grid's
    `levels` are left; then whole settings, the dearest first.
    """
    kept, dropped = list(points), list[str]()

    def over() -> bool:
        return limit is not None and sum(map(cost, kept)) > limit

    for level in reversed(sorted({*levels, *_levels(points)})[min_repeats:]):
        if over() and level in _levels(kept):
            kept = [p for p in kept if p.get("repeat") != level]
            dropped.append(f"repeat {level} of every point")
    while over():
        totals = defaultdict[str, float](float)
        for p in kept:
            totals[setting(p)] += cost(p)
        dearest = max(totals, key=lambda s: totals[s])
        kept = [p for p in kept if setting(p) != dearest]
        dropped.append(f"{label(json.loads(dearest))} ({duration(totals[dearest])})")
    return kept, dropped


def _levels(points: Iterable[Point]) -> set[int]:
    return {level for p in points if isinstance(level := p.get("repeat"), int)}


def _costs(points: Sequence[Point], store: Store) -> Callable[[Point], float]:
    """Seconds a point takes: as stored, else the mean of the points known, else NaN."""
    past = store.seconds()
    known = [past[setting(p)] for p in points if setting(p) in past]
    mean = float(np.mean(known)) if known else math.nan
    return lambda point: past.get(setting(point), mean)


@dataclass(frozen=True)
class _Outcome:
    status: str
    values: list[dict[str, Any]]
    detail: str = ""
    probe: float | None = None
    trace: str = ""

    @property
    def drifted(self) -> bool:
        return self.probe is not None and not 1 / DRIFT <= self.probe <= DRIFT


@dataclass(frozen=True)
class _Job:
    """How the points of one run are measured."""

    name: str
    measure: Measure
    sources: str
    isolate: bool
    timed: bool
    timeout: float | None
    origin: dict[str, Any]

    def row(self, point: Point) -> Row:
        """Measure a point, once more if the machine was disturbed."""
        start = time.perf_counter()
        found = self._once(point)
        if found.drifted and (found := self._once(point)).drifted:
            found = replace(found, status="noisy")
        result = asdict(found) | {"seconds": round(time.perf_counter() - start, 3)}
        trace = result.pop("trace")
        if found.status == "error":
            failed = f"{self.name}: {label(point)} failed: {found.detail}"
            raise MeasurementError(failed) from OriginalError(f"\n{trace}")
        return new_row(point, self.sources, self.origin, **result)

    def _once(self, point: Point) -> _Outcome:
        task, preload = (self.measure, point, self.timed), [__name__, self.measure.__module__]
        if not self.isolate:
            return _attempt(*task)
        try:
            return in_child(_attempt, task, self.timeout, preload)
        except TimeoutError as error:
            return _Outcome("timeout", [], str(error))
        except ChildError as error:
            return _Outcome("oom" if error.killed else "error", [], str(error))


def probe() -> float:
    """Seconds of a fixed matrix product: the median of nine, after one thrown away."""
    matrix, product = np.ones((2, 384, 384), np.float32)
    times = timeit.repeat(lambda: np.matmul(matrix, matrix, out=product), number=1, repeat=10)
    return float(np.median(times[1:]))


def _attempt(measure: Measure, point: Point, timed: bool) -> _Outcome:
    before = probe() if timed else math.nan
    try:
        values = _checked(measure(**point))
    except Exception as error:
        return _failure(error)
    return _Outcome("ok", values, probe=probe() / before if timed else None)


def _checked(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values as plain JSON types, an undefined one (NaN) as None."""
    if not values:
        raise ValueError("the measurement returned no values")
    for value in values:
        if missing := {"metric", "value", "unit", "source"} - set(value):
            raise ValueError(f"a value lacks {', '.join(sorted(missing))}: {value}")
        if value["source"] not in ("measured", "emulated", "modelled"):
            raise ValueError(f"unknown source {value['source']!r} of {value['metric']}")
    defined = [{k: None if v != v else v for k, v in value.items()} for value in values]
    return list(json.loads(canonical(defined)))


def _failure(error: Exception) -> _Outcome:
    detail = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if isinstance(error, Refused):
        size = {"metric": "predicted_bytes", "value": error.nbytes, "unit": "B"}
        return _Outcome("refused", [size | {"source": "modelled"}], str(error))
    if OUT_OF_MEMORY & {k.__name__ for k in type(error).__mro__} or "DefaultCPUAllocator" in detail:
        return _Outcome("oom", [], detail)
    return _Outcome("error", [], detail, trace="".join(traceback.format_exception(error)))


def verify(profile: str, figures: Path, notebooks: Path) -> int:
    """Run the notebooks into a scratch folder and print how their rows compare with `figures`."""
    from kvlib.comparison import comparison  # draws, which no measurement needs

    failed = list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for path in map(str, sorted(notebooks.glob("[0-9][0-9]_*.ipynb"))):
            command = [sys.executable, "-m", "kvlib.report", "run", path, "--report", scratch]
            command += ["--out", scratch, "--profile", profile, "--rows", "measure"]
            failed += [path] if subprocess.run(command, check=False).returncode else []
        print(comparison(figures, Path(scratch)))
    if failed:
        print(f"error: failed to run: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvlib.study")
    check = parser.add_subparsers(required=True).add_parser("verify", help="measure anew, compare")
    check.add_argument("--profile", default="laptop", choices=PROFILES)
    for folder in ("figures", "notebooks"):
        check.add_argument(f"--{folder}", type=Path, default=Path(folder))
    return verify(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
