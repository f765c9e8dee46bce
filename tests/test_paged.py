"""The paged cache: exact under sharing, forks and preemption; what it holds and what it wastes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import batch, generate
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import kvlib
from kvlib.caches.blocks import PoolExhausted
from kvlib.caches.paged import PagedCache
from kvlib.caches.pool import Pool
from kvlib.tiers import DeviceOutOfMemory, Tier, Tiers

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def model(tiny: Tiny) -> PreTrainedModel:
    return tiny("llama")


def paged(model: PreTrainedModel, **knobs: Any) -> PagedCache:
    cache = kvlib.make_cache("paged", model, **knobs)
    assert isinstance(cache, PagedCache)
    return cache


def feed(model: PreTrainedModel, cache: Any, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of these tokens of a single row."""
    return model(torch.tensor([tokens]), past_key_values=cache).logits[:, -1]


def alone(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return feed(model, kvlib.make_cache("full", model), tokens)


def same(ours: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)
    assert ours.argmax(-1).tolist() == plain.argmax(-1).tolist()


def check(*caches: PagedCache) -> None:
    """Invariants of the caches, which must be all that live in their pool."""
    for cache in caches:
        cache.check()
    caches[0].pool.check([table for cache in caches for table in cache.timeline.tables])


def test_equal_prefixes_are_stored_once(model: PreTrainedModel) -> None:
    prompt = batch([30])[0][0].tolist()
    with kvlib.attach(model):
        first = paged(model, block=4)
        feed(model, first, prompt)
        used = first.pool.used
        second = first.empty()
        assert second.share([[*prompt[:21], 5, 6]]) == [20]
        assert first.pool.used == used  # not a block more
        same(feed(model, second, [*prompt[20:21], 5, 6]), alone(model, [*prompt[:21], 5, 6]))
        check(first, second)
        first.reset()
        third = first.empty()
        assert third.share([prompt]) == [28]  # found though the row that wrote it is gone
        same(feed(model, third, prompt[28:]), alone(model, prompt))
        check(first, second, third)


def test_rows_of_one_batch_share_different_prefixes(model: PreTrainedModel) -> None:
    one, two = batch([30, 30])[0].tolist()
    with kvlib.attach(model):
        first = paged(model, block=4)
        ids = torch.tensor([one, two])
        model(ids, past_key_values=first)
        second = first.empty()
        prompts = [[*one[:17], 7], [*two[:9], 7, 8, 9]]
        known = second.share(prompts)
        assert known == [16, 8]
        rest = [prompts[0][16:], prompts[1][8:]]
        width = max(len(r) for r in rest)
        fed = torch.tensor([[0] * (width - len(r)) + r for r in rest])
        mask = torch.zeros(2, 16 + width, dtype=torch.long)
        for b, n in enumerate(known):
            mask[b, 16 - n : 16] = 1
            mask[b, 16 + width - len(rest[b]) :] = 1
        out = model(fed, attention_mask=mask, past_key_values=second).logits[:, -1]
        for b in range(2):
            same(out[b : b + 1], alone(model, prompts[b]))
        check(first, second)


def test_only_an_empty_cache_can_start_shared(model: PreTrainedModel) -> None:
    with kvlib.attach(model):
        cache = paged(model)
        feed(model, cache, [5, 6, 7])
        with pytest.raises(ValueError, match="empty cache"):
            cache.share([[1, 2]])


@pytest.mark.parametrize("swap", [True, False])
def test_a_preempted_row_loses_nothing(model: PreTrainedModel, swap: bool) -> None:
    prompts = batch([13, 13])[0].tolist()
    with kvlib.attach(model):
        cache = paged(model, block=4, blocks=20)
        model(torch.tensor(prompts), past_key_values=cache)
        model(torch.tensor([[9], [9]]), past_key_values=cache)
        gone = cache.preempt(0, swap=swap)
        assert cache.tiers.host.used == (4 * cache.pool.block_bytes if swap else 0)
        same(feed(model, cache, [8]), alone(model, [*prompts[1], 9, 8]))
        other = cache.empty()  # takes every block that is free, what is cached too
        feed(model, other, batch([4 * cache.pool.available])[0][0].tolist())
        with pytest.raises(PoolExhausted):
            cache.resume(gone) if swap else feed(model, cache.resume(gone), gone.tokens)
        check(cache, other)
        other.reset()
        back = cache.resume(gone)
        assert gone.tokens == [*prompts[0], 9]
        rest = [] if swap else gone.tokens[back.get_seq_length() :]
        same(feed(model, back, [*rest, 8]), alone(model, [*prompts[0], 9, 8]))
        check(cache, other, back)


def test_the_last_row_can_be_preempted(model: PreTrainedModel) -> None:
    with kvlib.attach(model):
        cache = paged(model, block=4)
        feed(model, cache, [5, 6, 7])
        gone = cache.preempt(0)
        assert (cache.pool.used, cache.get_seq_length()) == (0, 0)
        feed(model, cache, [8, 9])
        same(feed(model, cache.resume(gone), [4]), alone(model, [5, 6, 7, 4]))


def test_a_copy_that_fails_half_way_leaves_the_pool_as_it_was(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("bus error")

    with kvlib.attach(model):
        tiers = Tiers(host=Tier("host", capacity=10))
        cache = paged(model, block=4, tiers=tiers)
        feed(model, cache, [5, 6, 7])
        with pytest.raises(DeviceOutOfMemory, match="host memory is full"):
            cache.preempt(0)
        check(cache)
        tiers.host.capacity = None
        gone = cache.preempt(0)
        with monkeypatch.context() as patch:
            patch.setattr(tiers.link, "fetch", fail)
            with pytest.raises(OSError, match="bus error"):
                cache.resume(gone)
        check(cache)
        assert cache.pool.used == 0
        same(feed(model, cache.resume(gone), [4]), alone(model, [5, 6, 7, 4]))


def test_a_full_pool_refuses_and_changes_nothing(model: PreTrainedModel) -> None:
    ids, mask = batch([9, 5])
    with kvlib.attach(model):
        cache = paged(model, block=4, blocks=5)
        model(ids, attention_mask=mask, past_key_values=cache)
        more = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
        with pytest.raises(PoolExhausted, match="block pool is full"):
            model(ids[:, :4], attention_mask=more, past_key_values=cache)
        check(cache)
        assert (cache.timeline.seen, cache.pool.used) == ([9, 5], 5)
        step = torch.ones(2, 1, dtype=torch.long)
        out = model(step, attention_mask=more[:, :10], past_key_values=cache).logits[:, -1]
        same(out[:1], alone(model, [*ids[0].tolist(), 1]))
        with pytest.raises(PoolExhausted):  # too small for even one sequence
            feed(model, paged(model, block=4, blocks=2), list(range(3, 12)))


def test_waste_is_less_than_a_block_a_row(model: PreTrainedModel) -> None:
    lengths = [61, 3, 1, 9, 2]
    with kvlib.attach(model):
        cache = paged(model, block=8)
        generate(model, *batch(lengths), 5, past_key_values=cache)
        usage, token = cache.usage(), 3 * 2 * 2 * 8 * 4
        assert usage["used"] == sum(n + 4 for n in lengths) * token
        assert 0 <= usage["wasted"] <= 7 * len(lengths) * token
        assert usage["held"] == usage["used"] + usage["wasted"] == cache.nbytes()["kv"]
        assert usage["reserved"] == cache.tiers.device.used == cache.pool.kv.nbytes


def test_the_pool_reserves_what_vllm_would(model: PreTrainedModel) -> None:
    tiers = Tiers.of(model)
    cache = paged(model, tiers=tiers)
    assert tiers.device.capacity is not None
    room = 0.9 * tiers.device.capacity - tiers.device.fixed
    assert room - cache.pool.block_bytes < cache.pool.kv.nbytes <= room
    with pytest.raises(DeviceOutOfMemory):
        paged(model, tiers=Tiers.of(model, capacity=tiers.device.fixed + 10))
    for wrong in ({"block": 0}, {"blocks": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            paged(model, **wrong)


def test_caches_in_one_pool(model: PreTrainedModel) -> None:
    pool = Pool(model, Tiers(), blocks=40, block=4)
    with kvlib.attach(model):
        caches = [paged(model, pool=pool) for _ in range(2)]
        for i, cache in enumerate(caches):
            feed(model, cache, [5, 6, 7, 8 + i])
        same(feed(model, caches[0], [4]), alone(model, [5, 6, 7, 8, 4]))
        check(*caches)


@given(
    seed=st.integers(0, 999),
    block=st.sampled_from([1, 2, 4, 16]),
    steps=st.lists(
        st.tuples(st.sampled_from(["step", "fork", "preempt", "share", "drop"]), st.integers(0, 9)),
        max_size=8,
    ),
)
@settings(max_examples=25)
def test_any_mix_of_forks_sharing_and_preemption_is_exact(
    tiny: Tiny, seed: int, block: int, steps: list[tuple[str, int]]
) -> None:
    """Single-row caches of one pool, each beside the list of its tokens."""
    model = tiny("llama")
    pool = Pool(model, Tiers(), blocks=400, block=block)
    prompt = batch([11], seed=seed)[0][0].tolist()
    with torch.no_grad(), kvlib.attach(model):
        first = paged(model, pool=pool)
        feed(model, first, prompt)
        rows: list[tuple[PagedCache, list[int]]] = [(first, prompt)]
        for what, which in steps:
            cache, tokens = rows[which % len(rows)]
            if what == "step":
                feed(model, cache, [which])
                tokens.append(which)
            elif what == "fork":
                rows.append((cache.fork([0]), list(tokens)))
            elif what == "share":
                twin, n = first.empty(), len(tokens)
                known = twin.share([tokens])[0]
                feed(model, twin, tokens[known:])
                rows.append((twin, tokens[:n]))
            elif what == "preempt":
                back = cache.resume(cache.preempt(0, swap=which % 2 == 0))
                if back.get_seq_length() < len(tokens):
                    feed(model, back, tokens[back.get_seq_length() :])
                rows[which % len(rows)] = (back, tokens)
            elif len(rows) > 1:
                rows.pop(which % len(rows))[0].reset()
            check(*(cache for cache, _ in rows))
        for cache, tokens in rows:
            same(feed(model, cache, [3]), alone(model, [*tokens, 3]))
