"""Which strategy to run a model with on a machine: those that meet the limits, the fastest first.

Memory and times come from the cost model: with published figures at the most a machine can do, with
`machine="this"` at the rates that were fitted to the stored rows. What a strategy costs in answers
comes from stored rows alone, at the budgets that were measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvlib import evidence, fitting, records
from kvlib.costs import RESERVED, STRATEGIES, Case, Rates, memory, prefill_time, step_time
from kvlib.evidence import Evidence, Loss
from kvlib.hardware import Machine, find_link, find_machine
from kvlib.shapes import Shape, check_choice, check_positive, count, find_shape

NEAR = 3.0  # points: a strategy within them answers nearly as well as the full cache
THIS = ("this", "here")
AROUND = re.compile(r"^(shape:|meta-)|(-instruct|-chat|-base|-it|-v\d+(\.\d+)?)+$")  # a name
GB = 1e9


@dataclass(frozen=True)
class Limits:
    """What must not be exceeded; None: no limit. Seconds, and points of answers lost."""

    ttft: float | None = None
    tpot: float | None = None
    accuracy: float | None = NEAR
    recall: float | None = None


@dataclass(frozen=True)
class Option:
    """A strategy with its setting: bytes (of one device, of the host), seconds, points lost.

    exceeded  by limit, how many times over it is (at least 1; infinite where nothing is known)
    reasons   the same in words, or what the better ones have over it
    """

    strategy: str
    budget: float | None
    memory: float
    host: float
    ttft: float
    tpot: float
    throughput: float
    accuracy: Loss | None
    recall: Loss | None
    exceeded: dict[str, float]
    reasons: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Does it meet every limit?"""
        return not self.exceeded

    @property
    def name(self) -> str:
        """Strategy and budget in words."""
        return self.strategy if self.budget is None else f"{self.strategy} at {self.budget:g}"

    @property
    def order(self) -> tuple[Any, ...]:
        """What comes first: what fits, the fastest, what needs no host, the smallest."""
        if self.fits:
            return 0, float(f"{self.tpot:.3g}"), self.host > 0, self.memory
        return 1, max(self.exceeded.values()), len(self.exceeded), self.tpot


@dataclass(frozen=True)
class Advice:
    """The options, best first: the best setting of each strategy. `about`: what was asked."""

    about: str
    basis: str
    options: tuple[Option, ...]

    @property
    def best(self) -> Option | None:
        """The first one, None where no strategy meets all limits."""
        return self.options[0] if self.options[0].fits else None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        best = self.best
        options = [_plain(asdict(o) | {"fits": o.fits}) for o in self.options]
        return {
            "about": self.about,
            "basis": self.basis,
            "best": best and best.strategy,
            "options": options,
        }

    def __str__(self) -> str:
        head = ("", "strategy", "memory", "host", "TTFT", "TPOT", "tokens/s", "lost", "facts", "")
        lines = [head, *(_line(n, option) for n, option in enumerate(self.options, 1))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self.about, self.basis, "", *table, "", *self._notes()])

    def _notes(self) -> list[str]:
        """What the columns mean, what they rest on, and what was not asked for but matters."""
        losses = [loss for o in self.options for loss in (o.accuracy, o.recall) if loss]
        forgetful = [o.name for o in self.options if o.fits and (not o.recall or o.recall.at_most)]
        notes = [
            "lost, facts: points that may be lost (far end of a 95 % interval) on lm-eval tasks, "
            "and on facts stated early in a conversation",
            *dict.fromkeys(loss.source for loss in losses if loss.at_most),
        ]
        if forgetful:
            notes.append(
                f"where early facts matter set max_recall_loss: {', '.join(forgetful)} may not "
                "recall them"
            )
        return notes


def _line(place: int, option: Option) -> tuple[str, ...]:
    return (
        str(place) if option.fits else "–",
        option.name,
        f"{option.memory / GB:.1f} GB",
        f"{option.host / GB:.1f} GB" if option.host else "–",
        _seconds(option.ttft),
        _seconds(option.tpot),
        f"{option.throughput:,.0f}",
        _lost(option.accuracy),
        _lost(option.recall),
        "; ".join(option.reasons),
    )


