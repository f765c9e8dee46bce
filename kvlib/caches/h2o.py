"""H2O: keeps heavy hitters and recent tokens, evicts the rest for good.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", NeurIPS 2023, https://arxiv.org/abs/2306.14048
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from kvlib.caches.base import one_of
from kvlib.caches.evicting import EvictingLayer, to_float
from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers


class H2O(EvictingLayer):
    """Keeps, for each KV head, the recent tokens and the ones that drew most attention so far.

    A token's score is the attention it received, summed over all queries that saw it and over
    the query heads of its group. It counts past queries only: none of the future may vote.

    budget  share of the row's own tokens in (0, 1], or a whole number of tokens
    recent  share of the budget that goes to the most recent tokens, in [0, 1]
    score   "sum" (the paper; favours old tokens) or "mean" over the queries that saw the token
    evict   "end": once the announced prompt is complete; "chunk": after every chunk of it
    kernel  prefill attention: "flash" (scores rebuilt tile by tile), or "eager" as published
    """

    wants_mass: ClassVar[bool] = True
    extra: ClassVar[dict[str, torch.dtype]] = {"score": torch.float32}

    def __init__(
        self,
        timeline: Timeline,
        tiers: Tiers,
        *,
        budget: float | str = 0.2,
        recent: float = 0.5,
        score: str = "sum",
        evict: str = "end",
        kernel: str = "flash",
    ) -> None:
        if not 0 <= to_float(recent) <= 1:
            raise ValueError(f"recent {recent!r}: give a share of the budget in [0, 1]")
        self.recent = float(recent)
        self.score = one_of("score", score, ("sum", "mean"))
        super().__init__(timeline, tiers, budget=budget, evict=evict, kernel=kernel)

    def observe(self, query: Tensor, scale: float, mass: Tensor | None) -> None:
        assert mass is not None, "the attention function gave no column mass"
        self.slots["score"][:, :, : mass.shape[-1]] += mass
        super().observe(query, scale, mass)

    def priority(self) -> Tensor:
        position = self.slots["position"][:, :, : max(self.count)]
        score = self.slots["score"][:, :, : max(self.count)]
        seen = self.timeline.seen
        if self.score == "mean":
            score = score / (self.per_row(seen) - position)
        oldest_recent = [s - n for s, n in zip(seen, self.recents(), strict=True)]
        return score.masked_fill(position >= self.per_row(oldest_recent), math.inf)

    def recents(self) -> list[int]:
        """Size of each row's recent window."""
        return [math.floor(self.recent * limit + 0.5) for limit in self.limits()]

    def check(self) -> None:
        super().check()
        if not self.is_initialized:
            return
        position, score = self.positions, self.slots["score"][:, :, : max(self.count)]
        stored = position >= 0
        assert torch.isfinite(score[stored]).all(), "a score is not finite"
        assert (score[stored] >= 0).all(), "a score is negative"
        for row, seen, n in zip(position, self.timeline.seen, self.recents(), strict=True):
            recent = (row >= max(seen - n, 0)).sum(dim=-1)
            assert (recent == min(n, seen)).all(), "the recent window is not whole"
