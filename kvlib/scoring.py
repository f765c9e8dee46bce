"""Log-likelihoods of continuations under a strategy, from one exact reading of each context.

A context is read with exact attention but for its last token, and the strategy acts: only then
its last token and the continuation are fed, so that even an answer of one token is given under
the strategy, in one of the ways that `kvlib.policy` lists. All continuations, strategies and
budgets share the reading (`kvlib.caches.recording`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlib.attachment import attach
from kvlib.caches import InfiniGen, KVCache
from kvlib.caches.recording import Recording, recorder
from kvlib.padding import left_padded
from kvlib.policy import Policy

CROWDED = 0.7  # share of a batch's rows that are not done, at which the others leave
COMMON = 16  # tokens that contexts must share to be worth a forward
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
            if not groups or crowded or bool(prefix) != bool(pairs[groups[-1][0]].prefix):
                groups.append([])
                prefixes = set()
            groups[-1].append(n)
            prefixes.add(prefix)
        return groups

    def predicted(self, pairs: Sequence[Pair], policies: Sequence[Policy]) -> int:
        """Tokens that scoring all pairs under all policies feeds the model, pads left out.

        Each group's contexts once, and once what they have in common; in mode "streaming" each
        context for itself. Each pair's continuation once a policy.
        """
        alone = sum(map(len, unique_prefixes(pairs)))
        streaming = sum(policy.mode == "streaming" for policy in policies)
        shared = 0
        for group in self.groups(pairs) if streaming < len(policies) else ():
            prefixes = unique_prefixes([pairs[n] for n in group])
            common = common_length(prefixes)
            shared += common + sum(len(prefix) - common for prefix in prefixes)
        continuations = sum(len(pair.fed) for pair in dict.fromkeys(pairs))
        return shared + streaming * alone + len(policies) * continuations

    def scores(self, pairs: Sequence[Pair], policy: Policy) -> Iterator[tuple[int, Score]]:
        """The number and the score of each pair, in the order in which they are found."""
        self.check(pairs)
        for group in self.groups(pairs):
            some = [pairs[n] for n in group]
            recording = None if policy.mode == "streaming" else self.read(some)
            yield from zip(group, self.score(some, policy, recording), strict=True)

    @torch.inference_mode()
    def read(self, pairs: Sequence[Pair]) -> Recording | None:
        """Read the contexts of a group, what is equal once; None where they have but one token."""
        prefixes = unique_prefixes(pairs)
        if not prefixes[0]:
            return None
        common, cache = common_length(prefixes), recorder(self.model)
        with attach(self.model):
            if not common:
                return self._read(cache, prefixes)
            start = self._read(cache, [prefixes[0][:common]])
            cache = cache.fork([0] * len(prefixes))
            rest = [prefix[common:] for prefix in prefixes]
            return self._read(cache, rest).behind(start)

    def _read(self, cache: KVCache, texts: Sequence[Tokens]) -> Recording:
        """What the rows of a cache of Recorders learn from these texts, unequal in length."""
        ids, mask = left_padded(texts, self.model.device)
        before = mask.new_ones(len(texts), cache.get_seq_length())
        whole = torch.cat([before, mask], dim=1)
        self.model(ids, attention_mask=whole, past_key_values=cache, logits_to_keep=1)
        self.processed += int(mask.sum())
        return Recording.of(cache)

    @torch.inference_mode()
    def score(
        self, pairs: Sequence[Pair], policy: Policy, recording: Recording | None
    ) -> list[Score]:
        """The scores of a group under a policy; equal pairs are scored once.

        recording: of `read(pairs)`; not looked at in mode "streaming".
        """
        prefixes, unique = unique_prefixes(pairs), list(dict.fromkeys(pairs))
        unique.sort(key=lambda pair: -len(pair.continuation))
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
        """A token a step, the longest pairs first; rows that are done leave, some at a time."""
        ids, targets, real = _right_padded(pairs, self.model.device)
        start = torch.tensor([[len(pair.prefix)] for pair in pairs], device=ids.device)
        logs, greedy = torch.zeros(ids.shape, device=ids.device), torch.ones_like(real)
        rows, active = len(pairs), real.sum(dim=0).tolist()
        for step in range(ids.shape[1]):
            if active[step] <= CROWDED * rows:
                rows = active[step]
                cache.batch_select_indices(torch.arange(rows))
            now = slice(step, step + 1)
            at = start[:rows] + step
            out = self.model(ids[:rows, now], past_key_values=cache, position_ids=at)
            logs[:rows, now], greedy[:rows, now] = _judged(out.logits, targets[:rows, now])
            if not step:
                held = attended(cache)
        return _scores(logs, greedy, real, held, [len(p.prefix) + 1 for p in pairs])

    def _block(self, cache: KVCache, pairs: Sequence[Pair]) -> list[Score]:
        """All tokens in one forward, which sees what the cache kept of the context."""
        held, before = attended(cache), cache.get_seq_length()
        ids, mask = left_padded([pair.fed for pair in pairs], self.model.device)
        targets, _ = left_padded([pair.continuation for pair in pairs], self.model.device)
        seen = torch.tensor(cache.timeline.seen, device=ids.device)[:, None]
        past = torch.arange(before, device=ids.device) >= before - seen
        cache.begin([len(pair.fed) for pair in pairs])
        whole = torch.cat([past.long(), mask], dim=1)
        out = self.model(ids, attention_mask=whole, past_key_values=cache)
        logs, greedy = _judged(out.logits, targets)
        return _scores(logs, greedy, mask.bool(), held, [len(p.prefix) for p in pairs])


def attended(cache: KVCache) -> Tensor:
    """Tokens that the last step attended to, [L, B]: what was fetched, or else what is stored."""
    fetched = [
        layer.fetched_count if isinstance(layer, InfiniGen) and layer.chosen is not None
        else layer.count for layer in cache.layers
    ]  # fmt: skip
    return torch.tensor(fetched)


def _parts(sequence: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (sequence[n : n + size] for n in range(0, len(sequence), size))


def unique_prefixes(pairs: Sequence[Pair]) -> list[Tokens]:
    return list(dict.fromkeys(pair.prefix for pair in pairs))


def common_length(prefixes: Sequence[Tokens]) -> int:
    """How many tokens all of several contexts begin with, if they are worth a forward of their own.

    Of each at least one token is left to be read.
    """
    if len(prefixes) < 2:
        return 0
    equal = takewhile(lambda column: len(set(column)) == 1, zip(*prefixes, strict=False))
    common = min(sum(1 for _ in equal), min(map(len, prefixes)) - 1)
    return common if common >= COMMON else 0


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
