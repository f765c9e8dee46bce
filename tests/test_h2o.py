"""H2O against a reference in plain loops and float64, and its properties under hypothesis."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kvlib.attention import Binding, attention_forward
from kvlib.caches import Budget, KVCache
from kvlib.caches.h2o import H2O
from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers, storage_bytes

SIZE = 8
STATE = ("position", "score")


def run(
    inputs: tuple[Tensor, ...],
    lengths: list[int],
    decode: int,
    chunk: int | None = None,
    kind: type[H2O] = H2O,
    **knobs: Any,
) -> KVCache:
    """Feed left-padded prompts of these lengths, then `decode` tokens; check after every step."""
    cache = KVCache([kind(Timeline(), Tiers(), **knobs)])
    module: Any = nn.Module()
    module.layer_idx, module.kv_binding = 0, Binding(cache)
    width = max(lengths)
    mask = torch.ones(len(lengths), width + decode, dtype=torch.long)
    mask[:, :width] = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    cache.begin(lengths)
    starts = [*range(0, width, chunk or width), *range(width, width + decode), width + decode]
    for first, last in itertools.pairwise(starts):
        query, key, value = (t[:, :, first:last] for t in inputs)
        cache.advance(len(lengths), last - first, query.device, mask[:, :last])
        stored = cache.update(key, value, 0)
        attention_forward(module, query, *stored, None, SIZE**-0.5)
        cache.check()
    return cache


def random_inputs(
    seed: int, batch: int, kv_heads: int, group: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, kv_heads * group, tokens, SIZE, generator=generator) * 3
    key, value = torch.randn(2, batch, kv_heads, tokens, SIZE, generator=generator)
    return query, key, value


def reference(
    query: Tensor,
    key: Tensor,
    prompt: int,
    budget: float,
    recent: float,
    score: str,
    chunk: int | None = None,
) -> list[int]:
    """Kept positions of one KV head: query [G, N, D], key [N, D], of which `prompt` is announced.

    It evicts at the prompt's end, and before that after every `chunk` tokens.
    """
    scores: dict[int, float] = {}

    def attend(now: int) -> None:
        scores.setdefault(now, 0.0)
        for head in query:
            logits = {j: float(head[now] @ key[j]) / math.sqrt(SIZE) for j in scores if j <= now}
            top = max(logits.values())
            total = sum(math.exp(x - top) for x in logits.values())
            for j, x in logits.items():
                scores[j] += math.exp(x - top) / total

    def evict(seen: int) -> None:
        keep = Budget(budget).tokens(max(seen, prompt))
        window = seen - math.floor(recent * keep + 0.5)
        while len(scores) > keep:
            old = [j for j in scores if j < window]
            del scores[min(old, key=lambda j: scores[j] / (seen - j if score == "mean" else 1))]

    for now in range(len(key)):
        attend(now)
        if now >= prompt - 1 or (chunk and (now + 1) % chunk == 0):
            evict(now + 1)
    return sorted(scores)


@given(
    seed=st.integers(0, 2**16),
    prompt=st.integers(1, 24),
    decode=st.integers(0, 8),
    group=st.sampled_from([1, 3]),
    budget=st.one_of(st.floats(0.05, 1.0), st.integers(1, 30)),
    recent=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    score=st.sampled_from(["sum", "mean"]),
    kernel=st.sampled_from(["flash", "eager"]),
)
@settings(max_examples=60, deadline=None)
def test_kept_positions_are_the_reference(
    seed: int, prompt: int, decode: int, group: int, budget: float, recent: float, score: str,
    kernel: str,
) -> None:  # fmt: skip
    inputs = random_inputs(seed, 1, 2, group, prompt + decode)
    knobs = {"budget": budget, "recent": recent, "score": score, "kernel": kernel}
    layer = run(inputs, [prompt], decode, **knobs).layers[0]
    queries = inputs[0].double().unflatten(1, (2, group))
    for head in range(2):
        kept = sorted(layer.positions[0, head].tolist())
        expected = reference(
            queries[0, head], inputs[1][0, head].double(), prompt, budget, recent, score
        )
        assert kept == expected


@given(
    seed=st.integers(0, 2**16),
    prompt=st.integers(1, 40),
    chunk=st.integers(1, 45),
    decode=st.integers(0, 6),
    group=st.sampled_from([1, 3]),
    budget=st.one_of(st.floats(0.05, 1.0), st.integers(1, 40)),
    recent=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    score=st.sampled_from(["sum", "mean"]),
    kernel=st.sampled_from(["flash", "eager"]),
)
@settings(max_examples=80, deadline=None)
def test_what_stays_of_chunks_is_the_reference(
    seed: int, prompt: int, chunk: int, decode: int, group: int, budget: float, recent: float,
    score: str, kernel: str,
) -> None:  # fmt: skip
    inputs = random_inputs(seed, 1, 2, group, prompt + decode)
    knobs = {"budget": budget, "recent": recent, "score": score, "kernel": kernel}
    layer = run(inputs, [prompt], decode, chunk, evict="chunk", **knobs).layers[0]
    queries = inputs[0].double().unflatten(1, (2, group))
    for head in range(2):
        expected = reference(
            queries[0, head], inputs[1][0, head].double(), prompt, budget, recent, score, chunk
        )
        assert sorted(layer.positions[0, head].tolist()) == expected


@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    decode=st.integers(0, 10),
    chunk=st.integers(1, 45),
    budget=st.one_of(st.floats(0.02, 1.0), st.integers(1, 60)),
    evict=st.sampled_from(["end", "chunk"]),
    kernel=st.sampled_from(["flash", "eager"]),
)
@settings(max_examples=80, deadline=None)
def test_counts_recents_and_storage(
    seed: int, lengths: list[int], decode: int, chunk: int, budget: float, evict: str, kernel: str
) -> None:
    inputs = random_inputs(seed, len(lengths), 2, 2, max(lengths) + decode)
    cache = run(inputs, lengths, decode, chunk, budget=budget, evict=evict, kernel=kernel)
    layer = cache.layers[0]
    assert cache.timeline.seen == [n + decode for n in lengths]
    assert layer.count == [Budget(budget).tokens(n + decode) for n in lengths]
    assert layer.slots["key"].shape[1] == 2  # KV heads, never repeated to query heads
    slots = layer.slots["key"].shape[2]
    assert max(layer.count) <= slots <= max(layer.count) + layer.slack + 1
    assert layer.nbytes()["kv"] == 2 * 4 * len(lengths) * 2 * slots * SIZE
    assert cache.tiers.device.used == storage_bytes(layer.slots.values())


@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=3),
    chunk=st.integers(1, 20),
)
@settings(max_examples=40, deadline=None)
def test_chunks_evicted_at_the_end_keep_what_one_pass_keeps(
    seed: int, lengths: list[int], chunk: int
) -> None:
    inputs = random_inputs(seed, len(lengths), 2, 2, max(lengths))
    once = run(inputs, lengths, 0, budget=0.4).layers[0]
    parts = run(inputs, lengths, 0, chunk, budget=0.4).layers[0]
    eager = run(inputs, lengths, 0, budget=0.4, kernel="eager").layers[0]
    for other in (parts, eager):
        assert once.positions.sort(-1).values.equal(other.positions.sort(-1).values)


def test_mass_is_conserved_while_nothing_is_evicted() -> None:
    inputs = random_inputs(0, 2, 2, 3, 30)
    layer = run(inputs, [20, 13], 10, chunk=7, budget=1.0).layers[0]
    score = layer.slots["score"][:, :, : max(layer.count)]
    totals = score.masked_fill(layer.empties(), 0).sum(-1)
    torch.testing.assert_close(totals, torch.tensor([[90.0, 90.0], [69.0, 69.0]]))


class Recorder(H2O):
    """Notes what each step evicts, and that what stays keeps the score that it had."""

    def reset(self) -> None:
        super().reset()
        self.evicted: dict[tuple[int, int], float] = {}  # (row, head) -> scores gone so far

    def scores(self, row: int, head: int) -> dict[int, float]:
        """Position -> score of what this row's head stores."""
        n = self.count[row]
        position, score = (self.slots[name][row, head, :n].tolist() for name in STATE)
        return dict(zip(position, score, strict=True))

    def observe(self, query: Tensor, scale: float, mass: Tensor | None) -> None:
        assert mass is not None
        heads = list(itertools.product(range(mass.shape[0]), range(mass.shape[1])))
        before = {place: self.scores(*place) for place in heads}
        got = {(b, h): mass[b, h, : self.count[b]].tolist() for b, h in heads}
        super().observe(query, scale, mass)
        for place, old in before.items():
            full = {p: s + m for (p, s), m in zip(old.items(), got[place], strict=True)}
            left = self.scores(*place)
            assert left == pytest.approx({p: full[p] for p in left}, rel=1e-5, abs=1e-6)
            gone = sum(full[p] for p in full.keys() - left.keys())
            self.evicted[place] = self.evicted.get(place, 0.0) + gone


