"""Strategies that keep part of the tokens: the highest-priority ones within a budget.

A strategy of this kind is a subclass that says what its `priority` is, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvlib.caches.base import KVLayer, one_of
from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers


class Budget:
    """How many tokens a row may keep: a share of its own tokens, or an absolute count.

    >>> Budget(0.2).tokens(1000), Budget(64).tokens(1000)
    (200, 64)
    """

    def __init__(self, value: float | str) -> None:
        number = _number(value)
        self.is_share = isinstance(number, float)
        ok = 0 < number <= 1 if self.is_share else number >= 1
        if not ok:
            raise ValueError(
                f"budget {value!r}: give a share of the tokens in (0, 1], such as 0.2, "
                "or a whole number of tokens, such as 256"
            )
        self.value = number

    def tokens(self, seen: int) -> int:
        """Tokens kept of `seen`, at least one."""
        if not self.is_share:
            return min(int(self.value), seen)
        return max(1, math.ceil(self.value * seen - 1e-9))

    def __repr__(self) -> str:
        return f"Budget({self.value})"


def to_float(value: object) -> float:
    """`value` as a float; NaN where it is no number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _number(value: float | str) -> float | int:
    """`value` as int (a count) or float (a share); NaN where it is neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.isdigit() else to_float(value)


class EvictingLayer(KVLayer):
    """Keeps, for each KV head, the tokens of highest `priority()` within `budget`.

    Evicts only after a step's attention, and never for good reason of another row. After a
    prompt the kept tokens move to fresh storage; in decode the newest token takes the evicted
    one's slot, so slots are out of order and a step copies O(1) tokens.

    budget  share of the row's own tokens in (0, 1], or a whole number of tokens
    evict   "end": once the announced prompt is complete; "chunk": after every chunk of it
    kernel  attention of multi-token inputs: "flash", or "eager" = the matrix materialised
    """

    slack = 8
    is_croppable = False

    def __init__(
        self,
        timeline: Timeline,
        tiers: Tiers,
        *,
        budget: float | str = 0.2,
        evict: str = "end",
        kernel: str = "flash",
    ) -> None:
        self.budget = Budget(budget)
        self.evict = one_of("evict", evict, ("end", "chunk"))
        self.kernel = one_of("kernel", kernel, ("flash", "eager"))
        self.needs_lengths = self.budget.is_share and self.budget.value < 1
        super().__init__(timeline, tiers)

    def priority(self) -> Tensor:
        """[B, Hkv, S] float32: which tokens to keep, the higher the longer; inf = for now."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its priority is")

    def limits(self) -> list[int]:
        """Tokens that each row may keep now."""
        pairs = zip(self.timeline.seen, self.timeline.targets, strict=True)
        return [self.budget.tokens(max(seen, target)) for seen, target in pairs]

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            f"{type(self).__name__} cannot take tokens back: it has evicted or counted by them; "
            "use 'full', 'paged' or 'offload' for assisted or speculative decoding"
        )

    def observe(self, query: Tensor, scale: float, mass: Tensor | None) -> None:
        if self.evict == "end" and self.timeline.pending:
            return
        keep = [min(n, limit) for n, limit in zip(self.count, self.limits(), strict=True)]
        if keep == self.count:
            return
        if max(n - k for n, k in zip(self.count, keep, strict=True)) == 1:
            self._replace(keep)
        else:
            self._compact(keep)
        self.count = keep

    def check(self) -> None:
        super().check()
        if self.is_initialized and not (self.evict == "end" and self.timeline.pending):
            limits = self.limits()
            assert all(n <= k for n, k in zip(self.count, limits, strict=True)), "over budget"

    def _replace(self, keep: Sequence[int]) -> None:
        """Rows one over: the last slot's token moves into the lowest-priority slot."""
        priority = self.priority()
        if not self.is_uniform:
            priority = priority.masked_fill(self.empties(), math.inf)
        victim = priority.argmin(dim=-1, keepdim=True)  # [B, Hkv, 1]
        last = self.per_row([max(n - 1, 0) for n in self.count])
        if keep != [n - 1 for n in self.count]:  # rows within budget: the last slot onto itself
            over = torch.tensor([k < n for k, n in zip(keep, self.count, strict=True)])
            victim = torch.where(over.to(self.device)[:, None, None], victim, last)
        heads, capacity = victim.shape[0] * victim.shape[1], self.slots["key"].shape[2]
        where = victim.view(-1) + torch.arange(0, heads * capacity, capacity, device=self.device)
        for tensor in self.slots.values():
            newest = _at(tensor, last).flatten(0, 2)
            tensor.flatten(0, 2).index_copy_(0, where.to(tensor.device), newest)

    def _compact(self, keep: Sequence[int]) -> None:
        """Copy the `keep[b]` highest-priority tokens of row b into fresh, smaller storage."""
        priority = self.priority()
        if not self.is_uniform:
            priority = priority.masked_fill(self.empties(), -math.inf)
        index = priority.topk(max(keep), dim=-1).indices  # [B, Hkv, keep]
        if min(keep) < max(keep):  # a shorter row's surplus sorts behind what it keeps
            surplus = torch.arange(max(keep), device=self.device) >= self.per_row(keep)
            index = index.masked_fill(surplus, self.slots["key"].shape[2] - 1)
        index = index.sort(dim=-1).values
        old, self.slots = self.slots, {}
        for name in list(old):
            source = old.pop(name)
            new = self._storage(name, len(keep), max(keep) + 1)
            new[:, :, : max(keep)] = source.gather(2, _spread(index, source))
            self.slots[name] = new


def _at(tensor: Tensor, slot: Tensor | int) -> Tensor:
    """The entry of one slot a row, [B, Hkv, 1, …]."""
    if isinstance(slot, int):
        return tensor[:, :, slot : slot + 1].clone()
    return tensor.gather(2, _spread(slot.expand(*tensor.shape[:2], 1), tensor))


def _spread(index: Tensor, over: Tensor) -> Tensor:
    """A slot index [B, Hkv, n] for `gather` from a tensor [B, Hkv, S, …]."""
    index = index.to(over.device)
    return index if over.dim() == 3 else index[..., None].expand(*index.shape, *over.shape[3:])
