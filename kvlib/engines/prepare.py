"""Engines set up for measuring: by the strategy's name, on a device of the usual size.

A strategy that fetches over a slow link is emulated on a CPU: link and host are as slow beside this
run as the target machine's are beside an 8B model whose cache is as large beside its weights.
"""

from __future__ import annotations

import functools
import inspect
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from kvlib.attachment import attach
from kvlib.caches import find_strategy, make_cache
from kvlib.caches.offload import HostLayer
from kvlib.emulation import TARGET_SHAPE, Ratios, link_like, target_ratios
from kvlib.engines.base import Engine, Request
from kvlib.engines.local import LocalEngine
from kvlib.hardware import Machine, find_machine
from kvlib.link import Link
from kvlib.measure import finish
from kvlib.memory import BUDGET, kv_bytes, weight_bytes
from kvlib.models import Loaded, load, shape_of
from kvlib.shapes import Shape, find_shape
from kvlib.tiers import Tiers
from kvlib.workloads import fixed, requests

STEPS = 6  # decode steps that tell what one takes

loaded_model = functools.lru_cache(maxsize=1)(load)  # points of one process share the model


@dataclass(frozen=True)
class Emulation:
    """What an emulated link stands for: a run of `tokens` tokens in `batch` rows.

    resident  seconds of a decode step of that run with everything on the device
    """

    link: Link
    machine: Machine
    shape: Shape
    dtype: str
    batch: int
    tokens: int
    resident: float

    @property
    def kv(self) -> int:
        """Bytes of all keys and values."""
        return int(kv_bytes(self.shape, self.tokens, self.batch, self.dtype))

    @property
    def target_tokens(self) -> int:
        """Tokens a row at which the target's cache is as large beside its weights."""
        sizes = find_shape(TARGET_SHAPE)
        beside = self.kv / weight_bytes(self.shape, self.dtype) * weight_bytes(sizes)
        return max(1, round(beside / int(kv_bytes(sizes, 1, self.batch))))

    def target(self, share: float = 1.0) -> Ratios:
        """The target's ratios, if `share` of all keys and values is picked by its host."""
        sizes = find_shape(TARGET_SHAPE)
        return target_ratios(self.machine, sizes, self.target_tokens, self.batch, share)

    def ratios(self, steps: int) -> tuple[Ratios, Ratios]:
        """The ratios of the run, of which the link counted `steps` decode steps, and the target's.

        Raises ZeroDivisionError for no steps.
        """
        here = Ratios(
            self.kv / self.link.bandwidth / self.resident,
            self.kv / weight_bytes(self.shape, self.dtype),
            self.link.gather_time / steps / self.resident,
        )
        return here, self.target(self.link.gathered / steps / self.kv)


@dataclass(frozen=True)
class Prepared:
    """An engine, and what it takes beside its cache.

    weights  bytes of the model's weights
    tiers    of a local engine
    device   where it runs; memory of a "cpu" is the host's too
    """

    engine: Engine
    weights: int
    vocabulary: int
    tokenizer: Any
    tiers: Tiers | None = None
    emulation: Emulation | None = None
    device: str = "cpu"

    def requests(self, lengths: list[tuple[int, int]], when: list[float], seed: int) -> list[Any]:
        """Requests of these lengths and arrivals: text, or random ids for random weights."""
        if self.tokenizer is not None:
            return requests(self.tokenizer, lengths, when, seed)
        return [
            Request(random_ids(prompt, self.vocabulary, seed + 1000 * n), new, at)
            for n, ((prompt, new), at) in enumerate(zip(lengths, when, strict=True))
        ]

    def warm_up(self, tokens: int, seed: int) -> None:
        """Run what is not measured: a first request."""
        self.engine.run(self.requests(fixed(1, tokens, 3), [0.0], seed + 500_000))


def random_ids(count: int, vocabulary: int, seed: int) -> list[int]:
    """Token ids, for models that know no text."""
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(3, vocabulary, (count,), generator=generator)]


