"""Does a strategy remember, at the end of a long chat, what was said at its beginning?

Chats of `kvlib.facts` are read exchange by exchange; after each one the strategy evicts down to
its share of the tokens seen. Only then comes a question, token by token, so that the strategy
acts on it, and the answer, whose beginning is given ("Your dog's name is") and which goes on
greedily. `needle` is RULER's task as lm-eval generates and scores it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlib.answering import Reader, answer, kept_share
from kvlib.attachment import attach
from kvlib.bundled import BUNDLED, bundled_folder
from kvlib.caches import KVCache, make_cache
from kvlib.decoding import parse
from kvlib.facts import Chat, Fact, chats, check
from kvlib.measure import Values, value
from kvlib.models import Loaded, load, shape_of

NEEDLE = "niah_single_1"
NEW, NEW_NEEDLE = 6, 16  # tokens that an answer may take beyond what is given of it
ROOM = 64  # tokens kept free for question and answer
REASONS = {
    "selection": "chooses what is asked",
    "single": "the question helps to choose what is kept",
    "needle": "another task",
}


@dataclass(frozen=True)
class Query:
    """A fact of a chat that is asked for."""

    row: int  # of its chat in the cache
    chat: Chat
    fact: Fact


# -- measuring ---------------------------------------------------------------------------------


@torch.inference_mode()
def recall(
    *, strategy: str, knobs: str, variant: str, context: int, model: str, device: str, seed: int,
    kinds: str = "", conversations: int = 0, facts: int = 0, each: int = 0, needles: int = 0,
    **_: Any,
) -> Values:  # fmt: skip
    """Is each fact recalled (0/1), and which rank has it among alternatives?

    variant        "turns" and "selection": the question comes after the last eviction; "single":
                   it is part of the one prompt; "needle": lm-eval's task, `needles` documents
    context        tokens of a chat before the question, or of a needle's document
    kinds          of facts, "pet,street"; `facts` are told in each chat, `each` of them are asked
    conversations  how many chats

    Raises ValueError for unknown kinds or knobs, and a context that is too short or too long.
    """
    _check(model, variant, context, kinds, facts, conversations, needles)
    loaded = load(model, "float32" if device == "cpu" else "bfloat16", device)
    cache = make_cache(strategy, loaded.model, **parse(knobs))
    with attach(loaded.model):
        if variant == "needle":
            return _needles(loaded, cache, context, needles, seed)
        talk = chats(
            loaded.tokenizer, kinds=kinds.split(","), context=context, facts=facts,
            count=conversations, seed=seed,
        )  # fmt: skip
        asked = [Query(r, chat, f) for r, chat in enumerate(talk) for f in chat.facts[:each]]
        run = _in_one_prompt if variant == "single" else _by_turns
        return run(loaded, cache, asked, REASONS.get(variant))


def _check(
    model: str, variant: str, context: int, kinds: str, facts: int, conversations: int, needles: int
) -> None:
    if variant not in ("turns", *REASONS):
        raise ValueError(f"variant {variant!r}: choose from turns, {', '.join(REASONS)}")
    if variant != "needle":
        check(kinds.split(","), context, facts, conversations)
    elif needles < 1:
        raise ValueError(f"needles {needles}: give at least one")
    positions, longest = shape_of(model).positions, context + ROOM * (variant != "needle")
    if longest > positions:
        raise ValueError(
            f"{longest} tokens with the question, but {model} has {positions} positions: "
            "give a shorter context"
        )


def _by_turns(loaded: Loaded, cache: KVCache, asked: list[Query], why: str | None) -> Values:
    reader = Reader(loaded.model, cache)
    talk = {query.row: query.chat for query in asked}
    for turns in zip(*(chat.turns for chat in talk.values()), strict=True):
        reader.read(turns)
    kept = [kept_share(cache, query.row, query.chat.span(query.fact)) for query in asked]
    tails = [[*query.fact.question, *query.fact.lead] for query in asked]
    answers, scores = answer(loaded, cache.fork([query.row for query in asked]), tails, NEW)
    return _values(loaded, asked, answers, scores, "decoded", why) + [
        value("fact_kept", share, "1") | _columns(query, "decoded", why)
        for share, query in zip(kept, asked, strict=True)
    ]


def _in_one_prompt(loaded: Loaded, cache: KVCache, asked: list[Query], why: str | None) -> Values:
    Reader(loaded.model, cache).read([[*q.chat.ids, *q.fact.question] for q in asked])
    answers, scores = answer(loaded, cache, [query.fact.lead for query in asked], NEW)
    return _values(loaded, asked, answers, scores, "prefilled", why)


def _values(
    loaded: Loaded, asked: Sequence[Query], answers: Sequence[Sequence[int]], scores: Tensor,
    mode: str, why: str | None,
) -> Values:  # fmt: skip
    values = Values()
    assert loaded.tokenizer is not None
    for query, ids, row in zip(asked, answers, scores, strict=True):
        said, columns = str(loaded.tokenizer.decode([*ids])), _columns(query, mode, why)
        candidates = row[list(query.fact.firsts)]
        rank = 1 + int((candidates > candidates[0]).sum())
        values.append(value("recalled", float(says(said, query.fact.value)), "0/1") | columns)
        values.append(value("rank", rank, "1") | columns)
    return values


def _columns(query: Query, mode: str, excluded: str | None) -> dict[str, Any]:
    item = f"{query.chat.name}/{query.fact.kind}"
    columns = {"item": item, "kind": query.fact.kind, "mode": mode}
    return columns | ({"excluded": excluded} if excluded else {})


def says(text: str, word: str) -> bool:
    """Is the word in the text, upper or lower case?"""
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


# -- needles -----------------------------------------------------------------------------------


def _needles(loaded: Loaded, cache: KVCache, length: int, count: int, seed: int) -> Values:
    from kvlib.tasks import questions

    tokenizer, values = loaded.tokenizer, Values()
    assert tokenizer is not None
    folder = bundled_folder() if loaded.name == BUNDLED else Path(loaded.name)
    asked = questions(NEEDLE, count=count, seed=seed, tokenizer_folder=str(folder), length=length)
    prompts = [list(tokenizer(question.requests[0][0])["input_ids"]) for question in asked]
    Reader(loaded.model, cache).read([ids[:-1] for ids in prompts])
    answers, _ = answer(loaded, cache, [ids[-1:] for ids in prompts], NEW_NEEDLE)
    for question, ids in zip(asked, answers, strict=True):
        right = question.score_text(str(tokenizer.decode(ids)))[str(length)]
        columns = {"item": f"{NEEDLE}/{length}/{question.item}", "kind": NEEDLE}
        columns |= {"mode": "prefilled", "excluded": REASONS["needle"]}
        values.append(value("recalled", right, "0/1") | columns)
    return values
