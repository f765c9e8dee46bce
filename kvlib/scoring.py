"""Log-likelihoods of continuations under a strategy, from one exact reading of each context.

A context is read with exact attention but for its last token, and the strategy acts: only then
its last token and the continuation are fed, so that even an answer of one token is given under
the strategy. The reading is shared by all continuations, strategies and budgets (`recording`).

mode "decode"     one token at a time; evicts, or fetches, at every step
mode "block"      the continuation in one forward, without eviction inside: faster, nearly the same
mode "streaming"  the context is read under the budget too, in chunks, by each strategy for itself
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlib.attachment import attach
from kvlib.caches import InfiniGen, KVCache, find_strategy, make_cache
from kvlib.caches.base import one_of
from kvlib.caches.recording import Recording, recorder
from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers

MODES = ("decode", "block", "streaming")
CHUNK = 64  # tokens of a context at a time in mode "streaming"

Tokens = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """A continuation to be scored behind a context, both as token ids and neither empty."""

    context: Tokens
    continuation: Tokens

    @property
    def prefix(self) -> Tokens:
        """What is read before the strategy acts."""
        return self.context[:-1]

    @property
    def fed(self) -> Tokens:
        """What is fed under the strategy; each token foretells one of the continuation."""
        return (self.context[-1], *self.continuation[:-1])


@dataclass(frozen=True)
class Score:
    """How likely the model finds a continuation under a strategy.

    loglikelihood  natural logarithm of the probability of all its tokens
    is_greedy      would the model, choosing the likeliest token each time, have written it?
    kept           the fewest tokens that a layer attended to at the first step
    share          share of the tokens seen that was attended to then, mean over the layers
    """

    loglikelihood: float
    is_greedy: bool
    kept: int
    share: float


@dataclass(frozen=True)
class Policy:
    """A strategy with its parameters, and how continuations are fed to it (see above).

    Raises ValueError for an unknown strategy, mode or parameter, or one out of range.
    """

    strategy: str
    knobs: dict[str, Any] = field(default_factory=dict)
    mode: str = "decode"

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        layer = find_strategy(self.strategy)
        known = inspect.signature(layer).parameters.keys() - {"timeline", "tiers"}
        if unknown := sorted(self.knobs.keys() - known):
            has = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{self.strategy} has no parameter {', '.join(unknown)}; it has {has}")
        layer(Timeline(), Tiers(), **self.knobs)
        if self.mode == "block" and issubclass(layer, InfiniGen):
            raise ValueError(
                f"{self.strategy} fetches for one token at a time: use mode 'decode', not 'block'"
            )

    @classmethod
    def at(
        cls, strategy: str, budget: float | str | None = None, mode: str = "", **knobs: Any
    ) -> Policy:
        """A strategy at a budget, whatever it calls that; without a mode the fastest fair one.

        InfiniGen fetches up to the budget at each step; what keeps everything takes none.
        """
        layer = find_strategy(strategy)
        has = inspect.signature(layer).parameters
        if budget is not None:
            if "cap" in has:
                knobs = {"alpha": "inf", "cap": budget} | knobs
            elif "budget" in has:
                knobs = {"budget": budget} | knobs
            else:
                raise ValueError(f"{strategy} keeps every token: leave out the budget")
        return cls(strategy, knobs, mode or ("decode" if issubclass(layer, InfiniGen) else "block"))

    def cache(self, model: PreTrainedModel) -> KVCache:
        """A fresh cache; one that reads in chunks evicts after each, where it has the choice."""
        has = inspect.signature(find_strategy(self.strategy)).parameters
        more = {"evict": "chunk"} if self.mode == "streaming" and "evict" in has else {}
        return make_cache(self.strategy, model, **{**self.knobs, **more})


class Scorer:
    """Scores pairs with a model that is attached meanwhile.

    batch      continuations that are fed together
    room       tokens of contexts, pads included, that are read together
    processed  tokens that the model has been fed so far, pads left out
    """

    def __init__(self, model: PreTrainedModel, batch: int = 32, room: int = 8192) -> None:
        if batch < 1 or room < 1:
            raise ValueError(f"batch {batch}, room {room}: give at least 1")
        self.model, self.batch, self.room = model, batch, room
        self.limit = getattr(model.config, "max_position_embeddings", None)
        self.processed = 0

    def check(self, pairs: Sequence[Pair]) -> None:
        """ValueError, before any work, for a pair that cannot be scored."""
        for n, pair in enumerate(pairs):
            if not pair.context or not pair.continuation:
                what = "continuation" if pair.context else "context"
                raise ValueError(f"pair {n} has an empty {what}: there is nothing to score")
            total = len(pair.context) + len(pair.continuation) - 1
            if self.limit is not None and total > self.limit:
                raise ValueError(
                    f"pair {n} takes {total} tokens, this model has {self.limit} positions: "
                    "use fewer examples, or shorten the context"
                )

    def groups(self, pairs: Sequence[Pair]) -> list[list[int]]:
        """The pairs by number; those of one group have contexts that are read together."""
        order = sorted(range(len(pairs)), key=lambda n: (len(pairs[n].prefix), pairs[n].prefix))
        groups: list[list[int]] = []
        prefixes = set[Tokens]()
        for n in order:
            prefix = pairs[n].prefix
            crowded = (len(prefixes | {prefix})) * len(prefix) > self.room
            if not groups or crowded or not pairs[groups[-1][0]].prefix:
                groups.append([])
                prefixes = set()
            groups[-1].append(n)
            prefixes.add(prefix)
        return groups

    def scores(self, pairs: Sequence[Pair], policy: Policy) -> Iterator[tuple[int, Score]]:
        """The number and the score of each pair, in the order in which they are found."""
        self.check(pairs)
        for group in self.groups(pairs):
            some = [pairs[n] for n in group]
            recording = None if policy.mode == "streaming" else self.read(some)
            yield from zip(group, self.score(some, policy, recording), strict=True)

    @torch.inference_mode()
    def read(self, pairs: Sequence[Pair]) -> Recording | None:
        """Read the contexts of a group, each once; None where they have but one token."""
        prefixes = _unique(pairs)
        if not prefixes[0]:
            return None
        ids, mask = _left_padded(prefixes, self.model.device)
        cache = recorder(self.model)
        with attach(self.model):
            self.model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
        self.processed += int(mask.sum())
        return Recording.of(cache)

    @torch.inference_mode()
    def score(
        self, pairs: Sequence[Pair], policy: Policy, recording: Recording | None
    ) -> list[Score]:
        """The scores of a group under a policy; equal pairs are scored once.

        recording: of `read(pairs)`; not looked at in mode "streaming".
        """
        prefixes, unique = _unique(pairs), list(dict.fromkeys(pairs))
        unique.sort(key=lambda pair: len(pair.continuation))
        found: dict[Pair, Score] = {}
        with attach(self.model):
            if policy.mode == "streaming":
                for prefix in prefixes:
                    cache = self._stream(policy, prefix)
                    self._fork(cache, [prefix], [p for p in unique if p.prefix == prefix], found)
            elif recording is None:
                self._fork(policy.cache(self.model), [()], unique, found)
            else:
                cache = policy.cache(self.model)
                recording.replay(cache, range(len(prefixes)))
                self._fork(cache, prefixes, unique, found, policy.mode == "block")
        return [found[pair] for pair in pairs]

    def _stream(self, policy: Policy, prefix: Tokens) -> KVCache:
        """A cache that has read a context under its budget, a chunk at a time."""
        cache = policy.cache(self.model)
        if prefix:
            cache.begin([len(prefix)])
        for part in _parts(prefix, CHUNK):
            ids = torch.tensor([part], device=self.model.device)
            self.model(ids, past_key_values=cache, logits_to_keep=1)
        self.processed += len(prefix)
        return cache

    def _fork(
        self, cache: KVCache, prefixes: Sequence[Tokens], pairs: Sequence[Pair],
        found: dict[Pair, Score], block: bool = False,
    ) -> None:  # fmt: skip
        """Score the pairs, a batch at a time, on copies of the rows that hold their contexts."""
        place = {prefix: row for row, prefix in enumerate(prefixes)}
        feed = self._block if block else self._decode
        for some in self._batches(pairs):
            twin = cache.fork([place[p.prefix] for p in some]) if cache.timeline.seen else cache
            scores = feed(twin, some)
            found.update(zip(some, scores, strict=True))
            self.processed += sum(len(pair.fed) for pair in some)
            twin.reset()

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        """Batches of similar continuations, which no padding takes beyond the model's length."""
        for some in _parts(pairs, self.batch):
            longest = max(len(p.prefix) for p in some) + max(len(p.fed) for p in some)
            if self.limit is None or longest <= self.limit:
                yield some
            else:
                yield from ([pair] for pair in some)

    def _decode(self, cache: KVCache, pairs: Sequence[Pair]) -> list[Score]:
        """A token a step; a row that is done goes on with its last token, which nobody reads."""
        ids, targets, real = _right_padded(pairs, self.model.device)
        start = torch.tensor([[len(pair.prefix)] for pair in pairs], device=ids.device)
        parts, held = [], []
        for step in range(ids.shape[1]):
            now = slice(step, step + 1)
            out = self.model(ids[:, now], past_key_values=cache, position_ids=start + step)
            parts.append(_judged(out.logits, targets[:, now]))
            held += [attended(cache)] if not step else []
        logs, greedy = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return _scores(logs, greedy, real, held[0], [len(p.prefix) + 1 for p in pairs])

    def _block(self, cache: KVCache, pairs: Sequence[Pair]) -> list[Score]:
        """All tokens in one forward, which sees what the cache kept of the context."""
        held, before = attended(cache), cache.get_seq_length()
        ids, mask = _left_padded([pair.fed for pair in pairs], self.model.device)
        targets, _ = _left_padded([pair.continuation for pair in pairs], self.model.device)
        seen = torch.tensor(cache.timeline.seen, device=ids.device)[:, None]
        past = torch.arange(before, device=ids.device) >= before - seen
        cache.begin([len(pair.fed) for pair in pairs])
        whole = torch.cat([past.long(), mask], dim=1)
        out = self.model(ids, attention_mask=whole, past_key_values=cache)
        logs, greedy = _judged(out.logits, targets)
        return _scores(logs, greedy, mask.bool(), held, [len(p.prefix) for p in pairs])


