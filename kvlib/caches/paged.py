"""Paged: keys and values in equal blocks of one pool, as vLLM keeps them.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, https://arxiv.org/abs/2309.06180
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlib.caches.base import Kind, KVLayer, one_of
from kvlib.caches.blocks import Table
from kvlib.caches.cache import KVCache
from kvlib.caches.pool import BlockTables, Pool
from kvlib.caches.view import Pages, View
from kvlib.tiers import Tiers


class Paged(KVLayer):
    """Exact attention over blocks that are taken one by one, as a row grows.

    Nothing is reserved for what may come, rows of any length waste less than a block each, and
    equal prefixes are stored once.

    block   token slots a block
    blocks  blocks in the pool; by default as many as 0.9 of the device holds beside the weights
    pool    a Pool to share with other caches; then `block` and `blocks` are the pool's
    kernel  prefill attention: "flash", or "eager" = the matrix materialised
    """

    timeline: BlockTables

    def __init__(
        self,
        timeline: BlockTables,
        tiers: Tiers,
        *,
        block: int = 16,
        blocks: int | None = None,
        pool: Pool | None = None,
        kernel: str = "flash",
    ) -> None:
        self.kernel = one_of("kernel", kernel, ("flash", "eager"))
        super().__init__(timeline, tiers)

    @classmethod
    def build(cls, model: PreTrainedModel, tiers: Tiers, **knobs: Any) -> list[KVLayer]:
        pool = knobs.get("pool")
        if pool is None:
            pool = Pool(model, tiers, knobs.get("blocks"), knobs.get("block", 16))
        elif pool.model() is not model:
            raise ValueError("this pool belongs to another model: make one for this model")
        elif len(knobs.keys() & {"block", "blocks"}):
            raise ValueError("a pool has its own block and blocks: leave these out beside pool=")
        timeline = BlockTables(pool)
        return [cls(timeline, pool.tiers, **knobs) for _ in range(len(pool.kv[0]))]

    def kinds(self) -> dict[str, Kind]:
        return {}  # the pool has all

    @property
    def positions(self) -> Tensor:
        place = torch.arange(max(self.count), dtype=torch.int32, device=self.device)
        position = place.expand(len(self.count), self.shape[0], -1)
        return position if self.is_uniform else position.masked_fill(self.empties(), -1)

    def nbytes(self) -> dict[str, int]:
        pool, tables = self.timeline.pool, self.timeline.tables
        held = pool.reserved_slots(tables) // pool.block
        return {"kv": held * pool.block_bytes // pool.kv.shape[1], "state": 0, "host": 0}

    def in_use(self) -> dict[str, int]:
        pool, tables = self.timeline.pool, self.timeline.tables
        slot = pool.block_bytes // pool.block // pool.kv.shape[1]
        return {"device": pool.used_slots(tables) * slot, "host": 0}

    def check(self) -> None:
        super().check()
        if self.is_initialized:
            lengths = [table.length for table in self.timeline.tables]
            assert self.count == lengths, "a block table does not fit what is stored"

    def _write(self, key: Tensor, value: Tensor) -> None:
        lengths, tokens = self.timeline.lengths, key.shape[2]
        for stored, data in zip(self._storage_of(), (key, value), strict=True):
            new = data.transpose(1, 2)  # [B, T, Hkv, D]
            if min(lengths) < tokens:
                assert self.timeline.positions is not None
                flat = new[self.timeline.positions >= 0]
            else:
                flat = new.flatten(0, 1)
            stored.flatten(0, 1).index_copy_(0, self.timeline.places, flat)
        self.count = [n + new for n, new in zip(self.count, lengths, strict=True)]

    def _storage_of(self) -> tuple[Tensor, Tensor]:
        """This layer's keys and values, [blocks, block, Hkv, D] each."""
        key, value = self.timeline.pool.kv[:, self.index]
        return key, value

    def _show(self, key: Tensor, value: Tensor) -> View:
        pages = Pages(*self._storage_of(), self.timeline.table, list(self.count))
        decoding = key.shape[2] == 1 and min(self.timeline.lengths) == 1
        return pages if decoding else pages.gathered()


