"""The one sweep behind notebooks 02 to 04: its rows, panels, factors and small print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlib import figures, serving, study
from kvlib.axes import tokens_axis
from kvlib.engines.vllm import installed
from kvlib.hardware import find_machine

STORE = "serving"
SMOKE = {"batches": [2, 4], "rates": [4], "requests": 4, "tokens": 32, "output_tokens": 8}
LIMIT = 300  # seconds that the sweep may always take, however little the profile allows


# -- rows --------------------------------------------------------------------------------------


def swept(
    name: str, profile: str, *, folder: str | Path, rows: str, strategies: list[str],
    repeats: int | None, model: str | None, device: str | None, **axes: Any,
) -> pd.DataFrame:  # fmt: skip
    """The sweep's rows for the figure `name`; whichever notebook comes first measures them.

    axes  the other arguments of `serving.sweep`, in the smoke profile partly replaced by SMOKE

    `attrs` has, beside those of `store.table`, `absent` (why the real vLLM is left out) and
    `target` (the machine that an emulated link stands for).
    """
    settings = study.profile(profile)
    place, absent = device or settings.device, installed() if rows == "measure" else None
    axes |= SMOKE if profile == "smoke" else {}
    points = serving.sweep(
        [s for s in strategies if s != "vllm" or not absent],
        repeats=repeats or min(3, settings.repeats),
        model=model or settings.model, device=place,
        dtype="float32" if place == "cpu" else "bfloat16", **axes,
    )  # fmt: skip
    frame = study.run(
        STORE, points, serving.serve, folder=folder, rows=rows, timed=True,
        estimate=serving.serve_seconds, limit_seconds=max(LIMIT, 2 * settings.limit(name)),
    ).assign(figure=name)  # fmt: skip
    about = {"absent": absent if "vllm" in strategies else None, "target": axes["machine"]}
    frame.attrs |= {"parameters": ["strategy", "batch", "rate"], **about}
    return frame


def middle(frame: pd.DataFrame, metric: str, by: str = "batch") -> pd.DataFrame:
    """Medians over the undisturbed repeats: a line a strategy, a column a value of `by`."""
    rows = frame[frame["status"].eq("ok") & frame["metric"].eq(metric)].dropna(subset=[by])
    table = rows.pivot_table(index="strategy", columns=by, values="value", aggfunc="median")
    return table.reindex([s for s in frame["strategy"].unique() if s in table.index])


def factors(frame: pd.DataFrame, metric: str, higher_is_better: bool) -> pd.DataFrame:
    """How many times worse than the real vLLM each strategy is, at the most requests at once.

    That is the engine factor (our paged against vLLM) times the strategy factor (the strategy
    against paged, in the same engine); the ratios are of medians. NaN where a side is missing.
    """
    most = frame["batch"].max()
    table = middle(frame, metric).reindex(columns=[most])[most]
    table = table.reindex(frame["strategy"].unique())
    cost = 1 / table if higher_is_better else table
    vllm, paged = (cost.get(name, float("nan")) for name in ("vllm", "paged"))
    engine = pd.Series(paged / vllm, cost.index).mask(cost.index == "vllm", 1.0)
    strategy = (cost / paged).mask(cost.index == "vllm", 1.0)
    better = ["{1} ÷ {0}", "{0} ÷ {1}"][not higher_is_better]
    unit = frame.loc[frame["metric"].eq(metric), "unit"].iloc[0]
    emulated = frame.loc[frame["source"].eq("emulated"), "strategy"].unique()
    return pd.DataFrame(
        {
            f"{metric} at {most:g} requests, {unit}": table,
            better.format("strategy", "vllm"): cost / vllm,
            f"engine: {better.format('paged', 'vllm')}": engine,
            f"strategy: {better.format('strategy', 'paged')}": strategy,
            "link": ["emulated" if s in emulated else "" for s in cost.index],
        }
    )


# -- panels ------------------------------------------------------------------------------------


def panel(ax: Axes, frame: pd.DataFrame, metric: str, x: str = "batch", tail: str = "") -> None:
    """A metric of each strategy by requests at once, or by x="rate"; `tail` is drawn thin."""
    rows = frame[frame[x].notna()]
    if metric in set(rows["metric"]):
        figures.curve(ax, rows, x, metric)
    good = rows[rows["status"].isin(["ok", "noisy"])]
    for (name, source), part in good[good["metric"] == tail].groupby(["strategy", "source"]):
        line = figures.LINES[str(source)].style
        values = part.groupby(x)["value"].median()
        ax.plot(values, line, color=figures.colour(str(name)), lw=0.8, marker="_")
    figures.mark_oom(ax, rows, x)
    if x == "batch":
        tokens_axis(ax)
    else:
        ax.set_xticks(sorted(rows[x].unique()))
    ax.margins(y=0.12)  # room for the crosses
    ax.set_xlabel({"batch": "requests at once", "rate": "requests that arrive a second"}[x])


def legend(fig: Figure) -> None:
    """One legend above all panels: each strategy once."""
    found: dict[str, Any] = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            name, _, rest = label.partition(" ")
            if "memory" not in rest and (name not in found or rest):
                found[name] = handle
    names = [f"{n} (emulated link)" if h.get_linestyle() == "--" else n for n, h in found.items()]
    fig.legend(found.values(), names, loc="upper center", ncol=len(names), frameon=False)


# -- small print -------------------------------------------------------------------------------


def told(frame: pd.DataFrame) -> str:
    """What all three figures must say of their rows."""
    first, runs = frame.iloc[0], frame.groupby("strategy", sort=False)["repeat"].nunique()
    again = ", ".join(runs.index[runs > 1])
    parts = [
        f"{first['model']}, {first['dtype']}, {first['tokens']:g} tokens in and "
        f"{first['output_tokens']:g} out a request",
        f"Median and min–max of {runs.max()} runs of {again} with the fewest and the most "
        "requests; one run elsewhere"
        if again
        else "One run a point",
        *_emulation(frame),
    ]
    if frame.attrs.get("absent"):
        parts.append(f"The real vLLM is left out: {frame.attrs['absent']}")
    return ". ".join([*parts, figures.caption(frame[frame["source"] != "modelled"])])


def _emulation(frame: pd.DataFrame) -> list[str]:
    """What an emulated link stands for, what was not generated, and what feeds no verdict."""
    stands = frame[frame["metric"] == "target_tokens"]
    if stands.empty:
        return []
    machine, lengths = find_machine(frame.attrs["target"]), stands["value"]
    link = machine.link.name.replace("pcie-", "PCI Express ")
    parts = [
        "Emulated link (dashed): as slow beside this run as the target's, which is "
        f"{machine.name.upper()}, {link}, an 8B model, requests of {_span(lengths)} tokens"
    ]
    made = frame[frame["metric"] == "generated"]
    short = made[made["value"] < made["output_tokens"]]
    if len(short):
        who = ", ".join(sorted(short["strategy"].unique()))
        parts.append(
            f"Sampled: with all requests at once {who} generate only the first "
            f"{_span(short['value'])} tokens of each, and the others are taken to last as long as "
            "the steady steps"
        )
    reasons: set[str] = set(frame["excluded"].dropna()) if "excluded" in frame else set()
    if reasons:
        why = "; ".join(sorted(reasons)).replace("rho", "ρ").replace(" 2x ", " 2× ")
        parts.append(f"Kept out of verdicts, times of these: {why}")
    return parts


def _span(values: pd.Series[float]) -> str:
    """The range of some numbers in words."""
    return " to ".join(dict.fromkeys((f"{values.min():,.0f}", f"{values.max():,.0f}")))
