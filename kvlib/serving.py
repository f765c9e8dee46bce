"""Serving measured: requests through an engine under one strategy, in time and memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvlib import metrics
from kvlib.emulation import marked, ratio_values
from kvlib.engines.base import Request, Result
from kvlib.engines.prepare import Prepared, budget_of, fetches, prepare
from kvlib.measure import Values, value
from kvlib.metrics import Timing, Usage
from kvlib.models import shape_of
from kvlib.peak import resident_peak
from kvlib.workloads import arrivals, fixed

ONCE = ("full", "offload", "vllm")  # whose times no claim compares on this class of machine
STEADY = 8  # decode steps of all requests together that a sampled run has at least
WINDOW = 11  # tokens generated at each position of a long output
MOMENTS = 40  # of a run's memory that are stored
GB = 1e9


# -- the grids ---------------------------------------------------------------------------------


def sweep(
    strategies: Sequence[str], batches: Sequence[int], rates: Sequence[float], repeats: int,
    seed: int, *, requests: int, **more: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """The points of 02 to 04: all requests at once, and `requests` that arrive at a rate.

    Between the fewest and the most at once, by rate, and of the strategies in ONCE, a run is
    measured once; `full` only with the fewest and the most, `offload`, whose steps take seconds,
    with the fewest. `more`: the other arguments of `serve`.
    """
    ends = {b for b in batches if b in (min(batches), max(batches))}
    where = {"full": ends, "offload": {min(batches, default=0)}}
    by_batch: list[dict[str, Any]] = [
        {"batch": b, "rate": None, "requests": b, "repeat": r}
        for r in range(repeats) for b in batches if r == 0 or b in ends
    ]  # fmt: skip
    by_rate = [{"batch": None, "rate": r, "requests": requests, "repeat": 0} for r in rates]
    return [
        {"strategy": s, "budget": budget_of(s), **at, **more, "seed": seed + at["repeat"]}
        for at in [*by_batch, *by_rate]
        for s in strategies
        if at["batch"] in where.get(s, {at["batch"]}) and (at["repeat"] == 0 or s not in ONCE)
    ]


def outputs(
    strategies: Sequence[str], repeats: int, seed: int, **more: Any
) -> list[dict[str, Any]]:
    """The points of 05. `paged` also generates all of the two shortest outputs, as a check."""
    sampled: list[dict[str, Any]] = [
        {"strategy": s, "through": False, "repeat": r}
        for r in range(repeats) for s in strategies if r == 0 or s not in ONCE
    ]  # fmt: skip
    few = ",".join(more["output_tokens"].split(",")[:2])
    check: dict[str, Any] = {
        "strategy": "paged",
        "through": True,
        "repeat": 0,
        "output_tokens": few,
    }
    return [
        {"budget": budget_of(p["strategy"]), "batch": 1, **more, **p, "seed": seed + p["repeat"]}
        for p in [*sampled, *([check] if "paged" in strategies else [])]
    ]


def serve_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that `serve` takes on two cores, for the estimate before a run."""
    count, slow = point["requests"], {"infinigen": 0.011, "offload": 0.042}
    read, new = count * point["tokens"], point["output_tokens"]
    step = 0.06 + 0.0017 * (point["batch"] or 8)
    if point["rate"]:
        return float(6 + count / point["rate"] + new * step)
    if point["strategy"] in slow:
        new = min(new, sampled(count, point["tokens"], point["chunk"]))
        step += slow[point["strategy"]] * count
    return float(4 + 8 * (point["strategy"] == "vllm") + 1.15e-3 * read + new * step)


