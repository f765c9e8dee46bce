"""Continuous batching: whatever the company, each request gets what it would get alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from kvlib.caches import KVCache
from kvlib.caches.blocks import PoolExhausted
from kvlib.caches.paged import PagedCache
from kvlib.engines import LocalEngine, Request, Result
from kvlib.tiers import DeviceOutOfMemory, Tier, Tiers

Tiny = Callable[..., PreTrainedModel]
EOS = 2
CHUNKS = st.integers(1, 30) | st.integers(30, 150)  # for parts of a prompt, for several at once


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Callable[[Request], list[int]]:
    """What plain transformers generates for a greedy request that stops at EOS."""

    @cache
    def make(prompt: tuple[int, ...], new: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
        )
        found: list[int] = out[0, len(prompt) :].tolist()
        return found

    return lambda request: make(tuple(request.prompt), request.max_new_tokens)


def text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (length,), generator=generator).tolist()


@st.composite
def greedy(draw: st.DrawFn, longest: int = 24) -> list[Request]:
    """A few requests at once or some milliseconds apart, in any order of arrival."""
    arrival = draw(st.sampled_from([st.just(0.0), st.floats(0, 0.01)]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=6))
    return [
        Request(text(n, seed=n % 5), draw(st.integers(1, 9)), draw(arrival), stop=(EOS,))
        for n in lengths
    ]


def check_times(results: Sequence[Result], requests: Sequence[Request]) -> None:
    assert [result.request for result in results] == list(range(len(requests)))
    for result, request in zip(results, requests, strict=True):
        assert len(result.stamps) == len(result.tokens)
        assert list(result.stamps) == sorted(result.stamps)
        assert result.ttft > 0
        assert result.ttft + sum(result.itl) == pytest.approx(result.e2el)
        stopped = result.tokens[-1] in request.stop
        assert result.finished == ("stop" if stopped else "length")


def check_left(engine: LocalEngine) -> None:
    """The model is as it was, and nothing holds a block."""
    assert engine.model.config._attn_implementation != "kvlib"
    if isinstance(engine.blank, PagedCache):
        assert engine.blank.pool.used == 0
        engine.blank.pool.check([])


@settings(max_examples=10)
@given(requests=greedy(), chunk=CHUNKS, max_batch=st.integers(1, 4))
@pytest.mark.parametrize("strategy", ["full", "offload"])
def test_exact_strategies_give_what_transformers_gives(
    model: PreTrainedModel,
    plain: Callable[[Request], list[int]],
    strategy: str,
    requests: list[Request],
    chunk: int,
    max_batch: int,
) -> None:
    engine = LocalEngine(model, strategy, chunk=chunk, max_batch=max_batch)
    results = engine.run(requests)
    assert [result.tokens for result in results] == [plain(request) for request in requests]
    assert not any(result.preemptions for result in results)
    check_times(results, requests)
    check_left(engine)


@settings(max_examples=15)
@given(
    requests=greedy(),
    chunk=CHUNKS,
    max_batch=st.integers(1, 6),
    blocks=st.integers(8, 16),  # a request needs up to 8
    share=st.booleans(),
)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_paged_loses_nothing_in_a_small_pool(
    model: PreTrainedModel,
    plain: Callable[[Request], list[int]],
    preemption: str,
    requests: list[Request],
    chunk: int,
    max_batch: int,
    blocks: int,
    share: bool,
) -> None:
    engine = LocalEngine(
        model, "paged", chunk=chunk, max_batch=max_batch, preemption=preemption,
        share_prefixes=share, block=4, blocks=blocks,
    )  # fmt: skip
    for _ in range(1 + share):  # the second run finds what the first one left
        results = engine.run(requests)
        assert [result.tokens for result in results] == [plain(request) for request in requests]
        check_times(results, requests)
        check_left(engine)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_latest_arrival_is_preempted_and_comes_back(
    model: PreTrainedModel, plain: Callable[[Request], list[int]], preemption: str
) -> None:
    requests = [Request(text(7, seed), 20, stop=(EOS,)) for seed in (3, 4, 5)]
    engine = LocalEngine(model, "paged", preemption=preemption, block=4, blocks=9)
    results = engine.run(requests)
    assert [result.tokens for result in results] == [plain(request) for request in requests]
    assert results[0].preemptions == 0
    assert sum(result.preemptions for result in results) > 0
    check_left(engine)


LOSSY: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {"budget": 0.4}),
    ("h2o", {"budget": 6, "evict": "chunk"}),
    ("streaming", {"budget": 0.5, "sinks": 1}),
    ("infinigen", {"cap": 0.4, "skip_layers": 1}),
]


@settings(max_examples=6)
@given(requests=greedy(), chunk=CHUNKS, max_batch=st.integers(2, 4))
@pytest.mark.parametrize(("strategy", "knobs"), LOSSY)
def test_other_strategies_give_what_the_request_gets_alone(
    model: PreTrainedModel,
    strategy: str,
    knobs: dict[str, Any],
    requests: list[Request],
    chunk: int,
    max_batch: int,
) -> None:
    engine = LocalEngine(model, strategy, chunk=chunk, max_batch=max_batch, **knobs)
    results = engine.run(requests)
    assert [r.tokens for r in results] == [engine.run([r])[0].tokens for r in requests]
    check_times(results, requests)
    check_left(engine)


class Watched(LocalEngine):
    """Notes the lengths of the texts that each forward begins to read."""

    def run(self, requests: Sequence[Request]) -> list[Result]:
        self.read: list[list[int]] = []
        return super().run(requests)

    def forward(self, cache: KVCache, ids: Sequence[Sequence[int]]) -> Tensor:
        if not cache.timeline.seen:
            self.read.append([len(row) for row in ids])
        return super().forward(cache, ids)


LENGTHS = [5, 11, 1, 8, 3]  # of prompts that are read together


@pytest.mark.parametrize("strategy", ["full", "paged", "offload"])
def test_short_prompts_are_read_together(
    model: PreTrainedModel, plain: Callable[[Request], list[int]], strategy: str
) -> None:
    requests = [Request(text(n, seed=n), 7, stop=(EOS,)) for n in LENGTHS]
    engine = Watched(model, strategy, chunk=1000)
    results = engine.run(requests)
    assert engine.read == [LENGTHS]
    assert [result.tokens for result in results] == [plain(request) for request in requests]
    assert len({result.stamps[0] for result in results}) == 1
    check_times(results, requests)
    check_left(engine)


@pytest.mark.parametrize(("strategy", "knobs"), LOSSY)
def test_prompts_read_together_are_evicted_as_alone(
    model: PreTrainedModel, strategy: str, knobs: dict[str, Any]
) -> None:
    requests = [Request(text(n, seed=n), 7) for n in LENGTHS]
    engine = Watched(model, strategy, chunk=1000, **knobs)
    results = engine.run(requests)
    assert engine.read == [LENGTHS]
    assert [r.tokens for r in results] == [engine.run([r])[0].tokens for r in requests]


@pytest.mark.parametrize(
    ("chunk", "more", "read"),
    [
        (55, {}, [LENGTHS]),  # five rows of 11, pads included
        (54, {}, [LENGTHS[:4], LENGTHS[4:]]),
        (22, {}, [[5, 11], [1, 8], [3]]),
        (10, {}, [[5], [10], [1], [8], [3]]),  # a longer one is read in parts, by itself
        (55, {"max_batch": 3}, [LENGTHS[:3], [8], [3]]),  # when one of those before has ended
        (55, {"share_prefixes": True}, [[n] for n in LENGTHS]),  # each begins elsewhere
        (55, {"blocks": 8}, [[5, 11, 1, 8], [3]]),
    ],
)
def test_who_is_read_together(
    model: PreTrainedModel, chunk: int, more: dict[str, Any], read: list[list[int]]
) -> None:
    """As many as their pads and all fit into a chunk, the batch and the pool."""
    requests = [Request(text(n, seed=n), 2 + place) for place, n in enumerate(LENGTHS)]
    engine = Watched(model, "paged", chunk=chunk, **{"block": 4, "blocks": 40} | more)
    results = engine.run(requests)
    assert engine.read == read
    assert [len(result.tokens) for result in results] == [r.max_new_tokens for r in requests]
    check_left(engine)


def test_what_is_drawn_is_often_read_together(model: PreTrainedModel) -> None:
    """About as many examples as the tests above draw in all."""
    most: list[int] = []

    @settings(max_examples=50, derandomize=True, database=None)
    @given(requests=greedy(), chunk=CHUNKS, max_batch=st.integers(1, 4))
    def look(requests: list[Request], chunk: int, max_batch: int) -> None:
        engine = Watched(model, "full", chunk=chunk, max_batch=max_batch)
        engine.run(requests)
        most.append(max(len(lengths) for lengths in engine.read))

    look()
    assert sum(rows > 1 for rows in most) >= 5


USAGE: list[tuple[str, dict[str, Any]]] = [
    ("full", {}), ("paged", {"block": 4, "blocks": 40}), ("offload", {}), *LOSSY
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "knobs"), USAGE)
def test_usage_is_recorded_to_the_end(
    model: PreTrainedModel, strategy: str, knobs: dict[str, Any]
) -> None:
    requests = [Request(text(9 + n, seed=n), 4 + 2 * n) for n in range(3)]
    engine = LocalEngine(model, strategy, chunk=1000, max_batch=2, **knobs)
    for _ in range(2):  # it is the last run's alone
        engine.run(requests)
        usage = engine.usage
        assert all(0 <= moment.used <= moment.held for moment in usage)
        assert [m.at for m in usage] == sorted(m.at for m in usage)
        assert max(moment.used for moment in usage) > 0
        assert max(moment.running for moment in usage) == 2
        assert max(moment.waiting for moment in usage) == 1
        assert (max(m.host for m in usage) > 0) == (strategy in ("offload", "infinigen"))
        last = usage[-1]
        assert (last.running, last.waiting, last.used, last.held, last.host) == (0, 0, 0, 0, 0)
    if strategy == "paged":  # when the first one ends, after three steps of both
        a_token = 2 * 3 * 2 * 8 * 4
        assert a_token * (9 + 3 + 10 + 3) in {moment.used for moment in usage}


def test_what_a_pool_reserves_and_finds_again(model: PreTrainedModel) -> None:
    block = 4 * 2 * 3 * 2 * 8 * 4  # bytes of four tokens in three layers
    engine = LocalEngine(model, "paged", share_prefixes=True, block=4, blocks=40)
    assert engine.reserved == 40 * block
    assert LocalEngine(model, "full").reserved == 0
    same, other = Request(text(17, seed=1), 3), Request(text(17, seed=2), 3)
    first = engine.run([same, other])
    assert engine.prefix_hits == 0
    assert max(moment.held for moment in engine.usage) <= engine.reserved
    again = engine.run([same, Request([*same.prompt[:9], 3, 4], 3)])
    assert engine.prefix_hits == 16 + 8  # whole blocks, and the last token is always read
    assert again[0].tokens == first[0].tokens
    engine.run([Request(text(17, seed=5), 1)])
    assert engine.prefix_hits == 0


@pytest.mark.parametrize(
    ("strategy", "knobs"), [("full", {}), ("paged", {"block": 4, "blocks": 12})]
)
def test_company_does_not_change_a_draw(
    model: PreTrainedModel, strategy: str, knobs: dict[str, Any]
) -> None:
    requests = [
        Request(text(5, seed=1), 12, temperature=warm, seed=seed)
        for warm, seed in [(1.0, 1), (0.0, 1), (1.0, 2), (1.0, 1), (2.5, 1)]
    ]
    engine = LocalEngine(model, strategy, max_batch=4, **knobs)
    together = [result.tokens for result in engine.run(requests)]
    assert together == [engine.run([request])[0].tokens for request in requests]
    assert together[0] == together[3]
    assert len({tuple(tokens) for tokens in together}) == 4


def test_stop_tokens_and_the_last_token(model: PreTrainedModel) -> None:
    engine = LocalEngine(model, "full")
    prompt = text(9, seed=2)
    whole = engine.run([Request(prompt, 8)])[0]
    assert (len(whole.tokens), whole.finished) == (8, "length")
    stop = whole.tokens[3]
    cut = whole.tokens.index(stop) + 1
    stopped, one, single = engine.run(
        [Request(prompt, 8, stop=(127, stop)), Request(prompt, 1), Request([5], 3)]
    )
    assert (stopped.tokens, stopped.finished) == (whole.tokens[:cut], "stop")
    assert (one.tokens, one.finished) == (whole.tokens[:1], "length")
    assert math.isnan(one.tpot)
    assert one.itl == ()
    assert one.ttft == one.e2el
    assert len(single.tokens) == 3
    assert whole.tpot == pytest.approx(sum(whole.itl) / 7)


def test_arrivals_are_waited_for(model: PreTrainedModel) -> None:
    requests = [Request(text(5, seed), 3, arrival) for seed, arrival in [(1, 0.3), (2, 0.0)]]
    late, early = LocalEngine(model, "full").run(requests)
    assert late.stamps[0] > 0.3
    assert early.arrival == 0.0
    assert late.ttft == pytest.approx(late.stamps[0] - 0.3)
    assert LocalEngine(model, "full").run([]) == []


def test_a_long_prompt_does_not_stop_the_others(model: PreTrainedModel) -> None:
    """Its chunks alternate with decode steps, and its tokens come only after them."""
    short, long = LocalEngine(model, "full", chunk=8).run(
        [Request(text(4, seed=1), 10), Request(text(80, seed=2), 2)]
    )
    assert short.stamps[-1] < long.stamps[0]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [3, -1]}, "-1"),
        ({"prompt": [1.5]}, "whole numbers"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"arrival": -1.0}, "arrival"),
        ({"arrival": math.inf}, "arrival"),
        ({"temperature": -0.1}, "greedy"),
        ({"temperature": math.nan}, "greedy"),
        ({"seed": -1}, "seed"),
        ({"stop": (-2,)}, "stop"),
    ],
)
def test_bad_requests(wrong: dict[str, Any], match: str) -> None:
    good: dict[str, Any] = {"prompt": [3], "max_new_tokens": 1}
    with pytest.raises(ValueError, match=match):
        Request(**(good | wrong))


def test_requests_and_parameters_that_cannot_be_served(model: PreTrainedModel) -> None:
    engine = LocalEngine(model, "full")
    with pytest.raises(ValueError, match="request 1: 4097 tokens, the model has 4096"):
        engine.run([Request([3], 4096), Request([3, 4], 4096)])
    with pytest.raises(ValueError, match="vocabulary ends at token 127"):
        engine.run([Request([128], 1)])
    for knobs, match in [
        ({"max_batch": 0}, "max_batch"),
        ({"chunk": 0}, "chunk"),
        ({"preemption": "kill"}, "recompute"),
        ({"share_prefixes": True}, "paged"),
        ({"budget": 3}, "no parameter budget"),
    ]:
        with pytest.raises(ValueError, match=match):
            LocalEngine(model, "full", **knobs)
    check_left(engine)


@pytest.mark.parametrize(("prompt", "new"), [(40, 2), (6, 30)])
def test_what_is_longer_than_the_pool_is_refused_before_the_start(
    model: PreTrainedModel, prompt: int, new: int
) -> None:
    engine = LocalEngine(model, "paged", block=4, blocks=8)
    small, large = Request(text(4, seed=1), 3), Request(text(prompt, seed=2), new)
    with pytest.raises(PoolExhausted, match="request 1 is longer than the pool"):
        engine.run([small, large])
    assert not engine.usage
    assert len(engine.run([Request(text(6, seed=2), 27)])[0].tokens) == 27  # 32 are fed
    check_left(engine)
    assert len(engine.run([small])[0].tokens) == 3


def test_what_outgrows_the_device_alone_is_named(model: PreTrainedModel) -> None:
    engine = LocalEngine(model, "full", tiers=Tiers(device=Tier("device", 1000)))
    with pytest.raises(DeviceOutOfMemory, match=r"were requests \[0\]: shorten"):
        engine.run([Request(text(40, seed=1), 2)])


def test_preemption_counts_the_host_and_does_without_it_where_it_is_full(
    model: PreTrainedModel,
) -> None:
    requests = [Request(text(8, seed=n), 12) for n in range(3)]
    alone = [LocalEngine(model, "paged", block=4).run([one])[0].tokens for one in requests]
    for room, swaps in ((None, True), (1, False)):
        tiers = Tiers(host=Tier("host", room))
        engine = LocalEngine(model, "paged", tiers=tiers, block=4, blocks=8)
        results = engine.run(requests)
        assert [result.tokens for result in results] == alone
        assert sum(result.preemptions for result in results)
        assert (max(moment.host for moment in engine.usage) > 0) == swaps
        check_left(engine)


@pytest.mark.parametrize(("strategy", "knobs"), [("full", {}), *LOSSY])
def test_a_small_device_takes_fewer_at_a_time(
    model: PreTrainedModel, strategy: str, knobs: dict[str, Any]
) -> None:
    """Contiguous caches cannot be preempted: nobody may come who will not fit to the end."""
    requests = [Request(text(40 + 9 * (n % 4), seed=n), 12) for n in range(6)]

    def run(capacity: int | None, max_batch: int) -> tuple[list[list[int]], int]:
        """The tokens, and the highest use of the device."""
        tier = Tier("device", capacity)
        engine = LocalEngine(model, strategy, max_batch=max_batch, tiers=Tiers(tier), **knobs)
        tokens = [result.tokens for result in engine.run(requests)]
        assert tier.used == 0
        return tokens, tier.peak

    expected, most = run(None, 6)
    _, least = run(None, 1)
    for capacity in (least, (least + most) // 2):
        assert run(capacity, 6)[0] == expected
    with pytest.raises(DeviceOutOfMemory, match=r"were requests \[\d\]"):
        run(least - 1, 1)
    assert model.config._attn_implementation != "kvlib"


@pytest.mark.parametrize("strategy", ["full", "paged", "h2o"])
def test_positions_are_a_row_s_own_and_not_the_run_s(tiny: Tiny, strategy: str) -> None:
    """A run of any length: the model's positions limit each request, not all together."""
    model = tiny("llama", max_position_embeddings=24)
    requests = [Request(text(4, seed=n), 10 + n % 7) for n in range(8)]
    results = LocalEngine(model, strategy, max_batch=3).run(requests)
    assert [len(r.tokens) for r in results] == [r.max_new_tokens for r in requests]
