"""What the cost model is fitted to: prefills and decode steps by shape, length and batch.

Random weights of a published shape do the work of real ones. What InfiniGen fetches depends on the
values, so there the share is forced: as many tokens as its budget allows. No link is emulated: the
host's gather is part of a step, and what would have crossed a link is counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvlib.attachment import attach
from kvlib.caches import KVCache, make_cache
from kvlib.engines.prepare import budget_of, knobs_of, loaded_model, random_ids
from kvlib.hardware import Machine
from kvlib.measure import Values, feed, finish, value
from kvlib.tiers import Tier, Tiers

WARM_UP = 32  # tokens of a first prompt


def machine_rates(*, device: str, seconds: float, **_: Any) -> Values:
    """What this machine's memory and products reach, for the cost model."""
    found = Machine.measure(seconds, device)
    values = [
        value("memory", found.memory, "B"),
        value("bandwidth", found.bandwidth, "B/s"),
        value("link", found.link.bandwidth, "B/s"),
        value("host", found.host, "B/s"),
        value("host_memory", found.host_memory, "B"),
        value("threads", found.threads, "1"),
    ]
    rates = [value("flops", rate, "FLOP/s") | {"dtype": d} for d, rate in found.flops.items()]
    return [v | {"strategy": "none", "chip": found.name} for v in [*values, *rates]]


@torch.inference_mode()
def step_costs(
    *, model: str, strategies: str, lengths: str, batches: str, steps: int, device: str, seed: int,
    dtype: str = "float32", **_: Any,
) -> Values:  # fmt: skip
    """TTFT of one prompt, then TPOT and memory of some decode steps, of each combination.

    strategies  names, as in "full,h2o"; lengths, batches: numbers, as in "128,512"
    """
    loaded = loaded_model(model, dtype, device)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    values: Values = []
    with attach(loaded.model):
        for tokens in map(int, lengths.split(",")):
            ids = torch.tensor([random_ids(tokens, vocabulary, seed)], device=device)
            for strategy in strategies.split(","):
                about = {"strategy": strategy, "budget": budget_of(strategy), "tokens": tokens}
                if strategy == "infinigen":
                    about["fetch"] = "forced"
                found = _prefill_and_decode(loaded.model, strategy, ids, batches, steps)
                values += [v | about for v in found]
    return values


def _prefill_and_decode(model: Any, strategy: str, ids: Tensor, batches: str, steps: int) -> Values:
    """The values of one strategy and prompt [1, T]; each batch is so many copies of it."""
    tiers = Tiers(device=Tier("device"))
    feed(model, make_cache(strategy, model, **knobs_of(strategy)), ids[:, :WARM_UP], "flash")
    cache = make_cache(strategy, model, tiers=tiers, **knobs_of(strategy))
    finish(ids.device)
    start = time.perf_counter()
    feed(model, cache, ids, "flash")
    values = [value("ttft", time.perf_counter() - start, "s") | {"batch": 1}]
    cache.batch_select_indices(torch.tensor([0]))  # what it has sent for is not the copies'
    for batch in map(int, batches.split(",")):
        found = decode(model, cache.fork([0] * batch), tiers, steps, ids.device)
        shared = strategy == "paged" and batch > 1  # copies of a row have its blocks in common
        values += [v | {"batch": batch} for v in found if not (shared and v["unit"] == "B")]
    return values


def decode(model: Any, cache: KVCache, tiers: Tiers, steps: int, device: torch.device) -> Values:
    """TPOT (the median step) and bytes at the end of `steps` decode steps behind a first one."""
    token = torch.ones(len(cache.timeline.seen), 1, dtype=torch.long, device=device)
    taken = list[float]()
    for now in range(steps + 1):
        if now == 1:
            tiers.link.reset()
            tiers.device.reset_peak()
        start = time.perf_counter()
        model(token, past_key_values=cache, logits_to_keep=1)
        finish(device)
        taken.append(time.perf_counter() - start)
    used = cache.in_use()
    return [
        value("tpot", statistics.median(taken[1:]), "s"),
        value("device_used", used["device"] + tiers.device.lent_peak, "B"),
        value("host_used", used["host"], "B"),
        value("bytes_moved", tiers.link.fetched / steps, "B"),
        value("gather_time", tiers.link.gather_time / steps, "s"),
    ]


def step_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that `step_costs` takes on two cores, for the estimate before a run."""
    from kvlib.models import shape_of

    lengths, batches = ([int(n) for n in point[key].split(",")] for key in ("lengths", "batches"))
    size, kinds = shape_of(point["model"]).used() / 1.345e8, len(point["strategies"].split(","))
    read = sum(1.3e-3 * n * (1 + n / 8192) for n in lengths)
    steps = sum(0.04 + 0.004 * b * (1 + n / 1024) for n in lengths for b in batches)
    return float(4 + size * kinds * (read + (point["steps"] + 1) * steps))
