"""The cache contract: what every strategy is, and what the rest of kvlib may ask of it.

A strategy is one class, instantiated once a decoder layer. `KVLayer` keeps every token and is
what the others change.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers, storage_bytes

EMPTY = -1  # position of a slot that holds no token


class KVLayer(CacheLayerMixin):
    """One decoder layer's keys and values, every token kept.

    Row b's tokens fill slots 0 … count[b]-1 of each KV head; pads are never stored. All tensors
    that hold something a slot live in `slots`, so growing, copying and evicting treat them alike.
    """

    kernel: str = "flash"  # prefill attention: "flash", or "eager" = the matrix materialised
    wants_mass: ClassVar[bool] = False  # ask the attention function for the column mass
    needs_lengths: bool = False  # refuse chunks of a prompt that begin() did not announce
    slack: ClassVar[int] = 64  # slots added beyond need when storage grows
    extra: ClassVar[dict[str, torch.dtype]] = {}  # further per-slot state: name -> dtype

    def __init__(self, timeline: Timeline, tiers: Tiers) -> None:
        CacheLayerMixin.__init__(self)
        self.timeline, self.tiers = timeline, tiers
        self.reset()

    def reset(self) -> None:
        """Forget everything and free the storage."""
        self.slots: dict[str, Tensor] = {}
        self.keys = self.values = None
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
        self.tick += 1
        return self._view()

    def get_seq_length(self) -> int:
        """Columns fed so far, pads and evicted tokens included; never the number stored."""
        return self.fed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fed + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # -- what the attention function and the engine call --------------------------------------

    def observe(self, mass: Tensor | None) -> None:
        """After this forward's attention: its column mass [B, Hkv, S], if it was asked for."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may repeat."""
        if not self.is_initialized:
            return
        self.count = [self.count[r] for r in rows]
        self._gather_rows(rows)

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
        slot = torch.arange(max(self.count), device=self.device)
        return slot >= torch.tensor(self.count, device=self.device)[:, None, None]

    def per_row(self, values: Sequence[int]) -> Tensor | int:
        """`values` to broadcast over [B, Hkv, S]: one number where all rows agree."""
        if min(values) == max(values):
            return values[0]
        return torch.tensor(values, device=self.device)[:, None, None]

    def nbytes(self) -> dict[str, int]:
        """Bytes of distinct storage: `kv` for keys and values, `state` for what goes with them."""
        kv = {"key", "value"}
        return {
            "kv": storage_bytes(t for name, t in self.slots.items() if name in kv),
            "state": storage_bytes(t for name, t in self.slots.items() if name not in kv),
        }

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

    def _allocate(self, capacity: int) -> None:
        """Give every per-slot tensor `capacity` slots; what is stored moves along."""
        heads, size = self.shape
        old, self.slots, n = self.slots, {}, max(self.count)
        kinds = {"key": self.dtype, "value": self.dtype, "position": torch.int32, **self.extra}
        for name, dtype in kinds.items():
            tail = (size,) if name in ("key", "value") else ()
            new = self.tiers.device.empty(
                len(self.count), heads, capacity, *tail, dtype=dtype, device=self.device
            )
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
        new: dict[str, Tensor | int] = {
            "key": key,
            "value": value,
            "position": position,
            **dict.fromkeys(self.extra, 0),
        }
        for name, data in new.items():
            self._put(self.slots[name], data, tokens)
        self.count = [n + new for n, new in zip(self.count, lengths, strict=True)]

    def _put(self, into: Tensor, data: Tensor | int, tokens: int) -> None:
        """Write `data` [B, Hkv, T, …] (or a constant) behind what each row stores."""
        lengths = self.timeline.lengths
        if self.is_uniform and min(lengths) == tokens:
            into[:, :, self.count[0] : self.count[0] + tokens] = data
            return
        for b, (n, new) in enumerate(zip(self.count, lengths, strict=True)):
            if new:
                row = data[b, :, tokens - new :] if isinstance(data, Tensor) else data
                into[b, :, n : n + new] = row

    def _view(self) -> tuple[Tensor, Tensor]:
        n = max(self.count)
        self.keys, self.values = self.slots["key"][:, :, :n], self.slots["value"][:, :, :n]
        return self.keys, self.values

    def _gather_rows(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        for name in list(self.slots):
            old = self.slots[name]
            shape = (len(rows), *old.shape[1:])
            new = self.tiers.device.empty(*shape, dtype=old.dtype, device=self.device)
            self.slots[name] = torch.index_select(old, 0, index, out=new)
        self._view()


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """`value` if it is allowed, else a ValueError that lists what is."""
    if value not in allowed:
        raise ValueError(f"{name} {value!r}: choose from {', '.join(allowed)}")
    return value
