"""Rows that come and go: what is refused, what is left whole, and what is not carried over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import batch, generate
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kvlib
from kvlib import kernels
from kvlib.caches.pool import Pool
from kvlib.tiers import DeviceOutOfMemory, Tier, Tiers

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def model(tiny: Tiny) -> PreTrainedModel:
    return tiny("llama")


def filled(model: PreTrainedModel, tokens: int, strategy: str = "full", **knobs: Any) -> Any:
    cache = kvlib.make_cache(strategy, model, **knobs)
    model(batch([tokens])[0], past_key_values=cache)
    return cache


@pytest.mark.parametrize("policy", ["counter", "lru", "fifo"])
def test_rows_do_not_count_for_each_other_s_pool(model: PreTrainedModel, policy: str) -> None:
    """Rows that fetch unequal numbers of tokens, in a pool that evicts every step."""
    knobs = {"pool": 16, "skip_layers": 1, "cap": 0.5, "alpha": 1.0, "policy": policy}
    lengths = [10, 40]
    ids, mask = batch(lengths)
    with kvlib.attach(model):
        together = kvlib.make_cache("infinigen", model, **knobs)
        rows = generate(model, ids, mask, 30, past_key_values=together)
        for b, n in enumerate(lengths):
            alone = kvlib.make_cache("infinigen", model, **knobs)
            row = slice(b, b + 1)
            own = generate(model, ids[row, -n:], mask[row, -n:], 30, past_key_values=alone)
            assert own[0].tolist() == rows[b].tolist()
            for ours, theirs in zip(together.layers, alone.layers, strict=True):
                kept = ours.positions[b, :, : ours.count[b]].sort(-1).values
                assert kept.equal(theirs.positions[0].sort(-1).values)


def test_a_row_s_past_is_its_own_however_many_came_and_went(tiny: Tiny) -> None:
    """The longest row counts against the model's positions, not all columns ever fed."""
    model = tiny("llama", max_position_embeddings=32)
    with torch.no_grad(), kvlib.attach(model):
        cache = filled(model, 10)
        for _ in range(8):
            cache.insert(filled(model, 10))
            for _ in range(3):
                seen = torch.tensor(cache.timeline.seen)[:, None]
                ids = torch.ones_like(seen)
                model(ids, position_ids=seen, past_key_values=cache)
            cache.release(0)
        assert cache.timeline.seen == [13]
        assert cache.get_seq_length() == 13
        cache.check()


def test_what_cannot_be_joined_changes_nothing(model: PreTrainedModel) -> None:
    with kvlib.attach(model):
        ours = filled(model, 9, "h2o", budget=5)
        for other in (ours, kvlib.make_cache("h2o", model, budget=5)):
            with pytest.raises(ValueError, match="empty, or they are the same"):
                ours.insert(other)
        with pytest.raises(ValueError, match="same parameters"):
            ours.insert(filled(model, 9, "h2o", budget=6))
        ours.check()
        assert ours.timeline.seen == [9]


@pytest.mark.parametrize("row", [-1, 1, 99])
def test_a_row_that_is_not_there(model: PreTrainedModel, row: int) -> None:
    with kvlib.attach(model):
        cache = filled(model, 9, "paged")
        for change in (cache.release, cache.preempt, lambda r: cache.fork([r])):
            with pytest.raises(ValueError, match="no row"):
                change(row)
        cache.check()


def test_memory_that_runs_out_in_between_is_noticed(model: PreTrainedModel) -> None:
    device = Tier("device")
    with kvlib.attach(model):
        cache = filled(model, 9, tiers=Tiers(device))
        other = filled(model, 9)
        device.capacity = device.used + 3000  # enough for the first layer
        with pytest.raises(DeviceOutOfMemory):
            cache.insert(other)
        with pytest.raises(RuntimeError, match="reset"):
            model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
        cache.reset()
        assert device.used == 0


