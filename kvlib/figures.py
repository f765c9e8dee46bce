"""How the study's figures look, and the files that keep one: svg, png, csv and json.

Colour and marker say which strategy, the line says how its values came about: solid and filled
where measured, dashed and half filled where emulated, dotted without markers where modelled. A
cross marks where memory ran out, a hollow marker a point whose machine was disturbed.
"""

import io
import json
import textwrap
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvlib.provenance import REPEATS, canonical
from kvlib.store import write_atomic

FIRST = ["strategy", "metric", "value", "unit", "source", "status"]
STATUSES = {
    "noisy": "Disturbed (hollow)",
    "oom": "Out of memory (×)",
    "refused": "Refused as too large",
    "timeout": "Out of time",
}
# An equal figure is an equal file: ids from a fixed salt, glyphs as paths, no dates.
FILES: dict[Any, Any] = {"svg.hashsalt": "kvlib", "svg.fonttype": "path"}
LOOK: dict[Any, Any] = {
    "axes.grid": True,
    "figure.figsize": (6.4, 4.0),
    "grid.color": "0.88",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    **FILES,
}


class Look(NamedTuple):
    """Colour and marker of a strategy."""

    colour: str
    marker: str


_COLOURS = [to_hex(rgb) for rgb in sns.color_palette("colorblind")]
STRATEGIES = {
    name: Look(_COLOURS[index], marker)
    for name, index, marker in (
        ("full", 7, "o"),
        ("h2o", 1, "s"),
        ("paged", 0, "D"),
        ("vllm", 9, "v"),
        ("infinigen", 3, "^"),
        ("offload", 5, "P"),
        ("streaming", 2, "X"),
        ("blend", 4, "p"),
    )
}
OTHERS = [
    Look(colour, marker)
    for marker in "*hd<>8"
    for colour in ("#332288", "#661100", "#117733", "#882255")
]


class Line(NamedTuple):
    """How values of one source are drawn."""

    style: str
    width: float
    fill: Literal["full", "left", "none"]
    marked: bool


LINES = {
    "measured": Line("-", 1.8, "full", True),
    "emulated": Line("--", 1.8, "left", True),
    "modelled": Line(":", 1.0, "none", False),
}


@contextmanager
def style() -> Iterator[None]:
    """Seaborn's white grid and the study's fonts, for the figures made inside."""
    grid, text = sns.axes_style("whitegrid"), sns.plotting_context("notebook", font_scale=0.85)
    chosen: dict[Any, Any] = {**grid, **text, **LOOK}
    with plt.rc_context(chosen):
        yield


def look(strategy: str) -> Look:
    """Colour and marker of a strategy; any other name always gets the same ones too."""
    return STRATEGIES.get(strategy) or OTHERS[zlib.crc32(strategy.encode()) % len(OTHERS)]


def colour(strategy: str) -> str:
    """Colour of a strategy, as `#rrggbb`."""
    return look(strategy).colour


