"""The cost model: published figures, parameter counts, and bytes against hand-made numbers."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
TINY = replace(SHAPES["smollm2-135m"], layers=2, vocab=64)
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GQA: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "intermediate_size": 80}

tokens_ = st.integers(1, 1 << 20)
batches = st.integers(1, 128)
any_shape = st.sampled_from(sorted(SHAPES)).map(SHAPES.__getitem__)
dtypes = st.sampled_from(sorted(shapes.DTYPE_BYTES))
prefills = st.sampled_from(shapes.PREFILLS)
strategies = st.sampled_from(shapes.STRATEGIES)
unhurried = settings(deadline=None)  # other work on the machine may slow a single example


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


def test_bytes_by_hand() -> None:
    assert shapes.kv_bytes(LLAMA, 1) == 131_072
    assert shapes.kv_bytes(LLAMA, 1000, batch=3, dtype="float32", layers=2) == 49_152_000
    assert shapes.weight_bytes(LLAMA) == 16_060_522_496
    # 10 of 100 tokens and a staging slot, 2 layers, 3 KV heads, 64 wide: keys, values, score, place
    assert shapes.h2o_bytes(TINY, 100, 0.1, batch=4) == 4 * 11 * 2 * 3 * (2 * 64 * 2 + 8)
    assert shapes.h2o_bytes(TINY, 100, 10, batch=4) == shapes.h2o_bytes(TINY, 100, 0.1, batch=4)
    assert shapes.eager_scratch(TINY, 2048, dtype="float32") == 9 * 2048**2 * 8
    assert shapes.eager_scratch(TINY, 2048, chunk=256) == 9 * 256 * 2048 * 8
    assert shapes.flash_scratch(TINY, 2048, 2, tile=128) == 128 * 192 * 4 + 2 * 9 * 2048 * 4
    assert shapes.column_mass_scratch(TINY, 2048, tile=64, copies=1) == 2048 * 4 * (9 * 64 + 3)


def test_scalars_give_ints_and_arrays_broadcast() -> None:
    assert type(shapes.kv_bytes(LLAMA, np.int64(7))) is int
    assert type(shapes.h2o_bytes(LLAMA, 100, np.float64(0.25))) is int
    tokens, batch, budget = (
        np.array([[100], [1000]]),
        np.array([1, 2, 4]),
        np.array([0.1, 0.5, 1.0]),
    )
    table = shapes.h2o_bytes(LLAMA, tokens, budget, batch)
    assert isinstance(table, np.ndarray)
    assert table[1, 2] == shapes.h2o_bytes(LLAMA, 1000, 1.0, 4)
    for prefill in shapes.PREFILLS:
        peaks = shapes.predict_prefill_peak(LLAMA, tokens, prefill, "h2o", batch=batch, budget=0.3)
        one = shapes.predict_prefill_peak(LLAMA, 1000, prefill, "h2o", batch=4, budget=0.3)
        assert isinstance(peaks, np.ndarray)
        assert peaks[1, 2] == one


def test_kept_tokens() -> None:
    assert [shapes.kept_tokens(n, 0.1) for n in (1, 30, 31, 100)] == [1, 3, 4, 10]
    assert [shapes.kept_tokens(n, 16) for n in (1, 16, 17)] == [1, 16, 16]
    assert shapes.kept_tokens(50, 1.0) == 50
    assert shapes.kept_tokens(50, 1) == 1


@unhurried
@given(any_shape, tokens_, tokens_, batches, batches, dtypes)
def test_more_tokens_or_rows_never_take_less(
    shape: Shape, n: int, m: int, b: int, c: int, dtype: str
) -> None:
    (n, m), (b, c) = sorted((n, m)), sorted((b, c))
    formulas: list[Callable[[int, int], shapes.Count]] = [
        lambda t, r: shapes.kv_bytes(shape, t, r, dtype),
        lambda t, r: shapes.h2o_bytes(shape, t, 0.3, r, dtype),
        lambda t, r: shapes.h2o_bytes(shape, t, 64, r, dtype),
        lambda t, r: shapes.eager_scratch(shape, t, r, dtype),
        lambda t, r: shapes.eager_scratch(shape, t, r, dtype, chunk=512),
        lambda t, r: shapes.flash_scratch(shape, t, r),
        lambda t, r: shapes.column_mass_scratch(shape, t, r),
    ]
    assert all(formula(n, b) <= formula(m, c) for formula in formulas)


@unhurried
@given(any_shape, tokens_, st.floats(0.01, 1), st.floats(0.01, 1), batches)
def test_h2o_grows_with_its_budget(shape: Shape, n: int, p: float, q: float, batch: int) -> None:
    p, q = sorted((p, q))
    small, large = (shapes.h2o_bytes(shape, n, share, batch) for share in (p, q))
    assert small <= large <= shapes.h2o_bytes(shape, n, n, batch)


@unhurried
@given(any_shape, st.integers(512, 1 << 20), batches, dtypes)
def test_flash_needs_less_than_eager(shape: Shape, n: int, batch: int, dtype: str) -> None:
    eager = shapes.eager_scratch(shape, n, batch, dtype)
    assert shapes.flash_scratch(shape, n, batch) <= eager
    assert shapes.eager_scratch(shape, n, batch, dtype, chunk=512) <= eager


@unhurried
@given(any_shape, st.floats(0.1, 20), prefills, strategies, st.integers(1, 8))
def test_longest_prefill_is_the_last_that_fits(
    shape: Shape, spare: float, prefill: str, strategy: str, batch: int
) -> None:
    capacity = shapes.weight_bytes(shape) + spare * 2**30
    n = shapes.longest_prefill(shape, capacity, prefill, strategy, batch=batch, budget=0.3)

    def peak(tokens: int) -> shapes.Count:
        return shapes.predict_prefill_peak(
            shape, tokens, prefill, strategy, batch=batch, budget=0.3
        )

    assert n >= 1
    assert peak(n) <= capacity < peak(n + 1)


def test_what_does_not_fit_and_what_flash_gains() -> None:
    assert shapes.longest_prefill(SHAPES["llama-3.1-70b"], 80e9) == 0
    eager, flash = (shapes.longest_prefill(LLAMA, 80e9, p) for p in ("eager", "flash"))
    assert eager < 20_000 < 128_000 < flash


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


BAD_CALLS: list[Callable[[], object]] = [
    lambda: shapes.kv_bytes(LLAMA, 0),
    lambda: shapes.kv_bytes(LLAMA, -5),
    lambda: shapes.kv_bytes(LLAMA, math.nan),
    lambda: shapes.kv_bytes(LLAMA, math.inf),
    lambda: shapes.kv_bytes(LLAMA, 1.5),
    lambda: shapes.kv_bytes(LLAMA, [[4, 0], [1, 2]]),
    lambda: shapes.kv_bytes(LLAMA, 8, batch=0),
    lambda: shapes.kv_bytes(LLAMA, 8, layers=0),
    lambda: shapes.kv_bytes(LLAMA, 8, dtype="fp8"),
    lambda: shapes.h2o_bytes(LLAMA, 8, 0),
    lambda: shapes.h2o_bytes(LLAMA, 8, 0.0),
    lambda: shapes.h2o_bytes(LLAMA, 8, 1.5),
    lambda: shapes.h2o_bytes(LLAMA, 8, math.nan),
    lambda: shapes.eager_scratch(LLAMA, 8, chunk=0),
    lambda: shapes.flash_scratch(LLAMA, 8, tile=0),
    lambda: shapes.column_mass_scratch(LLAMA, 8, copies=-1),
    lambda: shapes.predict_prefill_peak(LLAMA, 8, "lazy"),
    lambda: shapes.predict_prefill_peak(LLAMA, 8, strategy="magic"),
    lambda: shapes.longest_prefill(LLAMA, 0),
    lambda: shapes.longest_prefill(LLAMA, math.nan),
    lambda: Machine.measure(seconds=0),
    lambda: Machine.measure(device="tpu"),
]


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_bad_input_is_refused_in_one_line(number: int) -> None:
    with pytest.raises(ValueError, match="must") as error:
        BAD_CALLS[number]()
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
    code = "import sys, kvlib.hardware; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
