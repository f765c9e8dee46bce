"""Machines and shapes: published figures, and parameter counts against the real models."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from kvlib import hardware, shapes
from kvlib.hardware import LINKS, MACHINES, Machine
from kvlib.shapes import SHAPES, Shape

LLAMA = SHAPES["llama-3.1-8b"]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GQA: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "intermediate_size": 80}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**GQA, tie_word_embeddings=False),
        LlamaConfig(**GQA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        LlamaConfig(**GQA, tie_word_embeddings=False, head_dim=16),
        Qwen3Config(**GQA, tie_word_embeddings=True, head_dim=16),
        MistralConfig(**GQA, tie_word_embeddings=False),
        OPTConfig(**SIZES, ffn_dim=80, word_embed_proj_dim=48),
        OPTConfig(**SIZES, ffn_dim=80, word_embed_proj_dim=48, enable_bias=False),
    ],
    ids=["llama", "llama-tied-biases", "llama-head16", "qwen3", "mistral", "opt", "opt-no-bias"],
)
def test_parameters_match_the_real_model(config: PreTrainedConfig) -> None:
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    shape = Shape.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.heads, shape.positions) == (6, 64)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_248_023_552),
        ("opt-125m", 125_239_296),
        ("opt-1.3b", 1_315_758_080),
        ("opt-6.7b", 6_658_473_984),
        ("opt-13b", 12_853_473_280),
    ],
)
def test_public_shapes_have_their_published_size(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters
    assert (SHAPES[name].rope_theta is None) == SHAPES[name].learned_positions


def test_from_config_reads_rope_theta_and_refuses_other_layouts() -> None:
    theta = {"rope_type": "default", "rope_theta": 5e5}
    assert Shape.from_config(LlamaConfig(**GQA, rope_parameters=theta)).rope_theta == 5e5
    with pytest.raises(ValueError, match="embedding projection"):
        Shape.from_config(OPTConfig(**SIZES, word_embed_proj_dim=24))
    with pytest.raises(ValueError, match="model type must be one of llama"):
        Shape.from_config(SimpleNamespace(model_type="gpt2"))
    with pytest.raises(ValueError, match="do not divide"):
        replace(LLAMA, kv_heads=5)
    with pytest.raises(ValueError, match="layers must be a whole number"):
        replace(LLAMA, layers=0)


@pytest.mark.parametrize("name", ["H100-SXM", " h100-sxm/ ", "h100-sxm//"])
def test_lookup_forgives_case_slashes_and_blanks(name: str) -> None:
    assert hardware.find_machine(name) is MACHINES["h100-sxm"]


def test_lookup_offers_near_names() -> None:
    assert hardware.find_link("PCIe-5") is LINKS["pcie-5"]
    assert shapes.find_shape("OPT-125m") is SHAPES["opt-125m"]
    for find, wrong, near in [
        (hardware.find_machine, "h100", "h100-sxm"),
        (hardware.find_link, "nvlink", "nvlink-c2c"),
        (shapes.find_shape, "llama-3.1-8", "llama-3.1-8b"),
        (shapes.find_shape, "", "qwen3-8b"),
    ]:
        with pytest.raises(ValueError, match=near) as error:
            find(wrong)
        assert "\n" not in str(error.value)


def test_published_figures_are_whole_and_sourced() -> None:
    for machine in MACHINES.values():
        assert min(len(machine.source), len(machine.link.source)) > 20
        assert {"float32", "bfloat16", "float16"} <= machine.flops.keys()
        assert 1e10 < machine.memory < 1e12 < machine.bandwidth < 1e13
        assert 1e13 < machine.flops["float32"] < machine.flops["bfloat16"] < 1e16
    h100, gh200 = MACHINES["h100-sxm"], MACHINES["gh200"]
    assert (h100.bandwidth, h100.link.bandwidth) == (3.35e12, 64e9)
    assert (gh200.bandwidth, gh200.link.bandwidth) == (4.0e12, 450e9)


@pytest.mark.parametrize("arguments", [{"seconds": 0}, {"device": "tpu"}])
def test_bad_input_is_refused_in_one_line(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must") as error:
        Machine.measure(**arguments)
    assert "\n" not in str(error.value)


def test_measure_this_machine() -> None:
    machine = Machine.measure(seconds=0.1)
    assert machine.name
    assert machine.threads >= 1
    assert "measured" in machine.source
    assert machine.flops.keys() == {"float32", "bfloat16"}
    rates = [machine.memory, machine.bandwidth, machine.link.bandwidth, *machine.flops.values()]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)


@pytest.mark.parametrize(
    ("line", "file", "limit"),
    [
        ("0::/box/inner", "box/memory.max", 4096),
        ("4:memory:/box", "memory/box/memory.limit_in_bytes", 8192),
    ],
)
def test_a_lower_cgroup_limit_counts(tmp_path: Path, line: str, file: str, limit: int) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text(f"3:cpuset:/\n{line}\n")
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("max\n")
    whole = hardware._memory_limit(proc, root)
    (root / file).write_text(f"{limit}\n")
    assert hardware._memory_limit(proc, root) == limit < whole


def test_the_cost_model_imports_no_torch() -> None:
    code = "import sys, kvlib.hardware, kvlib.memory; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
