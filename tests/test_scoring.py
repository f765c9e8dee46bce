"""Log-likelihoods under a strategy: exact where it keeps all, changed where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvlib.models import Loaded
from kvlib.policy import Policy
from kvlib.scoring import Pair, Score, Scorer
from kvlib.texts import long_text

EXACT = [
    Policy.at("full"),
    Policy.at("full", mode="block"),
    Policy.at("full", mode="streaming"),
    Policy.at("paged"),
    Policy.at("offload"),
    Policy.at("h2o", 1.0),
    Policy.at("h2o", 1.0, "block"),
    Policy.at("streaming", 1.0, "streaming"),
    Policy.at("infinigen", 1.0),
]
LOSSY = [
    Policy.at("h2o", 0.2),
    Policy.at("h2o", 0.2, "block"),
    Policy.at("h2o", 6, "streaming"),
    Policy.at("streaming", 0.2),
    Policy.at("infinigen", 0.2),
]


def random_pairs(count: int = 5, vocabulary: int = 128, seed: int = 0) -> list[Pair]:
    """Contexts of 1 to 90 tokens with three continuations of 1 to 6 each, one of them twice."""
    rng = random.Random(seed)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocabulary) for _ in range(rng.randint(least, most)))

    start = ids(30, 30)
    contexts = [ids(2, 90) for _ in range(count)] + [
        ids(1, 1),
        start + ids(2, 9),
        start + ids(9, 9),
    ]
    pairs = [Pair(context, ids(1, 6)) for context in contexts for _ in range(3)]
    return [*pairs, pairs[4]]


def found(scorer: Scorer, pairs: Sequence[Pair], policy: Policy) -> list[Score]:
    scores = dict(scorer.scores(pairs, policy))
    return [scores[n] for n in range(len(pairs))]


def plain(model: PreTrainedModel, pair: Pair) -> tuple[float, bool]:
    """The same from one forward of the model alone."""
    with torch.inference_mode():
        logits = model(torch.tensor([pair.context + pair.continuation])).logits[0]
    logs, at = logits.double().log_softmax(-1), len(pair.context) - 1
    best = logs.argmax(-1)
    rows = [(logs[at + n, t].item(), best[at + n] == t) for n, t in enumerate(pair.continuation)]
    return sum(row[0] for row in rows), all(row[1] for row in rows)


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """The real tokens of every forward, as a hook on the model's body sees them."""
    seen: list[int] = []

    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        seen.append(ids.numel() if mask is None else int(mask[:, -ids.shape[1] :].sum()))

    hook = model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("policy", EXACT, ids=str)
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_what_keeps_all_scores_as_the_model_alone(
    tiny: Callable[..., PreTrainedModel], name: str, policy: Policy
) -> None:
    model, pairs = tiny(name), random_pairs()
    for score, pair in zip(found(Scorer(model), pairs, policy), pairs, strict=True):
        own, greedy = plain(model, pair)
        assert score.loglikelihood == pytest.approx(own, abs=1e-4)
        assert score.is_greedy == greedy


@pytest.mark.parametrize("policy", LOSSY, ids=str)
def test_a_budget_below_the_context_changes_even_answers_of_one_token(
    tiny: Callable[..., PreTrainedModel], policy: Policy
) -> None:
    model = tiny("llama")
    pairs = [Pair(pair.context, pair.continuation[:1]) for pair in random_pairs()]
    long = [n for n, pair in enumerate(pairs) if len(pair.context) > 30]
    scores = found(Scorer(model), pairs, policy)
    assert long
    for n in long:
        assert abs(scores[n].loglikelihood - plain(model, pairs[n])[0]) > 1e-3
        assert scores[n].kept < len(pairs[n].context)
        assert scores[n].share < 1


@pytest.mark.parametrize("policy", [*EXACT[:2], *LOSSY], ids=str)
def test_neither_batch_nor_company_changes_an_answer(
    tiny: Callable[..., PreTrainedModel], policy: Policy
) -> None:
    model, pairs = tiny("llama"), random_pairs()
    together = found(Scorer(model), pairs, policy)
    for scorer in (Scorer(model, batch=1), Scorer(model, batch=3, room=100)):
        for one, other in zip(together, found(scorer, pairs, policy), strict=True):
            assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-4)
            assert (one.is_greedy, one.kept) == (other.is_greedy, other.kept)
            assert one.share == pytest.approx(other.share)


@pytest.mark.parametrize("policy", [*EXACT, *LOSSY], ids=str)
def test_the_model_is_fed_what_unique_contexts_and_continuations_predict(
    tiny: Callable[..., PreTrainedModel], policy: Policy
) -> None:
    model, pairs = tiny("llama"), random_pairs()
    scorer = Scorer(model)
    with counted(model) as seen:
        found(scorer, pairs, policy)
    assert scorer.processed == scorer.predicted(pairs, [policy])
    if policy.mode == "block":  # else rows that are done may go on with tokens that nobody reads
        assert sum(seen) == scorer.processed
    else:
        assert scorer.processed <= sum(seen) < 1.5 * scorer.processed


def test_rows_of_one_length_are_fed_nothing_else(tiny: Callable[..., PreTrainedModel]) -> None:
    model, policy = tiny("llama"), Policy.at("infinigen", 0.3)
    pairs = [Pair(pair.context, (5, 6, 7)) for pair in random_pairs()]
    scorer = Scorer(model)
    with counted(model) as seen:
        found(scorer, pairs, policy)
    assert sum(seen) == scorer.predicted(pairs, [policy])


