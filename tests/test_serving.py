"""Serving measured: what a run reports, the laws that it obeys, and which points are measured."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvlib import serving
from kvlib.engines import Result
from kvlib.engines.prepare import Emulation, budget_of, fetches
from kvlib.hardware import find_machine
from kvlib.link import Link
from kvlib.metrics import Timing
from kvlib.models import shape_of
from kvlib.provenance import canonical
from kvlib.store import Row

LOCAL = ["full", "paged", "h2o", "streaming", "infinigen", "offload"]
FETCHING = ["infinigen", "offload"]
RECORDED = Path(__file__).parent.parent / "figures" / "data" / "serving.jsonl"
OUTPUT = 14  # tokens, more than a strategy over an emulated link generates

TIMES = {f"{name}{tail}" for name in ("ttft", "tpot", "itl", "e2el") for tail in ("", "_p99")}
LAWS = {"in_system", "arrival_rate", "e2el_mean", "ttft_mean", "itl_sum_mean"}
BYTES = {"device_used", "device_peak", "device_reserved", "waste", "host_used"}
EACH = {f"throughput_per_gb_{which}" for which in ("used", "peak", "reserved")}
WANTED = TIMES | LAWS | BYTES | EACH
WANTED |= {"throughput", "goodput", "preemptions", "generated", "used_at", "held_at"}
RATIOS = {"rho1", "rho2", "rho3"}
EMULATED = RATIOS | {f"{name}_target" for name in RATIOS}
EMULATED |= {"bytes_moved", "target_tokens", "tpot_resident"}

Values = dict[str, list[float]]


@cache
def rows(strategy: str, requests: int = 3, rate: float | None = None) -> list[dict[str, Any]]:
    return serving.serve(
        strategy=strategy, tokens=20, output_tokens=OUTPUT, requests=requests, rate=rate,
        batch=None if rate else requests, model="tiny:llama", device="cpu", seed=0,
    )  # fmt: skip


def by_metric(values: list[dict[str, Any]]) -> Values:
    found: Values = defaultdict(list)
    for value in values:
        found[value["metric"]].append(value["value"])
    return found


def served(strategy: str, requests: int = 3, rate: float | None = None) -> dict[str, float]:
    """Each metric's first value."""
    values = by_metric(rows(strategy, requests, rate))
    return {metric: of[0] for metric, of in values.items()}


def check_laws(values: dict[str, float]) -> None:
    """TTFT + Σ ITL = E2EL, and Little's: L = λ · W."""
    assert values["ttft_mean"] + values["itl_sum_mean"] == pytest.approx(values["e2el_mean"], 1e-6)
    arrived = values["arrival_rate"] * values["e2el_mean"]
    assert values["in_system"] == pytest.approx(arrived, 1e-6)


# -- a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [None, 60.0], ids=["at once", "at a rate"])
@pytest.mark.parametrize("strategy", LOCAL)
def test_a_run_reports_all_and_obeys_the_laws(strategy: str, rate: float | None) -> None:
    values = by_metric(rows(strategy, rate=rate))
    there = values.keys() - {"host_peak"}  # not every system tells
    assert there == WANTED | (EMULATED if strategy in FETCHING else set())
    assert all(math.isfinite(number) for numbers in values.values() for number in numbers)
    assert all(len(of) == 1 for metric, of in values.items() if not metric.endswith("_at"))
    one = served(strategy, rate=rate)
    check_laws(one)
    assert all(one[name] > 0 for name in TIMES | LAWS | EACH)
    assert one["preemptions"] == 0
    assert all(one[name] <= one[f"{name}_p99"] for name in ("ttft", "tpot", "itl", "e2el"))
    assert one["device_used"] < one["device_peak"] <= one["device_reserved"]
    assert one["goodput"] * OUTPUT == pytest.approx(one["throughput"])  # without limits


@pytest.mark.parametrize("strategy", LOCAL)
def test_only_what_crosses_the_link_ends_early_and_is_emulated(strategy: str) -> None:
    early = strategy in FETCHING
    assert fetches(strategy) == early
    assert (served(strategy)["generated"] < OUTPUT) == early
    assert served(strategy, rate=60.0)["generated"] == OUTPUT
    sources = {value["metric"]: value["source"] for value in rows(strategy)}
    for metric in ("tpot", "e2el", "throughput", "throughput_per_gb_used"):
        assert sources[metric] == ("emulated" if early else "measured")
    assert {sources[metric] for metric in LAWS | BYTES} == {"measured"}


