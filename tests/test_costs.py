"""The cost model: monotone where it must be, its own inverse, and right in its units."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlib import costs, memory
from kvlib.costs import Case, Rates
from kvlib.hardware import MACHINES, Machine
from kvlib.shapes import SHAPES, Mixture

LLAMA, H100 = SHAPES["llama-3.1-8b"], MACHINES["h100-sxm"]
shapes = st.sampled_from(sorted(SHAPES)).map(SHAPES.__getitem__)
machines = st.sampled_from(sorted(MACHINES)).map(MACHINES.__getitem__)
cases = st.builds(
    Case,
    shapes,
    machines,
    st.sampled_from(costs.STRATEGIES),
    st.sampled_from([0.05, 0.3, 0.77, 1.0]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    gpus=st.sampled_from([1, 2, 4, 8]),
    prefill=st.sampled_from(memory.PREFILLS),
    overlap=st.booleans(),
    rates=st.just(Rates(layer=1e-5, evict=1e-6, foresee=2e-6, latency=1e-6, pack=0.3, blocks=0.5)),
)
sizes = st.tuples(st.integers(1, 200_000), st.integers(1, 300))


def faster(machine: Machine, by: float) -> Machine:
    """The same machine with everything that moves or computes `by` times as fast."""
    return replace(
        machine,
        bandwidth=machine.bandwidth * by,
        flops={name: rate * by for name, rate in machine.flops.items()},
        link=replace(machine.link, bandwidth=machine.link.bandwidth * by),
        host=machine.host * by,
        peer=machine.peer * by,
    )


def seconds(case: Case, tokens: int, batch: int) -> list[float]:
    step = costs.step_time(case, tokens, batch).total
    return [float(step), float(costs.prefill_time(case, tokens))]


@given(cases, sizes, st.sampled_from(["bandwidth", "host", "peer", "link", "flops"]))
def test_more_bandwidth_never_slows(case: Case, size: tuple[int, int], what: str) -> None:
    quick = faster(case.machine, 3.0)
    better = replace(case, machine=replace(case.machine, **{what: getattr(quick, what)}))
    for now, then in zip(seconds(better, *size), seconds(case, *size), strict=True):
        assert now <= then * (1 + 1e-12)


@given(cases, sizes, st.floats(0.05, 0.95))
def test_more_budget_never_saves_memory(case: Case, size: tuple[int, int], budget: float) -> None:
    little, much = replace(case, budget=budget), replace(case, budget=min(1.0, budget + 0.05))
    less, more = (costs.memory(c, *size) for c in (little, much))
    assert less.used <= more.used
    assert less.peak <= more.peak
    moved = [costs.fetched_bytes(c, *size)[1] for c in (little, much)]
    assert moved[0] <= moved[1]


@given(cases, st.integers(1, 64))
def test_capacity_inverts_memory(case: Case, batch: int) -> None:
    room = costs.RESERVED * case.machine.memory
    tokens = costs.longest_context(case, batch)
    assert costs.memory(case, tokens + 1, batch).peak > room
    assert not tokens or costs.memory(case, tokens, batch).peak <= room
    requests = costs.largest_batch(case, 2048)
    assert costs.memory(case, 2048, requests + 1).peak > room
    assert not requests or costs.memory(case, 2048, requests).peak <= room


@given(cases, sizes, st.floats(0.1, 10))
def test_times_scale_as_seconds(case: Case, size: tuple[int, int], by: float) -> None:
    """All speeds `by` times as high and all fixed times as short: all times as short."""
    names = ["layer", "evict", "foresee", "latency"]
    rates = replace(case.rates, **{name: getattr(case.rates, name) / by for name in names})
    other = replace(case, machine=faster(case.machine, by), rates=rates)
    for then, now in zip(seconds(case, *size), seconds(other, *size), strict=True):
        assert now * by == pytest.approx(then, rel=1e-9)


@given(cases, sizes)
def test_bytes_scale_as_bytes(case: Case, size: tuple[int, int]) -> None:
    half, whole = (
        costs.memory(replace(case, dtype=dtype), *size) for dtype in ("bfloat16", "float32")
    )
    assert whole.kv == 2 * half.kv
    assert whole.transit == 2 * half.transit
    assert whole.host == 2 * half.host


@given(cases)
def test_arrays_give_what_numbers_give(case: Case) -> None:
    tokens, batch = np.array([100.0, 4096.0]), np.array([[1.0], [7.0]])
    together = costs.memory(case, tokens, batch).peak
    steps, first = costs.step_time(case, tokens, batch).total, costs.prefill_time(case, tokens)
    assert np.shape(together) == np.shape(steps) == (2, 2)
    for row, b in enumerate((1, 7)):
        for column, t in enumerate((100, 4096)):
            assert together[row, column] == pytest.approx(costs.memory(case, t, b).peak)
            one = costs.step_time(case, t, b).total
            assert np.asarray(steps)[row, column] == pytest.approx(one)
            assert np.asarray(first)[column] == pytest.approx(costs.prefill_time(case, t))


def test_an_eight_billion_model_on_an_h100() -> None:
    """By hand: 16.06 GB of weights, 131,072 B a token, 3.35 TB/s."""
    case = Case(LLAMA, H100)
    found = costs.memory(case, 8192, 4)
    assert found.weights == 16_060_522_496
    assert found.kv == 8192 * 4 * 131_072
    step = costs.step_time(case, 8192, 4)
    table = 128_256 * 4096 * 2  # the embedding, of which a few rows are read
    assert step.products == pytest.approx((16_060_522_496 - table) / 3.35e12)
    assert step.attention == pytest.approx(8192 * 4 * 131_072 / 3.35e12)
    assert step.total == step.compute
    assert step.exposed == step.transfer == step.selection == 0


def test_a_budget_of_one_is_the_full_cache() -> None:
    full = Case(LLAMA, H100)
    h2o = replace(full, strategy="h2o")
    assert costs.step_time(h2o, 5000, 3).total == costs.step_time(full, 5000, 3).total
    assert costs.memory(h2o, 5000, 3).kv == costs.memory(full, 5000, 3).kv
    assert costs.prefill_time(h2o, 5000) == costs.prefill_time(full, 5000)


def test_what_fetches_hides_behind_computation_or_waits() -> None:
    slow, fast = (Case(LLAMA, H100, "offload").over(bw) for bw in (1e9, 1e15))
    serial = replace(slow, overlap=False)
    waiting, hidden, summed = (costs.step_time(c, 10_000) for c in (slow, fast, serial))
    assert hidden.exposed == pytest.approx(0, abs=1e-9)
    assert waiting.total == pytest.approx(waiting.transfer)
    assert summed.total == pytest.approx(summed.compute + summed.transfer)
    moved = 10_000 * 131_072
    assert waiting.transfer == pytest.approx(moved / 1e9)


def test_infinigen_fetches_two_layers_whole_and_its_share_of_the_others() -> None:
    case = Case(LLAMA, H100, "infinigen", 0.25)
    whole, picked = costs.fetched_bytes(case, 1000, 2)
    layer = 131_072 / 32
    assert (whole, picked) == (1000 * 2 * layer, 250 * 2 * layer)
    found = costs.memory(case, 1000, 2)
    assert found.kv == 0
    assert found.transit == 2 * whole
    assert found.host == 1000 * 2 * 131_072
    rank = 38  # 0.3 of 128 columns
    assert found.state == 2000 * 8 * (4 * 32 + 30 * rank * 2)


def test_a_whole_number_is_a_share_too() -> None:
    one, whole = (costs.memory(Case(LLAMA, H100, "h2o", b), 1000) for b in (1, 1.0))
    assert one.kv == whole.kv == 1000 * 131_072


def test_no_link_is_faster_than_the_memory_behind_it() -> None:
    case = Case(LLAMA, H100, "offload")
    fast, faster = (costs.step_time(case.over(bw), 50_000).transfer for bw in (4e11, 4e13))
    assert fast == faster == pytest.approx(50_000 * 131_072 / H100.host)


def test_every_device_has_the_residual_of_a_prompt() -> None:
    one, eight = (costs.memory(Case(LLAMA, H100, gpus=g), 8192).prefill for g in (1, 8))
    residual = 8192 * 2 * 4096 * 2
    assert eight == pytest.approx((one - residual) / 8 + residual)


def test_chunks_of_an_evicting_strategy_attend_to_what_it_keeps() -> None:
    whole, part = (
        costs.memory(Case(LLAMA, H100, "streaming", 0.1, prefill=p), 100_000).prefill
        for p in ("eager", "chunked")
    )
    assert part < whole / 50


def test_devices_share_weights_and_heads() -> None:
    one, two, many = (costs.memory(Case(LLAMA, H100, gpus=g), 1000) for g in (1, 2, 8))
    assert two.weights == one.weights / 2
    assert (two.kv, many.kv) == (one.kv / 2, one.kv / 8)
    three = costs.memory(Case(LLAMA, H100, gpus=3), 1000)
    assert three.kv == one.kv * 3 / 8  # of 8 KV heads one device has three
    assert costs.step_time(Case(LLAMA, H100, gpus=2), 1000).reduce > 0


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    shape = SHAPES["gpt-oss-20b"]
    assert isinstance(shape, Mixture)
    assert shape.parameters == pytest.approx(20.91e9, rel=1e-3)  # as published
    assert shape.used() == pytest.approx(3.61e9, rel=1e-3)
    experts = shape.held(0.0)
    rest = shape.read(0.0, 10**6)
    assert shape.read(0.0, 1) == pytest.approx(experts * 4 / 32)
    assert rest == pytest.approx(experts)
    assert shape.held(2.0) == pytest.approx(13.75e9, rel=1e-3)


def test_a_step_of_paged_costs_what_full_costs_and_reserves_the_device() -> None:
    full, paged = Case(LLAMA, H100), Case(LLAMA, H100, "paged")
    assert costs.step_time(paged, 777).total == costs.step_time(full, 777).total
    found = costs.memory(paged, 777, 3)
    assert found.waste == 3 * (784 - 777) * 131_072
    assert found.reserved == 0.9 * 80e9 - found.weights


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strategy": "lru"}, "strategy must be one of full, paged"),
        ({"budget": 0.0}, "must lie in"),
        ({"budget": 1.5}, "must lie in"),
        ({"gpus": 9}, "gpus must be 1 to 8"),
        ({"gpus": 0}, "gpus must be a whole number"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"prefill": "lazy"}, "prefill must be one of"),
    ],
)
def test_bad_cases_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case(**{"shape": LLAMA, "machine": H100, **wrong})


def test_devices_without_links_between_them_stand_alone() -> None:
    with pytest.raises(ValueError, match="gpus must be 1 to 1"):
        Case(LLAMA, replace(H100, peer=0.0), gpus=2)


@pytest.mark.parametrize("name", [item.name for item in fields(Rates)])
@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_bad_rates_are_refused(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=name):
        Rates(**{name: wrong})


@pytest.mark.parametrize("call", [costs.longest_context, costs.largest_batch])
def test_what_does_not_fit_at_all_is_zero(call: object) -> None:
    assert callable(call)
    assert call(Case(SHAPES["llama-3.1-70b"], MACHINES["rtx-4090"]), 1) == 0


def test_tokens_must_be_whole_numbers() -> None:
    for wrong in (0, -3, 2.5):
        with pytest.raises(ValueError, match="tokens must be a whole number"):
            costs.memory(Case(LLAMA, H100), wrong)


def test_it_runs_without_torch() -> None:
    code = (
        "import sys, kvlib, kvlib.fitting, kvlib.explorer\n"
        "kvlib.recommend(model='llama-3.1-8b', machine='h100-sxm', context=64, output=1)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