def test_what_contexts_begin_with_is_read_once(tiny: Callable[..., PreTrainedModel]) -> None:
    model, start = tiny("llama"), tuple(range(3, 63))
    pairs = [Pair((*start, 90 + n, *range(70, 72 + n)), (5, 6)) for n in range(4)]
    scorer, policy = Scorer(model), Policy.at("h2o", 0.3, "block")
    with counted(model) as seen:
        together = found(scorer, pairs, policy)
    assert sum(seen) == 60 + (2 + 3 + 4 + 5) + 4 * 2 == scorer.predicted(pairs, [policy])
    for pair, score in zip(pairs, together, strict=True):
        alone = found(Scorer(model), [pair], policy)[0]
        assert score.loglikelihood == pytest.approx(alone.loglikelihood, abs=1e-4)
        assert score.kept == alone.kept


def test_one_reading_serves_every_policy(tiny: Callable[..., PreTrainedModel]) -> None:
    model, pairs = tiny("llama"), random_pairs()[:15]
    policies = [p for p in (*EXACT, *LOSSY) if p.mode != "streaming"]
    scorer, reference = Scorer(model), Scorer(model)
    for group in scorer.groups(pairs):
        some = [pairs[n] for n in group]
        reading = scorer.read(some)
        for policy in policies:
            shared = scorer.score(some, policy, reading)
            assert shared == found(reference, some, policy)
    assert scorer.processed == scorer.predicted(pairs, policies)


def test_contexts_of_one_group_fit_into_the_room(tiny: Callable[..., PreTrainedModel]) -> None:
    pairs = random_pairs(9)
    groups = Scorer(tiny("llama"), room=120).groups(pairs)
    assert sorted(n for group in groups for n in group) == list(range(len(pairs)))
    for group in groups:
        prefixes = {pairs[n].prefix for n in group}
        assert len(prefixes) == 1 or len(prefixes) * max(map(len, prefixes)) <= 120
    for pair in pairs:
        alike = {n for n, other in enumerate(pairs) if other.prefix == pair.prefix}
        assert any(alike <= set(group) for group in groups)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "budget"), [("h2o", 0.3), ("streaming", 0.3)])
def test_block_is_near_decode_for_short_answers(
    smollm2: Loaded, strategy: str, budget: float
) -> None:
    """What mode "block" is good for: its error is small beside what the budget itself changes."""
    assert smollm2.tokenizer is not None
    ids, rng = smollm2.tokenizer(long_text(3)[:9000])["input_ids"], random.Random(0)
    starts = [rng.randrange(len(ids) - 150) for _ in range(8)]
    pairs = [Pair(tuple(ids[s : s + 80]), tuple(ids[s + 80 : s + 83])) for s in starts]
    scorer = Scorer(smollm2.model)
    full, block, decode = (
        torch.tensor([s.loglikelihood for s in found(scorer, pairs, policy)])
        for policy in (
            Policy.at("full"), Policy.at(strategy, budget, "block"), Policy.at(strategy, budget)
        )
    )  # fmt: skip
    assert (block - full).abs().mean() > 0.2  # nats that the budget costs
    assert (block - decode).abs().mean() < 0.5 * (block - full).abs().mean()


def test_a_strategy_of_ones_own(tiny: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from kvlib.caches import EvictingLayer\n\n\n"
        "class First(EvictingLayer):\n"
        "    def priority(self):\n"
        "        return -self.positions.float()\n"
    )
    scores = found(Scorer(tiny("llama")), random_pairs(), Policy.at(f"{path}:First", 3))
    assert {score.kept for score in scores} <= {1, 2, 3}


BAD = [
    (lambda: Policy.at("h2o", 2.0), "share of the tokens"),
    (lambda: Policy.at("h2o", "abc"), "share of the tokens"),
    (lambda: Policy.at("h2o", 0), "share of the tokens"),
    (lambda: Policy.at("infinigen", 2.0), r"in \(0, 1\]"),
    (lambda: Policy.at("full", 0.3), "leave out the budget"),
    (lambda: Policy.at("h3o", 0.3), "did you mean 'h2o'"),
    (lambda: Policy.at("h2o", 0.3, "blok"), "mode"),
    (lambda: Policy.at("h2o", 0.3, resent=0.1), "no parameter resent"),
    (lambda: Policy.at("infinigen", 0.3, "block"), "use mode 'decode'"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_a_bad_policy_is_refused_before_any_work(make: Callable[[], Policy], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair((4,), ()), "empty continuation"),
        (Pair((), (4,)), "empty context"),
        (Pair((4,) * 4096, (5, 6)), "positions"),
    ],
)
def test_a_pair_that_cannot_be_scored_is_named(
    tiny: Callable[..., PreTrainedModel], pair: Pair, message: str
) -> None:
    scorer = Scorer(tiny("llama"))
    with pytest.raises(ValueError, match=message):
        next(scorer.scores([Pair((4,), (5,)), pair], Policy.at("full")))
    assert scorer.processed == 0


def test_a_row_that_is_done_is_not_fed_beyond_the_models_length(
    tiny: Callable[..., PreTrainedModel],
) -> None:
    model = tiny("llama", max_position_embeddings=128)
    pairs = [Pair((4,) * 128, (5,)), Pair((6, 7), (8,) * 5)]
    scores = found(Scorer(model), pairs, Policy.at("full", mode="decode"))
    for score, pair in zip(scores, pairs, strict=True):
        assert score.loglikelihood == pytest.approx(plain_short(model, pair), abs=1e-3)


def plain_short(model: PreTrainedModel, pair: Pair) -> float:
    ids = torch.tensor([(*pair.context, *pair.continuation[:-1])])
    with torch.inference_mode():
        logs = model(ids).logits[0].double().log_softmax(-1)[-len(pair.continuation) :]
    return float(logs.gather(1, torch.tensor(pair.continuation)[:, None]).sum())
