"""Timings, pairs of rows, and intervals."""

import math
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from kvlib import intervals, metrics
from kvlib.intervals import Estimate, Region
from kvlib.metrics import Timing

TIMING = Timing(1.0, (3.0, 3.5, 4.5))
GAPS = st.lists(st.floats(0, 1e3), min_size=1, max_size=30)
POSITIVE = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)
ANSWERS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


def test_timings_of_a_request() -> None:
    assert (TIMING.ttft, TIMING.e2el, TIMING.itl) == (2.0, 3.5, (0.5, 1.0))
    assert TIMING.tpot == 0.75


def test_one_token_has_no_tpot() -> None:
    alone = Timing(0.0, (2.0,))
    assert math.isnan(alone.tpot)
    assert alone.itl == ()
    assert alone.ttft == alone.e2el == 2.0


@given(st.floats(0, 1e3), GAPS)
def test_ttft_and_gaps_add_up_to_e2el(arrival: float, gaps: list[float]) -> None:
    timing = Timing(arrival, tuple(np.cumsum([arrival, *gaps])[1:].tolist()))
    assert timing.ttft + sum(timing.itl) == pytest.approx(timing.e2el, abs=1e-9)
    if len(gaps) > 1:
        assert timing.ttft + timing.tpot * (len(gaps) - 1) == pytest.approx(timing.e2el, abs=1e-9)


@pytest.mark.parametrize(
    ("arrival", "stamps"),
    [(0.0, ()), (0.0, (1.0, 0.5)), (2.0, (1.0,)), (0.0, (math.nan,)), (math.nan, (1.0,))],
)
def test_bad_stamps_are_refused(arrival: float, stamps: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="stamps"):
        Timing(arrival, stamps)


def test_throughput_is_over_the_makespan_of_all_requests() -> None:
    later = Timing(2.0, (4.0, 6.0))
    assert metrics.throughput([later, TIMING]) == 5 / 5.0


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    slow, alone = Timing(1.0, (5.0, 6.0)), Timing(1.0, (2.0,))
    requests = [TIMING, slow, alone]  # a makespan of 5 s
    assert metrics.goodput(requests) == 3 / 5
    assert metrics.goodput(requests, ttft=2.0) == 2 / 5
    assert metrics.goodput(requests, tpot=0.8) == 2 / 5
    assert metrics.goodput(requests, ttft=2.0, e2el=1.0) == 1 / 5


def test_rates_need_requests_and_time() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        metrics.throughput([])
    with pytest.raises(ValueError, match="makespan is zero"):
        metrics.throughput([Timing(1.0, (1.0,))])
    with pytest.raises(ValueError, match="NaN"):
        metrics.goodput([TIMING], ttft=math.nan)


def test_requests_in_the_system_by_hand() -> None:
    # one from 1 to 4.5 s, one from 2 to 3 s; nobody from 4.5 to 6 s, one from 6 to 8 s
    requests = [Timing(6.0, (7.0, 8.0)), TIMING, Timing(2.0, (3.0,))]
    assert metrics.in_system(requests) == pytest.approx((3.5 + 1 + 2) / 7)
    assert metrics.in_system([TIMING]) == 1
    with pytest.raises(ValueError, match="at least one request"):
        metrics.in_system([])


@given(st.lists(st.tuples(st.floats(0, 1e3), GAPS), min_size=1, max_size=20))
def test_littles_law(requests: list[tuple[float, list[float]]]) -> None:
    timings = [
        Timing(arrival, tuple(np.cumsum([arrival, *gaps])[1:].tolist()))
        for arrival, gaps in requests
    ]
    assume(max(t.e2el for t in timings) > 1e-6)
    rate, stay = metrics.goodput(timings), float(np.mean([t.e2el for t in timings]))
    assert rate == pytest.approx(len(timings) / metrics.makespan(timings))
    assert metrics.in_system(timings) == pytest.approx(rate * stay, rel=1e-6)


def test_percentile() -> None:
    assert metrics.percentile([1, 2, 3, 4, 5], 50) == 3
    assert metrics.percentile([0, 10], 99) == pytest.approx(9.9)
    for values, q in (([], 50), ([math.nan], 50), ([1.0], 101)):
        with pytest.raises(ValueError, match=r"percentile|number"):
            metrics.percentile(values, q)


