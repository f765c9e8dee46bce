"""The rows behind a figure, read from its csv as plain dicts: quick, and without pandas."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]  # a row of a figure: one value


def read(figures: Path, name: str) -> list[Record]:
    """The rows of figure `name` that have a value; ValueError where it was not made yet."""
    path = figures / f"{name}.csv"
    if not path.is_file():
        raise ValueError(f"no rows are stored in {path}: run `make figures/{name}.svg`")
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["value"]]


def text(row: Record, column: str) -> str:
    """A column's text; "" where it is empty or missing."""
    cell = row.get(column)
    return "" if cell is None or cell != cell else str(cell)
