"""One exact reading of a context, of which any strategy can be given its own cache.

What a strategy does with a prompt depends on the keys, values, queries and column mass of exact
attention. Recorded once, they stand in for the forward in every cache that would have read it.
What several contexts begin with is read once too: `Recording.behind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlib.caches.cache import KVCache
from kvlib.caches.full import Full
from kvlib.tiers import Tiers


@dataclass(frozen=True)
class Reading:
    """What one layer's exact attention left behind of B rows' newest T tokens; pads stand left."""

    key: Tensor  # [B, Hkv, T, D]
    value: Tensor  # [B, Hkv, T, D]
    query: Tensor  # [B, Hq, T, D]
    mass: Tensor  # [B, Hkv, S], that all S tokens of a row received from these; its pads come last
    scale: float
    window: int | None


class Recorder(Full):
    """Keeps every token, and what any strategy would have learned from the last forward."""

    wants_mass: ClassVar[bool] = True

    def reset(self) -> None:
        super().reset()
        self.fresh: tuple[Tensor, Tensor] | None = None
        self.reading: Reading | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.fresh = key_states.detach(), value_states.detach()
        return super().update(key_states, value_states)

    def observe(self, query: Tensor, scale: float, mass: Tensor | None) -> None:
        assert mass is not None
        assert self.fresh is not None
        self.reading = Reading(*self.fresh, query, mass, scale, self.window)
        self.fresh = None


@dataclass(frozen=True)
class Recording:
    """Prompts that were read together: `lengths[b]` tokens in row b, and each layer's reading."""

    lengths: tuple[int, ...]
    layers: tuple[Reading, ...]

    @classmethod
    def of(cls, cache: KVCache) -> Recording:
        """What the last forward of a cache of Recorders has read."""
        return cls(tuple(cache.timeline.seen), tuple(layer.reading for layer in cache.layers))

    def behind(self, start: Recording) -> Recording:
        """All of each row, of which this is the rest and `start`, of one row, the beginning."""
        pairs = zip(start.layers, self.layers, strict=True)
        return Recording(self.lengths, tuple(self._joined(*pair, start) for pair in pairs))

    def _joined(self, first: Reading, rest: Reading, start: Recording) -> Reading:
        common, width = start.lengths[0], max(self.lengths)

        def joined(one: Tensor, other: Tensor) -> Tensor:
            rows = other.new_zeros(len(self.lengths), other.shape[1], width, other.shape[3])
            for row, own, length in zip(rows, other, self.lengths, strict=True):
                row[:, width - length : width - length + common] = one[0]
                row[:, width - length + common :] = own[:, own.shape[1] - length + common :]
            return rows

        mass = rest.mass.clone()
        mass[:, :, :common] += first.mass
        key, value = joined(first.key, rest.key), joined(first.value, rest.value)
        return Reading(key, value, joined(first.query, rest.query), mass, rest.scale, rest.window)

    def replay(self, cache: KVCache, rows: Sequence[int]) -> None:
        """Give an empty cache what it would hold had it read these rows itself, evictions too.

        Raises ValueError for a cache that has seen something.
        """
        if cache.timeline.seen:
            raise ValueError("this cache is not empty: replay into a fresh one, or reset() it")
        lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows, device=self.layers[0].key.device)
        width = max(lengths)
        cache.begin(lengths)
        cache.timeline.advance(lengths, width, index.device)
        for layer, read in zip(cache.layers, self.layers, strict=True):
            key, value, query = (
                t[:, :, -width:].index_select(0, index) for t in (read.key, read.value, read.query)
            )
            layer.update(key, value)
            layer.window = read.window
            mass = read.mass[:, :, :width].index_select(0, index) if layer.wants_mass else None
            layer.conclude(query, read.scale, mass)
        cache.complete()


def recorder(model: PreTrainedModel) -> KVCache:
    """A cache that records what it is fed."""
    return KVCache(Recorder.build(model, Tiers()))
