"""The measurements of 09 and 10, on tiny models: what fits, steps, and steps over links."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlib import costs, interconnect, room, stepping
from kvlib.costs import Case
from kvlib.hardware import find_machine
from kvlib.measure import Values
from kvlib.models import shape_of

TINY = "tiny:llama"


def picked(values: Values, **about: object) -> float:
    """The one value that has all of these."""
    (found,) = [v for v in values if all(v.get(k) == x for k, x in about.items())]
    return float(found["value"])


# -- what fits ---------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 10_000), st.integers(1, 50))
def test_the_search_finds_the_largest_that_fits(answer: int, guess: int, least: int) -> None:
    tried: list[int] = []

    def fits(n: int) -> bool:
        tried.append(n)
        return n <= answer

    found = room.search(fits, guess, least)
    assert min(tried) >= least
    if answer < least:
        assert found == 0
    else:
        assert answer - max(1, room.CLOSE * answer) <= found <= answer


@pytest.mark.parametrize("strategy", ["full", "paged", "h2o", "streaming", "infinigen", "offload"])
def test_what_fits_is_what_the_formulas_say(strategy: str) -> None:
    spare = 2**20
    values = room.what_fits(
        strategies=strategy, spare=spare, tokens=48, model=TINY, device="cpu", seed=0
    )
    measured, predicted = (
        [picked(values, metric=m, source=s) for m in ("longest_context", "largest_batch")]
        for s in ("emulated", "modelled")
    )
    assert measured[0] == pytest.approx(predicted[0], rel=0.12)
    assert measured[1] == pytest.approx(predicted[1], rel=0.25)
    assert {v["capacity"] - spare for v in values} == {shape_of(TINY).parameters * 4}


def test_an_attempt_beyond_the_device_fails() -> None:
    loaded, shape = stepping.loaded_model(TINY, "float32", "cpu"), shape_of(TINY)
    capacity = shape.parameters * 4 + 2**18
    case = Case(shape, replace(find_machine("h100-sxm"), memory=capacity), dtype="float32")
    from kvlib.attachment import attach

    with attach(loaded.model), torch.inference_mode():
        attempt = room.Attempt(loaded.model, case, 2**18, 0)
        assert attempt(8, 1)
        assert not attempt(4000, 1)


# -- steps -------------------------------------------------------------------------------------


def test_steps_are_timed_and_counted_for_every_size() -> None:
    values = stepping.step_costs(
        model=TINY, strategies="full,h2o,infinigen,paged", lengths="16,40", batches="1,3",
        steps=3, device="cpu", seed=0,
    )  # fmt: skip
    times = [v for v in values if v["metric"] in ("tpot", "ttft")]
    assert len(times) == 4 * 2 * (1 + 2)
    assert all(v["value"] > 0 for v in times)
    machine = find_machine("h100-sxm")
    for strategy, budget in (("full", 1.0), ("h2o", 0.3), ("infinigen", 0.3)):
        case = Case(shape_of(TINY), machine, strategy, budget, "float32")
        for batch in (1, 3):
            counted = picked(
                values, metric="device_used", strategy=strategy, tokens=40, batch=batch
            )
            expected = costs.memory(case, 40 + 4, batch).used  # InfiniGen's fetch lacks one token
            assert counted == pytest.approx(expected, rel=0.03 if strategy == "infinigen" else 0)
    assert all(v["fetch"] == "forced" for v in values if v["strategy"] == "infinigen")
    shared = [v for v in values if v["strategy"] == "paged" and v["batch"] == 3]
    assert {v["metric"] for v in shared} == {"tpot", "gather_time"}  # copies share their blocks


def test_a_machine_is_rows_that_make_it_again() -> None:
    from kvlib.fitting import machine_of

    values = stepping.machine_rates(device="cpu", seconds=0.1)
    machine = machine_of([v | {"machine": "this one"} for v in values])
    assert machine.threads == torch.get_num_threads()
    assert machine.flops.keys() == {"float32", "bfloat16"}
    assert machine.host == machine.bandwidth


# -- links -------------------------------------------------------------------------------------


def test_a_slower_link_takes_longer_and_the_ratios_are_the_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interconnect, "matching_tokens", lambda _: 48)
    values = interconnect.over_links(
        strategies="full,infinigen,offload", speeds="4,64,450", model="smollm2", device="cpu",
        seed=0, steps=3,
    )  # fmt: skip
    slow, fast = (
        picked(values, metric="tpot", strategy="offload", speed=speed) for speed in (4.0, 450.0)
    )
    assert slow > 2 * fast
    assert picked(values, metric="tpot", strategy="full", source="measured") > 0
    for speed in (4.0, 64.0, 450.0):
        about = {"strategy": "offload", "speed": speed}
        assert picked(values, metric="rho1", **about) == pytest.approx(
            picked(values, metric="rho1_target", **about), rel=0.02
        )
    links = {v["speed"]: v["link"] for v in values if "speed" in v}
    assert links == {4.0: None, 64.0: "pcie5", 450.0: "nvlink-c2c"}
    free = [v for v in values if v.get("gather") == "free"]
    assert {v["strategy"] for v in free} == {"infinigen"}
    assert all(v["excluded"] == interconnect.FREE for v in free)


def test_a_link_stands_for_its_machine() -> None:
    assert interconnect.target(450.0) is find_machine("gh200")
    base = interconnect.target(64.0)
    assert (base.link.bandwidth, base.bandwidth) == (64e9, find_machine("h100-sxm").bandwidth)


def test_estimates_are_seconds() -> None:
    point = {"model": TINY, "strategies": "full,infinigen", "lengths": "16", "batches": "1"}
    point |= {"steps": 2, "speeds": "16,64"}
    for estimate in (stepping.step_seconds, interconnect.link_seconds, room.room_seconds):
        assert 0 < estimate(point) < 600
        assert math.isfinite(estimate(point))
