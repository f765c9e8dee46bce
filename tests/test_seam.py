"""The seam with transformers: what is refused, and that the model comes back as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch, generate
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import kvlib
from kvlib.models import TINY
from kvlib.tiers import DeviceOutOfMemory, Tier, Tiers

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def model(tiny: Tiny) -> PreTrainedModel:
    return tiny("llama")


def test_detaching_gives_the_model_back_also_after_an_error(model: PreTrainedModel) -> None:
    before = model.config._attn_implementation
    ids, mask = batch([8])
    plain = generate(model, ids, mask, 4)
    attachment = kvlib.attach(model)
    assert model.config._attn_implementation == "kvlib"
    error = KeyError("anything")
    attachment.__exit__(KeyError, error, None)
    assert model.config._attn_implementation == before
    assert generate(model, ids, mask, 4).tolist() == plain.tolist()


def test_a_model_that_shares_the_config_is_not_silently_changed(model: PreTrainedModel) -> None:
    other = AutoModelForCausalLM.from_config(model.config)
    other.config = model.config
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = model.config
    ids, _ = batch([8])
    with kvlib.attach(model):
        with pytest.raises(RuntimeError, match="not attached"):
            other(ids)
        with pytest.raises(ValueError, match="attached already"):
            kvlib.attach(other)
    assert other(ids).logits.isfinite().all()


def test_an_attached_model_wants_a_kvlib_cache(model: PreTrainedModel) -> None:
    ids, mask = batch([8])
    with kvlib.attach(model):
        with pytest.raises(ValueError, match="DynamicCache"):
            generate(model, ids, mask, 2, past_key_values=DynamicCache())
        with pytest.raises(ValueError, match="needs a kvlib cache"):
            model(ids, use_cache=False)


def test_a_kvlib_cache_wants_an_attached_model(model: PreTrainedModel) -> None:
    with pytest.raises(RuntimeError, match="attach"):
        model(batch([8])[0], past_key_values=kvlib.make_cache("full", model))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mask too short": ({"attention_mask": torch.ones(2, 8)}, "does not continue"),
    "mask too long": ({"attention_mask": torch.ones(2, 11)}, "does not continue"),
    "other history": ({"attention_mask": torch.tensor([[0] + [1] * 9] * 2)}, "does not continue"),
    "position": ({"position_ids": torch.tensor([[7]])}, "does not continue"),
    "4D mask": ({"attention_mask": torch.ones(2, 1, 1, 10)}, "shape"),
    "attentions": ({"output_attentions": True}, "output_attentions"),
}


@pytest.mark.parametrize("case", WRONG)
def test_input_that_does_not_continue_the_cache(model: PreTrainedModel, case: str) -> None:
    wrong, message = WRONG[case]
    ids, _ = batch([9, 9])
    with kvlib.attach(model):
        cache = kvlib.make_cache("h2o", model, budget=0.5)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=message):
            model(ids[:, :1], past_key_values=cache, **wrong)
        cache.check()
        assert cache.timeline.seen == [9, 9]
        model(ids[:, :1], past_key_values=cache)  # the refused input changed nothing
        assert cache.timeline.seen == [10, 10]


def test_other_batch_and_right_padding(model: PreTrainedModel) -> None:
    ids, _ = batch([9, 9])
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    with kvlib.attach(model):
        with pytest.raises(ValueError, match="left"):
            model(ids, attention_mask=mask, past_key_values=kvlib.make_cache("full", model))
        with pytest.raises(ValueError, match="no token"):
            model(ids, attention_mask=mask * 0, past_key_values=kvlib.make_cache("full", model))
        cache = kvlib.make_cache("full", model)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="2 rows"):
            model(ids[:1, :1], past_key_values=cache)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("strategy", ["full", "h2o"])
def test_last_logits_of_a_padded_row_are_those_of_the_row_alone(
    tiny: Tiny, name: str, strategy: str
) -> None:
    """One forward without position_ids: the padding mask and the true positions get through."""
    model, lengths = tiny(name), [13, 6, 1]
    ids, mask = batch(lengths)
    with kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model)
        together = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
        assert cache.timeline.seen == lengths
    for b, n in enumerate(lengths):
        alone = model(ids[b : b + 1, -n:], use_cache=False).logits[0, -1]  # not attached
        torch.testing.assert_close(together[b], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("strategy", "knobs"), [("full", {}), ("h2o", {"budget": 5})])
def test_a_cache_that_refused_input_goes_on_as_if_it_had_not(
    model: PreTrainedModel, strategy: str, knobs: dict[str, Any]
) -> None:
    ids, _ = batch([10, 10])
    with kvlib.attach(model):
        logits = []
        for refuse in (False, True):
            cache = kvlib.make_cache(strategy, model, **knobs)
            model(ids[:, :9], past_key_values=cache)
            if refuse:
                wrong = [{"attention_mask": torch.ones(2, 8)}, {"position_ids": ids[:, :1] * 0}]
                for more in wrong:
                    with pytest.raises(ValueError, match="does not continue"):
                        model(ids[:, 9:], past_key_values=cache, **more)
                with pytest.raises(ValueError, match="2 rows"):
                    model(ids[:1, 9:], past_key_values=cache)
            logits.append(model(ids[:, 9:], past_key_values=cache).logits)
            cache.check()
    assert logits[0].equal(logits[1])


def test_an_error_inside_the_block_detaches(model: PreTrainedModel) -> None:
    before = model.config._attn_implementation
    with pytest.raises(KeyError, match="anything"), kvlib.attach(model):
        raise KeyError("anything")
    assert model.config._attn_implementation == before
    assert not any(hasattr(module, "kv_binding") for module in model.modules())
    assert model(batch([8])[0]).past_key_values is not None  # with a cache of its own


def test_a_share_needs_to_know_where_the_prompt_ends(model: PreTrainedModel) -> None:
    ids, _ = batch([12])
    with kvlib.attach(model):
        cache = kvlib.make_cache("h2o", model, budget=0.5)
        model(ids[:, :6], past_key_values=cache)
        with pytest.raises(ValueError, match="begin"):
            model(ids[:, 6:], past_key_values=cache)
        absolute = kvlib.make_cache("h2o", model, budget=5)
        for part in (ids[:, :6], ids[:, 6:]):
            model(part, past_key_values=absolute)
        absolute.check()
        announced = kvlib.make_cache("h2o", model, budget=0.5)
        announced.begin([12])
        for part in (ids[:, :6], ids[:, 6:11], ids[:, 11:]):
            model(part, past_key_values=announced)
        assert announced.layers[0].count == [6]
        announced.begin([3])
        with pytest.raises(ValueError, match="3 more tokens"):
            model(ids[:, :5], past_key_values=announced)


def test_a_prompt_longer_than_the_model(tiny: Tiny) -> None:
    model = tiny("llama", max_position_embeddings=16)
    with kvlib.attach(model), pytest.raises(ValueError, match="16 positions"):
        model(batch([17])[0], past_key_values=kvlib.make_cache("full", model))


def test_models_that_cannot_be_served_exactly() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    gemma = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, **heads, pad_token_id=0))
    ids = torch.ones(1, 4, dtype=torch.long)
    with kvlib.attach(gemma), pytest.raises(ValueError, match="softcap"):
        gemma.eval()(ids, past_key_values=kvlib.make_cache("full", gemma))
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8))
    with pytest.raises(ValueError, match="encoder-decoder"):
        kvlib.attach(t5)
    old = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("codegen", n_layer=1, n_embd=32, n_head=4, rotary_dim=4, vocab_size=9)
    )
    with pytest.raises(ValueError, match="attention interface"):
        kvlib.attach(old)


def test_unknown_names_are_answered_with_known_ones(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'h2o'"):
        kvlib.make_cache("h20", model)
    with pytest.raises(ValueError, match="budget"):
        kvlib.make_cache("h2o", model, bugdet=0.2)
    with pytest.raises(ValueError, match="eager"):
        kvlib.make_cache("h2o", model, kernel="fast")
    with pytest.raises(ValueError, match="no file"):
        kvlib.make_cache(f"{tmp_path}/none.py:Mine", model)
    (tmp_path / "mine.py").write_text("class Other: pass\n")
    with pytest.raises(ValueError, match="no KVLayer subclass"):
        kvlib.make_cache(f"{tmp_path}/mine.py:Mine", model)


def test_a_strategy_from_a_file(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import kvlib\n"
        "class Recent(kvlib.EvictingLayer):\n"
        "    def priority(self):\n"
        "        return self.positions.float()\n"
    )
    with kvlib.attach(model):
        cache = kvlib.make_cache(f"{tmp_path}/mine.py:Recent", model, budget=4)
        generate(model, *batch([9]), 5, past_key_values=cache)
    assert cache.layers[0].positions[0, 0].sort().values.tolist() == [9, 10, 11, 12]


def test_crop(model: PreTrainedModel) -> None:
    ids, _ = batch([12, 12])
    with kvlib.attach(model):
        cache = kvlib.make_cache("full", model)
        model(ids, past_key_values=cache)
        cache.crop(-4)
        again = model(ids[:, 8:], past_key_values=cache).logits[:, -1]
        cache.check()
        plain = model(ids, past_key_values=kvlib.make_cache("full", model)).logits[:, -1]
        torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-4)
        evicting = kvlib.make_cache("h2o", model, budget=0.5)
        model(ids, past_key_values=evicting)
        with pytest.raises(ValueError, match="cannot take tokens back"):
            evicting.crop(-1)
    assert not evicting.is_croppable


ALL: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("h2o", {"budget": 0.4}),
    ("streaming", {"budget": 5, "sinks": 1}),
    ("paged", {"block": 4}),
    ("offload", {}),
    ("infinigen", {"cap": 0.4, "skip_layers": 1}),
    ("infinigen", {"cap": 0.4, "pool": 6}),
]


@pytest.mark.parametrize(("strategy", "knobs"), ALL)
def test_a_fork_goes_its_own_way(
    model: PreTrainedModel, strategy: str, knobs: dict[str, Any]
) -> None:
    ids, mask = batch([11, 7])
    with kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model, **knobs)
        model(ids, attention_mask=mask, past_key_values=cache)
        twin = cache.fork([1, 1, 0])
        more = torch.cat([mask[[1, 1, 0]], torch.ones(3, 1, dtype=torch.long)], 1)
        token = torch.tensor([[5], [9], [5]])
        forked = model(token, attention_mask=more, past_key_values=twin).logits
        twin.check()
        cache.check()
        assert cache.timeline.seen == [11, 7]
        own = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        original = model(torch.tensor([[5], [5]]), attention_mask=own, past_key_values=cache).logits
    torch.testing.assert_close(forked[[2, 0]], original, atol=1e-5, rtol=1e-4)
    assert (forked[0] - forked[1]).abs().max() > 1e-3


@pytest.mark.parametrize(("strategy", "knobs"), ALL)
def test_rows_come_and_go_and_each_is_as_alone(
    model: PreTrainedModel, strategy: str, knobs: dict[str, Any]
) -> None:
    """Insert and release in the middle of decode, as continuous batching does."""
    prompts = [batch([n], seed=n)[0] for n in (11, 4, 17)]
    token = torch.tensor([[5]])

    def step(cache: Any) -> torch.Tensor:
        seen = torch.tensor(cache.timeline.seen)[:, None]
        ids = token.expand(len(seen), 1)
        logits = model(ids, position_ids=seen, past_key_values=cache).logits[:, -1]
        cache.check()
        return logits

    def filled(ids: torch.Tensor) -> Any:
        made = first.empty() if strategy == "paged" else kvlib.make_cache(strategy, model, **knobs)
        model(ids, past_key_values=made)
        return made

    with kvlib.attach(model):
        first = kvlib.make_cache(strategy, model, **knobs)
        model(prompts[0], past_key_values=first)
        alone = [filled(ids) for ids in prompts]
        expected = [torch.stack([step(cache)[0] for _ in range(4)]) for cache in alone]
        seen = [step(first)[0]]
        first.insert(filled(prompts[1]))
        both = step(first)
        first.insert(filled(prompts[2]))
        three = step(first)
        first.release(0)
        two = step(first)
        first.release(1)
        last = step(first)
    seen += [both[0], three[0]]
    torch.testing.assert_close(torch.stack(seen), expected[0][:3], atol=1e-5, rtol=1e-4)
    second = torch.stack([both[1], three[1], two[0], last[0]])
    torch.testing.assert_close(second, expected[1], atol=1e-5, rtol=1e-4)
    third = torch.stack([three[2], two[1]])
    torch.testing.assert_close(third, expected[2][:2], atol=1e-5, rtol=1e-4)


def test_caches_that_cannot_be_joined(model: PreTrainedModel) -> None:
    ids = batch([6])[0]
    with kvlib.attach(model):
        full, h2o, other = (kvlib.make_cache(s, model) for s in ("full", "h2o", "full"))
        with pytest.raises(ValueError, match="empty"):
            full.insert(other)
        for cache in (full, h2o):
            model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="one strategy"):
            full.insert(h2o)
        other.begin([9])
        model(ids, past_key_values=other)
        with pytest.raises(ValueError, match="not complete"):
            full.insert(other)
        paged = [kvlib.make_cache("paged", model, blocks=9) for _ in range(2)]
        for cache in paged:
            model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="different pools"):
            paged[0].insert(paged[1])
        for cache in (full, *paged):
            cache.check()


def test_a_forward_that_stopped_half_way_is_noticed(model: PreTrainedModel) -> None:
    ids, _ = batch([12])
    layer = model.get_decoder().layers[1]
    with kvlib.attach(model):
        cache = kvlib.make_cache("full", model)

        def fail(*_: object) -> None:
            raise OSError("disk gone")

        hook = layer.register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="disk gone"):
            model(ids, past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="half-way"):
            model(ids, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        cache.check()


def test_eager_runs_out_of_memory_where_flash_fits(model: PreTrainedModel) -> None:
    ids, _ = batch([600])
    room = 4_000_000
    with kvlib.attach(model):
        for kernel in ("flash", "eager"):
            device = Tier("device", room)
            cache = kvlib.make_cache("full", model, tiers=Tiers(device), kernel=kernel)
            if kernel == "flash":
                model(ids, past_key_values=cache)
                assert device.used == sum(cache.nbytes().values())
                continue
            with pytest.raises(DeviceOutOfMemory, match="device memory is full"):
                model(ids, past_key_values=cache)
            cache.reset()
            assert device.used == 0  # what was borrowed came back


def test_tiers_count_the_weights(model: PreTrainedModel) -> None:
    weights = sum(p.numel() * 4 for p in set(model.parameters()))
    tiers = Tiers.of(model)
    assert tiers.device.fixed == weights
    assert tiers.device.free == 4 * weights
    with pytest.raises(DeviceOutOfMemory):
        Tiers.of(model, capacity=weights)
