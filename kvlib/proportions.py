"""A share of right answers, and how far off it may be."""

from __future__ import annotations

from collections.abc import Sequence

from scipy import stats

from kvlib.intervals import Interval, numbers


def proportion(values: Sequence[float]) -> Interval:
    """The share of ones among 0/1 values, with Wilson's 95 % interval; ValueError for none."""
    array = numbers(values)
    ends = stats.binomtest(int(array.sum()), array.size).proportion_ci(method="wilson")
    return Interval(float(array.mean()), float(ends.low), float(ends.high))
