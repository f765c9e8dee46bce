"""The cost model under sliders: memory and time of every strategy follow what is chosen.

The bars are plain HTML, so that they follow at once; `picture` draws the same for the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlib.costs import RESERVED, STRATEGIES, Case, Memory, Step, memory, prefill_time, step_time
from kvlib.hardware import LINKS, MACHINES, Machine, find_machine
from kvlib.shapes import SHAPES, find_shape

GB = 1e9
CONTEXTS = [2**n for n in range(9, 18)]
CONCURRENCY = [1, 2, 4, 8, 16, 32, 64, 128, 256]
SPEEDS = sorted({4e9, 900e9, 1800e9, *(link.bandwidth for link in LINKS.values())})


class Part(NamedTuple):
    """A piece of a bar: what it stands for, its colour, its hatching in the picture."""

    name: str
    colour: str
    hatch: str


MEMORY = (
    Part("weights", "#7f7f7f", ""),
    Part("keys and values", "#0072b2", ""),
    Part("positions, scores, sketch, spare slots", "#56b4e9", "///"),
    Part("passing through, or a prompt in work", "#f0e442", "..."),
)
TIME = (
    Part("products with weights", "#7f7f7f", ""),
    Part("attention", "#0072b2", ""),
    Part("choosing", "#cc79a7", "///"),
    Part("the rest on the device", "#009e73", "\\\\\\"),
    Part("waiting for the link and the host", "#d55e00", "..."),
)


@dataclass(frozen=True)
class Choice:
    """What the sliders say. speed: bytes/s of the link, 0: the machine's own."""

    model: str = "llama-3.1-8b"
    machine: str = "h100-sxm"
    context: int = 8192
    concurrency: int = 16
    budget: float = 0.3
    speed: float = 0.0
    gpus: int = 1

    @property
    def warning(self) -> str:
        """What the bars do not show: a context that the model was not made for."""
        most = find_shape(self.model).positions
        return f"{self.model} has {most:,} positions" if self.context > most else ""

    def device(self) -> Machine:
        """The machine, with the link that was chosen."""
        machine = find_machine(self.machine)
        if not self.speed:
            return machine
        return replace(machine, link=replace(machine.link, bandwidth=self.speed))

    def cases(self) -> list[Case]:
        """One for each strategy."""
        shape, machine = find_shape(self.model), self.device()
        return [Case(shape, machine, s, self.budget, gpus=self.gpus) for s in STRATEGIES]


class Bar(NamedTuple):
    """A strategy's parts and their sum; `note` stands behind it."""

    strategy: str
    parts: tuple[float, ...]
    note: str


def memory_bars(choice: Choice) -> list[Bar]:
    """Bytes on each device at the peak."""
    bars = []
    for case in choice.cases():
        found = memory(case, choice.context, choice.concurrency)
        room = RESERVED * case.machine.memory
        parts = _memory_parts(found)
        host = f" + {float(found.host) / GB:.1f} GB on the host" if case.fetches else ""
        fits = sum(parts) <= room and found.host <= case.machine.host_memory * case.gpus
        note = f"{sum(parts) / GB:.1f} GB{host}{'' if fits else ', does not fit'}"
        bars.append(Bar(case.strategy, parts, note))
    return bars


def _memory_parts(found: Memory) -> tuple[float, ...]:
    passing = np.maximum(found.transit, found.prefill)
    return tuple(map(float, (found.weights, found.kv, found.state + found.waste, passing)))


def time_bars(choice: Choice) -> list[Bar]:
    """Seconds of a decode step, and TTFT and tokens/s behind them."""
    bars = []
    for case in choice.cases():
        step = step_time(case, choice.context, choice.concurrency)
        rate = choice.concurrency / float(step.total)
        first = float(prefill_time(case, choice.context))
        note = f"{1e3 * float(step.total):.1f} ms, {rate:,.0f} tokens/s; TTFT {first:.2f} s"
        bars.append(Bar(case.strategy, _time_parts(step), note))
    return bars


def _time_parts(step: Step) -> tuple[float, ...]:
    rest = step.elementwise + step.overhead + step.reduce
    parts = (step.products, step.attention, step.selection, rest, step.exposed)
    return tuple(max(0.0, float(part)) for part in parts)


# -- as HTML, for the sliders ------------------------------------------------------------------


def html(choice: Choice) -> str:
    """Both sets of bars, each as long as its share of the longest."""
    room = RESERVED * choice.device().memory
    tables = [
        _table(f"Memory of a device (line: {room / GB:.0f} GB)", memory_bars(choice), MEMORY, room),
        _table("Time of a decode step", time_bars(choice), TIME, None),
    ]
    return "".join(tables) + (f"<p><b>{escape(choice.warning)}</b></p>" if choice.warning else "")


def _table(title: str, bars: Sequence[Bar], parts: Sequence[Part], line: float | None) -> str:
    longest = max([*(sum(bar.parts) for bar in bars), line or 0.0])
    rows = "".join(_row(bar, parts, longest, line) for bar in bars)
    key = " ".join(
        f'<span style="white-space:nowrap"><span style="background:{p.colour}">&emsp;</span> '
        f"{escape(p.name)}</span>"
        for p in parts
    )
    return f"<h4>{escape(title)}: modelled</h4><p>{key}</p><table style='width:100%'>{rows}</table>"


