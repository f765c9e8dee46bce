"""Accuracy by budget, drawn: changes against the full cache, per task and over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlib import figures, intervals
from kvlib.evaluation import ORACLE

QUESTION = ["task", "item"]
SETTING = ["strategy", "budget", "mode"]
SAVED = ["correct", "correct_change", "chance", "accuracy", "agreement", "share", "loglikelihood"]
SAVED += ["kept_min", "kept_median"]
NAMES = {ORACLE: "H2O as a masked simulation (later tokens vote)"}
Ends = tuple[float, float, float]  # a value and its 95 % interval


# -- rows --------------------------------------------------------------------------------------


def annotated(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows and, of each question, `correct_change`; per task `accuracy` and `agreement`.

    A change is to the full cache's answer to the same question; without that there is none.
    """
    answers = frame[frame["metric"].eq("correct")]
    own = answers.merge(_full(frame, "correct"), on=QUESTION)
    change = own.assign(metric="correct_change", value=own["value"] - own["full"], unit="0/1")
    parts = [frame, change.drop(columns="full")]
    chosen = frame[frame["metric"].eq("choice")].merge(_full(frame, "choice"), on=QUESTION)
    same = chosen.assign(value=chosen["value"].eq(chosen["full"]).astype(float))
    same = same.drop(columns="full")
    for metric, rows in (("accuracy", answers), ("agreement", same)):
        parts.append(_by_task(rows, metric))
    whole = pd.concat(parts, ignore_index=True)
    whole.attrs = frame.attrs
    return whole


