"""Block tables: sharing, copy-on-write and refusal, one by one and in any order."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlib.caches.blocks import BlockPool, PoolExhausted, Table


def filled(pool: BlockPool, tokens: list[int]) -> Table:
    """A new sequence of `tokens`, shared as far as it can be."""
    table = pool.match(tokens)
    assert pool.append(table, len(tokens) - table.length, tokens[table.length :]) == []
    return table


def state(*objects: object) -> str:
    """All that the objects hold, to tell whether something changed."""
    return repr([vars(o) for o in objects])


@pytest.mark.parametrize(("blocks", "block"), [(0, 16), (-1, 16), (4, 0)])
def test_a_pool_needs_blocks_and_slots(blocks: int, block: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1; got {blocks} and {block}"):
        BlockPool(blocks, block)


def test_a_block_is_taken_only_when_the_last_is_full() -> None:
    pool, table = BlockPool(4, block=4), Table()
    used = []
    for token in range(9):
        assert pool.append(table, 1, [token]) == []
        used.append(pool.used)
    assert used == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert (pool.available, table.length, table.tokens) == (1, 9, list(range(9)))
    assert (pool.reserved_slots([table]), pool.used_slots([table]), pool.waste([table])) == (
        12,
        9,
        3,
    )


def test_a_refusal_says_the_numbers_and_changes_nothing() -> None:
    pool = BlockPool(3, block=2)
    table = filled(pool, [1, 2, 3])
    twin = pool.fork(table)
    before = state(pool, table, twin)
    assert pool.can_append(twin, 1)  # the copy
    assert not pool.can_append(twin, 2)  # the copy and one more
    with pytest.raises(PoolExhausted, match=r"2 blocks needed, 1 free of 3 \(2 tokens a block\)"):
        pool.append(twin, 2, [4, 5])
    with pytest.raises(ValueError, match="2 tokens to append, 1 ids"):
        pool.append(twin, 2, [4])
    with pytest.raises(ValueError, match="-1 tokens to append, no ids"):
        pool.append(twin, -1)
    with pytest.raises(ValueError, match="cannot crop 4 of 3"):
        pool.crop(twin, 4)
    assert state(pool, table, twin) == before


def test_a_refusal_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(PoolExhausted(2, 1, 3, 16)))
    assert str(error) == str(PoolExhausted(2, 1, 3, 16))


def test_appending_nothing_changes_nothing() -> None:
    pool = BlockPool(1, block=2)  # none left, even for a copy
    table = filled(pool, [1])
    twin = pool.fork(table)
    before = state(pool, table, twin)
    assert pool.can_append(twin, 0)
    assert pool.append(twin, 0) == []
    assert state(pool, table, twin) == before


def test_forks_share_until_one_writes() -> None:
    pool = BlockPool(4, block=4)
    table = filled(pool, [1, 2, 3, 4, 5])
    twin = pool.fork(table)
    assert (twin.blocks, pool.used) == (table.blocks, 2)
    first, last = table.blocks
    copies = pool.append(twin, 1, [6])
    assert copies == [(last, twin.blocks[1])]
    assert twin.blocks[0] == first
    assert twin.blocks[1] != last
    assert pool.append(table, 1, [7]) == []  # alone in its block by now
    assert (table.tokens, twin.tokens) == ([1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 6])
    pool.check([table, twin])


def test_forks_at_a_block_boundary_copy_nothing() -> None:
    pool = BlockPool(4, block=2)
    table = filled(pool, [1, 2])
    twin = pool.fork(table)
    assert pool.append(twin, 1, [3]) == pool.append(table, 1, [4]) == []
    assert pool.used == 3


@pytest.mark.parametrize(("length", "shared"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_match_leaves_the_last_token(length: int, shared: int) -> None:
    pool, ids = BlockPool(8, block=4), list(range(12))
    table = filled(pool, ids)
    twin = pool.match(ids[:length])
    assert twin.blocks == table.blocks[: shared // 4]
    assert (twin.length, twin.tokens) == (shared, ids[:shared])
    pool.check([table, twin])


def test_equal_blocks_behind_different_prefixes_are_not_shared() -> None:
    pool = BlockPool(8, block=2)
    table = filled(pool, [1, 2, 3, 4])
    assert pool.match([0, 0, 3, 4, 5]).blocks == []
    assert pool.match([3, 4, 5]).blocks == []
    assert pool.match([1, 2, 9, 9, 5]).blocks == table.blocks[:1]


def test_unknown_ids_are_not_shared() -> None:
    pool, table = BlockPool(4, block=2), Table()
    pool.append(table, 2, [1, 2])
    pool.append(table, 2)
    pool.append(table, 2, [5, 6])
    assert table.tokens == [1, 2]
    assert pool.match([1, 2, 3, 4, 5, 6, 7]).blocks == table.blocks[:1]
    pool.free(table)
    assert table.tokens == []  # of an empty table, all is known


def test_equal_blocks_filled_apart_stay_apart() -> None:
    pool = BlockPool(4, block=2)
    first, second = Table(), Table()
    for table in (first, second):
        pool.append(table, 2, [1, 2])
    assert first.blocks != second.blocks
    pool.check([first, second])
    assert pool.match([1, 2, 3]).blocks == first.blocks
    pool.append(second, 2, [3, 4])  # found behind either
    assert pool.match([1, 2, 3, 4, 5]).blocks == [*first.blocks, second.blocks[1]]


def test_free_twice_is_harmless() -> None:
    pool = BlockPool(4, block=2)
    table = filled(pool, [1, 2, 3])
    twin = pool.fork(table)
    pool.free(table)
    pool.free(table)
    assert (table.blocks, table.length, pool.used) == ([], 0, 2)
    pool.check([table, twin])


def test_freed_blocks_are_found_until_taken_again() -> None:
    pool = BlockPool(4, block=2)
    pool.free(filled(pool, [1, 2, 3, 4, 5]))
    assert pool.used == 0
    again = pool.match([1, 2, 3, 4, 5])
    assert (again.length, pool.used) == (4, 2)
    pool.free(again)
    other, ids = Table(), [7] * 6
    pool.append(other, 6, ids)  # the two blank blocks, then the end of the prefix
    assert pool.match([1, 2, 3, 4, 5]).length == 2


def test_the_least_recently_freed_is_taken_first() -> None:
    pool = BlockPool(2, block=2)
    old, new = filled(pool, [1, 2]), filled(pool, [3, 4])
    pool.free(old)
    pool.free(new)
    pool.free(pool.match([1, 2, 0]))  # used once more
    filled(pool, [5])
    assert [pool.match([*ids, 0]).length for ids in ([1, 2], [3, 4])] == [2, 0]


def test_crop_frees_whole_blocks() -> None:
    pool = BlockPool(4, block=2)
    table = filled(pool, [1, 2, 3, 4, 5])
    pool.crop(table, 2)
    assert (table.length, table.tokens, pool.used) == (3, [1, 2, 3], 2)
    pool.crop(table, 0)
    pool.check([table])
    assert pool.match([1, 2, 3, 4, 5]).length == 4  # cropped, not yet overwritten


def test_writing_into_a_cropped_block_forgets_what_it_held() -> None:
    pool = BlockPool(4, block=2)
    table = filled(pool, [1, 2, 3, 4])
    pool.crop(table, 1)
    assert pool.append(table, 1, [9]) == []
    pool.check([table])
    assert pool.match([1, 2, 3, 4, 0]).length == 2
    assert pool.match([1, 2, 3, 9, 0]).blocks == table.blocks


def test_writing_into_a_cropped_shared_block_copies_it() -> None:
    pool = BlockPool(4, block=2)
    table = filled(pool, [1, 2, 3, 4])
    twin = pool.match([1, 2, 3, 4, 5])
    pool.crop(twin, 1)
    assert pool.append(twin, 1, [9]) == [(table.blocks[1], twin.blocks[1])]
    pool.check([table, twin])
    assert pool.match([1, 2, 3, 4, 0]).blocks == table.blocks


@pytest.mark.parametrize(
    "harm",
    [
        lambda pool, table: pool.count.__setitem__(table.blocks[0], 2),
        lambda pool, table: pool._blank.append(table.blocks[0]),
        lambda pool, table: pool._blank.pop(),
        lambda pool, table: pool._index.clear(),
        lambda pool, table: table.tokens.__setitem__(0, 9),
        lambda pool, table: table.blocks.reverse(),
        lambda pool, table: table.tokens.append(9),
        lambda pool, table: table.chain.pop(),
        lambda pool, table: setattr(table, "length", 4),
    ],
)
def test_check_sees_harm(harm: Callable[[BlockPool, Table], object]) -> None:
    pool = BlockPool(5, block=2)
    table = filled(pool, [1, 2, 3, 4, 5])
    pool.check([table])
    harm(pool, table)
    with pytest.raises(AssertionError):
        pool.check([table])


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=7)  # so few that prefixes coincide
ANY = st.integers(0, 99)  # modulo the sequences there are


@dataclass
class Running:
    """A sequence: its block table, and what it must read back."""

    table: Table
    tokens: list[int] = field(default_factory=list)


class Serving(RuleBasedStateMachine):
    """Sequences come, grow, fork, shrink, pause and go; a dict plays the storage."""

    @initialize(blocks=st.integers(5, 16), block=st.integers(1, 4))
    def start(self, blocks: int, block: int) -> None:
        self.pool = BlockPool(blocks, block)
        self.storage: dict[tuple[int, int], int] = {}  # (block, slot): token
        self.running: list[Running] = []
        self.paused: list[list[int]] = []

    def read(self, table: Table) -> list[int]:
        size = self.pool.block
        return [self.storage[table.blocks[i // size], i % size] for i in range(table.length)]

    def grow(self, sequence: Running, tokens: list[int], known: bool = True) -> bool:
        """Append and write `tokens`; False if the pool is exhausted."""
        pool, table = self.pool, sequence.table
        before, free, room = state(pool, table), pool.available, pool.can_append(table, len(tokens))
        held, start = len(table.blocks), table.length
        ids = tokens if known else None
        if not room:
            with pytest.raises(PoolExhausted, match=f"{free} free of {pool.blocks}"):
                pool.append(table, len(tokens), ids)
            assert state(pool, table) == before
            return False
        copies = pool.append(table, len(tokens), ids)
        assert len(copies) <= 1
        assert free - pool.available == len(table.blocks) - held + len(copies)
        for source, target in copies:
            for slot in range(pool.block):
                if (source, slot) in self.storage:
                    self.storage[target, slot] = self.storage[source, slot]
        for i, token in enumerate(tokens, start):
            self.storage[table.blocks[i // pool.block], i % pool.block] = token
        sequence.tokens += tokens
        return True

    def admit(self, tokens: list[int], share: bool = True, known: bool = True) -> bool:
        """A new sequence of `tokens`, if the pool can serve it."""
        table = self.pool.match(tokens) if share else Table()
        assert table.length <= max(len(tokens) - 1, 0)
        sequence = Running(table, tokens[: table.length])
        assert self.read(table) == sequence.tokens
        admitted = self.grow(sequence, tokens[table.length :], known)
        if admitted:
            self.running.append(sequence)
        else:
            self.pool.free(table)
        return admitted

    def pick(self, which: int) -> Running:
        return self.running[which % len(self.running)]

    def drop(self, which: int) -> Running:
        sequence = self.running.pop(which % len(self.running))
        self.pool.free(sequence.table)
        return sequence

    some = precondition(lambda self: self.running)

    @rule(tokens=IDS, share=st.booleans(), known=st.booleans())
    def arrive(self, tokens: list[int], share: bool, known: bool) -> None:
        self.admit(tokens, share, known)

    @some
    @rule(which=ANY, more=IDS)
    def arrive_like(self, which: int, more: list[int]) -> None:
        self.admit(self.pick(which).tokens + more)

    @some
    @rule(which=ANY, tokens=IDS, known=st.booleans())
    def append(self, which: int, tokens: list[int], known: bool) -> None:
        self.grow(self.pick(which), tokens, known)

    @some
    @rule(which=ANY, then=st.just([]) | IDS)
    def fork(self, which: int, then: list[int]) -> None:
        parent = self.pick(which)
        self.running.append(Running(self.pool.fork(parent.table), list(parent.tokens)))
        self.grow(self.running[-1], then)

    @some
    @rule(which=ANY, n=st.integers(0, 6), then=st.just([]) | IDS)
    def crop(self, which: int, n: int, then: list[int]) -> None:
        sequence = self.pick(which)
        kept = max(0, len(sequence.tokens) - n)
        self.pool.crop(sequence.table, len(sequence.tokens) - kept)
        del sequence.tokens[kept:]
        self.grow(sequence, then)

    @some
    @rule(which=ANY)
    def finish(self, which: int) -> None:
        table = self.drop(which).table
        before = state(self.pool, table)
        self.pool.free(table)
        assert state(self.pool, table) == before

    @some
    @rule(which=ANY)
    def preempt(self, which: int) -> None:
        self.paused.append(self.drop(which).tokens)

    @precondition(lambda self: self.paused)
    @rule(swapped=st.booleans())
    def resume(self, swapped: bool) -> None:
        tokens = self.paused.pop(0)
        if not self.admit(tokens, share=not swapped):  # what was swapped out is copied back whole
            self.paused.append(tokens)

    @invariant()
    def each_reads_its_own(self) -> None:
        for sequence in self.running:
            assert sequence.table.length == len(sequence.tokens)
            assert self.read(sequence.table) == sequence.tokens
            assert sequence.table.tokens == sequence.tokens[: len(sequence.table.tokens)]

    @invariant()
    def books_balance(self) -> None:
        pool, tables = self.pool, [sequence.table for sequence in self.running]
        pool.check(tables)
        slots = {
            (t.blocks[i // pool.block], i % pool.block) for t in tables for i in range(t.length)
        }
        assert pool.used_slots(tables) == len(slots)
        assert pool.reserved_slots(tables) == pool.used * pool.block
        assert 0 <= pool.waste(tables) <= (pool.block - 1) * len(tables)

    @invariant()
    def known_content_is_stored(self) -> None:
        for block, (_, ids) in self.pool._key.items():
            assert tuple(self.storage[block, slot] for slot in range(self.pool.block)) == ids


def test_any_order() -> None:
    run_state_machine_as_test(
        Serving,
        settings=settings(
            max_examples=150, stateful_step_count=50, deadline=None, derandomize=True
        ),
    )
