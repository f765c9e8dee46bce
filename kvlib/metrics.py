"""Request timings, memory over time, and pairs of measured rows.

Times are seconds of one monotonic clock. Tools disagree on these names, so each formula is
written where it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pandas as pd

from kvlib.intervals import Floats, numbers

Selector = Mapping[str, Any]  # column -> a value, a list of them, {from, to}, or one of WORDS
WORDS = ("min", "max", "largest common")

# ---------------------------------------------------------------- timings of requests


@dataclass(frozen=True)
class Timing:
    """When a request arrived and when each of its n output tokens came, in seconds.

    Raises ValueError for no tokens, a number that is not finite, or stamps that go backwards
    or lie before the arrival.
    """

    arrival: float
    stamps: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers(self.stamps, "stamps")
        if (np.diff(numbers((self.arrival, *self.stamps), "arrival and stamps")) < 0).any():
            raise ValueError("stamps must not go backwards, nor lie before the arrival")

    @property
    def ttft(self) -> float:
        """Time to first token, TTFT = t_1 - arrival, in s."""
        return self.stamps[0] - self.arrival

    @property
    def e2el(self) -> float:
        """End-to-end latency, E2EL = t_n - arrival, in s."""
        return self.stamps[-1] - self.arrival

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies, every gap t_(i+1) - t_i, in s; empty for one token."""
        return tuple(b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False))

    @property
    def tpot(self) -> float:
        """Time per output token, TPOT = (E2EL - TTFT) / (n - 1), in s; NaN for n = 1."""
        gaps = len(self.stamps) - 1
        return (self.e2el - self.ttft) / gaps if gaps else math.nan


def makespan(timings: Sequence[Timing]) -> float:
    """From the first arrival to the last token of all requests, in s; must be above zero."""
    if not timings:
        raise ValueError("timings: need at least one request")
    span = max(t.stamps[-1] for t in timings) - min(t.arrival for t in timings)
    if span <= 0:
        raise ValueError("the makespan is zero: no rate can be told")
    return span


def throughput(timings: Sequence[Timing]) -> float:
    """Output tokens of all requests / makespan, in tokens/s."""
    return sum(len(t.stamps) for t in timings) / makespan(timings)


def goodput(
    timings: Sequence[Timing],
    *,
    ttft: float = math.inf,
    tpot: float = math.inf,
    e2el: float = math.inf,
) -> float:
    """Requests that meet every limit (each in s) / makespan, in requests/s.

    A request of one token has no TPOT and so cannot miss that limit. Without limits it is the
    rate of requests, n / makespan.
    """
    if any(math.isnan(limit) for limit in (ttft, tpot, e2el)):
        raise ValueError("a limit must be a number of seconds, not NaN")
    met = sum(t.ttft <= ttft and t.e2el <= e2el and not t.tpot > tpot for t in timings)
    return met / makespan(timings)


def in_system(timings: Sequence[Timing]) -> float:
    """Mean number of requests in the system, L = ∫ N(t) dt / makespan.

    N(t) counts the requests that have arrived by t and whose last token has not come. It is added
    up from one event to the next, so that Little's law can be held against it: L = λ · W, with
    λ = n / makespan and W the mean E2EL.
    """
    events = sorted([(t.arrival, 1) for t in timings] + [(t.stamps[-1], -1) for t in timings])
    area, present = 0.0, 0
    for (at, change), (until, _) in pairwise(events):
        present += change
        area += present * (until - at)
    return area / makespan(timings)


def percentile(values: Sequence[float] | Floats, q: float) -> float:
    """The q-th percentile (0 to 100), interpolated linearly, in the unit of the values."""
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, not at {q}")
    return float(np.percentile(numbers(values), q))


# ---------------------------------------------------------------- memory over time

Quantity = Literal["running", "waiting", "used", "held", "host", "waste"]