def select(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of one metric."""
    known = sorted(set(frame["metric"].dropna()))
    if metric not in known:
        raise ValueError(f"unknown metric {metric!r}: the rows have {', '.join(known)}")
    return frame[frame["metric"] == metric]


def curve(ax: Axes, frame: pd.DataFrame, x: str, y: str, hue: str = "strategy") -> None:
    """Median of metric `y` over the repeats at each `x`, with a min–max band, a curve each hue.

    Raises ValueError if a further parameter varies within a curve: its values would be mixed.
    """
    rows = select(frame, y)
    rows = rows[rows["status"].isin(["ok", "noisy"])].dropna(subset=["value"])
    rows = rows.astype({"value": float})
    for (name, source), part in rows.groupby([hue, "source"], sort=False):
        _refuse_mixture(part, frame.attrs.get("parameters", []), x, hue)
        _line(ax, _bands(part, x), str(name), str(source))


def _refuse_mixture(part: pd.DataFrame, parameters: list[str], x: str, hue: str) -> None:
    fixed = set(parameters) & set(part.columns) - {x, hue, "strategy", *REPEATS}
    mixed = sorted(p for p in fixed if part[p].nunique(dropna=False) > 1)
    if hue != "strategy" and "strategy" in part and part["strategy"].nunique() > 1:
        mixed.append("strategy")
    if mixed:
        raise ValueError(f"{', '.join(mixed)} varies within a curve: select one value of it")


def _bands(rows: pd.DataFrame, x: str) -> pd.DataFrame:
    """median, min, max and noisy at each x; disturbed rows count only where there are no others."""
    quiet = rows[rows["status"] == "ok"]
    noisy = rows[~rows[x].isin(quiet[x])]
    bands = pd.concat([quiet, noisy]).groupby(x)["value"].agg(["median", "min", "max"])
    return bands.assign(noisy=bands.index.isin(noisy[x]))


def _line(ax: Axes, bands: pd.DataFrame, name: str, source: str) -> None:
    shade, marker = look(name)
    line = LINES[source]
    text = name if source == "measured" else f"{name} ({source})"
    marks: dict[str, Any] = {"color": shade, "linestyle": line.style, "linewidth": line.width}
    if line.marked:
        marks |= {"marker": marker, "fillstyle": line.fill, "markerfacecoloralt": "white"}
    quiet = np.flatnonzero(~bands["noisy"].to_numpy())
    at, middle = bands.index.to_numpy(), bands["median"].to_numpy()
    ax.plot(at, middle, label=text, markevery=quiet.tolist(), **marks)
    ax.fill_between(at, bands["min"], bands["max"], color=shade, alpha=0.15, linewidth=0)
    hollow = bands["noisy"].to_numpy()
    if hollow.any():
        ax.plot(at[hollow], middle[hollow], marker, color=shade, markerfacecolor="white")


def mark_oom(ax: Axes, frame: pd.DataFrame, x: str, hue: str = "strategy") -> None:
    """A cross at the top of the axes for each `x` at which a strategy ran out of memory."""
    failed = frame[frame["status"] == "oom"]
    for row, (name, part) in enumerate(failed.groupby(hue, sort=False)):
        at = sorted(part[x].unique())
        height = [0.97 - 0.04 * row] * len(at)
        ax.plot(
            at,
            height,
            "x",
            color=colour(str(name)),
            markeredgewidth=2,
            transform=ax.get_xaxis_transform(),
            label=f"{name}: out of memory",
        )


def caption(frame: pd.DataFrame) -> str:
    """What a figure must say of itself: sources, machines, failed and shed points."""
    drawn = frame.dropna(subset=["value"])
    parts = [
        f"{source.capitalize()}: {', '.join(sorted(names.astype(str).unique()))}"
        for source in LINES
        if len(names := drawn.loc[drawn["source"] == source, "strategy"])
    ]
    parts.append(f"Machine: {'; '.join(sorted(frame['machine'].unique()))}")
    for status, part in frame[frame["status"] != "ok"].groupby("status"):
        parts.append(f"{STATUSES[str(status)]}: {_points(part['key'].nunique())}")
    if dropped := frame.attrs.get("shed"):
        parts.append(f"Left out to save time: {', '.join(dropped)}")
    for count, text in (("missing", "Not measured"), ("stale", "Measured with older code")):
        if frame.attrs.get(count):
            parts.append(f"{text}: {_points(frame.attrs[count])}")
    return ". ".join(parts) + "."


def _points(count: int) -> str:
    return f"{count} point" if count == 1 else f"{count} points"


def note(fig: Figure, text: str) -> None:
    """Small print below a figure."""
    width = int(fig.get_figwidth() * 18)  # characters of this size in an inch
    fig.text(0.02, -0.02, textwrap.fill(text, width), size=7, color="0.35", va="top")


def save(
    fig: Figure,
    frame: pd.DataFrame,
    name: str,
    folder: str | Path,
    provenance: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write `folder/NAME` as svg, png, csv (the rows) and json (where they came from).

    Equal rows and an equal drawing give equal bytes. Without `provenance` the frame's own is
    taken. ValueError if the frame lacks one of the columns that every figure has.
    """
    if missing := [column for column in FIRST if column not in frame]:
        raise ValueError(f"figure {name}: the rows lack {', '.join(missing)}")
    about = {str(k): v for k, v in frame.attrs.items()} | {"figure": name}
    about |= {"provenance": dict(provenance)} if provenance else {}
    files = {
        "svg": _drawn(fig, "svg", {"Date": None, "Creator": None}),
        "png": _drawn(fig, "png", {"Software": None}),
        "csv": _listed(frame),
        "json": json.dumps(json.loads(canonical(about)), indent=1, sort_keys=True).encode() + b"\n",
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / f"{name}.{ending}" for ending in files]
    for path, content in zip(paths, files.values(), strict=True):
        write_atomic(path, content)
    return paths


def _drawn(fig: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    with plt.rc_context(FILES):
        fig.savefig(buffer, format=kind, metadata=metadata, bbox_inches="tight", dpi=144)
    return buffer.getvalue()


def _listed(frame: pd.DataFrame) -> bytes:
    """The rows as csv in an order of their own; columns without any value are left out."""
    left_out = {*FIRST, "key", "figure"}
    parameters = [str(c) for c in frame if c not in left_out and frame[c].notna().any()]
    rows = frame[[*FIRST, *parameters]].copy()
    for column in parameters:
        present = rows[column].dropna()
        if present.dtype.kind == "f" and (present % 1 == 0).all():
            rows[column] = rows[column].astype("Int64")
    order = ["strategy", "metric", "source", *parameters, "status", "unit", "value"]
    rows = rows.sort_values(order, key=_sortable, kind="stable", na_position="first")
    return str(rows.to_csv(index=False, lineterminator="\n")).encode()


def _sortable(column: "pd.Series[Any]") -> "pd.Series[Any]":
    return column if column.dtype.kind in "iufb" else column.astype(str)


def home(out: str | Path | None = None) -> Path:
    """The folder that holds figures/: `out`, by default the checkout kvlib runs from."""
    return Path(out) if out else Path(__file__).resolve().parents[1]
