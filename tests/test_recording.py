"""One exact reading stands in for what every strategy would have read itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import batch
from transformers import PreTrainedModel

from kvlib.attachment import attach
from kvlib.caches import make_cache
from kvlib.caches.recording import Recording, recorder

SETTINGS = [
    ("full", {}),
    ("paged", {}),
    ("offload", {}),
    ("h2o", {"budget": 0.3}),
    ("h2o", {"budget": 4, "recent": 0.25, "score": "mean"}),
    ("streaming", {"budget": 0.4}),
    ("infinigen", {"alpha": "inf", "cap": 0.3, "skip_layers": 1}),
    ("infinigen", {"pool": 6, "skip_layers": 0}),
]


def record(model: PreTrainedModel, lengths: list[int]) -> Recording:
    ids, mask = batch(lengths)
    cache = recorder(model)
    with attach(model), torch.inference_mode():
        model(ids, attention_mask=mask, past_key_values=cache)
    return Recording.of(cache)


@pytest.mark.parametrize(("strategy", "knobs"), SETTINGS)
@pytest.mark.parametrize("name", ["llama", "opt", "mistral"])
def test_a_replayed_cache_is_the_one_that_read_the_prompt(
    tiny: Callable[..., PreTrainedModel], name: str, strategy: str, knobs: dict[str, object]
) -> None:
    model, lengths = tiny(name), [13, 5, 9]
    recording = record(model, lengths)
    ids, mask = batch(lengths)
    own, twin = (make_cache(strategy, model, **knobs) for _ in range(2))
    recording.replay(twin, range(3))
    twin.check()
    with attach(model), torch.inference_mode():
        own.begin(lengths)
        model(ids, attention_mask=mask, past_key_values=own)
        assert [layer.count for layer in own.layers] == [layer.count for layer in twin.layers]
        for mine, theirs in zip(own.layers, twin.layers, strict=True):
            assert torch.equal(mine.positions, theirs.positions)
        for step in range(4):
            token = torch.full((3, 1), 5 + step)
            at = torch.tensor([[n + step] for n in lengths])
            first, second = (
                model(token, past_key_values=c, position_ids=at).logits for c in (own, twin)
            )
            torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
        twin.check()


def test_rows_are_picked_and_may_repeat(tiny: Callable[..., PreTrainedModel]) -> None:
    model = tiny("llama")
    recording = record(model, [13, 5, 9])
    some, alone = make_cache("h2o", model, budget=0.5), make_cache("h2o", model, budget=0.5)
    recording.replay(some, [1, 1, 2])
    recording.replay(alone, [1])
    assert some.timeline.seen == [5, 5, 9]
    for layer, one in zip(some.layers, alone.layers, strict=True):
        assert torch.equal(layer.positions[0, :, :3], one.positions[0, :, :3])
        assert torch.equal(layer.positions[1], layer.positions[0])


def test_a_reading_serves_many_caches_and_is_not_changed(
    tiny: Callable[..., PreTrainedModel],
) -> None:
    model = tiny("llama")
    recording = record(model, [13])
    before = [layer.key.clone() for layer in recording.layers]
    kept = []
    for _ in range(2):
        cache = make_cache("h2o", model, budget=0.3)
        recording.replay(cache, [0])
        kept.append([layer.positions.clone() for layer in cache.layers])
        with attach(model), torch.inference_mode():
            model(torch.tensor([[7]]), past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert all(torch.equal(a, b.key) for a, b in zip(before, recording.layers, strict=True))


def test_only_an_empty_cache_can_be_given_a_reading(tiny: Callable[..., PreTrainedModel]) -> None:
    model = tiny("llama")
    recording = record(model, [4])
    cache = make_cache("full", model)
    recording.replay(cache, [0])
    with pytest.raises(ValueError, match="not empty"):
        recording.replay(cache, [0])