@dataclass(frozen=True)
class Usage:
    """What an engine holds for its requests from the moment `at` (s of the run) to the next one.

    running  sequences on the device
    waiting  those that have arrived, and wait for room or were preempted
    used     bytes behind tokens on the device
    held     bytes on the device: `used`, and the slots or blocks that are taken but empty
    host     bytes on the host
    """

    at: float
    running: int
    waiting: int
    used: int
    held: int
    host: int


def peak(usage: Sequence[Usage], quantity: Quantity) -> int:
    """The largest value of a quantity at any moment, in its unit.

    waste = held - used, in bytes; its peak need not come when most is held: see `waste_at_peak`.
    Raises ValueError for no moments.
    """
    if not usage:
        raise ValueError("usage: need at least one moment")
    return max(_quantity(moment, quantity) for moment in usage)


def waste_at_peak(usage: Sequence[Usage]) -> int:
    """held - used at the moment when most is held, the first of equal ones, in bytes.

    Raises ValueError for no moments.
    """
    if not usage:
        raise ValueError("usage: need at least one moment")
    return _quantity(max(usage, key=lambda moment: moment.held), "waste")


def time_average(usage: Sequence[Usage], quantity: Quantity) -> float:
    """Mean of a quantity over time, Σ x_i (t_(i+1) - t_i) / (t_n - t_1), in its unit.

    Each value holds until the next moment; the last one only ends the one before.
    waste = held - used, in bytes. Raises ValueError for moments that go backwards or span no time.
    """
    steps = np.diff([moment.at for moment in usage])
    if (steps < 0).any() or not steps.sum() > 0:
        raise ValueError("usage: need moments in order of time, and some time between them")
    values = [_quantity(moment, quantity) for moment in usage[:-1]]
    return float(np.average(values, weights=steps))


def _quantity(moment: Usage, quantity: Quantity) -> int:
    if quantity == "waste":
        return moment.held - moment.used
    value: int = getattr(moment, quantity)
    return value


# ---------------------------------------------------------------- pairs of rows


def select(rows: pd.DataFrame, *selectors: Selector) -> list[pd.DataFrame]:
    """The rows that each selector asks for; a column that is not there matches nothing.

    "min" and "max" are taken among the rows that the rest of the selector leaves, "largest
    common" is the largest value that all selectors leave.
    """
    sides = [rows[_matches(rows, selector)] for selector in selectors]
    for column in dict.fromkeys(column for selector in selectors for column in selector):
        values = [set(side[column].dropna()) if column in side else set() for side in sides]
        common = set.intersection(*values)
        for n, selector in enumerate(selectors):
            word = selector.get(column)
            if isinstance(word, str) and word in WORDS:
                pick = min if word == "min" else max
                best = pick(common if word == "largest common" else values[n], default=None)
                sides[n] = sides[n][sides[n][column].eq(best)] if best is not None else rows[:0]
    return sides


def _matches(rows: pd.DataFrame, selector: Selector) -> pd.Series[bool]:
    fits = pd.Series(True, index=rows.index)
    for column, entry in selector.items():
        if column not in rows:
            return pd.Series(False, index=rows.index)
        if isinstance(entry, Mapping):
            fits &= rows[column].between(entry["from"], entry["to"])
        elif entry not in WORDS:
            fits &= rows[column].isin(entry if isinstance(entry, list) else [entry])
    return fits


def pair(of: pd.DataFrame, against: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Rows of two sides that agree in `keys`: their keys, `value` and `value_against`.

    ValueError where several rows of a side match one pair, or no row finds its like.
    """
    keys = list(keys)
    for side in (of, against):
        if side.duplicated(keys).any():
            raise ValueError("several rows match one pair")
    left, right = of[[*keys, "value"]], against[[*keys, "value"]]
    pairs = left.merge(right, on=keys, suffixes=("", "_against"))
    if pairs.empty:
        raise ValueError("no row of one side has its like on the other")
    return pairs