@dataclass(frozen=True)
class Held:
    """As the engines' Usage, which needs torch."""

    at: float
    running: int = 0
    waiting: int = 0
    used: int = 0
    held: int = 0
    host: int = 0


# held 50 for 1 s, 90 for 3 s, 90 for 1 s; the last moment only ends the one before
USAGE = [
    Held(1.0, running=1, used=10, held=50),
    Held(2.0, running=2, waiting=1, used=80, held=90, host=5),
    Held(5.0, running=2, used=30, held=90, host=7),
    Held(6.0, used=99, held=99),
]


def test_peaks_of_memory() -> None:
    assert metrics.peak(USAGE[:3], "held") == 90
    assert metrics.peak(USAGE, "waiting") == 1
    assert metrics.peak(USAGE, "host") == 7
    assert metrics.peak(USAGE, "waste") == 60
    assert metrics.waste_at_peak(USAGE[:3]) == 10  # of two equal moments the first
    assert metrics.waste_at_peak(USAGE) == 0
    for bad in (metrics.waste_at_peak, lambda usage: metrics.peak(usage, "used")):
        with pytest.raises(ValueError, match="at least one moment"):
            bad([])


def test_averages_of_memory_weigh_by_time() -> None:
    assert metrics.time_average(USAGE, "used") == pytest.approx((10 + 3 * 80 + 30) / 5)
    assert metrics.time_average(USAGE, "held") == pytest.approx((50 + 4 * 90) / 5)
    assert metrics.time_average(USAGE, "waste") == pytest.approx((40 + 3 * 10 + 60) / 5)
    assert metrics.time_average(USAGE, "running") == pytest.approx((1 + 4 * 2) / 5)
    for bad in ([], USAGE[:1], [USAGE[0], USAGE[0]], USAGE[::-1], [*USAGE, USAGE[2]]):
        with pytest.raises(ValueError, match="in order of time"):
            metrics.time_average(bad, "used")


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e3), st.integers(0, 10**12), st.integers(0, 10**12)),
        min_size=2,
        max_size=20,
    )
)
def test_averages_lie_below_peaks_and_do_not_see_a_moment_more(
    steps: list[tuple[float, int, int]],
) -> None:
    ends = np.cumsum([step for step, _, _ in steps]).tolist()
    usage = [
        Held(at, used=used, held=used + empty)
        for at, (_, used, empty) in zip(ends, steps, strict=True)
    ]
    for quantity in get_args(metrics.Quantity):
        average = metrics.time_average(usage, quantity)
        assert average <= metrics.peak(usage, quantity) * (1 + 1e-12)
        split = [Held((a.at + b.at) / 2, used=a.used, held=a.held) for a, b in pairwise(usage)]
        more = sorted([*usage, *split], key=lambda moment: moment.at)
        assert metrics.time_average(more, quantity) == pytest.approx(average)
        assert metrics.peak(more, quantity) == metrics.peak(usage, quantity)
    held, used = (metrics.time_average(usage, of) for of in ("held", "used"))
    assert metrics.time_average(usage, "waste") == pytest.approx(held - used, abs=1e-3)


def test_metrics_need_no_torch() -> None:
    code = "import sys, kvlib.metrics; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(POSITIVE, st.integers(0, 5))
def test_bootstrap_holds_its_estimate_and_repeats_itself(values: list[float], seed: int) -> None:
    for statistic in (np.max, np.median):
        once = intervals.bootstrap_interval(
            values, lambda x, f=statistic: float(f(x)), 0.9, seed, 50
        )
        again = intervals.bootstrap_interval(
            values, lambda x, f=statistic: float(f(x)), 0.9, seed, 50
        )
        assert once == again
        assert once.low <= once.estimate == statistic(values) <= once.high


def test_bootstrap_covers_a_median_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        found = intervals.bootstrap_interval(draw.normal(size=25), np.median, draws=400)
        hits += found.low <= 0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_median_interval_depends_on_seed_and_level() -> None:
    values = np.random.default_rng(0).lognormal(size=40)
    narrow, wide = intervals.median_interval(values, 0.5), intervals.median_interval(values, 0.99)
    assert wide.low < narrow.low < narrow.estimate < narrow.high < wide.high
    with pytest.raises(ValueError, match="level"):
        intervals.median_interval(values, 1.0)