def predicted_tokens(pairs: Sequence[Pair], policies: Sequence[Policy]) -> int:
    """Tokens that scoring all pairs under all policies feeds the model, pads left out.

    Each context once, for itself in mode "streaming"; each pair's continuation once a policy.
    """
    contexts = sum(map(len, _unique(pairs)))
    continuations = sum(len(pair.fed) for pair in dict.fromkeys(pairs))
    streaming = sum(policy.mode == "streaming" for policy in policies)
    shared = contexts if streaming < len(policies) else 0
    return shared + streaming * contexts + len(policies) * continuations


def attended(cache: KVCache) -> Tensor:
    """Tokens that the last step attended to, [L, B]: what was fetched, or else what is stored."""
    fetched = [
        layer.fetched_count if isinstance(layer, InfiniGen) and layer.chosen is not None
        else layer.count for layer in cache.layers
    ]  # fmt: skip
    return torch.tensor(fetched)


def _parts(sequence: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (sequence[n : n + size] for n in range(0, len(sequence), size))


def _unique(pairs: Sequence[Pair]) -> list[Tokens]:
    return list(dict.fromkeys(pair.prefix for pair in pairs))


def _left_padded(rows: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, [B, T] each, pads to the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    first = width - torch.tensor([len(row) for row in rows], device=device)[:, None]
    return ids, (torch.arange(width, device=device) >= first).long()


def _right_padded(pairs: Sequence[Pair], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What is fed, what it is to foretell, and which of it is real, [B, T] each."""
    width = max(len(pair.fed) for pair in pairs)
    fed, targets = (
        torch.tensor([[*row, *row[-1:] * (width - len(row))] for row in rows], device=device)
        for rows in ([p.fed for p in pairs], [p.continuation for p in pairs])
    )
    lengths = torch.tensor([[len(pair.fed)] for pair in pairs], device=device)
    return fed, targets, torch.arange(width, device=device) < lengths


def _judged(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target [B, T] by logits [B, T, V], and is it the likeliest?"""
    logits = logits.float()
    own = logits.gather(2, targets[..., None])[..., 0]
    return own - logits.logsumexp(dim=-1), logits.argmax(dim=-1) == targets


def _scores(
    logs: Tensor, greedy: Tensor, real: Tensor, held: Tensor, seen: Sequence[int]
) -> list[Score]:
    sums = logs.double().masked_fill(~real, 0).sum(dim=1).tolist()
    exact = (greedy | ~real).all(dim=1).tolist()
    shares = (held.double().mean(dim=0) / torch.tensor(seen)).tolist()
    least = held.amin(dim=0).tolist()
    return [Score(*of) for of in zip(sums, exact, least, shares, strict=True)]
