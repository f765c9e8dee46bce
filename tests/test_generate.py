"""Caches in `model.generate`: a full budget is the plain model, rows do not touch each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from conftest import batch, generate
from transformers import DynamicCache, PreTrainedModel

import kvlib
from kvlib.models import TINY, Loaded

Tiny = Callable[..., PreTrainedModel]

HEADS = {"mha": {"num_key_value_heads": 6}, "gqa": {}, "mqa": {"num_key_value_heads": 1}}
MODELS = [pytest.param(name, {}, id=name) for name in TINY]
MODELS += [pytest.param("llama", change, id=f"llama-{h}") for h, change in HEADS.items()]
MODELS += [pytest.param("mistral", {"sliding_window": 7}, id="mistral-window")]
EXACT = [
    pytest.param("full", {}, id="full"),
    pytest.param("h2o", {"budget": 1.0}, id="share"),
    pytest.param("h2o", {"budget": 400}, id="count"),
    pytest.param("h2o", {"budget": 1.0, "kernel": "eager", "evict": "chunk"}, id="eager"),
    pytest.param("streaming", {"budget": 1.0}, id="streaming"),
    pytest.param("paged", {"block": 4}, id="paged"),
    pytest.param("offload", {}, id="offload"),
    pytest.param("infinigen", {"alpha": math.inf, "cap": 1.0, "skip_layers": 0}, id="infinigen"),
]
EVICTING = [
    pytest.param("h2o", {"budget": 0.3}, id="share"),
    pytest.param("h2o", {"budget": 5}, id="count"),
    pytest.param("h2o", {"budget": 1}, id="one"),
    pytest.param("h2o", {"budget": 0.4, "kernel": "eager", "score": "mean"}, id="eager-mean"),
    pytest.param("h2o", {"budget": 6, "recent": 0}, id="heavy-only"),
    pytest.param("h2o", {"budget": 6, "recent": 1}, id="recent-only"),
    pytest.param("streaming", {"budget": 6, "sinks": 2}, id="streaming"),
    pytest.param("infinigen", {"cap": 0.4, "skip_layers": 1}, id="infinigen"),
    pytest.param("infinigen", {"alpha": "inf", "pool": 7, "policy": "lru"}, id="pool"),
]


@pytest.mark.parametrize(("strategy", "knobs"), EXACT)
@pytest.mark.parametrize(("name", "change"), MODELS)
def test_full_budget_is_the_plain_model(
    tiny: Tiny, name: str, change: dict[str, object], strategy: str, knobs: dict[str, object]
) -> None:
    model = tiny(name, **change)
    ids, mask = batch([17, 12, 3, 1])
    plain = generate(model, ids, mask, 12, past_key_values=DynamicCache())
    with kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model, **knobs)
        ours = generate(model, ids, mask, 12, past_key_values=cache)
        cache.check()
    assert ours.tolist() == plain.tolist()
    assert cache.layers[0].count == [28, 23, 14, 12]  # the last token is never fed


@pytest.mark.parametrize(("strategy", "knobs"), EVICTING)
@pytest.mark.parametrize(("name", "change"), MODELS)
def test_a_padded_row_is_the_row_alone(
    tiny: Tiny, name: str, change: dict[str, object], strategy: str, knobs: dict[str, object]
) -> None:
    model = tiny(name, **change)
    lengths = [17, 12, 3, 1]
    ids, mask = batch(lengths)
    with kvlib.attach(model):
        together = kvlib.make_cache(strategy, model, **knobs)
        rows = generate(model, ids, mask, 12, past_key_values=together)
        together.check()
        for b, n in enumerate(lengths):
            alone = kvlib.make_cache(strategy, model, **knobs)
            row = generate(
                model, ids[b : b + 1, -n:], mask[b : b + 1, -n:], 12, past_key_values=alone
            )
            assert row[0].tolist() == rows[b].tolist()
            kept = alone.layers[1].positions.sort(dim=-1).values
            count = together.layers[1].count[b]
            assert kept[0].tolist() == (
                together.layers[1].positions[b, :, :count].sort(dim=-1).values.tolist()
            )


@pytest.mark.parametrize(("strategy", "knobs"), EVICTING)
def test_a_row_does_not_depend_on_what_other_rows_hold(
    tiny: Tiny, strategy: str, knobs: dict[str, object]
) -> None:
    model = tiny("llama")
    ids, mask = batch([15, 15])
    other = ids.clone()
    other[1] = ids[1].flip(0)
    with kvlib.attach(model):
        rows = []
        for prompt in (ids, other):
            cache = kvlib.make_cache(strategy, model, **knobs)
            rows.append(generate(model, prompt, mask, 10, past_key_values=cache)[0].tolist())
    assert rows[0] == rows[1]


def test_sampling_with_a_full_budget_is_the_plain_model(tiny: Tiny) -> None:
    model = tiny("llama")
    ids, mask = batch([9, 6])
    torch.manual_seed(3)
    plain = generate(model, ids, mask, 10, do_sample=True, past_key_values=DynamicCache())
    with kvlib.attach(model):
        torch.manual_seed(3)
        cache = kvlib.make_cache("h2o", model, budget=1.0)
        ours = generate(model, ids, mask, 10, do_sample=True, past_key_values=cache)
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize(
    "settings", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}]
)
def test_beams_and_several_sequences(tiny: Tiny, settings: dict[str, object]) -> None:
    model = tiny("llama")
    ids, mask = batch([9, 6])
    torch.manual_seed(3)
    plain = generate(model, ids, mask, 8, past_key_values=DynamicCache(), **settings)
    with kvlib.attach(model):
        for case in EXACT:
            strategy, knobs = case.values
            torch.manual_seed(3)
            cache = kvlib.make_cache(strategy, model, **knobs)
            ours = generate(model, ids, mask, 8, past_key_values=cache, **settings)
            assert ours.tolist() == plain.tolist(), case.id
            cache.check()
        for case in EVICTING:
            strategy, knobs = case.values
            small = kvlib.make_cache(strategy, model, **knobs)
            generate(model, ids, mask, 8, past_key_values=small, **settings)
            small.check()


@pytest.mark.parametrize(("strategy", "knobs"), EXACT + EVICTING)
def test_a_used_cache_after_reset_is_a_fresh_one(
    tiny: Tiny, strategy: str, knobs: dict[str, object]
) -> None:
    model = tiny("llama")
    with kvlib.attach(model):
        used = kvlib.make_cache(strategy, model, **knobs)
        before = used.tiers.device.used  # a block pool is there from the start
        generate(model, *batch([19, 4], seed=5), 9, past_key_values=used)
        used.reset()
        assert used.nbytes() == {"kv": 0, "state": 0, "host": 0}
        assert (used.tiers.device.used, used.tiers.host.used) == (before, 0)
        again = generate(model, *batch([14]), 9, past_key_values=used)
        fresh = kvlib.make_cache(strategy, model, **knobs)
        assert again.tolist() == generate(model, *batch([14]), 9, past_key_values=fresh).tolist()


def test_bfloat16_runs_and_evicts(tiny: Tiny) -> None:
    model = tiny("llama", torch.bfloat16)
    with kvlib.attach(model):
        cache = kvlib.make_cache("h2o", model, budget=0.3)
        generate(model, *batch([20, 11]), 10, past_key_values=cache)
        cache.check()
    assert cache.layers[0].slots["key"].dtype == torch.bfloat16
    assert cache.layers[0].slots["score"].dtype == torch.float32


def test_two_turns_continue_one_conversation(tiny: Tiny) -> None:
    """Turn by turn with ragged turns: positions go on, and a full budget stays exact."""
    model = tiny("llama")
    first, first_mask = batch([9, 5])
    second, second_mask = batch([4, 7], seed=2)
    with kvlib.attach(model):
        logits = {}
        for name, knobs in (("full", {}), ("h2o", {"budget": 1.0}), ("small", {"budget": 0.4})):
            cache = kvlib.make_cache("h2o" if knobs else "full", model, **knobs)
            cache.begin([9, 5])
            model(first, attention_mask=first_mask, past_key_values=cache)
            cache.begin([4, 7])
            mask = torch.cat([first_mask, second_mask], dim=1)
            positions = (mask.cumsum(1) - 1)[:, 9:]
            out = model(second, attention_mask=mask, position_ids=positions, past_key_values=cache)
            cache.check()
            logits[name] = out.logits[:, -1]
        alone = torch.cat([first[1, 4:], second[1]])[None]
        plain = model(alone, past_key_values=kvlib.make_cache("full", model)).logits[0, -1]
    torch.testing.assert_close(logits["full"][1], plain, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits["h2o"], logits["full"], atol=1e-5, rtol=1e-4)
    assert (logits["small"] - logits["full"]).abs().max() > 1e-2


@pytest.mark.parametrize(("strategy", "knobs"), EXACT)
@pytest.mark.parametrize("name", TINY)
def test_a_prompt_in_chunks_is_the_prompt_at_once(
    tiny: Tiny, name: str, strategy: str, knobs: dict[str, object]
) -> None:
    model, lengths = tiny(name), [17, 12, 3, 1]
    ids, mask = batch(lengths)
    plain = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    with kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model, **knobs)
        cache.begin(lengths)
        for first, last in ((0, 6), (6, 7), (7, 17)):
            out = model(
                ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache
            ).logits[:, -1]
            cache.check()
    torch.testing.assert_close(out, plain.logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("strategy", "knobs"), EXACT + EVICTING)
def test_assisted_decoding_works_or_is_refused(
    tiny: Tiny, strategy: str, knobs: dict[str, object]
) -> None:
    """An exact cache that can be cropped gives the plain tokens; others say why they cannot."""
    model, ids = tiny("llama"), batch([9])[0]
    plain = generate(model, ids, torch.ones_like(ids), 8)
    with kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model, **knobs)
        more = {"past_key_values": cache, "prompt_lookup_num_tokens": 3}
        if not cache.layers[0].is_croppable:
            with pytest.raises(ValueError, match="cannot take tokens back"):
                generate(model, ids, torch.ones_like(ids), 8, **more)
            return
        ours = generate(model, ids, torch.ones_like(ids), 8, **more)
    assert ours.tolist() == plain.tolist()


@pytest.mark.slow
def test_the_bundled_model_token_for_token(smollm2: Loaded) -> None:
    assert smollm2.tokenizer is not None
    texts = ["The capital of France is", "In the beginning there was a long and winding road that"]
    inputs = smollm2.tokenizer(texts, return_tensors="pt", padding=True)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    plain = generate(smollm2.model, ids, mask, 24, past_key_values=DynamicCache())
    with kvlib.attach(smollm2.model):
        for case in EXACT:
            strategy, knobs = case.values
            cache = kvlib.make_cache(strategy, smollm2.model, **knobs)
            ours = generate(smollm2.model, ids, mask, 24, past_key_values=cache)
            assert ours.tolist() == plain.tolist(), case.id
