"""What a strategy costs in answers, by the stored rows of 06_accuracy and 07_retention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlib.costs import EVICTING
from kvlib.records import Record, read, text

if TYPE_CHECKING:
    from kvlib.intervals import Estimate

INEXACT = (*EVICTING, "infinigen")
Answers = dict[str, float]


@dataclass(frozen=True)
class Loss:
    """Points lost against the full cache, and the most that a 95 % interval leaves open."""

    points: float
    at_most: float
    source: str


EXACT = Loss(0.0, 0.0, "exact: attends to every token, as tests show")


@dataclass(frozen=True)
class Evidence:
    """Answers to the same questions, 0 or 1, by strategy and budget; `full` has no budget."""

    name: str
    told: str
    answers: dict[tuple[str, float | None], Answers]

    def loss(self, strategy: str, budget: float) -> Loss | None:
        """Points lost at a budget; None where no rows are stored for it."""
        if strategy not in INEXACT or budget >= 1:
            return EXACT
        change = self.change(strategy, budget)
        if change is None:
            return None
        source = f"{self.name}: {change.n} {self.told}"
        return Loss(-100 * change.value, max(0.0, -100 * change.interval().low), source)

    def change(self, strategy: str, budget: float) -> Estimate | None:
        """Change in the share of right answers, paired by question; None where there are none."""
        own, full = self.answers.get((strategy, budget), {}), self.answers.get(("full", None), {})
        asked = [item for item in own if item in full]
        if not asked:
            return None
        from kvlib.intervals import paired_binary  # takes longer to import than to use

        return paired_binary([own[i] for i in asked], [full[i] for i in asked])

    @property
    def budgets(self) -> list[float]:
        """The budgets that rows are stored for."""
        return sorted({b for _, b in self.answers if b is not None})


def accuracy(figures: Path) -> Evidence:
    """Answers to the questions of lm-eval tasks."""
    rows = [
        r for r in read(figures, "06_accuracy")
        if r["metric"] == "correct" and not text(r, "excluded")
    ]  # fmt: skip
    tasks = {text(r, "task") for r in rows}
    return _evidence("06_accuracy", f"questions of {len(tasks)} tasks", rows)


def recall(figures: Path) -> Evidence:
    """Facts that are asked for after further turns of a conversation."""
    rows = [
        r for r in read(figures, "07_retention")
        if r["metric"] == "recalled" and not text(r, "excluded")
    ]  # fmt: skip
    return _evidence("07_retention", "facts stated early in a conversation", rows)


def _evidence(name: str, told: str, rows: Iterable[Record]) -> Evidence:
    answers: dict[tuple[str, float | None], Answers] = {}
    models = set()
    for row in rows:
        strategy, budget = row["strategy"], text(row, "budget")
        key = strategy, float(budget) if budget and strategy in INEXACT else None
        item = "/".join(text(row, column) for column in ("task", "context", "item"))
        answers.setdefault(key, {})[item] = float(row["value"])
        models.add(text(row, "model"))
    return Evidence(name, f"{told}, {', '.join(sorted(models))}", answers)
