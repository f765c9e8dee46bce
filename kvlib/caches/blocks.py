"""Block tables: the bookkeeping of a paged KV cache, without the storage.

Keys and values lie in equal physical blocks; a sequence's block table says which, in order.
Blocks are counted, so that sequences share them: forks until one of them writes (copy-on-write),
equal prompts by what their full blocks hold (prefix sharing). Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", SOSP 2023,
https://arxiv.org/abs/2309.06180.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[int, tuple[int, ...]]  # what a full block holds: id of the content before it, its ids

ROOT = 0  # content id before a sequence's first block


class PoolExhausted(MemoryError):  # noqa: N818, as DeviceOutOfMemory
    """A request needs more blocks than the pool has left."""

    def __init__(self, needed: int, free: int, total: int, block: int) -> None:
        super().__init__(
            f"the block pool is full: {needed} blocks needed, {free} free of {total} "
            f"({block} tokens a block); use fewer or shorter sequences, or a larger pool"
        )
        self.needed, self.free, self.total, self.block = needed, free, total, block

    def __reduce__(self) -> tuple[type, tuple[int, int, int, int]]:
        return type(self), (self.needed, self.free, self.total, self.block)


@dataclass(eq=False)  # forks look alike and are not the same
class Table:
    """The block table of one sequence; only a BlockPool changes it.

    blocks  physical block of each logical block
    length  slots filled, in tokens
    tokens  ids of the first of these tokens, as far as they are known
    chain   content id of each full block whose ids are known
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)