def output_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that `long_output` takes on two cores, for the estimate before a run."""
    longest = max(int(n) for n in point["output_tokens"].split(","))
    start = 4 + 8 * (point["strategy"] == "vllm")
    if point["through"]:
        return float(start + 2e-3 * point["tokens"] + 0.045 * longest)
    slow = {"infinigen": 0.05, "offload": 0.2}.get(point["strategy"], 0.0)
    read = 4 * point["tokens"] + 1.5 * longest
    return float(start + 1.2e-3 * read + 3 * WINDOW * (0.045 + slow))


# -- many requests: by concurrency, or by rate -------------------------------------------------


def serve(
    *, strategy: str, tokens: int, output_tokens: int, requests: int, model: str, device: str,
    seed: int, batch: int | None = None, rate: float | None = None, chunk: int = 4096,
    dtype: str = "float32", machine: str = "h100-sxm",
    limit_ttft: float = math.inf, limit_tpot: float = math.inf, **_: Any,
) -> Values:  # fmt: skip
    """Serve `requests` requests: all at once (`batch` of them together), or `rate` a second.

    Each has `tokens` tokens to read and `output_tokens` to generate. A strategy over an emulated
    link generates only so many that STEADY steps have all requests in them, and the rest is taken
    to go on like these. `limit_ttft`, `limit_tpot`: seconds that goodput allows.
    """
    together, new = batch or requests, output_tokens
    emulates = fetches(strategy) and torch.device(device).type == "cpu"
    if emulates and requests <= together and not rate:
        new = min(output_tokens, sampled(requests, tokens, chunk))
    ready = prepare(
        strategy, model, device, dtype,
        batch=together, tokens=tokens + output_tokens // 2, chunk=chunk, machine=machine,
    )  # fmt: skip
    when = arrivals(requests, "poisson" if rate else "together", rate=rate, seed=seed)
    asked = ready.requests(fixed(requests, tokens, new), when, seed)
    ready.warm_up(tokens, seed)
    if ready.tiers is not None:
        ready.tiers.link.reset()
    with resident_peak() as resident:
        results = ready.engine.run(asked)
    whole = [extended(result, output_tokens - new, steady(results)) for result in results]
    values = [*times(whole, ready, limit_ttft, limit_tpot), *little(results)]
    values += memory(ready, metrics.throughput(whole), resident)
    values += emulated(ready, len({stamp for r in results for stamp in r.stamps[1:]}))
    values.append(value("generated", new, "tokens"))
    return annotated(values, model)


def sampled(requests: int, tokens: int, chunk: int) -> int:
    """Tokens that each request generates, so that STEADY steps have all of them in."""
    if tokens > chunk:
        return STEADY + 1 + requests * math.ceil(tokens / chunk)
    return STEADY + 1 + math.ceil(requests / (chunk // tokens))


def steady(results: Sequence[Result]) -> float:
    """Seconds of a decode step while all requests run: the median; NaN if there is none."""
    begin, end = max(r.stamps[0] for r in results), min(r.stamps[-1] for r in results)
    stamps = [t for t in results[0].stamps if begin <= t <= end]
    return float(statistics.median(np.diff(stamps))) if len(stamps) > 1 else math.nan


def extended(result: Timing, steps: int, step: float) -> Timing:
    """The timing of a request that goes on for `steps` more tokens, `step` seconds each."""
    more = (result.stamps[-1] + step * (n + 1) for n in range(steps))
    return Timing(result.arrival, (*result.stamps, *more))


def times(whole: Sequence[Timing], ready: Prepared, limit_ttft: float, limit_tpot: float) -> Values:
    """TTFT, TPOT, ITL and E2EL (median and 99th percentile), throughput, goodput."""
    source = "emulated" if ready.emulation else "measured"
    gaps = [gap for timing in whole for gap in timing.itl]
    series = {
        "ttft": [t.ttft for t in whole],
        "tpot": [t.tpot for t in whole if len(t.stamps) > 1],
        "itl": gaps,
        "e2el": [t.e2el for t in whole],
    }
    values = [
        value(name + suffix, metrics.percentile(series[name], q), "s", source)
        for name in series if series[name] for suffix, q in (("", 50), ("_p99", 99))
    ]  # fmt: skip
    good = metrics.goodput(whole, ttft=limit_ttft, tpot=limit_tpot)
    return [
        *values,
        value("throughput", metrics.throughput(whole), "tokens/s", source),
        value("goodput", good, "requests/s", source),
    ]


def little(results: Sequence[Result]) -> Values:
    """What Little's law and TTFT + Σ ITL = E2EL speak of, of the run as it was."""
    count = len(results)
    return [
        value("in_system", metrics.in_system(results), "requests"),
        value("arrival_rate", count / metrics.makespan(results), "requests/s"),
        value("e2el_mean", statistics.fmean(r.e2el for r in results), "s"),
        value("ttft_mean", statistics.fmean(r.ttft for r in results), "s"),
        value("itl_sum_mean", statistics.fmean(sum(r.itl) for r in results), "s"),
        value("preemptions", sum(r.preemptions for r in results), "1"),
    ]


def memory(ready: Prepared, throughput: float, resident: Sequence[int]) -> Values:
    """Device bytes used, at the peak and reserved, what is wasted, host bytes; tokens/s by each."""
    usage, reserved = ready.engine.usage, ready.engine.reserved
    taken = ready.tiers.device.peak - reserved if ready.tiers else 0  # outside of any block pool
    peak = ready.weights + taken + (metrics.peak(usage, "held") if reserved else 0)
    most = {
        "used": metrics.peak(usage, "used"),
        "peak": peak,
        "reserved": ready.weights + taken + reserved,
    }
    source = "emulated" if ready.emulation else "measured"
    names = {"used": "device_used", "peak": "device_peak", "reserved": "device_reserved"}
    values = [value(names[which], amount, "B") for which, amount in most.items()]
    values += [
        value(f"throughput_per_gb_{which}", throughput / (amount / GB), "tokens/s/GB", source)
        for which, amount in most.items()
        if amount
    ]
    values += [
        value("waste", metrics.waste_at_peak(usage), "B"),
        value("host_used", metrics.peak(usage, "host"), "B"),
    ]
    if ready.tiers is not None and resident:
        on_device = int(most["reserved"])  # on a CPU in the same RAM
        on_device *= torch.device(ready.device).type == "cpu"
        values.append(value("host_peak", max(0, resident[0] - on_device), "B"))
    return values + over_time(usage)


