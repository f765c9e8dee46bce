"""What 12_choosing brings together: settings against the full cache, and cases decided."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from kvlib.advice import Advice, Option
from kvlib.costs import STRATEGIES
from kvlib.evidence import Evidence
from kvlib.measure import value

SPARSITY = "08_sparsity"
GOOD, BEST, BAD = "#c7e9c0", "#74c476", "#d9d9d9"


def settings(frame: pd.DataFrame, tasks: Evidence) -> pd.DataFrame:
    """One row a strategy and budget: memory and TPOT ÷ the full cache's, and points of answers.

    Columns strategy, budget, memory, tpot, change (points, with low and high of 95 %), front.
    frame: rows of all figures, one model's. tasks: the answers, of which a strategy that attends
    to all changes none.
    """
    if frame.empty or SPARSITY not in set(frame["figure"]):
        raise ValueError(f"no rows of {SPARSITY} for this model: run it first")
    sound = frame[frame["status"].isin(["ok", "noisy"])].astype({"value": float})
    own = sound[sound["figure"] == SPARSITY]
    by_budget = own[~own["knobs"].fillna("").str.contains("alpha=[0-9]")]
    wide = by_budget.pivot_table(
        index=["strategy", "budget"], columns="metric", values="value", aggfunc="median"
    )
    full = wide.loc["full"].loc[1.0]
    found = pd.DataFrame(
        {
            "memory": wide["device_used"] / full["device_used"],
            "tpot": wide["tpot"] / full["tpot"],
        }
    ).reset_index()
    changes = [
        _change(tasks, s, b) for s, b in zip(found["strategy"], found["budget"], strict=True)
    ]
    found[["change", "low", "high"]] = changes
    found = found.dropna(subset=["tpot", "change"])
    return found.assign(front=on_front(found[["memory", "tpot", "change"]].to_numpy() * (1, 1, -1)))


def _change(tasks: Evidence, strategy: str, budget: float) -> tuple[float, float, float]:
    """Points that answers change by, with a 95 % interval; NaN where they were not asked."""
    if budget >= 1:
        return 0.0, 0.0, 0.0
    change = tasks.change(strategy, budget)
    if change is None:
        return np.nan, np.nan, np.nan
    ends = change.interval()
    return 100 * change.value, 100 * ends.low, 100 * ends.high


def on_front(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which rows [n, objectives], the smaller the better, no other row dominates."""
    no_worse: npt.NDArray[np.bool_] = np.all(costs[None] <= costs[:, None], axis=2)
    better: npt.NDArray[np.bool_] = np.any(costs[None] < costs[:, None], axis=2)
    front: npt.NDArray[np.bool_] = ~np.any(no_worse & better, axis=1)
    return front


def rows_of(found: pd.DataFrame) -> pd.DataFrame:
    """The settings as rows of a figure."""
    units = {"memory": "1", "tpot": "1", "change": "points", "front": "0/1"}
    rows = [
        value(f"{metric}_relative" if metric in ("memory", "tpot") else metric,
              float(line[metric]), unit)
        | {"strategy": line["strategy"], "budget": line["budget"], "status": "ok"}
        for _, line in found.iterrows() for metric, unit in units.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def advice_rows(advice: Mapping[str, Advice]) -> pd.DataFrame:
    """What was predicted for each case and strategy, as modelled rows of a figure."""
    units = {"memory": "B", "host": "B", "ttft": "s", "tpot": "s", "throughput": "tokens/s"}
    rows = [
        value(f"predicted_{metric}", float(getattr(option, metric)), unit, "modelled")
        | {"strategy": option.strategy, "budget": option.budget, "case": case, "status": "ok"}
        | {"fits": option.fits, "place": place}
        for case, found in advice.items()
        for place, option in enumerate(found.options, 1)
        for metric, unit in units.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def decisions(ax: Axes, advice: Mapping[str, Advice]) -> None:
    """A table: a line a case, a column a strategy, its place or the limit that excludes it."""
    for line, found in enumerate(advice.values()):
        for place, option in enumerate(found.options, 1):
            column = STRATEGIES.index(option.strategy)
            shade, text = _cell(option, place)
            ax.add_patch(Rectangle((column - 0.48, line - 0.46), 0.96, 0.92, facecolor=shade))
            ax.text(column, line, text, ha="center", va="center", fontsize=7)
    ax.set_xticks(range(len(STRATEGIES)), STRATEGIES, fontsize=8)
    ax.set_yticks(range(len(advice)), [name.replace(", ", ",\n") for name in advice], fontsize=8)
    ax.set(xlim=(-0.5, len(STRATEGIES) - 0.5), ylim=(len(advice) - 0.5, -0.5))
    ax.grid(visible=False)
    ax.tick_params(length=0)


def _cell(option: Option, place: int) -> tuple[str, str]:
    budget = "" if option.budget is None else f"at {option.budget:g}\n"
    if option.fits:
        rate = f"{option.throughput:,.0f}\ntokens/s"
        return (BEST if place == 1 else GOOD), f"{place}\n{budget}{rate}"
    limit = max(option.exceeded, key=lambda name: option.exceeded[name])
    times = option.exceeded[limit]
    known = {"accuracy": option.accuracy, "recall": option.recall}.get(limit, True)
    much = "unknown" if not known else f"{times:.1f}×" if times < 1e6 else "over 0"
    return BAD, f"{limit.replace(' ', chr(10))}\n{much}"
