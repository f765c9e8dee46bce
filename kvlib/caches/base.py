"""The cache contract: what every strategy is, and what the rest of kvlib may ask of it.

A strategy is one class, instantiated once a decoder layer. `KVLayer` keeps every token and is
what the others change.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvlib.caches.timeline import Timeline
from kvlib.caches.view import View, empty_slots
from kvlib.tiers import Tier, Tiers, storage_bytes

EMPTY = -1  # position of a slot that holds no token
KV = ("key", "value")


@dataclass(frozen=True)
class Kind:
    """One kind of per-slot state: its entries are [*tail], and live in the `tier` of that name."""

    dtype: torch.dtype
    tail: tuple[int, ...] = ()
    tier: str = "device"


class KVLayer(CacheLayerMixin):
    """One decoder layer's keys and values, every token kept.

    Row b's tokens fill slots 0 … count[b]-1 of each KV head; pads are never stored. All tensors
    that hold something a slot live in `slots`, so growing, copying and evicting treat them alike.
    """

    kernel: str = "flash"  # prefill attention: "flash", or "eager" = the matrix materialised
    wants_mass: ClassVar[bool] = False  # ask the attention function for the column mass
    wants_query: bool = False  # ask for the query before it is computed, for `anticipate`
    needs_lengths: bool = False  # refuse chunks of a prompt that begin() did not announce
    slack: ClassVar[int] = 64  # slots added beyond need when storage grows
    home: ClassVar[str] = "device"  # the tier that keys and values live in
    extra: ClassVar[dict[str, torch.dtype]] = {}  # further per-slot numbers: name -> dtype
    is_croppable = True
    index: int = 0  # of the decoder layer that this serves
    window: int | None = None  # sliding window of its attention, known once that has run

    def __init__(self, timeline: Timeline, tiers: Tiers) -> None:
        CacheLayerMixin.__init__(self)
        self.timeline, self.tiers = timeline, tiers
        self.reset()

    @classmethod
    def build(cls, model: PreTrainedModel, tiers: Tiers, **knobs: Any) -> list[KVLayer]:
        """One layer for each of the model's decoder layers, on one timeline."""
        timeline = Timeline()
        depth = model.config.get_text_config().num_hidden_layers
        return [cls(timeline, tiers, **knobs) for _ in range(depth)]

    def reset(self) -> None:
        """Forget everything and free the storage."""
        self.slots: dict[str, Tensor] = {}
        self.keys = self.values = None  # transformers' names; ours are in `slots`
        self.view: View | None = None  # what the attention that runs now attends over
        self.count: list[int] = []  # tokens stored, a row
        self.fed = 0  # columns fed, pads included: what transformers calls the sequence length
        self.tick = 0
        self.is_initialized = False

    # -- what transformers calls ------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, size = key_states.shape
        self.shape, self.dtype, self.device = (heads, size), key_states.dtype, key_states.device
        self.count = [0] * batch
        self._allocate(0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store this forward's keys and values [B, Hkv, T, D]; return all stored [B, Hkv, S, D]."""
        if self.timeline.tick != self.tick + 1:
            raise RuntimeError("this cache serves attached models: use `with kvlib.attach(model)`")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._write(key_states.detach(), value_states.detach())  # a cache holds no graph
        self.fed += key_states.shape[-2]
        self.view = self._show(key_states.detach(), value_states.detach())
        return self.view.key, self.view.value

    def get_seq_length(self) -> int:
        """Columns fed so far, pads and evicted tokens included; never the number stored."""
        return self.fed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fed + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # -- what the attention function and the engine call --------------------------------------

    def anticipate(self, query: Tensor | None) -> None:
        """Before the attention of the layer in front of this one: time to fetch what it needs.

        query [B, Hq, T, D]: this layer's query as foreseen, where `wants_query` asks for it.
        """

    def conclude(self, query: Tensor, scale: float, mass: Tensor | None) -> None:
        """This forward's attention is over; see `observe`."""
        self.view = None  # else it would keep alive what is evicted now
        self.observe(query, scale, mass)
        self.tick += 1

    def observe(self, query: Tensor, scale: float, mass: Tensor | None) -> None:
        """After this forward's attention with `query` [B, Hq, T, D] and the factor `scale`.

        mass [B, Hkv, S]: the column mass over `view`, if it was asked for.
        """

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `tokens_to_remove` tokens (given as a negative number) of each row."""
        tokens = abs(tokens_to_remove)
        if tokens > min(self.count, default=0):
            raise ValueError(
                f"cannot crop {tokens} tokens: a row holds {min(self.count, default=0)}"
            )
        self.count = [n - tokens for n in self.count]
        self.fed -= tokens

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may repeat."""
        if not self.is_initialized:
            return
        self.count = [self.count[r] for r in rows]
        self._gather_rows(rows)

    def join(self, other: KVLayer) -> None:
        """Take over the rows of another layer of this kind, behind these."""
        n, old = len(self.count), self.slots
        self.count = self.count + other.count
        self.slots = {}
        for name in list(old):
            parts = [old.pop(name), other.slots[name]]
            new = self._storage(name, len(self.count), max(part.shape[2] for part in parts))
            for rows, part in zip((slice(0, n), slice(n, None)), parts, strict=True):
                new[rows, :, : part.shape[2]] = part
            self.slots[name] = new
        self.fed = max(self.fed, other.fed)

    def fork(self, timeline: Timeline, rows: Sequence[int]) -> KVLayer:
        """A copy of these rows that shares nothing with this layer."""
        twin = copy.copy(self)
        twin.timeline, twin.slots, twin.count = timeline, dict(self.slots), list(self.count)
        twin.select(rows)
        return twin

    @property
    def positions(self) -> Tensor:
        """True position of the token in each slot, [B, Hkv, S] int32; EMPTY where there is none."""
        stored = self.slots["position"][:, :, : max(self.count)]
        return stored if self.is_uniform else stored.masked_fill(self.empties(), EMPTY)

    @property
    def is_uniform(self) -> bool:
        """Do all rows store equally many tokens?"""
        return min(self.count) == max(self.count)

    def empties(self) -> Tensor:
        """[B, 1, S] bool: slots beyond a row's count."""
        return empty_slots(self.count, self.device)

    def per_row(self, values: Sequence[int]) -> Tensor | int:
        """`values` to broadcast over [B, Hkv, S]: one number where all rows agree."""
        if min(values) == max(values):
            return values[0]
        return torch.tensor(values, device=self.device)[:, None, None]

    def nbytes(self) -> dict[str, int]:
        """Bytes of distinct storage: `kv` and other `state` on the device, all on the `host`."""
        parts: dict[str, list[Tensor]] = {"kv": [], "state": [], "host": []}
        for name, kind in self.kinds().items() if self.slots else ():
            part = "host" if kind.tier == "host" else "kv" if name in KV else "state"
            parts[part].append(self.slots[name])
        return {part: storage_bytes(tensors) for part, tensors in parts.items()}

    def in_use(self) -> dict[str, int]:
        """Bytes behind the stored tokens, spare slots left out: on the `device`, on the `host`."""
        used = {"device": 0, "host": 0}
        for kind in self.kinds().values() if self.is_initialized else ():
            slot = kind.dtype.itemsize * math.prod(kind.tail)
            used[kind.tier] += sum(self.count) * self.shape[0] * slot
        return used

    def check(self) -> None:
        """Raise AssertionError if an invariant of the cache is broken."""
        if not self.is_initialized:
            return
        seen = self.timeline.seen
        assert self.tick == self.timeline.tick, "a forward stopped half-way"
        assert len(self.count) == len(seen), "rows of the layer and of the timeline differ"
        assert all(min(s, 1) <= n <= s for n, s in zip(self.count, seen, strict=True)), (
            "count outside seen"
        )
        positions = self.positions.cpu()
        for row, n, s in zip(positions, self.count, seen, strict=True):
            if not n:  # an announced row whose first chunks were pads
                continue
            kept = row[:, :n].sort(dim=-1).values
            assert kept.min() >= 0, "a stored token has no position"
            assert kept.max() < s, "a position was never seen"
            assert (kept.diff(dim=-1) > 0).all(), "a token is stored twice"
            assert (row[:, n:] == EMPTY).all(), "an empty slot has a position"

    # -- storage ----------------------------------------------------------------------------

    def kinds(self) -> dict[str, Kind]:
        """What is kept for each slot; all of it grows, moves and is evicted together."""
        _, size = self.shape
        kinds = {name: Kind(self.dtype, (size,), self.home) for name in KV}
        kinds["position"] = Kind(torch.int32)
        return kinds | {name: Kind(dtype) for name, dtype in self.extra.items()}

    def _storage(self, name: str, batch: int, capacity: int) -> Tensor:
        """Zeroed room for one kind of state, [batch, Hkv, capacity, *tail]."""
        kind = self.kinds()[name]
        tier: Tier = getattr(self.tiers, kind.tier)
        device = self.device if kind.tier == "device" else torch.device("cpu")
        pin = device != self.device  # so that copies to the device can run by themselves
        return tier.empty(
            batch, self.shape[0], capacity, *kind.tail, dtype=kind.dtype, device=device, pin=pin
        )

    def _allocate(self, capacity: int) -> None:
        """Give every per-slot tensor `capacity` slots; what is stored moves along."""
        old, self.slots, n = self.slots, {}, max(self.count)
        for name in self.kinds():
            new = self._storage(name, len(self.count), capacity)
            if name in old:
                new[:, :, :n] = old.pop(name)[:, :, :n]
            self.slots[name] = new

    def _write(self, key: Tensor, value: Tensor) -> None:
        """Append this forward's real tokens to each row; further state of new slots is zero."""
        lengths, tokens = self.timeline.lengths, key.shape[-2]
        need = max(n + new for n, new in zip(self.count, lengths, strict=True))
        if need > self.slots["key"].shape[2]:
            self._allocate(need + (self.slack if self.tick else 0))
        assert self.timeline.positions is not None
        position = self.timeline.positions[:, None].expand(-1, self.shape[0], -1)
        new: dict[str, Tensor | int] = dict.fromkeys(self.slots, 0)
        new |= {"key": key, "value": value, "position": position}
        for name, data in new.items():
            self._put(self.slots[name], data, self.count, tokens)
        self.count = [n + new for n, new in zip(self.count, lengths, strict=True)]

    def _put(self, into: Tensor, data: Tensor | int, count: Sequence[int], tokens: int) -> None:
        """Write `data` [B, Hkv, T, …] (or a constant) behind the first count[b] slots of row b."""
        lengths = self.timeline.lengths
        if min(count) == max(count) and min(lengths) == tokens:
            into[:, :, count[0] : count[0] + tokens] = data
            return
        if tokens == min(lengths) == 1:
            rows, slots = torch.arange(len(count)), torch.tensor(count, device=into.device)
            newest = data[:, :, 0].to(into.device) if isinstance(data, Tensor) else data
            into[rows.to(into.device), :, slots] = newest
            return
        for b, (n, new) in enumerate(zip(count, lengths, strict=True)):
            if new:
                row = data[b, :, tokens - new :] if isinstance(data, Tensor) else data
                into[b, :, n : n + new] = row

    def _show(self, key: Tensor, value: Tensor) -> View:
        """What this forward attends over; its new keys and values [B, Hkv, T, D] are stored."""
        n = max(self.count)
        key, value, position = (self.slots[name][:, :, :n] for name in (*KV, "position"))
        return View(key, value, position, self.count)

    def _gather_rows(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows)
        for name in list(self.slots):
            old = self.slots[name]
            new = self._storage(name, len(rows), old.shape[2])
            self.slots[name] = torch.index_select(old, 0, index.to(old.device), out=new)


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """`value` if it is allowed, else a ValueError that lists what is."""
    if value not in allowed:
        raise ValueError(f"{name} {value!r}: choose from {', '.join(allowed)}")
    return value