def test_mean_estimate_is_students_interval() -> None:
    values = [1.0, 2.0, 4.0, 3.5]
    found = intervals.mean_estimate(values).interval(0.9)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_equal_values_give_an_interval_of_no_width() -> None:
    found = intervals.mean_estimate([0.1] * 7)
    assert found.interval() == intervals.Interval(0.1, 0.1, 0.1)
    assert found.p_value(Region.beyond("<", 0.1, None, False)) == 1
    assert found.p_value(Region.beyond("<", 0.2, None, False)) == 0


@given(POSITIVE, st.floats(0.5, 0.999))
def test_ratio_interval_holds_its_estimate(values: list[float], level: float) -> None:
    found = intervals.paired_ratio(values, values[::-1])
    interval = found.interval(level)
    assert interval.low <= found.value <= interval.high
    assert found.value == pytest.approx(1)


def test_paired_ratio_is_the_geometric_mean_of_ratios() -> None:
    found = intervals.paired_ratio([1, 8], [2, 1])
    assert found.value == pytest.approx(2)
    assert found.n == 2
    with pytest.raises(ValueError, match="above zero"):
        intervals.paired_ratio([0, 1], [1, 1])
    with pytest.raises(ValueError, match="equal lengths"):
        intervals.paired_ratio([1], [1, 2])


@given(ANSWERS)
def test_binary_interval_holds_its_estimate_and_has_width(answers: list[tuple[int, int]]) -> None:
    first, second = zip(*answers, strict=True)
    found = intervals.paired_binary(first, second)
    interval = found.interval()
    assert interval.low <= found.value <= interval.high
    assert found.value == pytest.approx(np.mean(first) - np.mean(second))
    assert found.error > 0


def test_binary_interval_by_hand() -> None:
    # 10 pairs: 4 gained, 1 lost; (4 + 1) / 12 and (1 + 1) / 12
    found = intervals.paired_binary([1] * 4 + [0] * 6, [0] * 4 + [1] + [0] * 5)
    assert found.value == pytest.approx(0.3)
    assert found.centre == pytest.approx(3 / 12)
    assert found.error == pytest.approx(math.sqrt((7 / 12 - 9 / 144) / 12))
    with pytest.raises(ValueError, match="0 or 1"):
        intervals.paired_binary([0.5], [1])


def test_mcnemar_is_the_exact_sign_test_of_disagreements() -> None:
    assert intervals.mcnemar([1] * 5 + [0], [0] * 5 + [0]) == pytest.approx(2 / 2**5)
    assert intervals.mcnemar([1, 0], [1, 0]) == 1


def test_welch_agrees_with_scipy() -> None:
    first, second = [0.0, -1.0, 0.0, -1.0, -1.0], [0.0, 0.0, 1.0, 0.0, 0.0, -1.0]
    found = intervals.welch(first, second).interval()
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    for sample in ([1.0], [1.0, 1.0]):
        with pytest.raises(ValueError, match="spread"):
            intervals.welch(sample, second)


def test_mean_effect_averages_within_a_unit_first() -> None:
    pairs = pd.DataFrame({"value": [2, 8, 4, 4], "value_against": 1, "repeat": [0, 0, 1, 1]})
    found = intervals.mean_effect(pairs, "ratio", ["repeat"])
    assert (found.n, found.error) == (2, 0)
    assert found.value == pytest.approx(4)
    assert intervals.mean_effect(pairs, "difference", []).n == 4
    assert intervals.mean_effect(pairs, "value", ["repeat"]).value == 4.5


def test_regions_know_their_size_and_refuse_nonsense() -> None:
    assert Region.beyond("<", 1, 0.25, log=True).size == pytest.approx(math.log(4))
    assert Region.beyond(">", 0, 3, log=False) == Region(0, math.inf, 3)
    assert Region.around(0, 0, 0.03, log=False) == Region(-0.03, 0.03, 0.03)
    assert Region.around(10, 2, 0, log=True) == Region(5, 20, pytest.approx(math.log(2)))
    for side, bound, claimed in (("<", 1.0, 2.0), ("<", 1.0, -1.0), (">", 0.0, None)):
        with pytest.raises(ValueError, match=r"claimed|bound"):
            Region.beyond(side, bound, claimed, log=True)
    for factor, margin in ((0, 0), (2, 1), (1, 0), (0, -1)):
        with pytest.raises(ValueError, match="factor"):
            Region.around(1, factor, margin, log=False)


