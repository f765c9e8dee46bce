"""Streaming: keeps the first tokens, the attention sinks, and the most recent ones.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
https://arxiv.org/abs/2309.17453
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlib.caches.evicting import EvictingLayer
from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers

FIRST = 2.0**24  # beyond any position, and exact in float32


class Streaming(EvictingLayer):
    """Keeps `sinks` first tokens and fills the rest of the budget with the most recent ones.

    Positions stay the true ones; the paper counts them anew within the cache.

    budget  share of the row's own tokens in (0, 1], or a whole number of tokens
    sinks   how many first tokens stay, as far as the budget goes beyond the newest token
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
        if isinstance(sinks, bool) or not (isinstance(sinks, int) and sinks >= 0):
            raise ValueError(f"sinks {sinks!r}: give a whole number of tokens, 0 or more")
        self.sinks = sinks
        super().__init__(timeline, tiers, budget=budget, evict=evict, kernel=kernel)

    def priority(self) -> Tensor:
        """The newest token in any case, then the first ones from the front, then by recency."""
        position = self.positions.float()
        sinks = self.per_row([min(self.sinks, limit - 1) for limit in self.limits()])
        return torch.where((position >= 0) & (position < sinks), FIRST - position, position)
