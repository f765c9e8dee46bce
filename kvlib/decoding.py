"""Decode under a strategy: what a step takes, moves and holds, and how well the model still knows.

The text is known, so the model is fed its tokens one by one and scored on each: under the same
cache, with the same evictions and fetches, as if it had written them itself.
"""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlib.attachment import attach
from kvlib.caches import KVCache, find_strategy, make_cache
from kvlib.emulation import TARGET_SHAPE, Ratios, link_like, ratio_values, target_ratios
from kvlib.hardware import find_machine
from kvlib.link import Link
from kvlib.measure import Values, finish, prompt, value
from kvlib.models import kv_token_bytes, load
from kvlib.shapes import find_shape
from kvlib.tiers import Tier, Tiers, storage_bytes

TARGET_TOKENS, TARGET_BATCH = 4096, 4
TIMED = 12  # decode steps that are timed over the emulated link, after one that is not


def rolling_loglikelihood(
    model: Any, cache: KVCache, ids: Tensor, prompt: int
) -> tuple[Tensor, list[float]]:
    """Log-probabilities of ids[:, prompt:] under the cache [B, N − prompt], and seconds a step.

    ids [B, N], without pads. The first `prompt` tokens are read at once with exact attention,
    then the cache acts: each further token is predicted, then fed, one at a time.
    Raises ValueError unless 0 < prompt < N.
    """
    batch, tokens = ids.shape
    if not 0 < prompt < tokens:
        raise ValueError(f"prompt {prompt}: give fewer than the text's {tokens} tokens, and some")
    cache.begin([prompt] * batch)
    logits = model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1).logits[:, -1]
    found, seconds = [], []
    for now in range(prompt, tokens):
        scores = torch.log_softmax(logits.float(), dim=-1)
        found.append(scores.gather(1, ids[:, now : now + 1])[:, 0])
        finish(ids.device)
        start = time.perf_counter()
        logits = model(ids[:, now : now + 1], past_key_values=cache).logits[:, -1]
        finish(ids.device)
        seconds.append(time.perf_counter() - start)
    return torch.stack(found, dim=1), seconds


def perplexity(loglikelihoods: Tensor) -> float:
    """exp of the mean negative log-probability a token."""
    return math.exp(-loglikelihoods.double().mean().item())


@torch.inference_mode()
def decode_text(
    *, strategy: str, knobs: str, tokens: int, steps: int, batch: int, machine: str,
    model: str, device: str, seed: int, **_: Any,
) -> Values:  # fmt: skip
    """Decode real text under a strategy: perplexity, memory, bytes moved, and TPOT.

    knobs    the strategy's parameters, `budget=0.3` or `alpha=5,cap=0.2`; "" for none
    machine  the published machine whose link is emulated; on a GPU the link is the real one
    Perplexity comes from `steps` tokens behind a prompt of `tokens`; then TIMED steps are timed.
    """
    loaded = load(model, "float32", device)
    texts = [
        prompt(loaded.tokenizer, tokens + steps + TIMED + 1, seed + 7 * b) for b in range(batch)
    ]
    ids = torch.cat(texts).to(device)
    with attach(loaded.model):
        resident = resident_step(loaded.model, ids[:, : tokens + 9], tokens)
        tiers = Tiers(device=Tier("device"))
        cache = make_cache(strategy, loaded.model, tiers=tiers, **parse(knobs))
        known = ids[:, : tokens + steps]
        scores = rolling_loglikelihood(loaded.model, cache, known, tokens)[0]
        stored = batch * (tokens + steps + (TIMED + 1) / 2)  # tokens, on average of the timed steps
        link = emulated_link(loaded.model, machine, device, stored, resident)
        steps_taken = timed_steps(loaded.model, cache, ids[:, tokens + steps :], link)
    tpot, used = statistics.median(steps_taken), cache.in_use()
    source = "emulated" if link.is_emulated and link.fetched else "measured"
    values = [
        value("perplexity", perplexity(scores), "1"),
        value("device_used", used["device"] + tiers.device.lent_peak, "B"),
        value("host_used", used["host"], "B"),
        value("bytes_moved", link.fetched / TIMED, "B"),
        value("share", attended(cache, link, loaded.model), "1"),
        value("tpot", tpot, "s", source),
        value("tpot_resident", resident, "s"),
        value("gather_time", link.gather_time / TIMED, "s"),
    ]
    return values + ratios(loaded.model, link, machine, resident, stored)