def knobs_of(strategy: str) -> dict[str, Any]:
    """The strategy's parameters at BUDGET."""
    has = inspect.signature(find_strategy(strategy)).parameters
    if "cap" in has:
        return {"alpha": math.inf, "cap": BUDGET}
    return {"budget": BUDGET} if "budget" in has else {}


def fetches(strategy: str) -> bool:
    """Does the strategy keep its cache on the host?"""
    return strategy != "vllm" and issubclass(find_strategy(strategy), HostLayer)


def budget_of(strategy: str) -> float | None:
    """What a strategy keeps or fetches of the tokens, None where it is all of them."""
    return BUDGET if strategy != "vllm" and knobs_of(strategy) else None


def prepare(
    strategy: str, model: str, device: str = "cpu", dtype: str = "float32", *,
    batch: int, tokens: int, chunk: int, machine: str = "h100-sxm",
) -> Prepared:  # fmt: skip
    """The engine of a strategy. `batch` and `tokens`: of the run that an emulated link is for."""
    if strategy == "vllm":
        return _vllm(model, device, dtype, batch, chunk)
    loaded = loaded_model(model, dtype, device)
    emulation = None
    if fetches(strategy) and torch.device(device).type == "cpu":
        emulation = _emulation(loaded, batch, tokens, machine)
    tiers = Tiers.of(loaded.model, link=emulation.link if emulation else None)
    engine = LocalEngine(
        loaded.model, strategy, tiers=tiers, max_batch=batch, chunk=chunk, **knobs_of(strategy)
    )
    weights, vocabulary = tiers.device.fixed, loaded.model.config.get_text_config().vocab_size
    return Prepared(engine, weights, vocabulary, loaded.tokenizer, tiers, emulation, device)


def _vllm(model: str, device: str, dtype: str, batch: int, chunk: int) -> Prepared:
    from transformers import AutoTokenizer

    from kvlib.bundled import BUNDLED, bundled_folder
    from kvlib.engines.vllm import VLLMEngine

    engine, sizes = (
        VLLMEngine(model, dtype, max_batch=batch, chunk=max(chunk, batch)),
        shape_of(model),
    )
    family = model.partition(":")[0]
    folder = str(bundled_folder()) if model == BUNDLED else model
    tokenizer = None if family in ("shape", "tiny") else AutoTokenizer.from_pretrained(folder)
    return Prepared(engine, int(weight_bytes(sizes, dtype)), sizes.vocab, tokenizer)


def _emulation(loaded: Loaded, batch: int, tokens: int, machine: str) -> Emulation:
    """A link as slow beside a resident step as the machine's is beside its own."""
    sizes, dtype = Shape.from_config(loaded.model.config), str(loaded.model.dtype).split(".")[1]
    step, found = resident_step(loaded.model, batch, tokens), find_machine(machine)
    plan = Emulation(Link.real(), found, sizes, dtype, batch, tokens, step)
    link = link_like(found, plan.target().rho1, plan.kv, step)
    return Emulation(link, found, sizes, dtype, batch, tokens, step)


@torch.inference_mode()
def resident_step(model: Any, batch: int, tokens: int) -> float:
    """Seconds of a decode step of `batch` rows of `tokens` tokens, everything on the device."""
    ids = random_ids(tokens, model.config.get_text_config().vocab_size, 0)
    token, taken = torch.ones(batch, 1, dtype=torch.long, device=model.device), list[float]()
    with attach(model):
        one = make_cache("full", model)
        model(torch.tensor([ids], device=model.device), past_key_values=one, logits_to_keep=1)
        cache = one.fork([0] * batch)
        one.reset()
        for _ in range(STEPS + 2):
            finish(model.device)
            start = time.perf_counter()
            model(token, past_key_values=cache, logits_to_keep=1)
            finish(model.device)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])
