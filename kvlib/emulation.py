"""Which emulated link stands for which machine, and how far the rest of the likeness goes.

A slow link matters in proportion: what has to agree with the target machine is the ratio of times,
not the bandwidth. Three ratios are stored with every emulated row, for this run and the target:

ρ1  link time of all keys and values ÷ time of a decode step with everything on the device
ρ2  bytes of keys and values ÷ bytes of weights
ρ3  time in which the host gathers a layer's fetched rows ÷ time of a layer's decode step

The bandwidth is chosen so that ρ1 agrees, and how fast the host gathers, so that ρ3 does where
this machine's own gather is not slower. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlib.hardware import Machine
from kvlib.link import Link
from kvlib.measure import Values, value
from kvlib.memory import kv_bytes, weight_bytes
from kvlib.shapes import Shape, check_positive

TARGET_SHAPE = "llama-3.1-8b"  # the model that the target machine serves
APART = 2  # times by which a ratio may differ from the target's


@dataclass(frozen=True)
class Ratios:
    """ρ1, ρ2 and ρ3 of a run or of a target machine."""

    rho1: float
    rho2: float
    rho3: float


def target_ratios(
    machine: Machine, shape: Shape, tokens: int, batch: int, share: float, dtype: str = "bfloat16"
) -> Ratios:
    """The ratios on a published machine, where a decode step is the time to read its memory.

    share: part of all keys and values that the host gathers, read and written once.
    """
    kv, weights = kv_bytes(shape, tokens, batch, dtype), weight_bytes(shape, dtype)
    step = (kv + weights) / machine.bandwidth
    return Ratios(
        rho1=float(kv / machine.link.bandwidth / step),
        rho2=float(kv / weights),
        rho3=float(2 * share * kv / machine.host / step),
    )


def bandwidth_for(rho1: float, kv: float, step: float) -> float:
    """B/s at which `kv` bytes take `rho1` times as long as a resident step of `step` seconds."""
    check_positive("rho1", rho1)
    check_positive("step", step)
    return kv / (rho1 * step)


def link_like(machine: Machine, rho1: float, kv: float, step: float) -> Link:
    """An emulated link and host, as slow beside a resident step as the machine's beside its own.

    rho1: the machine's; kv: bytes that take this long; step: seconds of a resident step here.
    """
    bandwidth = bandwidth_for(rho1, kv, step)
    gather = bandwidth * machine.host / 2 / machine.link.bandwidth  # reads and writes
    return Link.emulated(bandwidth, gather=gather)


def ratio_values(here: Ratios, there: Ratios) -> Values:
    """The three ratios of a run and of its target, as values."""
    pairs = zip(vars(here).items(), vars(there).values(), strict=True)
    return [
        row
        for (name, ours), theirs in pairs
        for row in (
            value(name, ours, "1", "emulated"),
            value(f"{name}_target", theirs, "1", "modelled"),
        )
    ]


def mismatch(values: Values) -> str:
    """Why emulated times feed no verdict: which ratios are too far from the target's; or ""."""
    found = {v["metric"]: v["value"] for v in values}
    wrong = [
        name for name in ("rho1", "rho2", "rho3")
        if found.get(f"{name}_target")
        and not 1 / APART <= found[name] / found[f"{name}_target"] <= APART
    ]  # fmt: skip
    told = f"{', '.join(wrong)} of the emulated link differ more than {APART}x from the target's"
    return told if wrong else ""


def marked(values: Values) -> Values:
    """The values, the emulated ones with the reason `excluded` where there is a mismatch."""
    if not (why := mismatch(values)):
        return values
    return [v | {"excluded": why} if v["source"] == "emulated" else v for v in values]