def _full(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The full cache's value for each question, in the column `full`."""
    rows = frame[frame["strategy"].eq("full") & frame["metric"].eq(metric)]
    return rows.drop_duplicates(QUESTION)[[*QUESTION, "value"]].rename(columns={"value": "full"})


def _by_task(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    keys = [*SETTING, "task"]
    made = 100 * rows.groupby(keys, dropna=False, sort=False)["value"].mean()
    first = rows.drop_duplicates(keys).set_index(keys)
    table = first.assign(metric=metric, value=made, unit="%", item=None).reset_index()
    return table.drop(columns=["excluded", "first", "key"], errors="ignore")


def shares(frame: pd.DataFrame) -> pd.Series[float]:
    """The share of the tokens that each strategy really attended to, by strategy and budget."""
    rows = frame[frame["metric"].eq("share")]
    return rows.groupby(["strategy", "budget"], dropna=False)["value"].mean()


# -- statistics --------------------------------------------------------------------------------


def proportion(values: pd.Series[float]) -> Ends:
    """A share of 0/1 values in percent, with Wilson's interval."""
    found = intervals.proportion(list(values))
    return 100 * found.estimate, 100 * found.low, 100 * found.high


def change(own: pd.Series[float], full: pd.Series[float]) -> Ends:
    """Points of accuracy gained on the same questions, with the paired interval of claims."""
    found = intervals.paired_binary(list(own), list(full))
    interval = found.interval()
    return 100 * found.value, 100 * interval.low, 100 * interval.high


def shift(own: pd.Series[float], full: pd.Series[float]) -> Ends:
    """Mean change of the right answer's log-likelihood, with Student's interval."""
    interval = intervals.mean_estimate(list(own - full)).interval()
    return interval.estimate, interval.low, interval.high


def above_chance(rows: pd.DataFrame) -> Ends:
    """Percent of what the full cache answers beyond guessing that is lost, with a bootstrap.

    rows: `own`, `full` (0/1) and `chance` of the same questions; tasks `at_chance` are left out.
    """
    table = rows.loc[~rows["at_chance"], ["own", "full", "chance"]].to_numpy(dtype=float)
    if not len(table):
        return np.nan, np.nan, np.nan
    picks = np.random.default_rng(0).integers(0, len(table), size=(2000, len(table)))
    drawn = table[picks].mean(axis=1)  # [draws, 3]
    beyond = drawn[:, 1] - drawn[:, 2]
    usable = beyond > 0
    lost = 100 * (drawn[usable, 1] - drawn[usable, 0]) / beyond[usable]
    own, full, chance = table.mean(axis=0)
    middle = 100 * float((full - own) / (full - chance))
    low, high = np.percentile(lost, [2.5, 97.5])
    return middle, min(middle, float(low)), max(middle, float(high))


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Each setting against the full cache over all tasks, hollow questions left out.

    One row a strategy and budget: the realised share, questions, accuracy, its change with the
    interval, McNemar's p, agreement, the log-likelihood's shift, and the loss above chance.
    """
    frame = frame[_solid(frame)]
    share, found = shares(frame), []
    for (strategy, budget), rows in _paired(frame).groupby(["strategy", "budget"], dropna=False):
        moved = change(rows["own"], rows["full"])
        found.append(
            {
                "strategy": strategy,
                "budget": budget,
                "share": share.get((strategy, budget), np.nan),
                "questions": len(rows),
                "accuracy, %": 100 * rows["own"].mean(),
                "change, points": moved[0],
                "from": moved[1],
                "to": moved[2],
                "McNemar p": intervals.mcnemar(list(rows["own"]), list(rows["full"])),
                "same choice, %": 100 * rows["same"].mean(),
                "log-likelihood": (rows["own_ll"] - rows["full_ll"]).mean(),
                "lost above chance, %": above_chance(rows)[0],
            }
        )
    order = {s: n for n, s in enumerate(frame["strategy"].unique())}
    table = pd.DataFrame(found).sort_values(
        ["strategy", "budget"], key=lambda c: c.map(order) if c.name == "strategy" else c
    )
    return table.set_index(["strategy", "budget"])


def at_chance(frame: pd.DataFrame) -> list[str]:
    """Tasks that the full cache answers no better than by guessing: no loss can be told there."""
    full = frame[frame["strategy"].eq("full")].pivot_table(
        index=QUESTION, columns="metric", values="value"
    )
    means = full.groupby("task")[["correct", "chance"]].mean()
    return sorted(means.index[means["correct"] <= means["chance"]])


def _solid(frame: pd.DataFrame) -> pd.Series[bool]:
    """Rows that give no reason to be left out."""
    if "excluded" not in frame:
        return pd.Series(data=True, index=frame.index)
    return frame["excluded"].isna()


def _paired(frame: pd.DataFrame) -> pd.DataFrame:
    """Each question under each setting beside the full cache, in columns of one name each."""
    keys = ["strategy", "budget", *QUESTION]
    wide = frame[frame["item"].notna()].pivot_table(
        index=keys, columns="metric", values="value", dropna=False
    )
    wide = wide.dropna(subset=["correct"]).reset_index()
    full = wide[wide["strategy"].eq("full")].set_index(QUESTION)
    answers = full[["correct", "choice", "loglikelihood", "chance"]].add_suffix("_full")
    table = wide.join(answers, on=QUESTION).dropna(subset=["correct_full"])
    return table.assign(
        own=table["correct"], full=table["correct_full"], chance=table["chance_full"],
        same=table["choice"].eq(table["choice_full"]).astype(float),
        at_chance=table["task"].isin(at_chance(frame)),
        own_ll=table["loglikelihood"], full_ll=table["loglikelihood_full"],
    )  # fmt: skip


# -- the figure --------------------------------------------------------------------------------


def draw(frame: pd.DataFrame, tasks: Sequence[str]) -> Figure:
    """Accuracy a task, and below over all tasks what a strategy changes."""
    rows = -(-len(tasks) // 4)
    fig, axes = plt.subplots(rows + 1, 4, figsize=(15, 3.3 * (rows + 1)), squeeze=False)
    for ax, task in zip(axes[:rows].flat, tasks, strict=False):
        task_panel(ax, frame, task)
    for ax in axes[:rows].flat[len(tasks) :]:
        ax.axis("off")
    for row in axes[:rows]:
        row[0].set_ylabel("accuracy, %")
    share, table = shares(frame), _paired(frame[_solid(frame)])
    for ax, (title, label, same, measure) in zip(axes[rows], POOLED, strict=True):
        pooled_panel(ax, table, share, measure)
        ax.axhline(same, color=figures.colour("full"), lw=1.5)
        ax.set(title=title, ylabel=label)
    for ax in axes[rows]:
        ax.set_xlabel("share of the tokens attended to")
    legend(fig)
    fig.tight_layout(rect=(0, 0, 1, 0.97))
    return fig


def told(frame: pd.DataFrame) -> str:
    """What the figure must say of its rows."""
    first = frame.iloc[0]
    answers = frame[frame["metric"].eq("correct")]
    modes = answers.drop_duplicates("strategy").set_index("strategy")["mode"]
    least, low = at_chance(frame), answers[~_solid(answers)]
    parts = [
        f"{first['model']}, float32, {first['shots']:g}-shot; questions a task in brackets; "
        "bars and bands: 95 % intervals (Wilson; paired over all tasks)",
        "Fed: " + ", ".join(f"{NAMES.get(str(s), s)} {mode}" for s, mode in modes.items()),
    ]
    if least:
        parts.append(f"Full cache no better than guessing: {', '.join(least)}")
    if len(low):
        parts.append(
            f"Left out below: the {len(low)} answers given while a layer had fewer than four "
            "tokens; hollow: points with mostly such"
        )
    return ". ".join([*parts, figures.caption(frame)])


def saved(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that go into the figure's file: what is drawn, and what claims ask for."""
    rows = frame[frame["metric"].isin(SAVED) | frame["status"].ne("ok")]
    rows = rows.drop(columns=["first", "block", "source_kind"], errors="ignore")
    rows.attrs = frame.attrs
    return rows


# -- panels ------------------------------------------------------------------------------------


def task_panel(ax: Axes, frame: pd.DataFrame, task: str) -> None:
    """Accuracy on one task by the realised share; hollow where too few tokens were kept."""
    rows = frame[frame["task"].eq(task)]
    share = shares(rows)
    full = rows[rows["strategy"].eq("full")]
    answers = full.loc[full["metric"].eq("correct"), "value"]
    if len(answers):
        middle, low, high = proportion(answers)
        ax.axhspan(low, high, color=figures.colour("full"), alpha=0.15, lw=0)
        ax.axhline(middle, color=figures.colour("full"), lw=1.5, label="full cache")
        guess = 100 * full.loc[full["metric"].eq("chance"), "value"].mean()
        ax.axhline(guess, color="0.5", lw=1, ls=":", label="guessing")
    for strategy, part in _curves(rows[rows["metric"].eq("correct")]):
        points = [
            (share[strategy, budget], *proportion(some["value"]), _solid(some).mean() < 0.5)
            for budget, some in part.groupby("budget")
        ]
        _draw(ax, strategy, points)
    ax.set_title(f"{task} ({answers.size})")
    _share_axis(ax, share)


def pooled_panel(
    ax: Axes, table: pd.DataFrame, share: pd.Series[float], measure: Callable[[pd.DataFrame], Ends]
) -> None:
    """A measure of the paired questions of all tasks; of what answers them all, that is."""
    for strategy, part in _curves(table[table["strategy"].ne(ORACLE)]):
        points = [
            (share[strategy, budget], *measure(some), False)
            for budget, some in part.groupby("budget")
        ]
        _draw(ax, strategy, points)
    _share_axis(ax, share)


POOLED: tuple[tuple[str, str, float, Callable[[pd.DataFrame], Ends]], ...] = (
    ("All tasks: accuracy", "change, points", 0, lambda t: change(t["own"], t["full"])),
    ("All tasks: same choice as full", "questions, %", 100, lambda t: proportion(t["same"])),
    (
        "All tasks: log-likelihood of right answer", "change, nats", 0,
        lambda t: shift(t["own_ll"], t["full_ll"]),
    ),
    ("All tasks: loss above chance", "%", 0, above_chance),
)  # fmt: skip


def legend(fig: Figure) -> None:
    """One legend above all panels."""
    found: dict[str, Any] = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(NAMES.get(label, label), handle)
    fig.legend(found.values(), found.keys(), loc="upper center", ncol=len(found), frameon=False)


def _curves(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each strategy that has a budget."""
    with_budget = rows[rows["budget"].notna()]
    return [(str(name), part) for name, part in with_budget.groupby("strategy", sort=False)]


def _draw(ax: Axes, strategy: str, points: list[tuple[float, float, float, float, bool]]) -> None:
    """A curve with intervals; points are (x, value, low, high, is it hollow?)."""
    if not points:
        return
    x, middle, low, high, hollow = (np.array(column) for column in zip(*points, strict=True))
    shade, marker = figures.look(strategy)
    line = "--" if strategy == ORACLE else "-"
    nudge = x * {"h2o": 1.0, "infinigen": 1.02, "streaming": 0.97}.get(strategy, 1.04)
    bars = [middle - low, high - middle]
    ax.errorbar(
        nudge, middle, yerr=bars, color=shade, lw=1.5, elinewidth=0.7, ls=line, label=strategy
    )
    hollow = hollow.astype(bool)
    for mask, fill in ((hollow, "white"), (~hollow, shade)):
        ax.plot(nudge[mask], middle[mask], marker, color=shade, markerfacecolor=fill, ms=5)


def _share_axis(ax: Axes, share: pd.Series[float]) -> None:
    ax.set_xscale("log")
    least = min(0.034, 0.8 * share.min())
    ax.set_xlim(least, 1.15)
    ax.set_xticks([tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if tick > least])
    ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g} %")
    ax.xaxis.set_minor_formatter(lambda x, _: "")
