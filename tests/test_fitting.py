"""The fit: finds the rates behind times that the cost model made, and keeps repeats together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlib import fitting
from kvlib.costs import Case, Rates, memory, prefill_time, step_time
from kvlib.hardware import Link, Machine
from kvlib.records import read
from kvlib.shapes import find_shape

HERE = Machine(
    "chip", 16 * 10**9, 20e9, {"float32": 300e9}, Link("memory", 10e9, "x"), 20e9, 16e9, "x",
    threads=2,
)  # fmt: skip
TRUE = Rates(
    stream=0.9, attend=0.5, products=0.7, flash=0.4, scan=0.1, elementwise=0.3, gather=0.6,
    pack=0.5, blocks=1.5, layer=4e-4, evict=1e-4, foresee=3e-4,
)  # fmt: skip
BUDGETS = {"full": 1.0, "paged": 1.0, "h2o": 0.3, "streaming": 0.3, "infinigen": 0.3}


def rows(rates: Rates = TRUE, noise: float = 0.0) -> list[dict[str, Any]]:
    """Rows as 09_capacity stores them, of times that the cost model gives at these rates."""
    found, random = [], np.random.default_rng(0)
    for model in ("shape:smollm2-135m", "shape:opt-125m", "shape:qwen3-0.6b"):
        for strategy, budget in BUDGETS.items():
            shape = find_shape(model.removeprefix("shape:"))
            case = Case(shape, HERE, strategy, budget, "float32", rates=rates)
            for tokens in (128, 384, 1024):
                about = {"model": model, "strategy": strategy, "tokens": str(tokens)}
                about |= {"budget": str(budget), "source": "measured", "status": "ok"}
                times = [("ttft", 1, prefill_time(case, tokens))]
                times += [("tpot", b, step_time(case, tokens, b).total) for b in (1, 4, 16)]
                found += [
                    about
                    | {"metric": metric, "batch": str(batch)}
                    | {"value": str(float(taken) * (1 + noise * random.normal()))}
                    for metric, batch, taken in times
                ]
    return found


def test_the_rates_behind_the_times_are_found() -> None:
    times = fitting.times_of(rows(), HERE)
    found = fitting.fit(times)
    assert times.predicted(found) == pytest.approx(times.seconds, rel=1e-6)
    for name in ("attend", "gather", "blocks", "layer", "foresee", "flash"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02)
    assert (found.eager, found.latency) == (1.0, 0.0)  # of which no time says anything


def test_features_are_the_cost_model_itself() -> None:
    times = fitting.times_of(rows(), HERE)
    one = [
        fitting.TIMES[metric](replace(case, rates=TRUE), tokens, batch)
        for case, metric, tokens, batch in zip(
            times.cases, times.metric, times.tokens, times.batch, strict=True
        )
    ]
    assert times.predicted(TRUE) == pytest.approx(np.array(one, dtype=float), rel=1e-9)


def test_no_product_is_faster_than_the_fastest_one() -> None:
    times = fitting.times_of(rows(replace(TRUE, products=5.0, flash=9.0)), HERE)
    found = fitting.fit(times)
    assert found.products <= 1
    assert found.flash <= 1
    assert found.stream <= 2


def test_what_is_held_out_is_foretold() -> None:
    times = fitting.times_of(rows(noise=0.02), HERE)
    groups = fitting.schemes(times, "smollm2-135m", "qwen3-0.6b")
    held = fitting.held_out(times, groups)
    assert {row["scheme"] for row in held} == set(groups)
    worst = max(abs(row["error"]) for row in held)
    assert 0.001 < worst < 0.25
    shapes = {row["model"] for row in held if row["scheme"] == "another shape"}
    assert shapes == {"qwen3-0.6b"}
    longest = {row["tokens"] for row in held if row["scheme"] == "longest context"}
    assert longest == {1024}


def test_repeats_of_a_size_stay_together() -> None:
    twice = [*rows(), *rows(replace(TRUE, layer=9e-4))]
    times = fitting.times_of(twice, HERE)
    for masks in fitting.schemes(times, "smollm2-135m", "qwen3-0.6b").values():
        for mask in masks:
            columns = (times.model, times.metric, times.tokens, times.batch, times.strategy)
            size = list(zip(*columns, strict=True))
            inside = {size[n] for n in np.flatnonzero(mask)}
            assert not inside & {size[n] for n in np.flatnonzero(~mask)}


def test_interior_sizes_have_neighbours_on_both_sides() -> None:
    times = fitting.times_of(rows(), HERE)
    inner = fitting.interior(times)
    corner = (times.tokens == 1024) & (times.batch == 16)
    assert not inner[corner].any()
    assert inner[(times.tokens == 384) & (times.metric == "ttft")].all()


def test_only_sound_times_are_fitted() -> None:
    good = rows()
    spoilt = [
        row | {"value": "99", **wrong}
        for row in good[:8]
        for wrong in ({"status": "noisy"}, {"source": "emulated"}, {"metric": "e2el"})
    ]
    assert len(fitting.times_of([*good, *spoilt], HERE).seconds) == len(good)
    with pytest.raises(ValueError, match="measure 09_capacity first"):
        fitting.times_of(spoilt, HERE)


def test_the_parts_of_a_gpus_step_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="rates are fitted on CPUs"):
        fitting.times_of(rows(), replace(HERE, threads=0))


def test_rows_of_01_name_no_budget() -> None:
    row = rows()[0] | {"metric": "ttft", "batch": "", "budget": "", "prefill": "eager"}
    times = fitting.times_of([row | {"strategy": "h2o", "model": "smollm2"}], HERE)
    case = times.cases[0]
    assert (case.budget, case.prefill, case.shape.name) == (0.3, "eager", "smollm2-135m")


def test_the_machine_comes_from_its_rows() -> None:
    rates = {"memory": 1e9, "bandwidth": 2e9, "link": 1e9, "host": 2e9, "host_memory": 1e9}
    found = [
        {"metric": name, "value": str(value), "chip": "c", "machine": "c, 2 cores"}
        for name, value in {**rates, "threads": 2}.items()
    ]
    flops = {"metric": "flops", "value": "3e9", "chip": "c", "machine": "c", "dtype": "float32"}
    machine = fitting.machine_of([*found, flops])
    assert (machine.name, machine.bandwidth, machine.threads) == ("c", 2e9, 2)
    assert machine.flops == {"float32": 3e9}
    with pytest.raises(ValueError, match="measure 09_capacity first"):
        fitting.machine_of(rows())


def test_bytes_are_foretold_without_a_fit() -> None:
    case = Case(find_shape("smollm2-135m"), HERE, "h2o", 0.3, "float32")
    counted = float(memory(case, 128 + 5, 4).used)
    row = {"metric": "device_used", "model": "smollm2", "strategy": "h2o", "tokens": "128"}
    row |= {"batch": "4", "budget": "0.3", "steps": "4", "value": str(counted * 1.01)}
    row |= {"source": "measured", "status": "ok"}
    (found,) = fitting.byte_errors([row], HERE)
    assert found["error"] == pytest.approx(1 / 1.01 - 1)


def test_a_figure_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run `make figures/09_capacity\.svg`"):
        read(tmp_path, "09_capacity")