@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    decode=st.integers(0, 8),
    chunk=st.integers(1, 35),
    budget=st.one_of(st.floats(0.02, 1.0), st.integers(1, 20)),
    score=st.sampled_from(["sum", "mean"]),
    evict=st.sampled_from(["end", "chunk"]),
)
@settings(max_examples=30, deadline=None)
def test_each_slot_is_one_token_s_own_and_no_attention_is_lost(
    seed: int, lengths: list[int], decode: int, chunk: int, budget: float, score: str, evict: str
) -> None:
    inputs = random_inputs(seed, len(lengths), 2, 3, max(lengths) + decode)
    knobs = {"budget": budget, "score": score, "evict": evict}
    layer = run(inputs, lengths, decode, chunk, kind=Recorder, **knobs).layers[0]
    assert isinstance(layer, Recorder)
    for b, n in enumerate(lengths):
        pads, stored = max(lengths) - n, layer.count[b]
        for head in range(2):
            columns = layer.positions[b, head, :stored].long() + pads
            for name, fed in (("key", inputs[1]), ("value", inputs[2])):
                assert layer.slots[name][b, head, :stored].equal(fed[b, head, columns])
            kept = sum(layer.scores(b, head).values())
            assert kept + layer.evicted[b, head] == pytest.approx(3 * (n + decode), rel=1e-4)


