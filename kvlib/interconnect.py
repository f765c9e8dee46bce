"""Decode steps over emulated links of many speeds: what a faster path to the host buys.

The setting is the paper's long generation, an 8B model in bfloat16 behind 10k tokens, half-way
through 8,192 more, on an H100. Each link is emulated: as slow beside a decode step here as the real
one is beside the H100's; a GH200 stands for NVLink-C2C, with its own memory and host. The run here
is chosen so that its cache is as large beside its weights as the target's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvlib.attachment import attach
from kvlib.caches import KVCache, make_cache
from kvlib.decoding import resident_step, timed_steps
from kvlib.emulation import TARGET_SHAPE, Ratios, link_like, marked, ratio_values, target_ratios
from kvlib.engines.prepare import budget_of, knobs_of
from kvlib.hardware import Link as Path
from kvlib.hardware import Machine, find_machine
from kvlib.link import Link
from kvlib.measure import Values, feed, prompt, value
from kvlib.models import kv_token_bytes, load
from kvlib.shapes import find_shape
from kvlib.tiers import Tier, Tiers, storage_bytes

BASE, FAST = "h100-sxm", "gh200"
TARGET_TOKENS = 10_000 + 8192 // 2
NAMED = {16.0: "pcie3", 32.0: "pcie4", 64.0: "pcie5", 450.0: "nvlink-c2c"}  # GB/s -> a claim's name
FREE = "without the host's gather"


def target(speed: float) -> Machine:
    """The machine that a link of `speed` GB/s stands for: a GH200 at NVLink-C2C's, else an H100."""
    if NAMED.get(speed) == "nvlink-c2c":
        return find_machine(FAST)
    return replace(find_machine(BASE), link=Path(f"{speed:g} GB/s", speed * 1e9, "chosen"))


def matching_tokens(model: Any) -> int:
    """Tokens at which the model's cache is as large beside its weights as the target's."""
    there = target_ratios(find_machine(BASE), find_shape(TARGET_SHAPE), TARGET_TOKENS, 1, 1.0)
    return round(there.rho2 * storage_bytes(model.parameters()) / kv_token_bytes(model))


@dataclass(frozen=True)
class Run:
    """A prompt that has been read, and what its steps are held against."""

    model: Any
    ids: torch.Tensor
    tokens: int
    resident: float
    steps: int

    @property
    def kv(self) -> float:
        """Bytes of keys and values, on average of the timed steps."""
        return (self.tokens + self.steps / 2) * kv_token_bytes(self.model)


@torch.inference_mode()
def over_links(
    *, strategies: str, speeds: str, model: str, device: str, seed: int, steps: int, **_: Any
) -> Values:
    """TPOT of each strategy over each link, in GB/s as in "16,64"; strategies as in "full,offload".

    A strategy that fetches nothing is measured once. InfiniGen is, too, with a host that picks rows
    in no time: marked `gather` = free, and excluded from verdicts. On a GPU the link is its own.
    """
    loaded = load(model, "float32", device)
    tokens, values = matching_tokens(loaded.model), list[dict[str, Any]]()
    ids = prompt(loaded.tokenizer, tokens + steps + 2, seed).to(device)
    with attach(loaded.model):
        resident = resident_step(loaded.model, ids[:, : tokens + steps + 2], tokens)
        run = Run(loaded.model, ids, tokens, resident, steps)
        for strategy in strategies.split(","):
            about = {"strategy": strategy, "budget": budget_of(strategy)}
            found = _strategy(run, strategy, list(map(float, speeds.split(","))))
            values += [v | about | {"tokens": tokens} for v in found]
    return values


def _strategy(run: Run, strategy: str, speeds: Sequence[float]) -> Values:
    tiers = Tiers(device=Tier("device"))
    cache = make_cache(strategy, run.model, tiers=tiers, **knobs_of(strategy))
    feed(run.model, cache, run.ids[:, : run.tokens], "flash")
    if run.ids.device.type == "cuda" or not any(layer.home == "host" for layer in cache.layers):
        taken = _steps(run, cache, Link.real())
        return [value("tpot", statistics.median(taken), "s")]
    values: Values = []
    for speed in speeds:
        for free in (False, True) if strategy == "infinigen" else (False,):
            values += _over(run, cache, speed, free)
    return values


def _over(run: Run, cache: KVCache, speed: float, free: bool) -> Values:
    """The values of steps over one link; `free`: its host picks rows in no time."""
    machine, sizes = target(speed), find_shape(TARGET_SHAPE)
    rho1 = target_ratios(machine, sizes, TARGET_TOKENS, 1, 1.0).rho1
    link = link_like(machine, rho1, run.kv, run.resident)
    if free:
        link.gather = math.inf
    taken = _steps(run, cache, link)
    share = link.gathered / run.steps / run.kv
    there = target_ratios(machine, sizes, TARGET_TOKENS, 1, share)
    gather = link.gather_time / run.steps
    here = Ratios(
        run.kv / link.bandwidth / run.resident,
        run.kv / storage_bytes(run.model.parameters()),
        gather / run.resident,
    )
    values = [
        value("tpot", statistics.median(taken), "s", "emulated"),
        value("tpot_resident", run.resident, "s"),
        value("bytes_moved", link.fetched / run.steps, "B"),
        value("gather_time", gather, "s"),
        *ratio_values(here, there),
    ]
    about = {"link": NAMED.get(speed), "speed": speed, "gather": "free" if free else "host"}
    return [v | about | ({"excluded": FREE} if free else {}) for v in marked(values)]


def _steps(run: Run, cache: KVCache, link: Link) -> list[float]:
    """Seconds of each timed step, on a copy of the cache."""
    twin = cache.fork([0])
    return timed_steps(run.model, twin, run.ids[:, run.tokens : run.tokens + run.steps + 1], link)


def link_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that `over_links` takes on two cores, for the estimate before a run."""
    speeds = [float(s) for s in point["speeds"].split(",")]
    taken = 8.0
    for strategy in point["strategies"].split(","):
        taken += 2.5
        share = {"infinigen": 0.35, "offload": 1.0}.get(strategy, 0.0)
        variants = 2 if strategy == "infinigen" else 1
        each = sum(0.05 + share * 12.0 / speed for speed in speeds) if share else 0.05
        taken += (point["steps"] + 1) * variants * each
    return taken