def over_time(usage: Sequence[Usage]) -> Values:
    """The device's memory at some moments of the run; column `at`, seconds from its start."""
    step = -(-len(usage) // MOMENTS)
    return [
        value(name, amount, "B") | {"at": round(moment.at, 3)}
        for moment in usage[::step]
        for name, amount in (("used_at", moment.used), ("held_at", moment.held))
    ]


def emulated(ready: Prepared, steps: int) -> Values:
    """The three ratios of an emulated run and of its target, and what crossed the link a step.

    Of a real link, bytes and the time of the host's gather. steps: decode steps that the run took.
    """
    idle = ready.emulation is None and ready.tiers is not None and not ready.tiers.link.fetched
    if ready.tiers is None or idle or not steps:
        return []
    link = ready.tiers.link
    if ready.emulation is None:
        gather = value("gather_time", link.gather_time / steps, "s")
        return [value("bytes_moved", link.fetched / steps, "B"), gather]
    values = ratio_values(*ready.emulation.ratios(steps))
    return [
        *values,
        value("bytes_moved", link.fetched / steps, "B"),
        value("target_tokens", ready.emulation.target_tokens, "tokens", "modelled"),
        value("tpot_resident", ready.emulation.resident, "s"),
    ]


def annotated(values: Values, model: str) -> Values:
    """The values with the model's `parameters`, and `excluded` where an emulated ratio is off."""
    size = {"parameters": shape_of(model).parameters}
    return marked([v | size for v in values])


# -- one request: by the length of its output --------------------------------------------------


def long_output(
    *, strategy: str, tokens: int, output_tokens: str, model: str, device: str, seed: int,
    through: bool = False, dtype: str = "float32", machine: str = "h100-sxm", **_: Any,
) -> Values:  # fmt: skip
    """E2EL and throughput of one request of `tokens` tokens by the length of its output.

    output_tokens  lengths, as in "128,256"
    through        generate all of it; otherwise WINDOW tokens at the begin, in the middle and at
                   the end, behind a text as long, and a step's time follows the line between them
    """
    lengths = sorted(int(length) for length in output_tokens.split(","))
    longest = lengths[-1]
    ready = prepare(
        strategy, model, device, dtype,
        batch=1, tokens=tokens + longest // 2, chunk=tokens + longest, machine=machine,
    )  # fmt: skip
    text = ready.requests(fixed(1, tokens + longest, longest), [0.0], seed)[0].prompt
    ready.warm_up(tokens, seed)
    if ready.tiers is not None:
        ready.tiers.link.reset()
    if through:
        whole = ready.engine.run([Request(text[:tokens], longest)])[0]
        return [v for n in lengths for v in output(n, whole.stamps[n - 1], whole.ttft, ready)]
    at, steps, ttft = [0, longest // 2, longest], list[float](), 0.0
    for position in at:
        result = ready.engine.run([Request(text[: tokens + position], WINDOW)])[0]
        steps.append(statistics.median(result.itl))
        ttft = ttft or result.ttft
    values = [v for n in lengths for v in output(n, ttft + between(at, steps, n), ttft, ready)]
    values += [
        value("step", step, "s", "emulated" if ready.emulation else "measured") | {"position": p}
        for p, step in zip(at, steps, strict=True)
    ]
    values += emulated(ready, len(at) * (WINDOW - 1))
    return annotated(values, model)


def between(at: Sequence[int], steps: Sequence[float], count: int) -> float:
    """Seconds of the `count - 1` steps behind the first token, from those at some positions."""
    where = np.arange(count - 1) + 0.5
    return float(np.interp(where, at, steps).sum())


def output(count: int, e2el: float, ttft: float, ready: Prepared) -> Values:
    """The values of an output of `count` tokens."""
    source = "emulated" if ready.emulation else "measured"
    values = [
        value("e2el", e2el, "s", source),
        value("throughput", count / e2el, "tokens/s", source),
        value("ttft", ttft, "s"),
        value("tpot", (e2el - ttft) / max(1, count - 1), "s", source),
    ]
    return [v | {"output_tokens": count} for v in values]