def _lost(loss: Loss | None) -> str:
    if loss is None:
        return "?"
    return f"≤ {loss.at_most:.1f}" if loss.at_most else "none"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _plain(value: Any) -> Any:
    """Without infinities, which JSON does not know: None stands for them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value


class NoStrategyError(ValueError):
    """No strategy meets all limits; `advice` has how far each one is off."""

    def __init__(self, advice: Advice) -> None:
        super().__init__(why_none(advice.options))
        self.advice = advice


# -- what is asked -----------------------------------------------------------------------------


def recommend(
    *, model: str, machine: str, context: int, concurrency: int = 1, output: int = 256,
    max_accuracy_loss: float | None = NEAR, max_recall_loss: float | None = None,
    ttft: float | None = None, tpot: float | None = None, gpus: int = 1, link: str | None = None,
    dtype: str | None = None, figures: str | Path | None = None,
) -> Advice:  # fmt: skip
    """The strategies that serve `concurrency` requests of `context` tokens, ranked.

    model, machine     a published shape's and machine's name, or "this": the one of the stored rows
    output             tokens generated for each request; memory is that at their end
    max_accuracy_loss  points on lm-eval tasks, max_recall_loss: points on early facts of a
                       conversation, both at the far end of a 95 % interval; None: any
    ttft, tpot         seconds at most; TTFT of a request that finds the device free
    link               a published link in place of the machine's
    figures            the folder that has the stored rows; by default this checkout's

    Raises ValueError for a name or number that makes no sense, or rows that are not stored, and
    NoStrategyError where no strategy meets all limits.
    """
    folder = Path(figures) if figures else Path(__file__).resolve().parents[1] / "figures"
    limits = Limits(ttft, tpot, max_accuracy_loss, max_recall_loss)
    shape = find_model(model)
    _check(shape, limits, context=context, concurrency=concurrency, output=output)
    of, rates, basis = machine_and_rates(machine, folder)
    if link:
        of = replace(of, link=find_link(link))
    kind = dtype or ("float32" if of.threads else "bfloat16")
    check_choice("dtype", kind, of.flops)
    base = Case(shape, of, dtype=kind, gpus=gpus, rates=rates)
    options = _options(base, limits, folder, context, concurrency, output)
    about = (
        f"{shape.name} ({kind}) on {gpus} x {of.name}: {concurrency} "
        f"request{'s' * (concurrency > 1)} at once, {context:,} tokens in, {output:,} out"
    )
    advice = Advice(about, basis, tuple(_explained(_best_of_each(options))))
    if advice.best is None:
        raise NoStrategyError(advice)
    return advice


def find_model(name: str) -> Shape:
    """A shape by its name; what a hub's name has around it is forgiven."""
    bare = AROUND.sub("", name.strip().rstrip("/").rpartition("/")[2].casefold())
    return find_shape({"smollm2": "smollm2-135m"}.get(bare, bare) or name)


def machine_and_rates(name: str, figures: Path) -> tuple[Machine, Rates, str]:
    """A machine, its rates, and what they rest on."""
    if name.strip().casefold() not in THIS:
        told = "datasheet rates and no overhead, the most that it can do"
        return find_machine(name), Rates(), f"{told}; nothing here was measured on it"
    rows = records.read(figures, fitting.ROWS)
    machine = fitting.machine_of(rows)
    rates = fitting.fit(fitting.times_of(rows, machine))
    told = f"rates fitted to the rows of {fitting.ROWS}, {machine.source}"
    return machine, rates, told + "; host and device are one memory" * (machine.threads > 0)


def _check(shape: Shape, limits: Limits, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"{name} must be a whole number, 1 or more, got {number!r}")
        count(name, number)
    for name in ("ttft", "tpot"):
        if (limit := getattr(limits, name)) is not None:
            check_positive(name, limit)
    for name in ("accuracy", "recall"):
        limit = getattr(limits, name)
        if limit is not None and not 0 <= limit <= 100:
            raise ValueError(f"max_{name}_loss is in points, 0 to 100, got {limit!r}")
    total = numbers["context"] + numbers["output"]
    if total > shape.positions:
        raise ValueError(
            f"{total:,} tokens in and out, but {shape.name} has {shape.positions:,} positions: "
            "ask for less context or output"
        )


# -- the options -------------------------------------------------------------------------------


def _options(
    base: Case, limits: Limits, figures: Path, context: int, concurrency: int, output: int
) -> list[Option]:
    """Every strategy at every budget that was measured, judged."""
    tasks, facts = _evidence(figures, limits)
    budgets = tasks.budgets if tasks else [0.05, 0.1, 0.3, 0.5]
    found = []
    for strategy in STRATEGIES:
        for budget in budgets if strategy in evidence.INEXACT else (None,):
            case = replace(base, strategy=strategy, budget=budget or 1.0)
            losses = [e.loss(strategy, budget or 1.0) if e else None for e in (tasks, facts)]
            found.append(_option(case, budget, losses, limits, (context, concurrency, output)))
    return found


