"""Accuracy by budget, measured: lm-eval's questions answered under each strategy.

A point is a block of a task's questions under one strategy and budget; its contexts are read once
for all points that follow in the same process.
"""

from __future__ import annotations

import functools
import inspect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvlib.accuracy import KVLM
from kvlib.caches import find_strategy
from kvlib.caches.recording import Recording
from kvlib.measure import Values, value
from kvlib.models import load
from kvlib.oracle import oracle_scores
from kvlib.policy import Policy
from kvlib.scoring import Pair, Score
from kvlib.tasks import Question, questions, source_of

ORACLE = "h2o-oracle"  # the masked simulation of the public H2O code
EXACT = 1e-4  # nats that a log-likelihood may differ from lm-eval's own, in float32
ROOM = 20_000  # tokens of contexts whose readings are kept: of the bundled model 0.1 MB each
LEAST_KEPT = 4  # tokens; what is answered from fewer says nothing about a strategy
MOST = {"copa": 90}  # questions of tasks that have few: some of the 100 are examples


# -- the grid ----------------------------------------------------------------------------------


def settings(strategies: Sequence[str], budgets: Sequence[float]) -> list[dict[str, Any]]:
    """Strategy, budget and mode of each curve's points; `full` and its like have one point."""
    found: list[dict[str, Any]] = []
    for strategy in strategies:
        if strategy == ORACLE:
            found += [{"strategy": strategy, "budget": b, "mode": "masked"} for b in budgets]
            continue
        has = inspect.signature(find_strategy(strategy)).parameters
        shares = budgets if {"budget", "cap"} & has.keys() else [None]
        modes = [Policy.at(strategy, share).mode for share in shares]
        found += [
            {"strategy": strategy, "budget": share, "mode": mode}
            for share, mode in zip(shares, modes, strict=True)
        ]
    return found


def grid(
    counts: Mapping[str, int], chosen: Sequence[Mapping[str, Any]], *, block: int,
    last: int | None = None, data: str = "auto", **more: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """The points: so many questions of each task, `block` at a time, under all `chosen` settings.

    last  stop after as many questions, though they are chosen with all the others
    more  the other arguments of `answer`

    Raises ValueError for a task that cannot be had.
    """
    points = []
    for task, count in counts.items():
        end = min(last or count, count)
        source = source_of(task, data)
        about = {"data": source.name, "licence": source.licence, "revision": source.revision}
        about |= {"note": source.note} if source.note else {}
        points += [
            {"task": task, "first": first, "block": min(block, end - first), "count": count}
            | {"source_kind": source.kind, **about, **more, **setting}
            for first in range(0, end, block)
            for setting in chosen
        ]
    return points


# -- a point -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Some questions of a task, with the readings of their contexts that were taken so far."""

    questions: Sequence[Question]
    pairs: Sequence[Pair]  # of all their requests, one after another
    groups: Sequence[Sequence[int]]
    readings: dict[int, Recording | None]

    def split(self, scores: Sequence[Score]) -> list[tuple[Question, Sequence[Score]]]:
        """Each question with the scores of its requests."""
        found, start = [], 0
        for question in self.questions:
            end = start + len(question.requests)
            found.append((question, scores[start:end]))
            start = end
        return found


def answer(
    *, task: str, shots: int, first: int, block: int, count: int, strategy: str,
    budget: float | None, mode: str, model: str, device: str, seed: int, source_kind: str,
    **_: Any,
) -> Values:  # fmt: skip
    """Questions first … first + block - 1 of `count`, answered under a strategy.

    Some rows a question, by `item`: whether it was answered right, the choice, and the right
    answer's log-likelihood. Where a layer attended to few tokens (LEAST_KEPT) they say so in
    `excluded`.
    """
    lm = _lm(model, device)
    asked = _block(model, device, task, shots, first, block, count, seed, source_kind)
    before = lm.scorer.processed
    scores = _scored(lm, asked, strategy, budget, mode)
    values: Values = []
    for question, own in asked.split(scores):
        values += _answered(question, own, everything=budget is None)
    kept = [score.kept for score in scores]
    values += [
        value("share", statistics.fmean(score.share for score in scores), "1"),
        value("kept_min", min(kept), "tokens"),
        value("kept_median", statistics.median(kept), "tokens"),
        value("processed", lm.scorer.processed - before, "tokens"),
    ]
    return values


def compare(
    *, task: str, shots: int, first: int, block: int, count: int, model: str, device: str,
    seed: int, source_kind: str, **_: Any,
) -> Values:  # fmt: skip
    """How far the full cache's log-likelihoods are from lm-eval's own, and how often both agree."""
    lm = _lm(model, device)
    asked = _block(model, device, task, shots, first, block, count, seed, source_kind)
    plain = [Score(own, greedy, 0, 1.0) for own, greedy in lm.plain(asked.pairs)]
    ours = _scored(lm, asked, "full", None, "decode")
    apart = [abs(a.loglikelihood - b.loglikelihood) for a, b in zip(plain, ours, strict=True)]
    agree = [
        _metrics(question, a) == _metrics(question, b)
        for (question, a), (_, b) in zip(asked.split(plain), asked.split(ours), strict=True)
    ]
    return [
        value("loglikelihood_apart", max(apart), "nats"),
        value("same_answers", statistics.fmean(agree), "1"),
    ]


@functools.lru_cache(maxsize=1)
def _lm(model: str, device: str) -> KVLM:
    """lm-eval's view of the model; points of one process share it."""
    loaded = load(model, "float32", device)
    if loaded.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, and reads no text: choose another model")
    lm = KVLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=80)
    lm.scorer.room = ROOM
    return lm