@pytest.mark.parametrize("side", ["<", ">"])
def test_a_border_is_outside_of_its_region(side: str) -> None:
    region = Region.beyond(side, 1.0, None, log=True)
    assert intervals.paired_ratio([2.0, 2.0], [2.0, 2.0]).lies(region) is False


@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=8, unique=True),
    st.floats(0.1, 10),
    st.floats(0.5, 0.99),
)
def test_interval_and_p_value_agree(values: list[float], bound: float, level: float) -> None:
    found, region = intervals.mean_estimate(values), Region.beyond("<", bound, None, False)
    p = found.p_value(region)
    if abs(p - (1 - level)) > 1e-6:
        assert (found.lies(region, level) is not None) == (p < 1 - level)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.8, 0.99))
def test_holm_levels_reject_what_holms_adjusted_p_rejects(ps: list[float], level: float) -> None:
    order, worst, adjusted = np.argsort(ps, kind="stable"), 0.0, [0.0] * len(ps)
    for rank, index in enumerate(order):
        worst = max(worst, (len(ps) - rank) * ps[index])
        adjusted[index] = worst
    for p, q, own in zip(ps, adjusted, intervals.holm(ps, level), strict=True):
        if abs(q - (1 - level)) > 1e-9:
            assert (p <= 1 - own) == (q <= 1 - level)


def test_holm_by_hand() -> None:
    assert intervals.holm([0.5, 0.001, 0.02]) == pytest.approx([0.95, 1 - 0.05 / 3, 0.975])
    assert intervals.holm([0.2, 0.3]) == pytest.approx([0.975, 0.975])
    assert intervals.holm([]) == []
    with pytest.raises(ValueError, match="between"):
        intervals.holm([1.5])


def test_texts_for_a_reader() -> None:
    ratio = intervals.paired_ratio([0.3, 0.32, 0.31], [1, 1, 1])
    assert ratio.text() == "0.3099× [0.286, 0.3358], n=3"
    assert ratio.smallest() == "×1.083"
    shares = Estimate(-0.06, -0.06, 0.01, math.inf, 200)
    assert shares.text("0/1") == "-6 points [-7.96, -4.04], n=200"
    assert shares.smallest("0/1") == "±1.96 points"
    assert intervals.mean_estimate([2.5]).text("s") == "2.5 s [2.5, 2.5], n=1"


ROWS = pd.DataFrame(
    {
        "strategy": ["a", "a", "a", "b", "b"],
        "tokens": [1, 2, 4, 1, 2],
        "value": [10.0, 20.0, 40.0, 1.0, 2.0],
    }
)


def test_select_by_value_list_range_and_word() -> None:
    (one,) = metrics.select(ROWS, {"strategy": "a", "tokens": [1, 4]})
    assert one["value"].tolist() == [10, 40]
    (one,) = metrics.select(ROWS, {"tokens": {"from": 2, "to": 3}})
    assert one["value"].tolist() == [20, 2]
    a, b = metrics.select(ROWS, {"strategy": "a", "tokens": "max"}, {"strategy": "b"})
    assert (a["value"].tolist(), len(b)) == ([40], 2)
    common = {"tokens": "largest common"}
    a, b = metrics.select(ROWS, {"strategy": "a", **common}, {"strategy": "b", **common})
    assert (a["value"].item(), b["value"].item()) == (20, 2)
    a, b = metrics.select(ROWS, {"strategy": "a", **common}, {"strategy": "c", **common})
    assert a.empty
    assert b.empty
    assert metrics.select(ROWS, {"batch": "max"})[0].empty


def test_pair_by_keys_also_where_both_lack_one() -> None:
    a, b = (ROWS[ROWS["strategy"] == name].assign(budget=np.nan) for name in "ab")
    pairs = metrics.pair(a, b, ["tokens", "budget"])
    assert (pairs["value"] / pairs["value_against"]).tolist() == [10, 10]
    with pytest.raises(ValueError, match="several rows"):
        metrics.pair(a, b, ["budget"])
    with pytest.raises(ValueError, match="no row"):
        metrics.pair(a[a["tokens"] == 4], b, ["tokens"])
