"""Estimates with the intervals that carry a verdict, and the levels that several tests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

Floats = npt.NDArray[np.float64]


def numbers(values: Sequence[float] | Floats, what: str = "values") -> Floats:
    """The values as a flat array; ValueError if there are none or one is not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{what}: need at least one number in a flat list")
    if not np.isfinite(array).all():
        raise ValueError(f"{what}: every number must be finite")
    return array


def _pair(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> tuple[Floats, ...]:
    left, right = numbers(first, "first"), numbers(second, "second")
    if left.size != right.size:
        raise ValueError(f"pairs need equal lengths, not {left.size} and {right.size}")
    return left, right


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval, in the unit of the values."""

    estimate: float
    low: float
    high: float


def bootstrap_interval(
    values: Sequence[float] | Floats,
    statistic: Callable[[Floats], float],
    level: float = 0.95,
    seed: int = 0,
    draws: int = 2000,
) -> Interval:
    """Percentile bootstrap of `statistic`: the same values and seed give the same interval.

    The ends are stretched to the estimate where the drawn ones leave it out.
    """
    array, tail = numbers(values), 50 * (1 - _level(level))
    picks = np.random.default_rng(seed).integers(0, array.size, size=(draws, array.size))
    drawn = np.array([statistic(array[pick]) for pick in picks])
    low, high = np.percentile(drawn, [tail, 100 - tail])
    estimate = float(statistic(array))
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate))


def median_interval(
    values: Sequence[float] | Floats, level: float = 0.95, seed: int = 0
) -> Interval:
    """The median and its bootstrap interval: the band of the figures."""
    return bootstrap_interval(values, lambda drawn: float(np.median(drawn)), level, seed)


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"a confidence level lies between 0 and 1, not at {level}")
    return level


@dataclass(frozen=True)
class Region:
    """Where a claim puts an effect: between two borders, on the reader's scale.

    size: the claim's own effect, which a test must be able to see; on the scale of analysis,
    so a logarithm where `log` says that the effect is a ratio. Errors name the field at fault.
    """

    low: float
    high: float
    size: float

    @classmethod
    def beyond(cls, side: str, bound: float, claimed: float | None, log: bool) -> Region:
        """All below ("<") or above (">") a bound; the size is from there to the value claimed."""
        if log and bound <= 0:
            raise ValueError("bound: a ratio is held against a number above 0")
        low, high = {"<": (0.0 if log else -math.inf, bound), ">": (bound, math.inf)}[side]
        if claimed is None:
            return cls(low, high, math.inf)
        if not low < claimed < high:
            raise ValueError(f"claimed: {claimed} lies off the side that the rule names")
        return cls(low, high, abs(_scaled(claimed, log) - _scaled(bound, log)))

    @classmethod
    def around(cls, middle: float, factor: float, margin: float, log: bool) -> Region:
        """Within a factor, or else a margin, of a value; the size is half the stretch."""
        by_factor = factor > 1 and margin == 0 and middle > 0
        if not by_factor and not (factor == 0 and margin > 0):
            raise ValueError("factor: give a factor above 1 or else a margin above 0")
        low, high = middle - margin, middle + margin
        if by_factor:
            low, high = middle / factor, middle * factor
        return cls(low, high, (_scaled(high, log) - _scaled(low, log)) / 2)


def _scaled(value: float, log: bool) -> float:
    if not log:
        return value
    return math.log(value) if value > 0 else -math.inf


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error; for ratios both are kept as logarithms.

    value: what is reported, on the reader's scale. centre, error: the middle of the interval
    and its standard error on the scale of analysis. freedom: degrees of freedom of the t
    distribution, infinite for the normal one. An error of zero gives an interval of no width.
    """

    value: float
    centre: float
    error: float
    freedom: float
    n: int
    log: bool = False

    def half_width(self, level: float = 0.95) -> float:
        """Half the interval on the scale of analysis: the smallest effect to be seen."""
        return float(stats.t.ppf(0.5 + _level(level) / 2, self.freedom)) * self.error

    def interval(self, level: float = 0.95) -> Interval:
        """The interval on the reader's scale."""
        half = self.half_width(level)
        low, high = self.centre - half, self.centre + half
        if self.log:
            low, high = _exp(low), _exp(high)
        return Interval(self.value, min(low, self.value), max(high, self.value))

    def p_value(self, region: Region) -> float:
        """Two-sided p that the true value lies on the region's nearest border.

        The interval of level 1 - p ends at that border.
        """
        ends = (_scaled(end, self.log) for end in (region.low, region.high))
        distance = min(abs(self.centre - end) for end in ends)
        if self.error == 0:
            return 1.0 if distance == 0 else 0.0
        return 2 * float(stats.t.sf(distance / self.error, self.freedom))

    def lies(self, region: Region, level: float = 0.95) -> bool | None:
        """True if the interval lies inside the (open) region, False if outside, None if across."""
        interval = self.interval(level)
        if region.low < interval.low and interval.high < region.high:
            return True
        return False if interval.high <= region.low or region.high <= interval.low else None

    def amount(self, unit: str = "1") -> str:
        """The value with its unit, as in "0.31×"; shares of 0/1 answers come in points of 100."""
        return _written(self.value, unit) + self._suffix(unit)

    def text(self, unit: str = "1", level: float = 0.95) -> str:
        """The value with its interval, as in "0.31× [0.30, 0.32], n=5"."""
        interval = self.interval(level)
        low, high = _written(interval.low, unit), _written(interval.high, unit)
        return f"{self.amount(unit)} [{low}, {high}], n={self.n}"

    def smallest(self, unit: str = "1", level: float = 0.95) -> str:
        """The smallest effect that could have been seen, as in "×1.02" or "±3 points"."""
        half = self.half_width(level)
        return f"×{_exp(half):.4g}" if self.log else f"±{_written(half, unit)}{self._suffix(unit)}"

    def _suffix(self, unit: str) -> str:
        return "×" if self.log else {"1": "", "0/1": " points"}.get(unit, f" {unit}")


def _written(value: float, unit: str) -> str:
    return f"{100 * value if unit == '0/1' else value:.4g}"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def mean_estimate(values: Sequence[float] | Floats, *, log: bool = False) -> Estimate:
    """Mean with Student's t; `log` says that the values are logarithms of ratios.

    One value, or equal values, are taken as exact: judge beforehand whether they are.
    """
    array = numbers(values)
    exact = bool((array == array[0]).all())
    mean = float(array[0] if exact else array.mean())
    error = 0.0 if exact else float(array.std(ddof=1)) / math.sqrt(array.size)
    return Estimate(
        _exp(mean) if log else mean, mean, error, max(array.size - 1, 1), array.size, log
    )


def log_ratios(
    numerator: Sequence[float] | Floats, denominator: Sequence[float] | Floats
) -> Floats:
    """log(numerator / denominator), pair by pair; ValueError unless all are above zero."""
    above, below = _pair(numerator, denominator)
    if (above <= 0).any() or (below <= 0).any():
        raise ValueError("a ratio needs numbers above zero")
    return np.asarray(np.log(above) - np.log(below), dtype=np.float64)


def paired_ratio(
    numerator: Sequence[float] | Floats, denominator: Sequence[float] | Floats
) -> Estimate:
    """Geometric mean of the pairs' ratios, with Student's t on their logarithms."""
    return mean_estimate(log_ratios(numerator, denominator), log=True)


def mean_effect(pairs: pd.DataFrame, kind: str, units: Sequence[str]) -> Estimate:
    """Mean "ratio" or "difference" of `value` to `value_against`, or of the "value" itself.

    The pairs of one unit, such as the points of one repeat, are averaged first: they are not
    independent. Without units each pair counts as one.
    """
    of = pairs["value"].to_numpy(dtype=np.float64)
    against = pairs["value_against"].to_numpy(dtype=np.float64)
    effect = log_ratios(of, against) if kind == "ratio" else of
    effects = pd.Series(of - against if kind == "difference" else effect)
    columns = [pairs[unit].to_numpy() for unit in units]
    means = effects.groupby(columns, dropna=False).mean() if columns else effects
    return mean_estimate(means.to_numpy(dtype=np.float64), log=kind == "ratio")


def paired_binary(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> Estimate:
    """Difference of two shares of right answers (0 or 1) to the same questions.

    Adjusted Wald interval of Bonett and Price (2012): one pair of each disagreeing sort is
    added, so that no disagreement among n questions still leaves an interval of some width.
    """
    gained, lost, n = _disagreements(first, second)
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    error = math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return Estimate((gained - lost) / n, up - down, error, math.inf, n)


def proportion(values: Sequence[float]) -> Interval:
    """The share of ones among 0/1 values, with Wilson's 95 % interval; ValueError for none."""
    array = numbers(values)
    ends = stats.binomtest(int(array.sum()), array.size).proportion_ci(method="wilson")
    return Interval(float(array.mean()), float(ends.low), float(ends.high))


def mcnemar(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """Exact two-sided p that 0/1 answers of a pair disagree as often one way as the other."""
    gained, lost, _ = _disagreements(first, second)
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def _disagreements(
    first: Sequence[float] | Floats, second: Sequence[float] | Floats
) -> tuple[int, int, int]:
    left, right = _pair(first, second)
    if not np.isin(np.concatenate([left, right]), (0, 1)).all():
        raise ValueError("answers must be 0 or 1")
    return int((left > right).sum()), int((left < right).sum()), left.size


def welch(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> Estimate:
    """mean(first) - mean(second) of unpaired samples that may differ in spread (Welch's t).

    ValueError for fewer than two values on a side, or where a side shows no spread: a sample
    of equal answers says nothing about the spread behind it.
    """
    samples = numbers(first, "first"), numbers(second, "second")
    if min(sample.size for sample in samples) < 2 or min(np.ptp(s) for s in samples) == 0:
        raise ValueError("unpaired samples need two values and some spread on each side")
    parts = [float(sample.var(ddof=1)) / sample.size for sample in samples]
    total = sum(parts)
    freedom = total**2 / sum(p**2 / (s.size - 1) for p, s in zip(parts, samples, strict=True))
    value = float(samples[0].mean() - samples[1].mean())
    return Estimate(value, value, math.sqrt(total), freedom, samples[0].size + samples[1].size)


def holm(p_values: Sequence[float], level: float = 0.95) -> list[float]:
    """The confidence level for each test's interval that makes it agree with Holm's procedure.

    The k-th smallest of m p-values is held against (1 - level) / (m - k + 1). At the first
    that fails the procedure stops, and the rest keep the level at which it stopped. An
    interval of the level returned leaves the border out exactly where Holm rejects.
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise ValueError("p-values lie between 0 and 1")
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    levels, share, stopped = [0.0] * len(p_values), 1 - _level(level), False
    alpha = share
    for rank, index in enumerate(order):
        if not stopped:
            alpha = share / (len(order) - rank)
            stopped = p_values[index] > alpha
        levels[index] = 1 - alpha
    return levels