def test_a_run_that_ends_early_is_taken_to_its_end() -> None:
    """The whole output's time and tokens, but the laws speak of what was run."""
    values = served("offload")
    assert values["e2el"] > 1.2 * values["e2el_mean"]
    assert values["throughput"] < 3 * OUTPUT / values["e2el_mean"]
    assert values["throughput"] * values["e2el_p99"] <= 3 * OUTPUT * (1 + 1e-9)


def test_limits_count_in_goodput() -> None:
    common: dict[str, Any] = {
        "strategy": "full", "tokens": 6, "output_tokens": 2, "requests": 2, "model": "tiny:llama",
        "device": "cpu", "seed": 0,
    }  # fmt: skip
    for limit in ("limit_ttft", "limit_tpot"):
        values = by_metric(serving.serve(**common, **{limit: 1e-9}))
        assert values["goodput"] == [0]


def test_what_strategies_hold() -> None:
    full, kept = served("full"), served("h2o")
    for name in ("device_used", "device_peak", "device_reserved"):
        assert kept[name] < full[name]
    layers, heads, size = 3, 2, 8
    most = 3 * (20 + OUTPUT - 1) * 2 * layers * heads * size * 4  # the last one is not fed
    assert most * 0.9 <= full["device_used"] <= most * 1.1  # the tokens' places are there as well
    assert all((served(s)["host_used"] > 0) == (s in FETCHING) for s in LOCAL)


def test_a_pool_is_reserved_whatever_is_in_it() -> None:
    few, many = (served("paged", requests) for requests in (1, 3))
    assert few["device_reserved"] == many["device_reserved"]
    assert few["device_used"] < many["device_used"]
    assert few["device_peak"] < many["device_peak"] < many["device_reserved"]
    assert served("full", 1)["device_reserved"] < served("full")["device_reserved"]
    assert 0 < many["waste"] < 3 * 16 * 2 * 3 * 2 * 8 * 4  # less than a block of 16 a row


def test_ratios_of_a_run_are_the_target_s() -> None:
    values = served("infinigen")
    for name in ("rho1", "rho2"):
        assert values[name] == pytest.approx(values[f"{name}_target"], 1e-3)
    assert values["rho3"] >= values["rho3_target"] * 0.999  # this host may be slower, not faster
    assert values["bytes_moved"] > 0


def test_where_a_ratio_is_not_the_target_s_its_emulated_values_say_so() -> None:
    def marked(target: float) -> list[bool]:
        values = [
            serving.value("rho1", 2.0, "1", "emulated"),
            serving.value("rho1_target", target, "1", "modelled"),
        ]
        found = serving.annotated(values, "tiny:llama")
        assert len({value["parameters"] for value in found}) == 1
        return ["rho1 of the emulated link" in value.get("excluded", "") for value in found]

    assert marked(1.0) == marked(4.0) == [False, False]
    assert marked(0.9) == marked(4.1) == [True, False]


@pytest.mark.parametrize("through", [False, True])
def test_one_request_by_the_length_of_its_output(through: bool) -> None:
    values = serving.long_output(
        strategy="full", tokens=8, output_tokens="24,12", through=through,
        model="tiny:llama", device="cpu", seed=0,
    )  # fmt: skip
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for value in values:
        if "output_tokens" in value:
            found[value["output_tokens"]][value["metric"]] = value["value"]
    assert list(found) == [12, 24]
    assert found[12]["e2el"] < found[24]["e2el"]
    for count, of in found.items():
        assert of["throughput"] == pytest.approx(count / of["e2el"])
        assert of["ttft"] + (count - 1) * of["tpot"] == pytest.approx(of["e2el"])
    steps = [value["position"] for value in values if value["metric"] == "step"]
    assert steps == ([] if through else [0, 12, 24])


# -- by hand -----------------------------------------------------------------------------------


def result(*stamps: float) -> Result:
    return Result(0.0, stamps, 0, [5] * len(stamps), "length", 0)