def test_a_failure_in_the_last_layer_is_noticed(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room")
        return plain(*args)

    plain = kernels.explicit_prefill
    with kvlib.attach(model):
        cache = kvlib.make_cache("h2o", model, budget=0.5, kernel="eager")
        monkeypatch.setattr(kernels, "explicit_prefill", fail)
        with pytest.raises(MemoryError):
            model(batch([9])[0], past_key_values=cache)
        with pytest.raises(RuntimeError, match="half-way"):
            model(batch([1])[0], past_key_values=cache)


def test_a_pool_is_of_one_model(model: PreTrainedModel, tiny: Tiny) -> None:
    pool = Pool(model, Tiers(), blocks=9)
    with pytest.raises(ValueError, match="another model"):
        kvlib.make_cache("paged", tiny("qwen3"), pool=pool)
    with pytest.raises(ValueError, match="beside pool"):
        kvlib.make_cache("paged", model, pool=pool, block=4)
    for wrong in ({"blocks": "8"}, {"block": 8.5}, {"blocks": True}):
        with pytest.raises(ValueError, match="whole number"):
            kvlib.make_cache("paged", model, **wrong)


@pytest.mark.parametrize("strategy", ["full", "h2o", "infinigen", "offload", "paged"])
def test_a_cache_goes_on_in_another_grad_mode(model: PreTrainedModel, strategy: str) -> None:
    """Filled under inference_mode, continued as `generate` does."""
    with kvlib.attach(model):
        with torch.inference_mode():
            cache = filled(model, 9, strategy)
        with torch.no_grad():
            for token in range(3):
                model(torch.tensor([[token]]), past_key_values=cache)
        cache.check()


def test_a_deep_copy_is_a_fork(model: PreTrainedModel) -> None:
    with torch.no_grad(), kvlib.attach(model):
        cache = filled(model, 9, "paged", blocks=9)
        twin = copy.deepcopy(cache)
        assert twin.pool is cache.pool
        model(torch.tensor([[4]]), past_key_values=twin)
        assert (cache.timeline.seen, twin.timeline.seen) == ([9], [10])
        cache.pool.check([*cache.timeline.tables, *twin.timeline.tables])


@pytest.mark.parametrize(("budget", "sinks"), [(4, 64), (4, 4), (1, 4), (8, 4)])
def test_sinks_leave_room_for_the_newest_token(
    model: PreTrainedModel, budget: int, sinks: int
) -> None:
    with kvlib.attach(model):
        cache = filled(model, 200, "streaming", budget=budget, sinks=sinks)
    first = min(sinks, budget - 1)
    expected = [*range(first), *range(200 - budget + first, 200)]
    assert cache.layers[0].positions[0, 0].sort().values.tolist() == expected


def test_infinigen_refuses_models_that_it_cannot_foretell() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    for kind in ("cohere", "gemma3_text"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads))
        with pytest.raises(ValueError, match=r"not known|different ways"):
            kvlib.make_cache("infinigen", model)


def test_infinigen_fetches_what_the_window_lets_it_see(tiny: Tiny) -> None:
    model = tiny("mistral", sliding_window=8)
    with kvlib.attach(model):
        cache = filled(model, 100, "infinigen", alpha="inf", cap=0.5, skip_layers=1)
        model(torch.tensor([[4]]), past_key_values=cache)
        layer = cache.layers[1]
        fetched = layer.positions.gather(2, layer.chosen)
    assert fetched.shape[-1] == 4  # half of the window
    assert (fetched > 100 - 8).all()


def test_a_crop_within_a_turn_leaves_the_turn_open(model: PreTrainedModel) -> None:
    ids = batch([10])[0]
    with kvlib.attach(model):
        cache = kvlib.make_cache("full", model)
        cache.begin([10])
        model(ids[:, :6], past_key_values=cache)
        cache.crop(-2)
        out = model(ids[:, 4:], past_key_values=cache).logits[:, -1]
        plain = model(ids, past_key_values=kvlib.make_cache("full", model)).logits[:, -1]
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="cannot crop"):
        kvlib.make_cache("full", model).crop(-1)
