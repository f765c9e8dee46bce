"""The cost model's rates, fitted to what was measured, and how well they foretell the rest.

On one machine the time of a step is a sum of parts, each of which has one unknown factor. The
factors that bring prediction and measurement closest, in relative terms, are found by least squares
within bounds; the features come from the cost model itself, so that its formulas stand once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlib.costs import (
    Amount,
    Case,
    Rates,
    fetched_bytes,
    memory,
    prefill_time,
    step_time,
)
from kvlib.evidence import INEXACT
from kvlib.hardware import Link, Machine
from kvlib.memory import BUDGET
from kvlib.records import Record, text
from kvlib.shapes import find_shape

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NAMES = [item.name for item in fields(Rates)]
SECONDS = [item.name for item in fields(Rates) if item.default == 0.0]  # the others are shares
# At least so many times the seconds of a full rate: no product beats the machine's fastest one, and
# reading alone takes at least half the time of a copy, which is what its bandwidth was measured by.
LEAST = {"products": 1.0, "flash": 1.0, "eager": 1.0, "stream": 0.5, "attend": 0.5}
FAINT = 1e-20  # of a measured time: what a part that costs nothing leaves
NEVER = 1e30  # a share so large that its part costs nothing
NOTHING = Rates(**{name: 0.0 if name in SECONDS else NEVER for name in NAMES})
TIMES: dict[str, Callable[..., Amount]] = {
    "tpot": lambda case, tokens, batch: step_time(case, tokens, batch).total,
    "ttft": lambda case, tokens, batch: prefill_time(case, tokens),
}
HELD = ("strategy", "model", "metric", "tokens", "batch", "seconds", "predicted", "error")
ARRAYS = ("metric", "tokens", "batch", "seconds", "features")
COUNTED = ("device_used", "host_used", "bytes_moved")
ROWS = "09_capacity"  # the figure whose rows are fitted


# -- what was measured -------------------------------------------------------------------------


def machine_of(records: Iterable[Record]) -> Machine:
    """The machine that the rows were measured on, from the rates among them."""
    found, flops = dict[str, float](), dict[str, float]()
    chip = name = ""
    for row in records:
        if text(row, "chip"):
            chip, name = row["chip"], row["machine"]
            into = flops if row["metric"] == "flops" else found
            into[text(row, "dtype") if into is flops else row["metric"]] = float(row["value"])
    if not chip:
        raise ValueError("no rates of this machine are stored: measure 09_capacity first")
    return Machine(
        name=chip,
        memory=int(found["memory"]),
        bandwidth=found["bandwidth"],
        flops=flops,
        link=Link("memory", found["link"], "measured"),
        host=found["host"],
        host_memory=found["host_memory"],
        source=f"measured on {name}",
        around="measured",
        threads=int(found["threads"]),
    )


@dataclass(frozen=True)
class Times:
    """Measured times: for each one its case, metric, size, seconds, and what its parts cost."""

    cases: Sequence[Case]
    metric: npt.NDArray[np.str_]
    tokens: Floats
    batch: Floats
    seconds: Floats
    features: Floats  # [observations, NAMES]: seconds of each part at a factor of 1

    @property
    def model(self) -> npt.NDArray[np.str_]:
        """Name of each one's shape."""
        return np.array([case.shape.name for case in self.cases])

    @property
    def strategy(self) -> npt.NDArray[np.str_]:
        """Name of each one's strategy."""
        return np.array([case.strategy for case in self.cases])

    def take(self, chosen: Mask) -> Times:
        """Those that are chosen."""
        cases = [case for case, taken in zip(self.cases, chosen, strict=True) if taken]
        part: dict[str, Any] = {name: getattr(self, name)[chosen] for name in ARRAYS}
        return Times(cases, **part)

    def predicted(self, rates: Rates) -> Floats:
        """Seconds by the cost model: the sum of the parts, each times its factor."""
        values = [getattr(rates, name) for name in NAMES]
        factors = [v if n in SECONDS else 1 / v for n, v in zip(NAMES, values, strict=True)]
        seconds: Floats = self.features @ np.array(factors)
        return seconds


def times_of(records: Iterable[Record], machine: Machine) -> Times:
    """The times among the rows that are sound: measured, on whole models, undisturbed."""
    if not machine.threads:
        raise ValueError(f"{machine.name}: rates are fitted on CPUs, where the parts add up")
    groups: dict[tuple[Any, ...], list[tuple[float, float, float]]] = defaultdict(list)
    for row in records:
        sound = row["source"] == "measured" and row["status"] == "ok"
        if not (sound and row["metric"] in TIMES):
            continue
        prefill = text(row, "prefill") or "flash"
        key = (_shape(row), row["strategy"], _share(row), prefill, row["metric"])
        size = float(row["tokens"]), float(text(row, "batch") or 1), float(row["value"])
        groups[key].append(size)
    parts = [_times(key, np.array(sizes), machine) for key, sizes in sorted(groups.items())]
    if not parts:
        raise ValueError("no times to fit the cost model to: measure 09_capacity first")

    cases = [case for part in parts for case in part.cases]
    joined = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ARRAYS}
    return Times(cases, **joined)


