"""The storage of a block pool, and the block tables of one cache that lives in it."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvlib.caches.blocks import BlockPool, PoolExhausted, Table
from kvlib.caches.timeline import Timeline
from kvlib.tiers import DeviceOutOfMemory, Tiers

RESERVED = 0.9  # share of the device that vLLM takes for weights and pool together


class Pool(BlockPool):
    """The block pool of a model: bookkeeping, and the storage of all its layers.

    kv [2, L, blocks, block, Hkv, D]: keys and values; a block's number serves every layer.
    Any number of paged caches may live in one pool, and share the blocks of equal prefixes.
    """

    def __init__(
        self, model: PreTrainedModel, tiers: Tiers, blocks: int | None = None, block: int = 16
    ) -> None:
        for name, number in (("blocks", blocks), ("block", block)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                raise ValueError(f"{name} {number!r}: give a whole number, at least 1")
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, block, heads, size)
        self.block_bytes = 2 * math.prod(shape) * model.dtype.itemsize
        self.tiers, self.model = tiers, weakref.ref(model)
        super().__init__(self._fitting(model) if blocks is None else blocks, block)
        depth = config.num_hidden_layers
        self.kv = tiers.device.empty(
            2, depth, self.blocks, block, heads, size, dtype=model.dtype, device=model.device
        )

    def _fitting(self, model: PreTrainedModel) -> int:
        """Blocks in what vLLM would reserve on this device, or on the model's usual one."""
        device = self.tiers.device
        if device.capacity is None:
            device = Tiers.of(model).device
        assert device.capacity is not None
        room = int(RESERVED * device.capacity) - device.fixed - device.used
        if room < self.block_bytes:
            raise DeviceOutOfMemory(device.name, self.block_bytes, max(room, 0), device.capacity)
        return room // max(self.block_bytes, 1)  # BlockPool refuses a block of no tokens

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, target), in every layer."""
        for source, target in pairs:
            self.kv[:, :, target] = self.kv[:, :, source]


class BlockTables(Timeline):
    """The timeline of a paged cache: what a row has seen is in the blocks of its table.

    places  [tokens] slots (block · size + offset) of this forward's real tokens, row after row
    table   [B, blocks] block tables, filled up with block 0
    """

    wants_ids = True

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._own([])
        super().__init__()

    def _own(self, tables: list[Table]) -> None:
        """Hold these tables; their blocks return to the pool with this object at the latest."""
        self.tables = tables  # changed in place from now on
        weakref.finalize(self, free_all, self.pool, tables)

    def reset(self) -> None:
        free_all(self.pool, self.tables)
        self.ids: Sequence[Sequence[int]] = []
        super().reset()

    def advance(
        self,
        lengths: Sequence[int],
        tokens: int,
        device: torch.device,
        ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """As Timeline's; takes the blocks first, and raises PoolExhausted with nothing changed."""
        self.check_turn(lengths, tokens)
        before = [table.length for table in self.tables] or [0] * len(lengths)
        self._take(lengths)
        super().advance(lengths, tokens, device)
        self.ids = ids or []
        self._lay_out(before, device)

    def complete(self) -> None:
        """Make what this forward wrote findable."""
        for table, ids in zip(self.tables, self.ids, strict=False):
            self.pool.record(table, ids)
        self.ids = []

    def _take(self, lengths: Sequence[int]) -> None:
        """Room for `lengths[b]` more tokens in every row, or in none."""
        tables = self.tables or [Table() for _ in lengths]
        done: list[tuple[Table, int]] = []
        try:
            for table, n in zip(tables, lengths, strict=True):
                self.pool.copy(self.pool.append(table, n))
                done.append((table, n))
        except PoolExhausted:
            for table, n in done:
                self.pool.crop(table, n)
            raise
        self.tables[:] = tables

    def _lay_out(self, before: Sequence[int], device: torch.device) -> None:
        size, width = self.pool.block, max(len(table.blocks) for table in self.tables)
        rows = [table.blocks + [0] * (width - len(table.blocks)) for table in self.tables]
        self.table = torch.tensor(rows, dtype=torch.long, device=device).view(len(rows), width)
        places = [
            table.blocks[slot // size] * size + slot % size
            for first, table in zip(before, self.tables, strict=True)
            for slot in range(first, table.length)
        ]
        self.places = torch.tensor(places, dtype=torch.long, device=device)

    def fork(self, rows: Sequence[int]) -> BlockTables:
        twin = copy.copy(self)
        twin._own([self.pool.fork(self.tables[r]) for r in rows])
        Timeline.select(twin, rows)
        return twin

    def select(self, rows: Sequence[int]) -> None:
        kept = [self.pool.fork(self.tables[r]) for r in rows]
        free_all(self.pool, self.tables)
        self.tables += kept
        super().select(rows)

    def check_join(self, other: Timeline) -> None:
        super().check_join(other)
        if getattr(other, "pool", None) is not self.pool:
            raise ValueError("these caches live in different pools: make the other with empty()")

    def join(self, other: Timeline) -> None:
        assert isinstance(other, BlockTables)
        super().join(other)
        self.tables += other.tables
        other.tables.clear()  # their blocks are ours now

    def shorten(self, tokens: int) -> None:
        for table in self.tables:
            self.pool.crop(table, tokens)
        super().shorten(tokens)


def free_all(pool: Pool, tables: list[Table]) -> None:
    """Give back the blocks of these tables, and empty the list."""
    for table in tables:
        pool.free(table)
    tables.clear()
