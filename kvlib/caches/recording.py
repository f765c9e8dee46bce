"""One exact reading of a context, of which any strategy can be given its own cache.

What a strategy does with a prompt depends on the keys, values, queries and column mass of exact
attention. Recorded once, they stand in for the forward in every cache that would have read it.
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
    """What one layer's exact attention over a prompt of B rows left behind; pads stand left."""

    key: Tensor  # [B, Hkv, T, D]
    value: Tensor  # [B, Hkv, T, D]
    query: Tensor  # [B, Hq, T, D]
    mass: Tensor  # [B, Hkv, T], of row b's tokens first
    scale: float
    window: int | None


class Recorder(Full):
    """Reads a prompt in one forward, and keeps what any strategy would have learned from it."""

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
        if self.reading is not None:
            raise RuntimeError("a recording is of one forward: feed the whole prompt at once")
        self.reading = Reading(*self.fresh, query, mass, scale, self.window)
        self.fresh, self.slots = None, {}


@dataclass(frozen=True)
class Recording:
    """Prompts that were read together: `lengths[b]` tokens in row b, and each layer's reading."""

    lengths: tuple[int, ...]
    layers: tuple[Reading, ...]

    @classmethod
    def of(cls, cache: KVCache) -> Recording:
        """What a cache of Recorders has read, once its forward is over; the cache is emptied."""
        layers = tuple(layer.reading for layer in cache.layers)
        lengths = tuple(cache.timeline.seen)
        cache.reset()
        return cls(lengths, layers)

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
    """A cache that records the one forward it is fed."""
    return KVCache(Recorder.build(model, Tiers()))