def _shape(row: Record) -> str:
    """The name of a row's shape: rows name the model that was loaded."""
    name = text(row, "model").removeprefix("shape:")
    return "smollm2-135m" if name == "smollm2" else name


def _share(row: Record) -> float:
    """The budget of a row; where it names none, the one that the study takes."""
    usual = BUDGET if row["strategy"] in INEXACT else 1.0
    return float(text(row, "budget") or usual)


def _times(key: tuple[Any, ...], sizes: Floats, machine: Machine) -> Times:
    shape, strategy, budget, prefill, metric = key
    case = Case(find_shape(shape), machine, strategy, budget, "float32", prefill=prefill)
    tokens, batch, seconds = sizes.T

    def part(name: str) -> Floats:
        alone = replace(case, rates=replace(NOTHING, **{name: 1.0}))
        found = np.asarray(TIMES[metric](alone, tokens, batch), dtype=np.float64)
        return np.broadcast_to(found, seconds.shape)

    features = np.stack([part(name) for name in NAMES], axis=1)
    count = len(seconds)
    return Times([case] * count, np.array([metric] * count), tokens, batch, seconds, features)


# -- the fit -----------------------------------------------------------------------------------


def fit(times: Times) -> Rates:
    """The rates that predict these times with the least mean square of the relative error.

    A part that no time has keeps its default, the best; one that has left no trace in the times is
    taken to cost nothing.
    """
    from scipy.optimize import lsq_linear

    matrix = times.features / times.seconds[:, None]
    seen = (matrix > FAINT).any(axis=0)
    least = np.array([LEAST.get(name, 0.0) for name in NAMES])[seen]
    factors = lsq_linear(matrix[:, seen], np.ones(len(matrix)), (least, np.inf)).x
    found = zip(np.array(NAMES)[seen], map(float, factors), strict=True)
    rates = {n: f if n in SECONDS else 1 / max(f, 1 / NEVER) for n, f in found}
    return replace(Rates(), **rates)


def interior(times: Times) -> Mask:
    """Sizes inside what was measured of a model and metric, by tokens or by batch."""
    inside = np.zeros(len(times.seconds), dtype=bool)
    for model in set(times.model):
        for metric in TIMES:
            own = (times.model == model) & (times.metric == metric)
            for axis in (times.tokens, times.batch):
                if own.any():
                    inside |= own & (axis > axis[own].min()) & (axis < axis[own].max())
    return inside


def schemes(times: Times, longest: str, shape: str) -> dict[str, list[Mask]]:
    """What is held out together, by scheme; repeats of a size always are.

    interpolation    each interior size in turn
    longest context, largest batch   of the model `longest`
    another shape    all of the model `shape`
    """
    inner, own = interior(times), times.model == longest
    sizes = {*zip(times.model[inner], times.tokens[inner], times.batch[inner], strict=True)}
    each = [
        inner & (times.model == m) & (times.tokens == t) & (times.batch == b)
        for m, t, b in sorted(sizes)
    ]
    return {
        "interpolation": each,
        "longest context": [own & (times.tokens == times.tokens[own].max())],
        "largest batch": [own & (times.batch == times.batch[own].max())],
        "another shape": [times.model == shape],
    }


def held_out(times: Times, groups: Mapping[str, Sequence[Mask]]) -> list[dict[str, Any]]:
    """One record a time that was held out: what rates fitted to the others predict, and the error.

    Columns scheme, strategy, model, metric, tokens, batch, seconds, predicted, error (relative).
    """
    found = []
    for scheme, masks in groups.items():
        for mask in (m for m in masks if m.any() and not m.all()):
            rates, part = fit(times.take(~mask)), times.take(mask)
            predicted = part.predicted(rates)
            columns = zip(
                part.strategy, part.model, part.metric, part.tokens, part.batch, part.seconds,
                predicted, predicted / part.seconds - 1, strict=True,
            )  # fmt: skip
            found += [{"scheme": scheme} | dict(zip(HELD, c, strict=True)) for c in columns]
    return found


# -- bytes -------------------------------------------------------------------------------------


def byte_errors(records: Iterable[Record], machine: Machine) -> list[dict[str, Any]]:
    """One record a counted size: what the formulas say, unfitted, and the relative error."""
    found = []
    for row in records:
        if row["metric"] not in COUNTED or row["status"] not in ("ok", "noisy"):
            continue
        shape, counted = find_shape(_shape(row)), float(row["value"])
        case = Case(shape, machine, row["strategy"], _share(row), "float32")
        size = float(row["tokens"]), float(row["batch"]), int(float(row["steps"]))
        told = _told(case, row["metric"], *size)
        if counted:
            about = {name: row[name] for name in ("strategy", "metric", "tokens", "batch")}
            error = told / counted - 1
            found.append(about | {"model": shape.name, "bytes": counted, "error": error})
    return found


def _told(case: Case, metric: str, tokens: float, batch: float, steps: int) -> float:
    """Bytes by the formulas, behind the last of the steps (moved: on average of the timed ones)."""
    if metric == "bytes_moved":
        many = [fetched_bytes(case, tokens + n + 1, batch) for n in range(steps)]
        few = case.shape.layers - case.whole
        return float(np.mean([w * case.whole + p * few for w, p in many]))
    found = memory(case, tokens + steps + 1, batch)
    return float(found.used if metric == "device_used" else found.host)
