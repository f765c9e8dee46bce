"""InfiniGen: keeps everything on the host, and fetches what the next layer is predicted to need.

Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV
Cache Management", OSDI 2024, https://www.usenix.org/conference/osdi24/presentation/lee
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlib.caches.base import KV, Kind, KVLayer, one_of
from kvlib.caches.evicting import EvictingLayer, to_float
from kvlib.caches.offload import HostLayer
from kvlib.caches.timeline import Timeline
from kvlib.caches.view import View
from kvlib.tiers import Tiers

POLICIES = ("counter", "lru", "fifo")


class InfiniGen(HostLayer, EvictingLayer):
    """Fetches, for each KV head, the tokens whose keys a cheap forecast scores highest.

    While layer i-1 computes, its input gives a forecast of layer i's query. Scored against the
    *sketch*, a few columns of the keys that stay on the device, it tells how many tokens matter:
    in each query head those within `alpha` of that head's best, on average over the heads. Each
    KV head fetches that many of its own best. The new token is attended in any case.

    alpha        how far below the best score a token may lie (the paper: 5 for Llama, 4 for OPT);
                 inf fetches as many as `cap` allows
    cap          largest share of the stored tokens that is fetched, in (0, 1]; at least one token
    ratio        share of the columns that the sketch keeps, in (0, 1]
    skew         [L, Hkv, D, D] from `kvlib.skewing.skew_of`; None takes the columns as they are
    skip_layers  the first layers, which are fetched whole: nothing foretells what they need
    pool         what the host may hold: a share of the tokens in (0, 1], or a number of tokens
    policy       what leaves a full pool: "counter" (fetched least often; a new token starts with
                 the mean), "lru" (fetched longest ago), "fifo"
    """

    slack = 64

    def __init__(
        self,
        timeline: Timeline,
        tiers: Tiers,
        *,
        alpha: float | str = 5.0,
        cap: float | str = 0.2,
        ratio: float = 0.3,
        skew: Tensor | None = None,
        skip_layers: int = 2,
        pool: float | str = 1.0,
        policy: str = "counter",
        kernel: str = "flash",
    ) -> None:
        self.alpha = _number("alpha", alpha, math.inf, "above 0; inf fetches up to the cap")
        self.cap = _number("cap", cap, 1, "in (0, 1], a share of the stored tokens")
        self.ratio = _number("ratio", ratio, 1, "in (0, 1], a share of the head's columns")
        if not (isinstance(skip_layers, int) and skip_layers >= 0):
            raise ValueError(f"skip_layers {skip_layers!r}: give a number of layers, 0 or more")
        self.skew, self.skip_layers = skew, skip_layers
        self.policy = one_of("policy", policy, POLICIES)
        super().__init__(timeline, tiers, budget=pool, evict="chunk", kernel=kernel)

    def reset(self) -> None:
        super().reset()
        self.importance: Tensor | None = None  # [B, Hkv, D], while the first prompt is read
        self.columns: Tensor | None = None  # [B, Hkv, r], of the (skewed) head, in the sketch
        self.chosen: Tensor | None = None  # [B, Hkv, n], slots that the last step fetched
        self.fetched_count: list[int] = []
        self.fresh: Tensor | None = None  # this forward's keys, until its attention is over

    @classmethod
    def build(cls, model: PreTrainedModel, tiers: Tiers, **knobs: Any) -> list[KVLayer]:
        """Raises ValueError for a model whose queries cannot be foretold, or another one's skew."""
        from kvlib.projection import check_foretold
        from kvlib.skewing import skew_shape

        check_foretold(model)
        skew = knobs.get("skew")
        if skew is not None and tuple(getattr(skew, "shape", ())) != skew_shape(model):
            raise ValueError(
                f"this skew is of another model: {list(getattr(skew, 'shape', []))}, where "
                f"{list(skew_shape(model))} is needed; learn it with kvlib.skewing.skew_of"
            )
        return super().build(model, tiers, **knobs)

    # -- what is kept -----------------------------------------------------------------------

    def kinds(self) -> dict[str, Kind]:
        kinds = super().kinds()
        if not self.is_whole:
            kinds["sketch"] = Kind(self.dtype, (self.rank,))
        if self.is_limited:
            kinds["uses"] = Kind(torch.float32)
        return kinds

    @property
    def is_whole(self) -> bool:
        """Is this layer fetched whole?"""
        return self.index < self.skip_layers

    @property
    def is_limited(self) -> bool:
        """May the pool be too small for all tokens?"""
        return self.budget.value != 1 or not self.budget.is_share

    @property
    def rank(self) -> int:
        """Columns of the sketch."""
        return max(1, math.floor(self.ratio * self.shape[1] + 0.5))

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        index = torch.tensor(rows, device=getattr(self, "device", None))
        self.importance = None if self.importance is None else self.importance[index]
        self.columns = None if self.columns is None else self.columns[index]
        self.chosen = None

    def join(self, other: KVLayer) -> None:
        assert isinstance(other, InfiniGen)
        super().join(other)
        if self.columns is not None and other.columns is not None:
            self.columns = torch.cat([self.columns, other.columns])
        self.chosen = None

    # -- speculation ------------------------------------------------------------------------

    @property
    def wants_query(self) -> bool:  # type: ignore[override]
        return self.columns is not None

    def anticipate(self, query: Tensor | None) -> None:
        if query is None or self.columns is None:
            self.chosen = None
            super().anticipate(query)
            return
        scores = self.forecast(query)
        self.fetched_count = self.wanted(scores)
        best = scores.amax(dim=2)  # over the group
        self.chosen = best.topk(max(self.fetched_count), dim=-1).indices  # [B, Hkv, n]
        picked = self.chosen.cpu()  # waits for the device, which is no part of the gather
        with self.tiers.link.gathering(self._bytes(sum(self.fetched_count))):
            rows = [self._gather(self.slots[name], picked) for name in KV]
        self.transfer = self._fetch(rows, self.fetched_count)

    def forecast(self, query: Tensor) -> Tensor:
        """Scores of the stored tokens by the sketch, [B, Hkv, G, S] float32; -inf = no token."""
        assert self.columns is not None
        batch, _, _, size = query.shape
        grouped = self._skewed(query.detach().reshape(batch, self.shape[0], -1, size))
        partial = grouped.gather(3, self.columns[:, :, None].expand(-1, -1, grouped.shape[2], -1))
        sketch = self.slots["sketch"][:, :, : max(self.count)]
        scores = torch.matmul(sketch, partial.to(sketch.dtype).mT).float().mT * self.scale
        if not self.is_uniform:
            scores = scores.masked_fill(self.empties()[:, :, None], -math.inf)
        if self.window is not None and max(self.timeline.seen) > self.window:
            newest = self.per_row([s - 1 for s in self.timeline.seen])
            outside = self.slots["position"][:, :, : max(self.count)] <= newest - self.window
            scores = scores.masked_fill(outside[:, :, None], -math.inf)
        return scores

    def wanted(self, scores: Tensor) -> list[int]:
        """How many tokens each row fetches for every KV head."""
        seeable = [n if self.window is None else min(n, self.window) for n in self.count]
        limits = [max(1, math.floor(self.cap * n + 1e-9)) for n in seeable]
        if math.isinf(self.alpha):
            return limits
        near = scores > scores.amax(dim=-1, keepdim=True) - self.alpha
        mean = near.sum(dim=-1).float().mean(dim=(1, 2)).tolist()  # over the query heads
        return [min(math.ceil(n), most) for n, most in zip(mean, limits, strict=True)]

    def _gather(self, stored: Tensor, slots: Tensor) -> Tensor:
        """Rows of stored [B, Hkv, S, D] by slots [B, Hkv, n], and a spare: [B, Hkv, n+1, D]."""
        batch, heads, n = slots.shape
        first = torch.arange(batch * heads)[:, None] * stored.shape[2]
        where = torch.cat([first + slots.view(batch * heads, n), first], dim=1).view(-1)
        pin = self.device.type == "cuda"
        rows = torch.empty(len(where), stored.shape[3], dtype=stored.dtype, pin_memory=pin)
        torch.index_select(stored.view(-1, stored.shape[3]), 0, where, out=rows)
        return rows.view(batch, heads, n + 1, -1)

    def _show(self, key: Tensor, value: Tensor) -> View:
        self.fresh = key
        if self.chosen is None:
            return super()._show(key, value)
        assert self.transfer is not None
        position = self.slots["position"].gather(2, self.chosen)
        return self._join([*self.transfer.wait(), position], self.fetched_count, key, value)

    # -- the sketch -------------------------------------------------------------------------

    def observe(self, query: Tensor, scale: float, mass: Tensor | None) -> None:
        assert self.fresh is not None
        self.scale = scale
        if self.is_limited:
            self._count_uses()
        if not self.is_whole:
            if self.columns is None:
                self._weigh(query)
            else:
                self._sketch(self.fresh)
        self.fresh = None
        super().observe(query, scale, mass)

    def _weigh(self, query: Tensor) -> None:
        """Add |q| + |k| of the first prompt's tokens to the columns; at its end choose the best."""
        assert self.timeline.positions is not None
        batch, heads, size = len(self.count), *self.shape
        grouped = query.reshape(batch, heads, -1, query.shape[2], size)
        real = (self.timeline.positions >= 0)[:, None, :, None]
        added = torch.zeros(batch, heads, size, device=query.device)
        assert self.fresh is not None
        for part in (*grouped.unbind(2), self.fresh):  # a head at a time bounds the scratch
            added += (self._skewed(part).abs() * real).sum(dim=2, dtype=torch.float32)
        self.importance = added if self.importance is None else self.importance + added
        if self.timeline.pending:
            return
        self.columns = self.importance.topk(self.rank, dim=-1).indices.sort(dim=-1).values
        self.importance = None
        stored = self.slots["key"][:, :, : max(self.count)].to(self.device)
        self.slots["sketch"][:, :, : max(self.count)] = self._partial(stored)

    def _sketch(self, key: Tensor) -> None:
        """Add the sketch of the newest keys [B, Hkv, T, D], which stand last in their rows."""
        self._put(self.slots["sketch"], self._partial(key), self.before, key.shape[2])

    def _partial(self, key: Tensor) -> Tensor:
        """The sketch's columns of keys [B, Hkv, n, D]: [B, Hkv, n, r]."""
        assert self.columns is not None
        columns = self.columns[:, :, None].expand(-1, -1, key.shape[2], -1)
        return self._skewed(key).gather(3, columns).to(self.dtype)

    def _skewed(self, vectors: Tensor) -> Tensor:
        """Queries or keys [B, Hkv, n, D] in the columns of the skew."""
        if self.skew is None:
            return vectors
        return torch.matmul(vectors.float(), self.skew[self.index].to(vectors.device))

    # -- the pool ---------------------------------------------------------------------------

    def _count_uses(self) -> None:
        uses = self.slots["uses"][:, :, : max(self.count)]
        now = torch.tensor(self.timeline.seen, device=self.device)[:, None, None]
        if self.chosen is not None:
            place = torch.arange(self.chosen.shape[-1], device=self.device)
            count = torch.tensor(self.fetched_count, device=self.device)[:, None, None]
            fetched = (place < count).expand(self.chosen.shape)  # fewer than other rows, maybe
            if self.policy == "counter":
                uses.scatter_add_(2, self.chosen, fetched.to(uses.dtype))
            else:
                own = torch.where(fetched, self.chosen, self.chosen[..., :1])
                uses.scatter_(2, own, now.to(uses.dtype).expand(own.shape))
        newest = torch.tensor(self.before, device=self.device)[:, None, None]
        fresh = torch.arange(uses.shape[2], device=self.device) >= newest
        start = self._start(uses, fresh) if self.policy == "counter" else now
        uses.copy_(torch.where(fresh, start, uses))

    def _start(self, uses: Tensor, fresh: Tensor) -> Tensor:
        """The uses that a new token begins with: the mean of the others."""
        old = ~fresh & ~self.empties()
        return (uses * old).sum(-1, keepdim=True) / old.sum(-1, keepdim=True).clamp(min=1)

    def priority(self) -> Tensor:
        stored = slice(0, max(self.count))
        position = self.slots["position"][:, :, stored].float()
        if self.policy == "fifo":
            return position
        newest = self.per_row([max(s - 1, 1) for s in self.timeline.seen])
        uses = self.slots["uses"][:, :, stored] + 1e-3 * position / newest  # ties: the older goes
        return uses.masked_fill(position >= newest, math.inf)

    # -- invariants -------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        if self.columns is None or not self.is_initialized:
            return
        n = max(self.count)
        expected = self._partial(self.slots["key"][:, :, :n].to(self.device))
        same = torch.isclose(self.slots["sketch"][:, :, :n], expected, rtol=0.02, atol=1e-3)
        wrong = ~same.all(dim=-1)
        assert not (wrong & ~self.empties()).any(), "a sketch is not of its key"


def _number(name: str, value: float | str, most: float, allowed: str) -> float:
    number = to_float(value)
    if not 0 < number <= most:
        raise ValueError(f"{name} {value!r}: give a number {allowed}")
    return number
