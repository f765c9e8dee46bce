"""The figure of early-fact retention: recall by context, a panel for each way of asking."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from kvlib import figures, intervals
from kvlib.axes import tokens_text
from kvlib.retention_points import PASS, shares

TITLES = {
    "turns": "Turn by turn, asked after eviction",
    "single": "In one prompt, asked before eviction",
    "needle": "Needle (RULER), asked before eviction",
}
CELL = ["variant", "strategy", "budget", "context"]
NOT_SCORED = "selection"


def answers(frame: pd.DataFrame, metric: str = "recalled") -> pd.DataFrame:
    """The scored rows of a metric. The full cache's turns stand for it in one prompt too.

    It evicts nothing, so both ways it reads the same tokens: those items that others are asked
    in one prompt are its rows there.
    """
    rows = frame[frame["metric"].eq(metric) & frame["status"].isin(["ok", "noisy"])]
    rows = rows[rows["variant"].ne(NOT_SCORED)].astype({"value": float})
    asked = rows.loc[rows["variant"].eq("single"), ["item", "context"]].drop_duplicates()
    full = rows[rows["variant"].eq("turns") & rows["strategy"].eq("full")]
    return pd.concat([rows, full.merge(asked).assign(variant="single")], ignore_index=True)


def rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Share recalled with its 95 % interval (Wilson) and the number of answers, by CELL."""
    groups = answers(frame).groupby(CELL, sort=False)["value"]
    table = []
    for _, values in groups:
        found = intervals.proportion(list(values))
        table.append((found.estimate, found.low, found.high, len(values)))
    columns = ["recall", "low", "high", "answers"]
    return pd.DataFrame(table, groups.count().index, columns=columns)


def draw(frame: pd.DataFrame, text: str = "") -> Figure:
    """All variants that have rows, side by side; `text` leads the small print."""
    table = rates(frame).reset_index()
    variants = [v for v in TITLES if v in set(table["variant"])]
    fig, grid = plt.subplots(
        1, len(variants), figsize=(4.6 * len(variants) + 0.6, 4.4), sharey=True, squeeze=False
    )
    for ax, variant in zip(grid[0], variants, strict=True):
        _panel(ax, table[table["variant"] == variant])
        ax.set(title=f"{TITLES[variant]} (measured)", xlabel="context before the question, tokens")
    grid[0, 0].set(ylabel="facts recalled", ylim=(-0.03, 1.03))
    grid[0, 0].yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    named: dict[str, Any] = {}
    for ax in grid[0]:
        named |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    fig.legend(named.values(), named, loc="upper center", ncol=len(named), frameon=False)
    fig.tight_layout(rect=(0, 0, 1, 0.92))
    scored = frame[frame["variant"].ne(NOT_SCORED)]
    figures.note(fig, f"{text} {told(frame)} {figures.caption(scored)}".strip())
    return fig


def _panel(ax: Axes, table: pd.DataFrame) -> None:
    """A line each strategy and budget, a few percent apart so that no interval hides another."""
    lines = list(table.groupby(["strategy", "budget"], sort=False))
    largest = table.groupby("strategy")["budget"].max()
    for n, ((name, budget), unsorted) in enumerate(lines):
        part, look = unsorted.sort_values("context"), figures.look(str(name))
        first = part["budget"].iloc[0] == largest[str(name)]
        error = [part["recall"] - part["low"], part["high"] - part["recall"]]
        ax.errorbar(
            part["context"] * 2 ** (0.06 * (n - (len(lines) - 1) / 2)), part["recall"], yerr=error,
            color=look.colour, marker=look.marker, capsize=2,
            lw=1.8 if first else 1.0, ms=6 if first else 4, alpha=1 if first else 0.6,
            label=str(name) if budget == 1 else f"{name}, {part['budget'].iloc[0]:.0%}",
        )  # fmt: skip
    contexts = sorted(set(table["context"]))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(contexts))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda at, _: tokens_text(at))
    ax.set_xlim(contexts[0] / 1.5, contexts[-1] * 1.5)


def told(frame: pd.DataFrame) -> str:
    """What was asked, what was left out and why, and how many answers a point has."""
    table = shares(frame)
    scored = frame[frame["variant"].eq("turns")]
    if table.empty or scored.empty:
        return ""
    plan = dict(zip(scored["context"], scored["kinds"].str.split(","), strict=True))
    parts = []
    for context in sorted({int(at) for at in table.index.get_level_values("context")}):
        asked, tried = plan.get(context, []), table["mean"].loc[context]
        gone = tried[~tried.index.isin(asked)]
        without = ", ".join(f"{kind} {100 * mean:.0f} %" for kind, mean in gone.items())
        text = f"{context:,} tokens: {', '.join(asked) or 'nothing'}"
        parts.append(text + f" (left out: {without})" * bool(without))
    count = rates(frame)["answers"].groupby("variant", sort=False).agg(["min", "max"])
    answered = "; ".join(f"{v} {low} to {high}" for v, low, high in count.itertuples())
    return (
        f"Asked is what the full cache recalled at least {PASS:.0%} of on other seeds. "
        f"{'. '.join(parts)}. Answers a point: {answered}. Bars: 95 % intervals (Wilson)."
    )