def test_extended() -> None:
    timing = serving.extended(Timing(1.0, (2.0, 3.0)), 2, 0.5)
    assert timing == Timing(1.0, (2.0, 3.0, 3.5, 4.0))
    assert serving.extended(timing, 0, math.nan) == timing


def test_between() -> None:
    at, steps = [0, 2, 4], [1.0, 2.0, 3.0]
    assert serving.between(at, steps, 1) == 0
    assert serving.between(at, steps, 3) == pytest.approx(1.25 + 1.75)
    assert serving.between(at, steps, 5) == pytest.approx(1.25 + 1.75 + 2.25 + 2.75)
    assert serving.between(at, [2.0] * 3, 9) == pytest.approx(16)  # level beyond the last one too


def test_steady() -> None:
    first, later = result(1, 2, 4, 5, 7, 8), result(3, 4, 5, 7, 8)
    assert serving.steady([first, later]) == 1  # of 4, 5, 7, 8: gaps of 1, 2, 1
    assert serving.steady([first, result(3, 4, 5, 7)]) == 1.5
    assert math.isnan(serving.steady([first, result(7.5, 8)]))
    assert math.isnan(serving.steady([first, result(9, 10)]))


# -- which points ------------------------------------------------------------------------------


ALL = [*LOCAL, "vllm"]


@pytest.mark.parametrize("repeats", [1, 2, 5])
@pytest.mark.parametrize("batches", [[], [4], [1, 4], [1, 4, 16]])
@pytest.mark.parametrize("rates", [[], [0.5, 2.0]])
def test_no_point_of_a_sweep_is_measured_twice(
    repeats: int, batches: list[int], rates: list[float]
) -> None:
    points = serving.sweep(
        ALL, batches, rates, repeats, 7, requests=9, tokens=64, output_tokens=32, chunk=64
    )
    assert len({canonical(point) for point in points}) == len(points)
    places = [*((b, None) for b in batches), *((None, r) for r in rates)]
    every = {(strategy, *place) for strategy in ALL for place in places}
    asked = {(p["strategy"], p["batch"], p["rate"]) for p in points}
    assert asked <= every
    assert all(strategy in serving.ONCE for strategy, _, _ in every - asked)
    for point in points:
        assert point["seed"] == 7 + point["repeat"]
        assert point["requests"] == (point["batch"] or 9)
        assert point["budget"] == budget_of(point["strategy"])
        assert serving.serve_seconds(point) > 0
    again = [p for p in points if p["repeat"]]
    assert {p["batch"] for p in again} == ({*batches[:1], *batches[-1:]} if repeats > 1 else set())
    assert not {p["strategy"] for p in again} & {*serving.ONCE}


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_no_point_of_the_outputs_is_measured_twice(repeats: int) -> None:
    points = serving.outputs(ALL, repeats, 7, tokens=64, output_tokens="32,64,128")
    assert len({canonical(point) for point in points}) == len(points)
    check = [p for p in points if p["through"]]
    assert [(p["strategy"], p["repeat"], p["output_tokens"]) for p in check] == [
        ("paged", 0, "32,64")
    ]
    for strategy in ALL:
        count = sum(p["strategy"] == strategy and not p["through"] for p in points)
        assert count == (1 if strategy in serving.ONCE else repeats)
    assert all(serving.output_seconds(point) > 0 for point in points)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 4096), (8, 192), (16, 1024), (32, 192)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_s_cache_is_as_large_beside_its_weights(
    batch: int, tokens: int, dtype: str
) -> None:
    machine, sizes = find_machine("h100-sxm"), shape_of("smollm2")
    plan = Emulation(Link.emulated(1e9), machine, sizes, dtype, batch, tokens, 0.05)
    here, there = plan.ratios(1)
    assert plan.target_tokens > tokens
    assert here.rho2 == pytest.approx(there.rho2, 1 / plan.target_tokens)


# -- as recorded -------------------------------------------------------------------------------


def test_recorded_rows_obey_the_laws() -> None:
    if not RECORDED.exists():
        pytest.skip(f"{RECORDED.name} has not been measured")
    lines = RECORDED.read_bytes().splitlines()
    values = [by_metric(row.values) for row in map(Row.parse, lines) if row.status == "ok"]
    checked = [{name: of[0] for name, of in one.items()} for one in values if one.keys() >= LAWS]
    assert checked
    for one in checked:
        check_laws(one)
