"""Perplexity under a strategy, the emulated point, and what a decode measurement returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import batch
from transformers import PreTrainedModel

import kvlib
from kvlib.decoding import decode_text, parse, perplexity, rolling_loglikelihood
from kvlib.emulation import bandwidth_for, link_like, target_ratios
from kvlib.hardware import MACHINES
from kvlib.shapes import SHAPES

Tiny = Callable[..., PreTrainedModel]

EXACT: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("paged", {"block": 4}),
    ("offload", {}),
    ("h2o", {"budget": 1.0}),
    ("infinigen", {"alpha": "inf", "cap": 1.0, "skip_layers": 0}),
]
LOSSY: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {"budget": 0.2}),
    ("streaming", {"budget": 0.2}),
    ("infinigen", {"alpha": "inf", "cap": 0.1, "skip_layers": 0}),
]


def scored(model: PreTrainedModel, strategy: str, knobs: dict[str, Any]) -> torch.Tensor:
    ids = batch([40, 40])[0]
    with torch.no_grad(), kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model, **knobs)
        scores, seconds = rolling_loglikelihood(model, cache, ids, 25)
        cache.check()
    assert scores.shape == (2, 15)
    assert len(seconds) == 15
    return scores


@pytest.mark.parametrize(("strategy", "knobs"), EXACT)
def test_an_exact_cache_scores_as_one_forward(
    tiny: Tiny, strategy: str, knobs: dict[str, Any]
) -> None:
    model, ids = tiny("llama"), batch([40, 40])[0]
    logits = model(ids).logits[:, 24:-1].log_softmax(-1)
    plain = logits.gather(2, ids[:, 25:, None])[..., 0]
    torch.testing.assert_close(scored(model, strategy, knobs), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("strategy", "knobs"), LOSSY)
def test_a_small_budget_changes_every_score_but_the_first(
    tiny: Tiny, strategy: str, knobs: dict[str, Any]
) -> None:
    model = tiny("llama")
    full, small = scored(model, "full", {}), scored(model, strategy, knobs)
    torch.testing.assert_close(small[:, 0], full[:, 0], atol=1e-4, rtol=1e-4)  # exact prefill
    assert ((small - full)[:, 1:].abs() > 1e-4).float().mean() > 0.9


@pytest.mark.parametrize("prompt", [0, 40, 41])
def test_the_prompt_is_part_of_the_text(tiny: Tiny, prompt: int) -> None:
    model = tiny("llama")
    cache = kvlib.make_cache("full", model)
    with kvlib.attach(model), pytest.raises(ValueError, match="prompt"):
        rolling_loglikelihood(model, cache, batch([40, 40])[0], prompt)


def test_perplexity_of_a_fair_coin() -> None:
    assert perplexity(torch.full((2, 3), math.log(0.5))) == pytest.approx(2.0)


def test_knobs_as_text() -> None:
    assert parse("") == {}
    assert parse("alpha=inf,cap=0.2,block=16") == {"alpha": "inf", "cap": "0.2", "block": 16}


def test_the_first_ratio_is_the_target_s() -> None:
    """At the chosen bandwidth, moving all takes ρ1 times as long as a resident step."""
    target = target_ratios(MACHINES["h100-sxm"], SHAPES["llama-3.1-8b"], 4096, 4, 0.2)
    assert target.rho1 == pytest.approx(6.2, rel=0.02)  # 2.1 GB at 64 GB/s ÷ 18.2 GB at 3.35 TB/s
    assert target.rho2 == pytest.approx(0.134, rel=0.02)
    step, kv = 0.05, 1e8
    assert kv / bandwidth_for(target.rho1, kv, step) == pytest.approx(target.rho1 * step)
    whole = target_ratios(MACHINES["h100-sxm"], SHAPES["llama-3.1-8b"], 4096, 4, 1.0)
    assert whole.rho3 == pytest.approx(5 * target.rho3)
    with pytest.raises(ValueError, match="step"):
        bandwidth_for(1.0, kv, 0.0)
    link = link_like(MACHINES["h100-sxm"], target.rho1, kv, step)
    assert 0.2 * kv / link.gather / step == pytest.approx(target.rho3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "knobs"),
    [
        ("full", ""),
        ("paged", "block=16"),
        ("h2o", "budget=0.3"),
        ("infinigen", "alpha=inf,cap=0.1"),
    ],
)
def test_a_decode_measurement(strategy: str, knobs: str) -> None:
    values = decode_text(
        strategy=strategy, knobs=knobs, tokens=96, steps=4, batch=1, machine="h100-sxm",
        model="smollm2", device="cpu", seed=0,
    )  # fmt: skip
    found = {v["metric"]: v["value"] for v in values}
    token = 2 * 30 * 3 * 64 * 4
    assert 1 < found["perplexity"] < 200
    if strategy == "infinigen":
        assert found["host_used"] >= 110 * token
        stored = range(101, 113)  # tokens before each timed step
        fetched = sum(n + 1 + n + 28 * (n // 10) for n in stored) / 12 / 30  # layer 0 looks ahead
        assert found["bytes_moved"] == pytest.approx(fetched * token)
        assert found["share"] == pytest.approx((fetched + 1) / 107.5)
        assert found["rho1"] == pytest.approx(found["rho1_target"], rel=0.2)
        assert {v["source"] for v in values if v["metric"] == "tpot"} == {"emulated"}
    else:
        assert found["share"] == pytest.approx(0.3 if strategy == "h2o" else 1.0, abs=0.02)
        assert (found["host_used"], found["bytes_moved"]) == (0, 0)
        assert found["device_used"] >= found["share"] * 100 * token