@dataclass
class Preempted:
    """A sequence that was taken off the device: its tokens, and its keys and values if swapped.

    kv  [2, L, blocks, block, Hkv, D] on the host; None: to be computed again from `tokens`
    """

    tokens: list[int]
    seen: int
    kv: Tensor | None


class PagedCache(KVCache):
    """A cache in a block pool: rows come and go, share prefixes, and can be preempted."""

    timeline: BlockTables

    @property
    def pool(self) -> Pool:
        return self.timeline.pool

    def usage(self) -> dict[str, int]:
        """Bytes `used` by tokens, `held` in blocks, `wasted` between the two, `reserved` in all."""
        slot = self.pool.block_bytes // self.pool.block
        used = self.pool.used_slots(self.timeline.tables) * slot
        held = self.pool.reserved_slots(self.timeline.tables) * slot
        reserved = self.pool.blocks * self.pool.block_bytes
        return {"used": used, "held": held, "wasted": held - used, "reserved": reserved}

    def share(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Start with what the pool knows of these prompts; the tokens of each that need no feeding.

        The cache must be empty. Feed the rest of each prompt, padded on the left.
        """
        if self.timeline.seen or self.timeline.announced:
            raise ValueError("share() is for an empty cache, before begin(): reset() it first")
        tables = [self.pool.match(prompt) for prompt in prompts]
        known = [table.length for table in tables]
        if any(known):
            self.timeline.tables += tables
            self._open(known)
        return known

    def _open(self, seen: Sequence[int]) -> None:
        """Let the rows of an empty cache begin with `seen` tokens that are in their blocks."""
        self.timeline.seen, self.timeline.targets = list(seen), list(seen)
        self.timeline.lengths = [0] * len(seen)
        key = self.pool.kv[0, 0, :1].transpose(1, 2).expand(len(seen), -1, -1, -1)
        for layer in self.layers:
            layer.lazy_initialization(key, key)
            layer.count, layer.fed = list(seen), max(seen)

    def preempt(self, row: int, *, swap: bool = True) -> Preempted:
        """Take a row off the device, by swap to the host or to be computed again.

        Raises DeviceOutOfMemory for a host without room and ValueError for tokens without ids,
        before anything is changed.
        """
        self._check_row(row)
        table = self.timeline.tables[row]
        kv = self._swap_out(table) if swap else None
        if kv is None and len(table.tokens) < table.length:
            raise ValueError("this row's token ids are not all known: preempt it with swap=True")
        gone = Preempted(list(table.tokens), table.length, kv)
        self.release(row)
        return gone

    def _swap_out(self, table: Table) -> Tensor:
        shape = (*self.pool.kv.shape[:2], len(table.blocks), *self.pool.kv.shape[3:])
        kv = self.tiers.host.empty(*shape, dtype=self.pool.kv.dtype, device=torch.device("cpu"))
        kv.copy_(self.pool.kv[:, :, table.blocks])
        self.tiers.link.stored += kv.nbytes
        return kv

    def resume(self, gone: Preempted) -> PagedCache:
        """A cache of one row with a preempted sequence, in the same pool.

        After a swap it holds all that the row held; otherwise what the pool still knows of its
        tokens, and the caller feeds the others. Raises PoolExhausted with nothing changed.
        """
        twin = self.empty()
        if gone.kv is None:
            twin.share([gone.tokens])
            return twin
        table = Table()
        self.pool.append(table, gone.seen)
        try:
            moved = self.tiers.link.fetch([gone.kv], self.pool.kv.device, 0).wait()[0]
            self.pool.kv[:, :, table.blocks] = moved
        except BaseException:
            self.pool.free(table)
            raise
        self.pool.record(table, gone.tokens)
        twin.timeline.tables.append(table)
        twin._open([gone.seen])
        return twin

    def empty(self) -> PagedCache:
        """Another cache in the same pool, without rows."""
        timeline = BlockTables(self.pool)
        layers = [copy.copy(layer) for layer in self.layers]
        for layer in layers:
            layer.timeline = timeline
            layer.reset()
        return PagedCache(layers, self.knobs)
