"""The paper's own setting, predicted: Llama-3.1-8B on one H100 over PCI Express 5.

`blind.toml` holds what the cost model said with published figures alone (`Rates()`), committed
before anything was tuned or any overhead was looked for; a test holds the model to it. The paper's
figures are quoted from a podcast transcript and a summary, see `claims.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvlib.costs import BUDGET, Case, Rates, e2el, longest_context
from kvlib.hardware import find_machine
from kvlib.shapes import find_shape

MODEL, MACHINE = "llama-3.1-8b", "h100-sxm"
PROMPT, OUTPUT = 10_000, 8192  # tokens in and out
CHAT = (70, 214)  # tokens in and out, LMSYS-Chat-1M's published means (69.5 and 214.5), rounded
REQUESTS = 96


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, as reported: between `low` and `high`, in `unit`."""

    name: str
    what: str
    low: float
    high: float
    unit: str


PUBLISHED = (
    Figure("infinigen_ratio", "time, InfiniGen ÷ vLLM, 10k in, 8,192 out", 16, 18, "1"),
    Figure("h2o_ratio", "time, H2O ÷ vLLM, 10k in, 8,192 out", 2.5, 3.5, "1"),
    Figure("rate_512", "InfiniGen, 10k in, 512 out", 7.5, 8.5, "tokens/s"),
    Figure("rate_8192", "InfiniGen, 10k in, 8,192 out", 7.5, 8.5, "tokens/s"),
    Figure("longest_eager", "longest prompt, matrix materialised", 10_000, 12_000, "tokens"),
    Figure("longest_flash", "longest prompt, flash attention", 128_000, np.inf, "tokens"),
    Figure("requests_ratio", "latency, InfiniGen ÷ vLLM, 96 requests", 13, 15, "1"),
)


def cases(rates: Mapping[str, Rates] | None = None, overlap: bool = True) -> dict[str, Case]:
    """The paper's three strategies in its setting; `rates` by strategy, by default the best."""
    shape, machine = find_shape(MODEL), find_machine(MACHINE)
    found = {"paged": Case(shape, machine, "paged")}
    for name in ("h2o", "infinigen"):
        found[name] = Case(shape, machine, name, BUDGET, overlap=overlap)
    return {name: replace(c, rates=(rates or {}).get(name, c.rates)) for name, c in found.items()}


def predict(of: Mapping[str, Case]) -> dict[str, float]:
    """What the cost model gives for each of PUBLISHED, by its name."""
    long = {name: float(e2el(case, PROMPT, OUTPUT)) for name, case in of.items()}
    chat = {name: float(e2el(case, *CHAT, REQUESTS)) for name, case in of.items()}
    short = float(e2el(of["infinigen"], PROMPT, 512))
    eager = replace(of["infinigen"], prefill="eager")
    return {
        "infinigen_ratio": long["infinigen"] / long["paged"],
        "h2o_ratio": long["h2o"] / long["paged"],
        "rate_512": 512 / short,
        "rate_8192": OUTPUT / long["infinigen"],
        "longest_eager": longest_context(eager),
        "longest_flash": longest_context(of["infinigen"]),
        "requests_ratio": chat["infinigen"] / chat["paged"],
    }


def blind() -> dict[str, dict[str, float]]:
    """The committed predictions: `overlapped`, as the papers design it, and `serial`."""
    path = Path(__file__).with_name("blind.toml")
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["predicted"])


def miss(predicted: float, figure: Figure) -> float:
    """How many times too high (above 1) or too low (below) a prediction is; 1 within the range."""
    return predicted / float(np.clip(predicted, figure.low, figure.high))