def test_steady_decode_writes_in_place() -> None:
    """At an absolute budget no storage is made anew: a step overwrites the evicted slot."""
    inputs = random_inputs(0, 1, 2, 2, 60)
    cache = run(tuple(t[:, :, :30] for t in inputs), [30], 0, budget=10)
    module: Any = nn.Module()
    module.layer_idx, module.kv_binding = 0, Binding(cache)
    layer = cache.layers[0]
    places = {name: t.data_ptr() for name, t in layer.slots.items()}
    before = layer.slots["key"][:, :, :10].clone()
    for now in range(30, 60):
        query, key, value = (t[:, :, now : now + 1] for t in inputs)
        cache.advance(1, 1, query.device)
        attention_forward(module, query, *cache.update(key, value, 0), None, SIZE**-0.5)
        cache.check()
        assert {name: t.data_ptr() for name, t in layer.slots.items()} == places
        changed = (layer.slots["key"][:, :, :10] != before).any(-1).sum(-1)
        assert changed.max() <= 1  # one slot a head
        before = layer.slots["key"][:, :, :10].clone()


@pytest.mark.parametrize("prompt", [1, 2])
@pytest.mark.parametrize("budget", [0.01, 1, 2, 50])
def test_short_prompts_keep_at_least_one_token(prompt: int, budget: float) -> None:
    layer = run(random_inputs(0, 1, 1, 1, prompt + 3), [prompt], 3, budget=budget).layers[0]
    assert layer.count == [Budget(budget).tokens(prompt + 3)]
    assert layer.count[0] >= 1


@pytest.mark.parametrize("budget", [0, -1, 0.0, -0.5, 1.5, math.nan, math.inf, True, "abc", "2.0"])
def test_impossible_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget(budget)