def _row(bar: Bar, parts: Sequence[Part], longest: float, line: float | None) -> str:
    pieces = "".join(
        f'<div style="height:1em;width:{100 * amount / longest:.3f}%;'
        f'background:{part.colour}" title="{escape(part.name)}"></div>'
        for part, amount in zip(parts, bar.parts, strict=True)
    )
    mark = ""
    if line:
        style = "position:absolute;top:0;bottom:0;border-left:2px solid #000"
        mark = f'<div style="{style};left:{100 * line / longest:.3f}%"></div>'
    return (
        f"<tr><td style='width:6em'>{escape(bar.strategy)}</td><td style='width:55%'>"
        f"<div style='position:relative;display:flex'>{pieces}{mark}</div></td>"
        f"<td style='text-align:left'>{escape(bar.note)}</td></tr>"
    )


def show(choice: Choice | None = None) -> Any:
    """The sliders and their bars, for a notebook."""
    import ipywidgets as widgets

    start = _named(choice or Choice())
    wide = {"layout": widgets.Layout(width="430px"), "style": {"description_width": "110px"}}
    speeds = [s for s in _with(SPEEDS, start.speed) if s]
    lists: dict[str, Any] = {
        "model": list(SHAPES),
        "machine": list(MACHINES),
        "gpus": _with([1, 2, 4, 8], start.gpus),
        "speed": [("the machine's", 0.0), *((f"{s / 1e9:g} GB/s", s) for s in speeds)],
        "context": _with(CONTEXTS, start.context),
        "concurrency": _with(CONCURRENCY, start.concurrency),
    }
    controls: dict[str, Any] = {}
    for name, options in lists.items():
        kind = widgets.Dropdown if name in ("model", "machine") else widgets.SelectionSlider
        controls[name] = kind(options=options, value=getattr(start, name), **wide)
    controls["budget"] = widgets.FloatSlider(start.budget, min=0.05, max=1.0, step=0.05, **wide)
    for name, control in controls.items():
        control.description = {"speed": "link", "gpus": "GPUs"}.get(name, name)
    view = widgets.HTML(html(start))

    def follow(_: Any) -> None:
        view.value = html(Choice(**{name: control.value for name, control in controls.items()}))

    for control in controls.values():
        control.observe(follow, names="value")
    return widgets.VBox([*controls.values(), view])


def _with(options: Sequence[float], chosen: float) -> list[float]:
    """The options of a slider, with what the choice has."""
    return sorted({*options, chosen})


def _named(choice: Choice) -> Choice:
    """The choice with names as the tables have them; ValueError offers the nearest ones."""
    return replace(
        choice, model=find_shape(choice.model).name, machine=find_machine(choice.machine).name
    )


# -- as rows and a picture, for the report ------------------------------------------------------


def rows(choice: Choice) -> pd.DataFrame:
    """The bars as modelled rows of a figure."""
    about = {"model": choice.model, "target": choice.machine, "tokens": choice.context}
    about |= {"batch": choice.concurrency, "gpus": choice.gpus, "status": "ok"}
    found = []
    for metric, unit, bars, parts in (
        ("memory", "B", memory_bars(choice), MEMORY), ("step", "s", time_bars(choice), TIME)
    ):  # fmt: skip
        for bar in bars:
            for part, amount in zip(parts, bar.parts, strict=True):
                own = {"metric": metric, "part": part.name, "value": amount, "unit": unit}
                found.append(own | about | {"strategy": bar.strategy, "source": "modelled"})
    return pd.DataFrame(found)


def picture(figure: Figure, choice: Choice) -> None:
    """The bars of a choice, drawn on two panels."""
    left, right = figure.subplots(1, 2)
    _panel(left, memory_bars(choice), MEMORY, GB)
    room = RESERVED * choice.device().memory / GB
    left.axvline(room, color="black", lw=1.5)
    left.set_xlim(right=max(1.02 * room, left.get_xlim()[1]))
    left.set(title="Memory of a device: modelled", xlabel="GB (line: what there is)")
    _panel(right, time_bars(choice), TIME, 1e-3)
    right.set(title="Time of a decode step: modelled", xlabel="ms")


def _panel(ax: Axes, bars: Sequence[Bar], parts: Sequence[Part], unit: float) -> None:
    longest = max(sum(bar.parts) for bar in bars) / unit
    for place, bar in enumerate(bars):
        start = 0.0
        for part, amount in zip(parts, bar.parts, strict=True):
            ax.barh(place, amount / unit, 0.6, start, color=part.colour, hatch=part.hatch,
                    edgecolor="white", label=None if place else part.name)  # fmt: skip
            start += amount / unit
        ax.text(start + 0.01 * longest, place, bar.note, va="center", fontsize=7)
    ax.set_yticks(range(len(bars)), [bar.strategy for bar in bars])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.75 * longest)
    ax.grid(visible=False, axis="y")
    ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
