"""InfiniGen against a slow reference: what it fetches, its sketch, what its pool drops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import batch, generate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

import kvlib
from kvlib import decode_kernels
from kvlib.caches import InfiniGen, KVCache
from kvlib.caches.timeline import Timeline
from kvlib.measure import prompt
from kvlib.models import Loaded
from kvlib.skewing import learn_model
from kvlib.tiers import DeviceOutOfMemory, Tier, Tiers

Tiny = Callable[..., PreTrainedModel]

SIZE, HEADS, GROUP = 8, 2, 3


def filled(seed: int, lengths: list[int], **knobs: Any) -> tuple[InfiniGen, Tensor, Tensor]:
    """A layer after left-padded prompts of these lengths, and their queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    layer = InfiniGen(Timeline(), Tiers(), skip_layers=0, **knobs)
    cache, width = KVCache([layer]), max(lengths)
    query = torch.randn(len(lengths), HEADS * GROUP, width, SIZE, generator=generator)
    key, value = torch.randn(2, len(lengths), HEADS, width, SIZE, generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    cache.advance(len(lengths), width, query.device, mask)
    cache.update(key, value, 0)
    layer.conclude(query, SIZE**-0.5, None)
    cache.check()
    return layer, query, key


def chosen_columns(query: Tensor, key: Tensor, skew: Tensor, rank: int) -> list[int]:
    """Columns with the largest Σ|q| + Σ|k|; query [G, n, D], key [n, D], skew [D, D], float64."""
    weight = [0.0] * SIZE
    for head in [*query, key]:
        for vector in head:
            turned = [sum(float(vector[i] * skew[i, c]) for i in range(SIZE)) for c in range(SIZE)]
            weight = [w + abs(x) for w, x in zip(weight, turned, strict=True)]
    return sorted(sorted(range(SIZE), key=lambda c: -weight[c])[:rank])


def fetched_tokens(
    foreseen: Tensor,
    keys: Tensor,
    skews: Tensor,
    columns: list[list[int]],
    alpha: float,
    cap: float,
) -> list[set[int]]:  # fmt: skip
    """For one row, each KV head's tokens: foreseen [Hkv, G, D], keys [Hkv, n, D]; plain loops."""
    n, scores, near = keys.shape[1], [], []
    for head in range(HEADS):
        picked = (skews[head])[:, columns[head]]
        for query in foreseen[head]:
            row = [float((query @ picked) @ (k @ picked)) / math.sqrt(SIZE) for k in keys[head]]
            scores.append(row)
            near.append(sum(x > max(row) - alpha for x in row))
    count = min(math.ceil(sum(near) / len(near)), max(1, math.floor(cap * n + 1e-9)))
    chosen = []
    for head in range(HEADS):
        group = scores[head * GROUP : (head + 1) * GROUP]
        best = [max(row[j] for row in group) for j in range(n)]
        chosen.append(set(sorted(range(n), key=lambda j: -best[j])[:count]))
    return chosen


@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=3),
    alpha=st.sampled_from([0.3, 1.0, 4.0, math.inf]),
    cap=st.sampled_from([0.05, 0.3, 1.0]),
    ratio=st.sampled_from([0.1, 0.5, 1.0]),
    skewed=st.booleans(),
)
@settings(max_examples=50)
def test_the_fetched_set_is_the_reference(
    seed: int, lengths: list[int], alpha: float, cap: float, ratio: float, skewed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    turns = torch.linalg.qr(torch.randn(1, HEADS, SIZE, SIZE, generator=generator))[0]
    skew = turns if skewed else None
    knobs = {"alpha": alpha, "cap": cap, "ratio": ratio, "skew": skew}
    layer, query, key = filled(seed, lengths, **knobs)
    foreseen = torch.randn(len(lengths), HEADS * GROUP, 1, SIZE, generator=generator)
    layer.anticipate(foreseen)
    assert layer.columns is not None
    assert layer.chosen is not None
    turns = turns[0].double() if skewed else torch.eye(SIZE).double().expand(HEADS, -1, -1)
    for b, n in enumerate(lengths):
        keys = key[b, :, -n:].double()
        queries = query[b, :, -n:].double().unflatten(0, (HEADS, GROUP))
        columns = [chosen_columns(queries[h], keys[h], turns[h], layer.rank) for h in range(HEADS)]
        assert layer.columns[b].tolist() == columns
        ahead = foreseen[b, :, 0].double().unflatten(0, (HEADS, GROUP))
        expected = fetched_tokens(ahead, keys, turns, columns, alpha, cap)
        count = layer.fetched_count[b]
        assert [set(layer.chosen[b, h, :count].tolist()) for h in range(HEADS)] == expected
        assert count == len(expected[0]) <= max(1, cap * n)


def test_the_view_is_what_was_fetched_and_the_new_token() -> None:
    layer, _, key = filled(0, [20, 9], alpha=1.0, cap=0.5)
    layer.anticipate(torch.randn(2, HEADS * GROUP, 1, SIZE))
    assert layer.chosen is not None
    chosen, counts = layer.chosen, layer.fetched_count
    layer.timeline.advance([1, 1], 1, key.device)
    new = torch.randn(2, HEADS, 1, SIZE)
    layer.update(new, 2 * new)
    view = layer.view
    assert view is not None
    assert view.count == [n + 1 for n in counts]
    for b, (n, pads) in enumerate(zip(counts, (0, 11), strict=True)):
        for head in range(HEADS):
            places = chosen[b, head, :n] + pads
            assert view.key[b, head, :n].equal(key[b, head, places])
            assert view.key[b, head, n].equal(new[b, head, 0])
            assert view.value[b, head, n].equal(2 * new[b, head, 0])
            assert view.position[b, head, : n + 1].tolist() == [
                *chosen[b, head, :n].tolist(), layer.timeline.seen[b] - 1
            ]  # fmt: skip


@pytest.mark.parametrize("policy", ["counter", "lru", "fifo"])
def test_a_limited_pool_keeps_what_its_policy_says(policy: str) -> None:
    layer, _, _ = filled(0, [10], alpha=math.inf, cap=0.3, pool=10, policy=policy)
    uses = dict.fromkeys(range(10), 0.0)
    last = dict.fromkeys(range(10), 1)
    for step in range(6):
        now = 10 + step
        layer.anticipate(torch.randn(1, HEADS * GROUP, 1, SIZE))
        assert layer.chosen is not None
        fetched = layer.positions[0, 0, layer.chosen[0, 0]].tolist()
        layer.timeline.advance([1], 1, layer.device)
        new = torch.randn(1, HEADS, 1, SIZE)
        layer.update(new, new)
        layer.conclude(torch.randn(1, HEADS * GROUP, 1, SIZE), 1.0, None)
        for p in fetched:
            uses[p], last[p] = uses[p] + 1, now - 8
        old = list(uses)
        order: dict[str, Callable[[int], tuple[float, int]]] = {
            "counter": lambda p: (uses[p], p),
            "lru": lambda p: (last[p], p),
            "fifo": lambda p: (0, p),
        }
        uses[now], last[now] = sum(uses.values()) / len(uses), now - 8
        gone = min(old, key=order[policy])
        del uses[gone], last[gone]
        assert sorted(layer.positions[0, 0].tolist()) == sorted(uses)
        layer.check()


def test_skipped_layers_are_fetched_whole_and_have_no_sketch(tiny: Tiny) -> None:
    model = tiny("llama")
    with kvlib.attach(model):
        cache = kvlib.make_cache("infinigen", model, skip_layers=2, cap=0.25, alpha="inf")
        generate(model, *batch([40]), 3, past_key_values=cache)
        assert [("sketch" in layer.slots) for layer in cache.layers] == [False, False, True]
        moves = cache.tiers.link.trace[-3:]  # layers 1 and 2 of the last step, then 0 of the next
        assert [move.layer for move in moves] == [1, 2, 0]
        token = 2 * 2 * 8 * 4
        assert [move.nbytes // token for move in moves] == [41, 10, 42]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha": 0}, "alpha"), ({"alpha": "wide"}, "alpha"), ({"alpha": math.nan}, "alpha"),
        ({"cap": 0}, "cap"), ({"cap": 1.5}, "cap"), ({"ratio": 0}, "ratio"),
        ({"skip_layers": -1}, "skip_layers"), ({"policy": "random"}, "policy"),
        ({"pool": 0}, "budget"),
    ],
)  # fmt: skip
def test_knobs_out_of_range(tiny: Tiny, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvlib.make_cache("infinigen", tiny("llama"), **wrong)


@pytest.mark.parametrize("shape", [(3, 2, 16, 16), (3, 4, 8, 8), (2, 2, 8, 8)])
def test_a_skew_of_another_model_is_refused(tiny: Tiny, shape: tuple[int, ...]) -> None:
    model = tiny("llama")  # 3 layers, 2 KV heads of 8
    with pytest.raises(ValueError, match="another model"):
        kvlib.make_cache("infinigen", model, skew=torch.zeros(shape))


def test_a_full_host_refuses_before_anything_is_lost(tiny: Tiny) -> None:
    model = tiny("llama")
    tiers = Tiers(host=Tier("host", capacity=30_000))
    with kvlib.attach(model):
        cache = kvlib.make_cache("infinigen", model, tiers=tiers)
        with pytest.raises(DeviceOutOfMemory, match="host memory is full"):
            model(batch([100])[0], past_key_values=cache)
        cache.reset()
        assert tiers.host.used == 0
        model(batch([20])[0], past_key_values=cache)
        cache.check()


@pytest.mark.slow
def test_speculation_finds_most_of_the_attention(
    smollm2: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundled model, real text: the fetched 13 % cover far more than recent or random tokens."""
    model, tokens = smollm2.model, 1024
    ids = prompt(smollm2.tokenizer, tokens + 3, 0)
    for skew in (None, learn_model(model, prompt(smollm2.tokenizer, 512, 9))):
        with torch.inference_mode(), kvlib.attach(model):
            cache = kvlib.make_cache("infinigen", model, alpha=math.inf, cap=0.13, skew=skew)
            model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
            shares = covered(model, cache, ids[:, tokens:], monkeypatch)
        ours, best, recent = (sum(s[i] for s in shares) / len(shares) for i in range(3))
        assert ours > 0.8
        assert ours > 0.9 * best
        assert ours > recent + 0.3


def covered(
    model: Any, cache: KVCache, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, float, float]]:
    """Share of each speculated layer's true attention to past tokens: fetched, best, recent."""
    shares, running = [], iter(())
    plain = decode_kernels.decode

    def spy(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        layer = next(running)
        if layer.chosen is not None:
            stored = layer.slots["key"][:, :, : max(layer.count)]
            grouped = query.reshape(1, key.shape[1], -1, query.shape[3])
            past = torch.softmax(grouped @ stored.mT * rest[1], -1)[..., :-1]
            share = (past / past.sum(-1, keepdim=True)).mean(2)  # [1, Hkv, S - 1]
            n = layer.chosen.shape[-1]
            ways = (share.gather(2, layer.chosen), share.topk(n).values, share[..., -n:])
            shares.append(tuple(way.sum(-1).mean().item() for way in ways))
        return plain(query, key, *rest)

    monkeypatch.setattr(decode_kernels, "decode", spy)
    for t in range(ids.shape[1]):
        running = iter(cache.layers)
        model(ids[:, t : t + 1], past_key_values=cache, logits_to_keep=1)
    monkeypatch.setattr(decode_kernels, "decode", plain)
    return shares


def test_a_skew_changes_nothing_once_all_is_fetched(tiny: Tiny) -> None:
    model = tiny("llama")
    skew = learn_model(model, batch([60])[0])
    ids, mask = batch([30, 11])
    answers = []
    with kvlib.attach(model):
        for knobs in ({"skew": None}, {"skew": skew}):
            everything = {"alpha": "inf", "cap": 1.0, "skip_layers": 0, **knobs}
            cache = kvlib.make_cache("infinigen", model, **everything)
            answers.append(generate(model, ids, mask, 8, past_key_values=cache).tolist())
            cache.check()
    assert answers[0] == answers[1]
