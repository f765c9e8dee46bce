"""The query computed ahead of a module is the one that its attention function then receives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import batch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from kvlib.projection import attention_modules, find_hidden, find_rope, project_query

SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama, heads wider": ("llama", {**GROUPED, "head_dim": 16, "attention_bias": True}),
    "mistral": ("mistral", GROUPED),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", GROUPED),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),  # the norm spans all heads at once
    "glm": ("glm", GROUPED),  # half of each head is rotated, neighbouring columns together
    "opt": ("opt", OPT),
    "opt, no bias": ("opt", {**OPT, "enable_bias": False}),
    "gpt_neox": ("gpt_neox", {}),  # a quarter of each head is rotated
    "gpt_neox, no bias": ("gpt_neox", {"attention_bias": False}),
    "phi3": ("phi3", {"num_key_value_heads": 2}),
    "phi3, half rotated": ("phi3", {"num_key_value_heads": 2, "rope_parameters": HALF}),
}
Seen = list[tuple[Tensor, Tensor]]  # what project_query said, what the attention function got


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model whose biases and norms are random too, so that they count."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **changes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, 1, 0.3)
    trained: PreTrainedModel = model.eval()
    return trained


def watch(model: PreTrainedModel) -> Seen:
    """Note both queries of every attention call from now on."""
    seen: Seen = []
    ahead: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ahead[module] = project_query(module, find_hidden(args, kwargs), find_rope(args, kwargs))

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any
    ) -> tuple[Tensor, None]:
        seen.append((ahead.pop(module), query))
        out = scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=more["scaling"], enable_gqa=True
        )
        return out.transpose(1, 2), None

    AttentionInterface.register("recording", record)
    AttentionMaskInterface.register("recording", lambda *_, **__: None)
    model.set_attn_implementation("recording")
    for module in attention_modules(model):
        module.register_forward_pre_hook(before, with_kwargs=True)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_query_is_the_one_that_attention_gets(family: str) -> None:
    kind, changes = FAMILIES[family]
    model = tiny(kind, **changes)
    seen = watch(model)
    ids, _ = batch([9, 9])
    cache = model(ids[:, :7], use_cache=True).past_key_values
    for t in (7, 8):
        model(ids[:, t : t + 1], past_key_values=cache)
    assert [got.shape[2] for _, got in seen] == [7] * 3 + [1] * 6
    for ahead, got in seen:
        torch.testing.assert_close(ahead, got, atol=1e-5, rtol=1e-5)


def first_module(model: PreTrainedModel) -> tuple[nn.Module, Tensor]:
    """A model's first attention module, and some input for it."""
    return attention_modules(model)[0], torch.randn(1, 4, 48)


def rope_of(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(1, tokens, size // 2).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("smollm3", GROUPED, "SmolLM3Attention .* use_rope"),  # no rotation in some layers
        ("cohere2", GROUPED, "Cohere2Attention .* order"),
        ("olmo", {}, "OlmoAttention .* clip_qkv"),
        ("falcon_h1", GROUPED | {"mamba_d_ssm": 32, "mamba_n_heads": 4}, "FalconH1Attention"),
    ],
)
def test_a_module_of_unknown_making_is_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    module, hidden = first_module(tiny(kind, **changes))
    with pytest.raises(ValueError, match=message):
        project_query(module, hidden, rope_of(4, 8))


def test_modules_that_were_changed_are_refused() -> None:
    module, hidden = first_module(tiny("qwen3", **GROUPED))
    module.q_norm = nn.RMSNorm(16)
    with pytest.raises(ValueError, match=r"Qwen3Attention .* 16 of 48"):
        project_query(module, hidden, rope_of(4, 8))
    module, hidden = first_module(tiny("phi3"))
    module.qkv_proj = nn.Sequential(module.qkv_proj)
    with pytest.raises(ValueError, match=r"Phi3Attention .* Sequential"):
        project_query(module, hidden, rope_of(4, 8))
    del module.qkv_proj
    with pytest.raises(ValueError, match=r"Phi3Attention .* no q_proj"):
        project_query(module, hidden, rope_of(4, 8))
    with pytest.raises(ValueError, match=r"Linear .* attention interface"):
        project_query(nn.Linear(48, 48), hidden, None)


def test_rotation_is_neither_forgotten_nor_invented() -> None:
    module, hidden = first_module(tiny("llama", **GROUPED))
    with pytest.raises(ValueError, match="LlamaAttention got no position_embeddings"):
        project_query(module, hidden, None)
    module, hidden = first_module(tiny("opt", **OPT))
    with pytest.raises(ValueError, match="OPTAttention does not take position_embeddings"):
        project_query(module, hidden, rope_of(4, 8))


def test_fused_weights_are_not_copied() -> None:
    """A token's query must not cost a pass over a copy of the weights."""
    for kind in ("gpt_neox", "phi3"):
        module, _ = first_module(tiny(kind))
        with torch.profiler.profile(profile_memory=True) as profile:
            project_query(module, torch.randn(1, 1, 48), rope_of(1, 2 if kind == "gpt_neox" else 8))
        largest = max(event.self_cpu_memory_usage for event in profile.key_averages())
        assert largest < 48 * 48 * 4, kind


def test_what_a_pre_hook_sees() -> None:
    hidden, rope = torch.randn(1, 2, 4), rope_of(2, 4)
    assert find_hidden((hidden,), {}) is hidden
    assert find_hidden((), {"hidden_states": hidden}) is hidden
    with pytest.raises(ValueError, match="hidden_states"):
        find_hidden((), {"position_embeddings": rope})
    assert find_rope((hidden,), {"position_embeddings": rope}) is rope
    assert find_rope((hidden, rope), {}) is rope
    assert find_rope((hidden,), {"position_embeddings": None}) is None


def test_models_without_one_attention_module_a_layer() -> None:
    bloom = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", n_layer=2, hidden_size=16, n_head=2, vocab_size=32)
    )
    with pytest.raises(ValueError, match="BloomForCausalLM has 2 layers"):
        attention_modules(bloom)
