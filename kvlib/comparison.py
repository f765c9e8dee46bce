"""How two runs of the same figures compare: medians, claims that flip, reproduced k of n."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from kvlib.figures import FIRST
from kvlib.provenance import REPEATS, label

COMPARED = ["figure", "point", "metric", "source", "value", "status"]
NOT_PARAMETERS = {*FIRST, *REPEATS, "machine", "key", "figure", "detail"}


def read(folder: Path) -> pd.DataFrame:
    """The rows of all figures saved below a folder, each with its `figure` and its `point`."""
    frames = []
    for path in sorted(folder.rglob("[0-9][0-9]_*.csv")):
        frame = pd.read_csv(path)
        frame.attrs = json.loads(path.with_suffix(".json").read_text("utf-8"))
        frames.append(_with_points(frame.assign(figure=path.stem)))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=COMPARED)


def _with_points(frame: pd.DataFrame) -> pd.DataFrame:
    known = [c for c in frame.columns if c not in NOT_PARAMETERS]
    names = ["strategy", *[c for c in known if c in frame.attrs.get("parameters", known)]]
    points = frame[names].to_dict("records")
    words = [label({str(k): v for k, v in point.items() if v == v}) for point in points]
    return frame.assign(point=words)


def compare(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Medians over the repeats of what both frames hold, row by row of figure, point, metric.

    Columns `old`, `new`, `ratio`, and `reproduced`: the two min–max ranges meet, or the medians
    differ by at most 20 %. Failed and disturbed points are left out.
    """
    both = _medians(old).merge(
        _medians(new), left_index=True, right_index=True, suffixes=("_old", "_new")
    )
    table = both[["median_old", "median_new"]].set_axis(["old", "new"], axis=1)
    equal = table["old"] == table["new"]
    table["ratio"] = (table["new"] / table["old"]).where(~equal, 1.0)
    meet = (both["min_old"] <= both["max_new"]) & (both["min_new"] <= both["max_old"])
    table["reproduced"] = meet | table["ratio"].between(0.8, 1.2)
    return table.reset_index()


def _medians(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame if "point" in frame else _with_points(frame)
    rows = rows[rows["status"] == "ok"].dropna(subset=["value"])
    return rows.groupby(COMPARED[:-2])["value"].agg(["median", "min", "max"])


def flips(old: pd.DataFrame, new: pd.DataFrame) -> list[str]:
    """Claims of two `claims.csv` whose verdict, direction or magnitude differ, in words."""
    both = old.merge(new, on="id", suffixes=("_old", "_new"))
    return [
        f"{row['id']} {column}: {row[column + '_old']} -> {row[column + '_new']}"
        for column in ("direction", "magnitude", "verdict")
        for row in both.to_dict("records")
        if row[f"{column}_old"] != row[f"{column}_new"]
    ]


def comparison(old: Path, new: Path) -> str:
    """What two folders of figures agree on: ratios, claims that flip, reproduced k of n."""
    table = compare(read(old), read(new))
    claims = [next(folder.rglob("claims.csv"), None) for folder in (old, new)]
    changed = flips(*[pd.read_csv(path) for path in claims if path]) if all(claims) else []
    lines = [table.to_string(index=False, float_format="{:.4g}".format)] if len(table) else []
    lines += [f"flipped: {change}" for change in changed]
    return "\n".join([*lines, f"reproduced {table['reproduced'].sum()} of {len(table)}"])