def _evidence(figures: Path, limits: Limits) -> tuple[Evidence | None, Evidence | None]:
    """Both kinds; ValueError where a limit needs rows that are not stored."""
    found: list[Evidence | None] = []
    sources: tuple[tuple[Callable[[Path], Evidence], float | None], ...] = (
        (evidence.accuracy, limits.accuracy),
        (evidence.recall, limits.recall),
    )
    for load, limit in sources:
        try:
            found.append(load(figures))
        except ValueError as error:
            if limit is not None:
                raise ValueError(f"{error}; or leave out the limit on answers lost") from None
            found.append(None)
    return found[0], found[1]


def _option(
    case: Case, budget: float | None, losses: Sequence[Loss | None], limits: Limits,
    size: tuple[int, int, int],
) -> Option:  # fmt: skip
    context, rows, output = size
    held = memory(case, context + output, rows)
    step = float(step_time(case, context + output // 2, rows).total)
    first = float(prefill_time(case, context))
    option = Option(
        case.strategy, budget, float(held.peak), float(held.host), first,
        step, rows / step, losses[0], losses[1], {},
    )  # fmt: skip
    return _judged(option, case, limits)


def _judged(option: Option, case: Case, limits: Limits) -> Option:
    """The option with the limits that it exceeds, and by how much."""
    room, host = RESERVED * case.machine.memory, case.machine.host_memory * case.gpus
    shared = option.host if case.machine.threads else 0.0  # on a CPU both are one memory
    amounts = {
        "memory": (option.memory + shared, room, _bytes),
        "host memory": (option.host, host, _bytes),
        "TTFT": (option.ttft, limits.ttft, _seconds),
        "TPOT": (option.tpot, limits.tpot, _seconds),
        "accuracy": (_at_most(option.accuracy), limits.accuracy, _points),
        "recall": (_at_most(option.recall), limits.recall, _points),
    }
    exceeded, reasons = {}, []
    for name, (amount, limit, told) in amounts.items():
        if limit is None or amount <= limit:
            continue
        exceeded[name] = amount / limit if limit else float("inf")
        reasons.append(f"{name}: {told(amount)}, limit {told(limit)}")
    return replace(option, exceeded=exceeded, reasons=tuple(reasons))


def _at_most(loss: Loss | None) -> float:
    return float("inf") if loss is None else loss.at_most


def _bytes(value: float) -> str:
    return f"{value / GB:.1f} GB"


def _points(value: float) -> str:
    return "unknown" if value == float("inf") else f"{value:.1f} points"


def _best_of_each(options: Sequence[Option]) -> list[Option]:
    """The first option of each strategy, in order."""
    first: dict[str, Option] = {}
    for option in sorted(options, key=lambda option: option.order):
        first.setdefault(option.strategy, option)
    return list(first.values())


def _explained(ranked: Sequence[Option]) -> list[Option]:
    """Those that fit with what the best one, which comes first, has over them."""
    best = ranked[0]
    return [_compared(o, best) if o.fits and o is not best else o for o in ranked]


def _compared(option: Option, best: Option) -> Option:
    ratio, more = option.tpot / best.tpot, option.memory - best.memory
    if ratio >= 1.0005:
        slower = f"{ratio:.1f} times the time" if ratio >= 2 else f"{ratio - 1:.1%} more time"
        return replace(option, reasons=(f"{slower} a token",))
    other = f"{_bytes(option.host)} on the host" if option.host else f"{more / GB:.2f} GB more"
    return replace(option, reasons=(f"as fast as {best.name}, {other}",))


def why_none(options: Sequence[Option]) -> str:
    """Which limit excludes every strategy, and by how much at the least."""
    alone = []
    for limit in {name: None for o in options for name in o.exceeded}:
        if all(limit in option.exceeded for option in options):
            least = min(options, key=lambda option: option.exceeded[limit])
            reason = next(r for r in least.reasons if r.startswith(f"{limit}:"))
            over = f"{least.exceeded[limit]:.2f} times"
            alone.append(f"{reason} ({least.name} comes nearest, with {over} the limit)")
    if alone:
        return "no strategy meets " + "; ".join(alone)
    nearest = options[0]
    return (
        "no strategy meets all limits together, though none excludes every one; nearest is "
        f"{nearest.name}: {'; '.join(nearest.reasons)}"
    )
