"""What the notebooks on capacity, links and choosing draw: rows and panels of the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvlib import figures
from kvlib.costs import Case, largest_batch, longest_context, step_time
from kvlib.evidence import INEXACT
from kvlib.fitting import NEVER
from kvlib.hardware import find_machine
from kvlib.interconnect import FREE
from kvlib.measure import value
from kvlib.memory import BUDGET
from kvlib.paper_scale import on_gh200
from kvlib.shapes import find_shape

GOALS = {  # largest mean absolute error, by what was held out
    "interpolation": 0.10,
    "longest context": 0.25,
    "largest batch": 0.25,
    "another shape": 0.25,
}
MARKS = dict(zip(GOALS, "o^sD", strict=True))


def case_of(shape: str, machine: str, strategy: str, gpus: int = 1) -> Case:
    """The case of a strategy at the study's budget, by names, at the most a machine can do."""
    budget = BUDGET if strategy in INEXACT else 1.0
    return Case(find_shape(shape), find_machine(machine), strategy, budget, gpus=gpus)


def fewest_gpus(shape: str, machine: str) -> int | None:
    """The least number of devices that holds the weights and 1k tokens; None where 8 do not."""
    for gpus in (1, 2, 4, 8):
        if longest_context(case_of(shape, machine, "paged", gpus)) >= 1024:
            return gpus
    return None


def capacity_rows(
    shapes: Sequence[str], machines: Sequence[str], strategies: Sequence[str], tokens: int
) -> list[dict[str, Any]]:
    """Modelled rows: longest context, most requests of `tokens` tokens, TPOT of one of these.

    On as few devices as hold the weights; a model that 8 do not hold has no rows.
    """
    rows: list[dict[str, Any]] = []
    for machine, shape in ((m, s) for m in machines for s in shapes):
        if not (gpus := fewest_gpus(shape, machine)):
            continue
        about = {"target": machine, "model": shape, "gpus": gpus, "tokens": tokens}
        about |= {"parameters": find_shape(shape).parameters, "status": "ok", "machine": "formulas"}
        for strategy in strategies:
            case = case_of(shape, machine, strategy, gpus)
            found = [
                value("longest_context", longest_context(case), "tokens", "modelled"),
                value("largest_batch", largest_batch(case, tokens), "requests", "modelled"),
                value("tpot", float(step_time(case, tokens).total), "s", "modelled"),
            ]
            rows += [v | about | {"strategy": strategy, "budget": case.share} for v in found]
    return rows


def link_rows(
    shape: str, machine: str, strategies: Sequence[str], speeds: Sequence[float], tokens: int,
    named: Mapping[float, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Modelled rows: TPOT behind `tokens` tokens over links of so many GB/s.

    InfiniGen once more with a host that picks rows in no time: `gather` is "free", and the row
    excluded from what projects a claim.

    named: speeds that have a name in the column `link`, and are added to the others
    """
    rows: list[dict[str, Any]] = []
    for strategy in strategies:
        case = case_of(shape, machine, strategy)
        for gather in ("host", "free") if strategy == "infinigen" else ("host",):
            rates = replace(case.rates, gather=NEVER) if gather == "free" else case.rates
            about = {"strategy": strategy, "budget": case.share, "gather": gather}
            about |= {"target": machine, "status": "ok", "model": shape, "tokens": tokens}
            about |= {"excluded": FREE} if gather == "free" else {}
            for speed in sorted({*speeds, *named}) if case.fetches else (np.nan,):
                own = _linked(case, speed, named.get(speed)) if case.fetches else case
                seconds = float(step_time(replace(own, rates=rates), tokens).total)
                at = {"speed": speed, "link": named.get(speed), "machine": "formulas"}
                rows.append(value("tpot", seconds, "s", "modelled") | about | at)
    return rows


def _linked(case: Case, speed: float, name: str | None) -> Case:
    """The case over a link of so many GB/s; NVLink-C2C comes with the GH200 that it is part of."""
    return on_gh200(case) if name == "nvlink-c2c" else case.over(speed * 1e9)


def predicted_against_measured(ax: Axes, held: pd.DataFrame) -> None:
    """A mark for each time that was held out; colour by strategy, shape by what was left out."""
    for (scheme, strategy), part in held.groupby(["scheme", "strategy"], sort=False):
        ax.plot(
            part["seconds"], part["predicted"], MARKS[str(scheme)], ms=4, alpha=0.7,
            color=figures.colour(str(strategy)), mew=0,
        )  # fmt: skip
    ends = np.array([held["seconds"].min() * 0.8, held["seconds"].max() * 1.25])
    ax.plot(ends, ends, color="0.3", lw=1)
    ax.fill_between(ends, ends * 0.9, ends * 1.1, color="0.6", alpha=0.25, lw=0)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)


def mean_errors(held: pd.DataFrame) -> pd.DataFrame:
    """Mean absolute error in %, by metric and what was held out, for each strategy."""
    percent = held.assign(percent=100 * held["error"].abs())
    table = percent.pivot_table(index="strategy", columns=["metric", "scheme"], values="percent")
    order = [(m, s) for m in ("tpot", "ttft") for s in GOALS if (m, s) in table.columns]
    return table[order]
