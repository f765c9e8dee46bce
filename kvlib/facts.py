"""Long chats that begin with facts, and the questions that ask for one of them at the end.

A chat is a list of exchanges, each a user's turn and the scripted answer to it: some facts, then
small talk and Wikipedia. `seed` draws all of it: values, wording, order and filler.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvlib.texts import wikipedia

ALTERNATIVES = 8  # values that an answer is ranked among, the right one included
PAIR = 128  # tokens of a small-talk exchange and one about Wikipedia, roughly


@dataclass(frozen=True)
class Kind:
    """What can be told: how it is said, asked and answered, with {} for one of the values."""

    values: tuple[str, ...]
    told: tuple[str, ...]
    asked: tuple[str, ...]
    answer: str
    tail: str = ""  # what follows the value where the answer is scripted


def _settings() -> tuple[dict[str, Kind], tuple[tuple[str, str], ...]]:
    """The kinds and the small talk of facts.toml."""
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    kinds = {
        name: Kind(
            tuple(of["values"].split()), tuple(of["told"]), tuple(of["asked"]), of["answer"],
            of.get("tail", ""),
        )
        for name, of in found["kinds"].items()
    }  # fmt: skip
    return kinds, tuple(found["talk"].items())


KINDS, TALK = _settings()


@dataclass(frozen=True)
class Fact:
    """A fact of a chat, told in exchange number `turn`, and how it is asked for.

    question  ids of the last user turn, to the point where the answer begins
    lead      ids of the answer's beginning, up to the value
    firsts    the first token of each alternative's value; the right one's is firsts[0]
    """

    kind: str
    value: str
    turn: int
    question: tuple[int, ...]
    lead: tuple[int, ...]
    firsts: tuple[int, ...]


@dataclass(frozen=True)
class Chat:
    """The ids of each exchange, and the facts in the order in which they are told."""

    name: str
    turns: tuple[tuple[int, ...], ...]
    facts: tuple[Fact, ...]

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [token for turn in self.turns for token in turn]

    def span(self, fact: Fact) -> tuple[int, int]:
        """Positions first … last-1 of the exchange that tells a fact."""
        first = sum(len(turn) for turn in self.turns[: fact.turn])
        return first, first + len(self.turns[fact.turn])


def check(kinds: Sequence[str], context: int, facts: int, count: int) -> None:
    """ValueError for unknown kinds, and for numbers that make no chat."""
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"unknown kinds {', '.join(unknown)}: choose from {', '.join(KINDS)}")
    if context < 1:
        raise ValueError(f"context {context}: give a number of tokens")
    if not 1 <= facts <= len(set(kinds)):
        raise ValueError(f"facts {facts}: give 1 to {len(set(kinds))}, the number of kinds")
    if count < 1:
        raise ValueError(f"chats {count}: give at least one")


def chats(
    tokenizer: Any,
    *,
    kinds: Sequence[str],
    context: int,
    facts: int,
    count: int,
    seed: int,
) -> list[Chat]:
    """`count` chats of `context` tokens, or a few less, with `facts` facts each.

    The kinds take turns, and all chats have as many exchanges.

    Raises ValueError for unknown kinds, for a tokenizer without a chat template or one that
    rewrites earlier turns, and for a context too short to hold the facts and some filler.
    """
    check(kinds, context, facts, count)
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("this model has no chat template: choose an instruction-tuned one")
    order = sorted(set(kinds))
    random.Random(f"kinds {seed}").shuffle(order)
    made = []
    for n in range(count):
        mine = [order[(n * facts + i) % len(order)] for i in range(facts)]
        draw = random.Random(f"chat {seed} {context} {n}")
        draw.shuffle(mine)
        made.append(_chat(f"{seed}/{context}/{n}", tokenizer, mine, context, draw))
    return made


def _chat(
    name: str, tokenizer: Any, kinds: Sequence[str], context: int, draw: random.Random
) -> Chat:
    script, values = _Script(tokenizer), {}
    for kind in kinds:
        values[kind] = draw.choice(KINDS[kind].values)
        scripted = KINDS[kind].answer.format(values[kind]) + KINDS[kind].tail
        told = draw.choice(KINDS[kind].told).format(values[kind])
        script.add(told, f"I will remember that. {scripted}.")
    _fill(script, context, max(1, round((context - 45 * (len(kinds) + 1)) / PAIR)), draw)
    asked = [_fact(script, kind, values[kind], turn, draw) for turn, kind in enumerate(kinds)]
    return Chat(name, tuple(script.turns), tuple(asked))


def _fact(script: _Script, kind: str, value: str, turn: int, draw: random.Random) -> Fact:
    of = KINDS[kind]
    lead = of.answer.partition(" {}")[0]
    ids, start = script.tokens(lead), len(script.tokens(lead))
    others = draw.sample([v for v in of.values if v != value], len(of.values) - 1)
    firsts = [script.tokens(f"{lead} {v}")[start] for v in (value, *others)]
    distinct = tuple(dict.fromkeys(firsts))[:ALTERNATIVES]
    question = script.question(draw.choice(of.asked))
    return Fact(kind, value, turn, tuple(question), tuple(ids), distinct)


class _Script:
    """A chat under construction: the ids of each exchange extend those before."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = []
        self.text, self.turns, self.length = "", list[tuple[int, ...]](), 0

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def add(self, user: str, assistant: str, room: float = float("inf")) -> bool:
        """Append an exchange, unless it takes more than `room` tokens."""
        messages = [*self.messages, _said("user", user), _said("assistant", assistant)]
        ids = self.tokens(self._after(messages, False))
        if len(ids) > room:
            return False
        self.text += self._after(messages, False)
        self.messages, self.length = messages, self.length + len(ids)
        self.turns.append(tuple(ids))
        return True

    def question(self, user: str) -> list[int]:
        """Ids of a last user turn, with what the template writes before an answer."""
        return self.tokens(self._after([*self.messages, _said("user", user)], True))

    def _after(self, messages: list[dict[str, str]], prompt: bool) -> str:
        """What the messages add to the text so far."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        if not text.startswith(self.text):
            raise ValueError(
                "this model's chat template rewrites earlier turns, so no cache can be continued"
            )
        return str(text[len(self.text) :])


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _fill(script: _Script, context: int, pairs: int, draw: random.Random) -> None:
    """Small talk and Wikipedia in turn, `pairs` times, up to `context` tokens."""
    for left in range(pairs, 0, -1):
        room = (context - script.length) / left
        if not script.add(*draw.choice(TALK), room):
            _refuse(context)
        room = (context - script.length - 35 * (left - 1)) / left
        if not any(script.add(*exchange, room) for exchange in _read(room, draw)):
            fits = [t for t in TALK if script.add(*t, context - script.length)][:1]
            if not fits:
                _refuse(context)


def _refuse(context: int) -> None:
    raise ValueError(f"context {context}: too short to hold the facts and talk behind them")


def _read(room: float, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Exchanges about Wikipedia for about `room` tokens: some articles, ever fewer sentences."""
    for _ in range(10):
        title, sentences = draw.choice(_sentences())
        most = min(max(1, int(room / 20)), len(sentences))
        first = draw.randrange(len(sentences) - most + 1)
        for count in range(most, 0, -1):
            text = " ".join(sentences[first : first + count])
            yield f"Tell me something about {title}.", text


@cache
def _sentences() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Plain sentences of each article: no digits, and none of the values that are asked for."""
    values = {value.lower() for kind in KINDS.values() for value in kind.values}
    found = []
    for title, text in wikipedia().items():
        plain = re.findall(r"(?<=[.!?]\s)[A-Z][A-Za-z ,;'-]{40,160}\.(?=\s)", text)
        kept = tuple(s for s in plain if not values & set(re.findall(r"[a-z]+", s.lower())))
        name = title.replace("_", " ")
        if len(kept) > 3 and name.isascii() and not values & set(name.lower().split()):
            found.append((name, kept))
    return tuple(found)
