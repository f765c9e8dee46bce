"""Early facts: the chats, what is evicted before a question, and how answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import batch
from matplotlib import pyplot as plt
from transformers import PreTrainedModel

import kvlib
from kvlib import claims, facts, retention, retention_figures
from kvlib import retention_points as grids
from kvlib.answering import Reader, answer, kept_share
from kvlib.caches import KVCache
from kvlib.models import Loaded

Tiny = Callable[..., PreTrainedModel]

LOSSY: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {"budget": 0.3}),
    ("streaming", {"budget": 0.3}),
    ("infinigen", {"alpha": "inf", "cap": 0.3}),
]
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("paged", {"block": 4}),
    ("h2o", {"budget": 1.0}),
    ("infinigen", {"alpha": "inf", "cap": 1.0}),
]
KINDS = ["street", "codeword", "hotel"]
COMMON: dict[str, Any] = {"conversations": 2, "facts": 2, "model": "smollm2", "device": "cpu"}


def rows(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """One turn of random tokens a row."""
    ids, mask = batch(list(lengths), seed=seed)
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]


TURNS = [rows(lengths, n) for n, lengths in enumerate([(9, 12, 7), (11, 6, 14), (8, 10, 9)])]
TAILS = rows((5, 3, 4), 7)


def loaded(model: PreTrainedModel) -> Loaded:
    return Loaded("tiny", model, None, "")


def ask(
    model: PreTrainedModel, strategy: str, knobs: dict[str, Any], pick: Sequence[int] = (0, 1, 2)
) -> tuple[list[list[int]], torch.Tensor, KVCache]:
    """Read TURNS, then answer TAILS, of some of the rows."""
    with torch.no_grad(), kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model, **knobs)
        reader = Reader(model, cache)
        for turn in TURNS:
            reader.read([turn[row] for row in pick])
            cache.check()
        found = answer(loaded(model), cache, [TAILS[row] for row in pick], 4)
        cache.check()
    return *found, cache


# -- reading and answering ---------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "knobs"), EXACT)
def test_exact_turns_are_one_plain_forward(
    tiny: Tiny, strategy: str, knobs: dict[str, Any]
) -> None:
    model = tiny("llama")
    answers, scores, _ = ask(model, strategy, knobs)
    for row, tail in enumerate(TAILS):
        ids = torch.tensor([[*(t for turn in TURNS for t in turn[row]), *tail]])
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
            plain = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        torch.testing.assert_close(scores[row], logits, atol=1e-4, rtol=1e-4)
        assert answers[row] == plain.tolist()


@pytest.mark.parametrize(("strategy", "knobs"), LOSSY)
def test_a_row_answers_as_if_alone(tiny: Tiny, strategy: str, knobs: dict[str, Any]) -> None:
    model = tiny("llama")
    together, scores, _ = ask(model, strategy, knobs)
    exact = ask(model, "full", {})[1]
    assert not torch.allclose(scores, exact, atol=1e-4)
    for row in range(3):
        alone, score, _ = ask(model, strategy, knobs, [row])
        assert alone[0] == together[row]
        torch.testing.assert_close(score[0], scores[row], atol=1e-4, rtol=1e-4)


def test_no_token_is_fed_that_is_not_a_row_s_own(tiny: Tiny) -> None:
    """Rows with short tails answer while others read: all end with equally many tokens fed."""
    _, _, cache = ask(tiny("llama"), "full", {})
    told = [sum(len(turn[row]) for turn in TURNS) for row in range(3)]
    assert cache.timeline.seen == [n + max(map(len, TAILS)) + 3 for n in told]


def test_the_question_comes_after_the_eviction(tiny: Tiny) -> None:
    model = tiny("llama")
    with torch.no_grad(), kvlib.attach(model):
        cache = kvlib.make_cache("h2o", model, budget=0.3)
        reader = Reader(model, cache)
        for turn in TURNS:
            reader.read(turn)
        seen = [sum(len(turn[row]) for turn in TURNS) for row in range(3)]
        assert cache.timeline.seen == seen
        for layer in cache.layers:
            assert layer.count == [-(-3 * n // 10) for n in seen]
        before = cache.layers[0].positions.clone()
        answer(loaded(model), cache.fork([0, 0, 2]), TAILS, 4)
        assert torch.equal(cache.layers[0].positions, before)  # a question to a copy


def test_the_end_of_a_turn_ends_an_answer(tiny: Tiny) -> None:
    model = tiny("llama")
    first = ask(model, "full", {})[0][0][1]
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, first
    try:
        answers = ask(model, "full", {})[0]
    finally:
        model.generation_config.eos_token_id = before
    assert answers[0][-1] == first
    assert len(answers[0]) <= 2


def test_a_word_is_recalled_as_a_word() -> None:
    assert retention.says(" Rose Street.", "rose")
    assert not retention.says(" Rosebud", "Rose")


# -- chats -------------------------------------------------------------------------------------


def chats(smollm2: Loaded, **changes: Any) -> list[facts.Chat]:
    asked: dict[str, Any] = {"kinds": KINDS, "context": 256, "facts": 2, "count": 4}
    return facts.chats(smollm2.tokenizer, **asked | {"seed": 0} | changes)


def test_chats_grow_turn_by_turn(smollm2: Loaded) -> None:
    tokenizer: Any = smollm2.tokenizer
    made = chats(smollm2)
    assert len({len(chat.turns) for chat in made}) == 1
    assert made == chats(smollm2)
    assert 400 < min(len(chat.ids) for chat in chats(smollm2, context=512)) <= 512
    for chat in made:
        assert 180 < len(chat.ids) <= 256
        text = tokenizer.decode(chat.ids)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert whole == chat.ids
        for fact in chat.facts:
            first, last = chat.span(fact)
            assert tokenizer.decode(chat.ids[first:last]).count(fact.value) == 2  # told, repeated
            assert text.count(fact.value) == 2
            asked = tokenizer.decode([*fact.question, *fact.lead])
            assert asked.startswith("<|im_start|>user\n")
            assert "<|im_start|>assistant\n" in asked
            assert len(set(fact.firsts)) == facts.ALTERNATIVES
            assert fact.value.startswith(tokenizer.decode(fact.firsts[0]).strip())


def test_each_seed_and_context_has_chats_of_its_own(smollm2: Loaded) -> None:
    made = [chats(smollm2), chats(smollm2, seed=1), chats(smollm2, context=320)]
    assert len({chat.name for part in made for chat in part}) == 12
    assert len({tuple(chat.ids) for part in made for chat in part}) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ["street", "shoe"]}, "unknown kinds shoe"),
        ({"context": 64}, "context 64: too short"),
        ({"context": 0}, "context 0"),
        ({"facts": 4}, "facts 4: give 1 to 3"),
        ({"count": 0}, "chats 0"),
    ],
)
def test_chats_that_cannot_be(smollm2: Loaded, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chats(smollm2, **changes)


# -- points ------------------------------------------------------------------------------------


def told(recalled: dict[tuple[int, str], list[int]]) -> pd.DataFrame:
    found = [
        {"variant": "selection", "metric": "recalled", "status": "ok", "value": v}
        | {"context": context, "kind": kind}
        for (context, kind), values in recalled.items()
        for v in values
    ]
    return pd.DataFrame(found)


def test_what_the_full_cache_recalls_is_asked_on_other_seeds() -> None:
    first = grids.selection(contexts=[256, 512], kinds=KINDS, seed=3, **COMMON)
    assert {(p["context"], p["kinds"]) for p in first} == {
        (256, "codeword,hotel,street"),
        (512, "codeword,hotel,street"),
    }
    answers = {(256, "street"): [1, 1, 1, 1, 0], (256, "hotel"): [1, 0], (512, "hotel"): [1]}
    asked = grids.chosen(told(answers))
    assert asked == {256: ["street"], 512: ["hotel"]}
    points = grids.scoring(
        asked=asked, strategies=["full", "h2o", "infinigen", "streaming"], budgets=[0.3, 0.1],
        single=1, needles={1024: 2}, seed=3, repeats=2, **COMMON,
    )  # fmt: skip
    assert {p["seed"] for p in points}.isdisjoint(p["seed"] for p in first)
    assert {(p["context"], p["kinds"], p["facts"]) for p in points if "kinds" in p} == {
        (256, "street", 1),
        (512, "hotel", 1),
    }
    found = [(p["strategy"], p["knobs"], p["variant"]) for p in points if not p["repeat"]]
    assert [f for f in found if f[0] in ("full", "streaming")] == [
        ("full", "", "turns"),
        ("full", "", "turns"),
        ("full", "", "needle"),
        ("streaming", "budget=0.3", "turns"),
        ("streaming", "budget=0.3", "turns"),
    ]
    assert found.count(("infinigen", "alpha=inf,cap=0.3", "single")) == 2
    assert found.count(("infinigen", "alpha=inf,cap=0.1", "single")) == 0
    assert all(grids.recall_seconds(p) > 1 for p in points + first)
    with pytest.raises(ValueError, match="recalls no kind"):
        grids.chosen(told({(256, "hotel"): [1, 0]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": "shoe,street"}, "unknown kinds shoe"),
        ({"kinds": "street"}, "facts 2: give 1 to 1"),
        ({"context": 9000}, "9064 tokens with the question"),
        ({"variant": "twice"}, "variant 'twice'"),
        ({"variant": "needle"}, "needles 0"),
        ({"variant": "needle", "needles": 1, "context": 16384}, "16384 tokens"),
        ({"strategy": "h2o", "knobs": "budget=1.5"}, "budget '1.5'"),
        ({"strategy": "h3o"}, "unknown strategy"),
        ({"knobs": "budget=0.3"}, "Full has no parameter budget"),
    ],
)
def test_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(retention, "chats", None)
    monkeypatch.setattr(retention, "_needles", None)
    point: dict[str, Any] = {"strategy": "full", "knobs": "", "variant": "turns", "seed": 0}
    with pytest.raises(ValueError, match=message):
        retention.recall(
            **point | COMMON | {"context": 256, "kinds": "street,hotel", "each": 2} | changes
        )


# -- the bundled model -------------------------------------------------------------------------


def test_h2o_evicts_a_fact_that_infinigen_still_holds(smollm2: Loaded) -> None:
    made, kept = chats(smollm2, count=2), {}
    for strategy, knobs in LOSSY:
        with torch.no_grad(), kvlib.attach(smollm2.model):
            cache = kvlib.make_cache(strategy, smollm2.model, **knobs)
            reader = Reader(smollm2.model, cache)
            for turn in range(len(made[0].turns)):
                reader.read([chat.turns[turn] for chat in made])
            spans = [(row, chat.span(chat.facts[0])) for row, chat in enumerate(made)]
            kept[strategy] = [kept_share(cache, row, span) for row, span in spans]
    assert kept["infinigen"] == [1, 1]
    assert max(kept["h2o"]) < 0.5
    assert max(kept["streaming"]) < 0.2


def measured(strategy: str, knobs: str, budget: float, variant: str = "turns") -> pd.DataFrame:
    point: dict[str, Any] = {"strategy": strategy, "knobs": knobs, "variant": variant, "seed": 0}
    point |= COMMON | {"context": 256, "kinds": "codeword,street", "each": 2, "budget": budget}
    found = pd.DataFrame([point | v for v in retention.recall(**point)])
    return found.assign(figure="07_retention", status="ok", machine="here", repeat=0)


@pytest.mark.slow
def test_rows_from_measurement_to_verdict_and_figure() -> None:
    frame = pd.concat(
        [
            measured("full", "", 1.0, "selection").assign(seed=1),
            measured("full", "", 1.0),
            measured("h2o", "budget=1.0", 1.0),
            measured("h2o", "budget=0.3", 0.3),
            measured("h2o", "budget=0.3", 0.3, "single"),
            measured("infinigen", "alpha=inf,cap=0.3", 0.3),
        ],
        ignore_index=True,
    )
    turns = frame[frame["variant"] == "turns"]
    cells = turns.pivot_table("value", ["metric", "item"], ["strategy", "budget"])
    assert cells["h2o", 1.0].tolist() == cells["full", 1.0].tolist()
    assert cells.loc["recalled", ("full", 1.0)].mean() > 0.5
    assert (cells.loc["fact_kept", ("infinigen", 0.3)] == 1).all()
    assert (cells.loc["fact_kept", ("h2o", 0.3)] < 0.6).all()
    assert cells.loc["rank"].stack([0, 1], future_stack=True).between(1, facts.ALTERNATIVES).all()
    assert turns["excluded"].isna().all()
    assert frame.loc[frame["variant"] != "turns", "excluded"].notna().all()
    verdict = claims.judge(frame, only=["C7"])
    assert "n=4" in verdict["measured"][0]
    assert "several rows" not in verdict["reason"][0]
    rates = retention_figures.rates(frame)
    assert rates.loc[("single", "full", 1.0, 256), "answers"] == 4
    assert ((rates["low"] <= rates["recall"]) & (rates["recall"] <= rates["high"])).all()
    fig = retention_figures.draw(frame)
    assert len(fig.axes) == 2
    plt.close(fig)


@pytest.mark.slow
def test_a_needle_is_lm_eval_s(smollm2: Loaded) -> None:
    pytest.importorskip("wonderwords")
    found = retention.recall(
        strategy="full",
        knobs="",
        variant="needle",
        context=1024,
        needles=1,
        seed=0,
        model="smollm2",
        device="cpu",
    )
    assert [(v["metric"], v["value"]) for v in found] == [("recalled", 1.0)]
    assert found[0]["excluded"]