class BlockPool:
    """`blocks` physical blocks of `block` token slots each.

    A freed block whose content is known stays findable until it is taken again: blocks of unknown
    content are taken first, then the least recently freed. Raises ValueError if either is < 1.
    """

    def __init__(self, blocks: int, block: int = 16) -> None:
        if blocks < 1 or block < 1:
            raise ValueError(f"blocks and block must be at least 1; got {blocks} and {block}")
        self.blocks, self.block = blocks, block
        self.count = [0] * blocks  # tables that hold each block
        self._blank = deque(range(blocks))  # free, content unknown
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, findable
        self._index: dict[Key, tuple[int, int]] = {}  # content: its block and its id
        self._key: dict[int, Key] = {}  # the same, by block
        self._ids = itertools.count(ROOT + 1)  # never reused, so equal keys are equal prefixes

    @property
    def available(self) -> int:
        """Blocks that no table holds."""
        return len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that some table holds, each counted once."""
        return self.blocks - self.available

    # -- sequences --------------------------------------------------------------------------

    def can_append(self, table: Table, n: int) -> bool:
        """Would `append` find the blocks for `n` more tokens?"""
        return self._needed(table, n) <= self.available

    def append(
        self, table: Table, n: int, tokens: Sequence[int] | None = None
    ) -> list[tuple[int, int]]:
        """Make room for `n` more tokens; with ids, `record` them at once.

        Returns the (source, target) block copies that the storage must make, in order, before
        anything is written. Raises PoolExhausted, or ValueError for n < 0 or ids that are not n,
        before anything is changed.
        """
        if n < 0 or (tokens is not None and len(tokens) != n):
            raise ValueError(f"{n} tokens to append, {'no' if tokens is None else len(tokens)} ids")
        if not n:
            return []
        needed = self._needed(table, n)
        if needed > self.available:
            raise PoolExhausted(needed, self.available, self.blocks, self.block)
        copies = self._own_last(table)
        table.blocks += [self._take() for _ in range(needed - len(copies))]
        table.length += n
        self.record(table, tokens or ())
        return copies

    def record(self, table: Table, tokens: Sequence[int]) -> None:
        """Tell the ids of the last tokens: the full blocks that they complete can now be found.

        Wait for this until the blocks are written. Ids behind unknown ones are of no use, and
        are ignored.
        """
        if len(table.tokens) + len(tokens) != table.length:
            return
        table.tokens += tokens
        for i in range(len(table.chain), table.length // self.block):
            ids = tuple(table.tokens[i * self.block : (i + 1) * self.block])
            key = (table.chain[-1] if table.chain else ROOT, ids)
            block, content = self._index.setdefault(key, (table.blocks[i], next(self._ids)))
            if block == table.blocks[i]:  # else an equal one is known already, and ours stays ours
                self._key[block] = key
            table.chain.append(content)

    def crop(self, table: Table, n: int) -> None:
        """Forget the last `n` tokens and free the blocks that held nothing else.

        Raises ValueError unless 0 <= n <= length.
        """
        if not 0 <= n <= table.length:
            raise ValueError(f"cannot crop {n} of {table.length} tokens")
        table.length -= n
        kept = self._blocks_for(table.length)
        for block in reversed(table.blocks[kept:]):  # so that a prefix outlives what follows it
            self._release(block)
        del table.blocks[kept:], table.chain[table.length // self.block :]
        del table.tokens[table.length :]

    def free(self, table: Table) -> None:
        """Give all blocks back and empty the table; an empty one has nothing to give."""
        self.crop(table, table.length)

    def fork(self, table: Table) -> Table:
        """A second sequence with the same tokens, in the same blocks."""
        for block in table.blocks:
            self._hold(block)
        return Table(list(table.blocks), table.length, list(table.tokens), list(table.chain))

    def match(self, tokens: Sequence[int]) -> Table:
        """A sequence that holds the longest known prefix of `tokens`, in full blocks.

        At least the last token is left out: it must be computed to predict the next.
        """
        table, parent = Table(), ROOT
        for start in range(0, len(tokens) - self.block, self.block):
            ids = tuple(tokens[start : start + self.block])
            if (parent, ids) not in self._index:
                break
            block, parent = self._index[parent, ids]
            self._hold(block)
            table.blocks.append(block)
            table.chain.append(parent)
        table.length = len(table.blocks) * self.block
        table.tokens = list(tokens[: table.length])
        return table

    # -- what it costs ----------------------------------------------------------------------

    def used_slots(self, tables: Sequence[Table]) -> int:
        """Slots that hold a token of one of `tables`, a shared one counted once."""
        filled: Counter[int] = Counter()
        for table in tables:
            for i, block in enumerate(table.blocks):
                filled[block] = max(filled[block], min(table.length - i * self.block, self.block))
        return filled.total()

    def reserved_slots(self, tables: Sequence[Table]) -> int:
        """Slots of the distinct blocks that `tables` hold."""
        return len({block for table in tables for block in table.blocks}) * self.block

    def waste(self, tables: Sequence[Table]) -> int:
        """Slots reserved and not used: at most block − 1 for each of `tables`."""
        return self.reserved_slots(tables) - self.used_slots(tables)

    def check(self, tables: Sequence[Table]) -> None:
        """Raise AssertionError if an invariant is broken; `tables` are all that hold blocks."""
        held = Counter(block for table in tables for block in table.blocks)
        free = [*self._blank, *self._cached]
        assert self.count == [held[b] for b in range(self.blocks)], "a count is not its holders"
        assert sorted([*free, *held]) == list(range(self.blocks)), "a block is lost or taken twice"
        assert {b: key for key, (b, _) in self._index.items()} == self._key, "index is one-sided"
        assert len(self._index) == len(self._key), "a block is known by two contents"
        assert self._key.keys() >= self._cached.keys(), "a free block is kept for nothing"
        assert self._key.keys().isdisjoint(self._blank), "a blank block is known by content"
        for table in tables:
            self._check_table(table)

    def _check_table(self, table: Table) -> None:
        assert len(set(table.blocks)) == len(table.blocks), "a table holds a block twice"
        assert len(table.blocks) == self._blocks_for(table.length), "blocks do not fit the length"
        assert len(table.tokens) <= table.length, "ids of tokens that are not there"
        assert len(table.chain) == len(table.tokens) // self.block, "chain does not fit the ids"
        for i, (block, parent) in enumerate(zip(table.blocks, [ROOT, *table.chain], strict=False)):
            ids = tuple(table.tokens[i * self.block : (i + 1) * self.block])
            before, known = self._key.get(block, (parent, ids))
            assert (before, known[: len(ids)]) == (parent, ids), "index has another content"

    # -- blocks -----------------------------------------------------------------------------

    def _blocks_for(self, slots: int) -> int:
        return -(-slots // self.block)

    def _shares_last(self, table: Table) -> bool:
        """Would the next token go into a block that others hold?"""
        return table.length % self.block > 0 and self.count[table.blocks[-1]] > 1

    def _needed(self, table: Table, n: int) -> int:
        """Free blocks that `n` more tokens take."""
        more = self._blocks_for(table.length + n) - len(table.blocks)
        return more + (n > 0 and self._shares_last(table))

    def _own_last(self, table: Table) -> list[tuple[int, int]]:
        """Make a partly filled last block safe to write; returns the copy that this takes."""
        if not table.length % self.block:
            return []
        last = table.blocks[-1]
        if not self._shares_last(table):
            self._forget(last)  # cropped: what was known of it is overwritten
            return []
        table.blocks[-1] = self._take()
        self._release(last)
        return [(last, table.blocks[-1])]

    def _take(self) -> int:
        """A free block to overwrite."""
        block = self._blank.popleft() if self._blank else self._cached.popitem(last=False)[0]
        self._forget(block)
        self.count[block] = 1
        return block

    def _hold(self, block: int) -> None:
        """One more table holds `block`, in use or free but findable."""
        self._cached.pop(block, None)
        self.count[block] += 1

    def _release(self, block: int) -> None:
        self.count[block] -= 1
        if self.count[block]:
            return
        if block in self._key:
            self._cached[block] = None
        else:
            self._blank.append(block)

    def _forget(self, block: int) -> None:
        """The content of `block` can no longer be found."""
        if block in self._key:
            del self._index[self._key.pop(block)]
