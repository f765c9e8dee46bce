"""Streaming: keeps the first tokens, the attention sinks, and the most recent ones.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
https://arxiv.org/abs/2309.17453
"""

from __future__ import annotations

import math

from torch import Tensor

from kvlib.caches.evicting import EvictingLayer
from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers


class Streaming(EvictingLayer):
    """Keeps `sinks` first tokens and fills the rest of the budget with the most recent ones.

    Positions stay the true ones; the paper counts them anew within the cache.

    budget  share of the row's own tokens in (0, 1], or a whole number of tokens
    sinks   how many first tokens stay, as far as the budget goes
    """

    def __init__(
        self,
        timeline: Timeline,
        tiers: Tiers,
        *,
        budget: float | str = 0.2,
        sinks: int = 4,
        evict: str = "end",
        kernel: str = "flash",
    ) -> None:
        if not (isinstance(sinks, int) and sinks >= 0):
            raise ValueError(f"sinks {sinks!r}: give a whole number of tokens, 0 or more")
        self.sinks = sinks
        super().__init__(timeline, tiers, budget=budget, evict=evict, kernel=kernel)

    def priority(self) -> Tensor:
        position = self.positions.float()
        return position.masked_fill((position >= 0) & (position < self.sinks), math.inf)