@functools.lru_cache(maxsize=1)  # the readings take gigabytes
def _block(
    model: str, device: str, task: str, shots: int, first: int, block: int, count: int, seed: int,
    source_kind: str,
) -> Block:  # fmt: skip
    lm, data = _lm(model, device), {"generated": "auto"}.get(source_kind, source_kind)
    some = questions(task, count=count, shots=shots, seed=seed, data=data)[first : first + block]
    pairs = lm.pairs([request for question in some for request in question.requests])
    lm.scorer.check(pairs)
    return Block(some, pairs, lm.scorer.groups(pairs), {})


def _scored(lm: KVLM, asked: Block, strategy: str, budget: float | None, mode: str) -> list[Score]:
    """The scores of all pairs of a block; what was read before is not read again."""
    if strategy == ORACLE:
        lm.scorer.processed += sum(len(pair.prefix) + len(pair.fed) for pair in asked.pairs)
        return oracle_scores(lm.model, asked.pairs, budget or 1.0)
    policy, found = Policy.at(strategy, budget, mode), dict[int, Score]()
    for n, group in enumerate(asked.groups):
        pairs = [asked.pairs[i] for i in group]
        if n not in asked.readings and mode != "streaming":
            asked.readings[n] = lm.scorer.read(pairs)
        scores = lm.scorer.score(pairs, policy, asked.readings.get(n))
        found |= dict(zip(group, scores, strict=True))
    return [found[n] for n in range(len(asked.pairs))]


def _metrics(question: Question, scores: Sequence[Score]) -> dict[str, float]:
    return question.score([s.loglikelihood for s in scores], [s.is_greedy for s in scores])


def _answered(question: Question, scores: Sequence[Score], everything: bool) -> Values:
    """The rows of one question. Of a single answer the choice is whether it would be written."""
    likeliest = max(range(len(scores)), key=lambda n: scores[n].loglikelihood)
    choice = likeliest if len(scores) > 1 else int(scores[0].is_greedy)
    kept, metrics = min(score.kept for score in scores), _metrics(question, scores)
    rows = [
        value("correct", metrics["acc"], "0/1"),
        value("choice", choice, "1"),
        value("loglikelihood", scores[question.gold].loglikelihood, "nats"),
    ]
    if "acc_norm" in metrics:
        rows.append(value("correct_norm", metrics["acc_norm"], "0/1"))
    if everything:
        rows.append(value("chance", 1 / len(scores) if len(scores) > 1 else 0.0, "0/1"))
    own: dict[str, Any] = {"item": str(question.item)}
    if kept < LEAST_KEPT and not everything:
        own["excluded"] = f"fewer than {LEAST_KEPT} kept tokens"
    return [row | own for row in rows]


def require_exact(rows: pd.DataFrame) -> None:
    """RuntimeError where the full cache does not answer as lm-eval's own model does."""
    if len(failed := rows[rows["status"].ne("ok")]):
        names, status = ", ".join(sorted({*failed["task"]})), failed["status"].iloc[0]
        raise RuntimeError(f"{names}: not compared with lm-eval's own model ({status})")
    apart = rows[rows["metric"].eq("loglikelihood_apart")]
    wrong = apart[apart["value"] > EXACT]
    other = rows[rows["metric"].eq("same_answers") & rows["value"].lt(1)]
    if len(wrong) or len(other):
        tasks = sorted({*wrong["task"], *other["task"]})
        raise RuntimeError(
            f"the full cache and lm-eval's own model disagree on {', '.join(tasks)} (up to "
            f"{apart['value'].max():.2g} nats): no strategy can be scored on them"
        )


# -- how long it takes -------------------------------------------------------------------------

# Tokens of a context with five examples, and of all continuations of a question.
SIZES = {
    "piqa": (290, 48), "hellaswag": (480, 130), "copa": (100, 14), "winogrande": (330, 14),
    "openbookqa": (110, 20), "boolq": (900, 2), "arc_easy": (210, 20),
}  # fmt: skip
READ, FED, STEPPED, PLAIN = 1100, 900, 220, 900  # tokens a second, on two cores


def seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds of a point of the bundled model on two cores."""
    context, answers = SIZES.get(point["task"], (400, 40))
    context *= (1 + point["shots"]) / 6
    if point["strategy"] == ORACLE:
        return float(0.2 + point["block"] * (4 * context + answers) / PLAIN)
    reading = context / READ if point["strategy"] == "full" else 0.1 * context / READ
    rate = STEPPED if point["mode"] == "decode" else FED
    return float(0.2 + point["block"] * (reading + answers / rate))


def check_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds of `compare` there."""
    context, answers = SIZES.get(point["task"], (400, 40))
    context *= (1 + point["shots"]) / 6
    return float(1 + point["block"] * (context / READ + (4 * context + answers) / PLAIN))
