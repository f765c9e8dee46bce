"""Axes that count in bytes, seconds or tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator


def bytes_text(value: float) -> str:
    """A size with a binary unit, e.g. `1.5 MiB`."""
    power = min(4, int(np.log2(abs(value)) // 10)) if abs(value) >= 1 else 0
    return f"{value / 1024**power:.4g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


def seconds_text(value: float) -> str:
    """A time with a fitting unit, e.g. `20 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size or value == 0:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"


def tokens_text(value: float) -> str:
    """A count of tokens, e.g. `2k` for 2048 and `10k` for 10,000."""
    if value < 1000 or (value < 1024 and value != 1000):
        return f"{value:g}"
    return f"{value / 1024:g}k" if value % 512 == 0 else f"{value / 1000:g}k"


def bytes_axis(ax: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Label an axis in KiB, MiB, GiB; a linear one at whole powers of two."""
    chosen = _of(ax, axis)
    if chosen.get_scale() == "linear":
        low, high = chosen.get_view_interval()
        chosen.set_major_locator(MultipleLocator(2.0 ** np.ceil(np.log2((high - low) / 6))))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))


def seconds_axis(ax: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Label an axis in µs, ms, s."""
    _of(ax, axis).set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))


def tokens_axis(ax: Axes, axis: Literal["x", "y"] = "x") -> None:
    """Base 2, with a tick at each value drawn so far."""
    drawn = [line.get_xdata() if axis == "x" else line.get_ydata() for line in ax.lines]
    ticks = sorted({float(value) for values in drawn for value in np.asarray(values)})
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log", base=2)
    chosen = _of(ax, axis)
    chosen.set_major_locator(FixedLocator(ticks))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(value)))


def _of(ax: Axes, axis: Literal["x", "y"]) -> Axis:
    return ax.xaxis if axis == "x" else ax.yaxis