def sweep(
    strategy: str, budgets: Sequence[float], alphas: Sequence[float]
) -> list[tuple[float | None, str]]:
    """The settings of a strategy along its own axis: budget (None: by threshold) and knobs."""
    has = inspect.signature(find_strategy(strategy)).parameters
    if "cap" in has:
        return [(b, f"alpha=inf,cap={b}") for b in budgets] + [
            (None, f"alpha={a},cap=1.0") for a in alphas
        ]
    return [(b, f"budget={b}") for b in budgets] if "budget" in has else [(1.0, "")]


def parse(knobs: str) -> dict[str, Any]:
    """`alpha=5,cap=0.2` as keyword arguments; whole numbers are counts, others are left as text."""
    pairs = (item.partition("=") for item in knobs.split(",") if item)
    return {name: int(text) if text.isdigit() else text for name, _, text in pairs}


def resident_step(model: Any, ids: Tensor, prompt: int) -> float:
    """Seconds of a decode step with everything on the device: the median of a few."""
    _, seconds = rolling_loglikelihood(model, make_cache("full", model), ids, prompt)
    return statistics.median(seconds[1:])


def emulated_link(model: Any, machine: str, device: str, tokens: float, resident: float) -> Link:
    """A link as slow beside this run as the machine's is beside its own; a GPU has a real one."""
    if torch.device(device).type == "cuda":
        return Link.real()
    kv = tokens * kv_token_bytes(model)
    return link_like(find_machine(machine), _target(machine, 1.0).rho1, kv, resident)


def _target(machine: str, share: float) -> Ratios:
    sizes = find_shape(TARGET_SHAPE)
    return target_ratios(find_machine(machine), sizes, TARGET_TOKENS, TARGET_BATCH, share)


def timed_steps(model: Any, cache: KVCache, ids: Tensor, link: Link) -> list[float]:
    """Seconds of each step over `link` that feeds a column of ids; the first is thrown away.

    The link's counts and the device's peak are those of the timed steps.
    """
    cache.tiers.link = link
    seconds = []
    for now in range(ids.shape[1]):
        if now == 1:
            link.reset()
            cache.tiers.device.reset_peak()
        finish(ids.device)
        start = time.perf_counter()
        model(ids[:, now : now + 1], past_key_values=cache)
        finish(ids.device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def attended(cache: KVCache, link: Link, model: Any) -> float:
    """Share of the tokens seen that a decode step attends to, over all layers.

    What a strategy fetches is read off the link, whole layers included; the newest token, which
    needs no fetching, is attended too.
    """
    rows, seen = len(cache.timeline.seen), sum(cache.timeline.seen)
    if link.fetched:
        fetched = link.fetched / TIMED / kv_token_bytes(model)
        return (fetched + rows) / (seen - rows * (TIMED - 1) / 2)  # seen on average
    stored = sum(sum(layer.count) for layer in cache.layers)
    return float(stored / len(cache.layers) / seen)


def ratios(model: Any, link: Link, machine: str, resident: float, tokens: float) -> Values:
    """The three ratios of this run and of its target, where the link is emulated.

    tokens: stored in all rows, on average of the timed steps.
    """
    if not link.is_emulated or not link.fetched:
        return []
    kv, weights = tokens * kv_token_bytes(model), storage_bytes(model.parameters())
    here = Ratios(kv / link.bandwidth / resident, kv / weights, link.gather_time / TIMED / resident)
    there = _target(machine, link.gathered / TIMED / kv)
    return ratio_values(here, there)


def decode_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that `decode_text` takes on two cores, for the estimate before a run."""
    slow = 4.0 if point["strategy"] == "offload" else 0.0
    return float(3 + slow + point["batch"] * (point["tokens"] / 500 + 0.02 * point["steps"]))
