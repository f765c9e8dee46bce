"""What a strategy costs on a machine: bytes and seconds, as formulas over arrays.

    L layers, H hidden, Hq and Hkv heads, D head size, b bytes of a number, g devices
    S tokens of a request that are stored, n of them attended to, B requests at once, T prompt
    M bytes/s of device memory, F FLOP/s, C bytes/s of the link, R bytes/s of the host's memory

A decode step takes compute + what of the transfers its layers cannot hide:

    compute  = products + attention + selection + elementwise + overhead + reduce
    products = max(weights read / (stream·M), 2 · weights used · B / (products·F)), on a CPU the sum
    attention = keys, values and sketches read / (attend·M)
    step     = Σ over layers of max(compute / L, gather + transfer of the layer that comes next)
    transfer = bytes fetched / min(C, R) + latency,   gather = 2 · bytes fetched / (gather·R)

A prefill takes 2 · weights · T / (products·F) for the products, 4 · Hq · D · L · T² / F for
attention, half of it where flash attention skips the future, half as much again for H2O's second
pass. `Rates` says which part of the published figures is reached; physics is all the rest. The
formulas run without torch. Tensor parallelism divides weights, heads and work by g.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlib.hardware import Machine
from kvlib.memory import (
    DTYPE_BYTES,
    PREFILLS,
    activations,
    dtype_bytes,
    kept_tokens,
    kv_bytes,
    prefill_scratch,
    weight_bytes,
)
from kvlib.shapes import Mixture, Shape, check_choice, check_positive, count

Amount = float | npt.NDArray[np.float64]

STRATEGIES = ("full", "paged", "h2o", "streaming", "infinigen", "offload")
EVICTING, FETCHING = ("h2o", "streaming"), ("infinigen", "offload")
BLOCK = 16  # tokens a block of the paged pool
SPARE = {"full": 64, "h2o": 8, "streaming": 8, "infinigen": 64, "offload": 64}  # slots of a row
RESERVED = 0.9  # of the device's memory, which vLLM takes by default, and so do all here
WHOLE_LAYERS = 2  # that InfiniGen fetches whole
SKETCH = 0.3  # of the head's columns, in InfiniGen's sketch
DEVICES = 8  # at most, in one node


@dataclass(frozen=True)
class Rates:
    """What a machine reaches of its published figures. The defaults are the most it could.

    stream, attend  of M, reading weights and reading keys and values in a decode step
    products        of F, in the products of many tokens with the weights
    flash, eager    of F, in the attention of a prefill
    scan            of M, in going through scores and choosing
    elementwise     of M, in what is done to activations between the products
    gather          of R, in picking rows on the host
    pack            further passes over the weights where a product has several rows
    blocks          further passes over keys and values where blocks are first put together
    layer           seconds a layer and forward that none of the above explains: launches, calls
    evict, foresee  seconds a layer and step, of an evicting strategy and of InfiniGen
    latency         seconds a transfer, beside its bytes
    """

    stream: float = 1.0
    attend: float = 1.0
    products: float = 1.0
    flash: float = 1.0
    eager: float = 1.0
    scan: float = 1.0
    elementwise: float = 1.0
    gather: float = 1.0
    pack: float = 0.0
    blocks: float = 0.0
    layer: float = 0.0
    evict: float = 0.0
    foresee: float = 0.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            rate, least = getattr(self, item.name), item.default == 0.0
            if not (math.isfinite(rate) and (rate > 0 or (least and rate == 0))):
                raise ValueError(f"{item.name} must be a number above 0, got {rate!r}")


@dataclass(frozen=True)
class Case:
    """A model's shape on a machine under a strategy. budget: share of the tokens, in (0, 1]."""

    shape: Shape
    machine: Machine
    strategy: str = "full"
    budget: float = 1.0
    dtype: str = "bfloat16"
    gpus: int = 1
    prefill: str = "flash"
    chunk: int = 512
    overlap: bool = True  # transfers run while the layer in front computes
    rates: Rates = Rates()

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("dtype", self.dtype, DTYPE_BYTES)
        check_choice("prefill", self.prefill, PREFILLS)
        kept_tokens(1, float(self.budget))
        if count("gpus", self.gpus) > (most := DEVICES if self.machine.peer else 1):
            raise ValueError(f"gpus must be 1 to {most} of {self.machine.name}, got {self.gpus}")

    @property
    def fetches(self) -> bool:
        """Does the cache live on the host?"""
        return self.strategy in FETCHING

    @property
    def share(self) -> float:
        """The budget where the strategy has one, else 1."""
        return float(self.budget) if self.strategy in (*EVICTING, "infinigen") else 1.0

    @property
    def whole(self) -> int:
        """Layers that attend to, or fetch, all that is stored."""
        layers = self.shape.layers
        return min(WHOLE_LAYERS, layers) if self.strategy == "infinigen" else layers

    @property
    def heads(self) -> float:
        """Share of the heads on the device that has the most of them."""
        return math.ceil(self.shape.kv_heads / self.gpus) / self.shape.kv_heads

    def over(self, bandwidth: float) -> Case:
        """The same over a link of so many bytes a second."""
        check_positive("bandwidth", bandwidth)
        link = replace(self.machine.link, bandwidth=bandwidth)
        return replace(self, machine=replace(self.machine, link=link))


# -- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes: of one device, but `host` of all together.

    kv        keys and values of the tokens that stay on the device
    waste     slots that hold no token yet: of a last block, or those in store for the next steps
    state     their positions and scores; the sketch
    transit   what two fetched layers hold while they pass through
    prefill   what the last prompt to be read adds at its peak
    reserved  what the engine holds beside the weights, used or not
    """

    weights: Amount
    kv: Amount
    waste: Amount
    state: Amount
    transit: Amount
    prefill: Amount
    reserved: Amount
    host: Amount

    @property
    def used(self) -> Amount:
        """Of the cache, while it decodes."""
        return self.kv + self.state + self.transit

    @property
    def peak(self) -> Amount:
        """With the weights, at the most."""
        held = self.weights + self.kv + self.waste + self.state
        return held + np.maximum(self.transit, self.prefill)


def memory(case: Case, tokens: npt.ArrayLike, batch: npt.ArrayLike = 1) -> Memory:
    """Bytes with `batch` requests of `tokens` tokens each; the last one has just been read."""
    stored, rows = count("tokens", tokens), count("batch", batch)
    held = _on_device(case, stored) * rows
    empty = rows * _empty_slots(case, stored)
    slot = 0.0 if case.fetches else case.heads * kv_bytes(case.shape, 1, 1, case.dtype)
    state, weights = _state_bytes(case), weight_bytes(case.shape, case.dtype) / case.gpus
    kv, waste = slot * held, (slot + state) * empty
    everything = kv_bytes(case.shape, stored, rows, case.dtype)
    pool = np.maximum(RESERVED * case.machine.memory - weights, kv + waste)
    return Memory(
        weights=weights,
        kv=kv,
        waste=waste,
        state=state * held,
        transit=case.fetches * 2 * case.heads * everything / case.shape.layers,
        prefill=_prefilling(case, stored),
        reserved=pool if case.strategy == "paged" else kv + waste,
        host=case.fetches * everything,
    )


def _empty_slots(case: Case, stored: Amount) -> Amount:
    """Slots of a request without a token: at most, but in the last block exactly."""
    if case.strategy == "paged":
        return np.asarray(-np.asarray(stored) % BLOCK, dtype=np.float64)
    return float(SPARE[case.strategy])


def _on_device(case: Case, stored: Amount) -> Amount:
    """Tokens of a request that have a slot on the device, of whatever kind."""
    return kept_tokens(stored, case.share) if case.strategy in EVICTING else stored


def _state_bytes(case: Case) -> float:
    """Bytes of a slot beside keys and values: int32 positions, float32 scores, the sketch."""
    shape, size = case.shape, 0.0
    if case.strategy != "paged":
        size += 4.0 * shape.layers + 4.0 * shape.layers * (case.strategy == "h2o")
    if case.strategy == "infinigen":
        size += (shape.layers - case.whole) * sketch_rank(shape) * dtype_bytes(case.dtype)
    return case.heads * shape.kv_heads * size


def sketch_rank(shape: Shape) -> int:
    """Columns of InfiniGen's sketch."""
    return max(1, math.floor(SKETCH * shape.head_dim + 0.5))


def _prefilling(case: Case, prompt: Amount) -> Amount:
    """Bytes that reading one prompt adds, at its peak, to what it leaves behind.

    Where tokens are evicted that is, beside what passes, all tokens of the layer in work. Several
    devices share all of it but the residual, which each one has.
    """
    width = _in_work(case, prompt)
    layer = kv_bytes(case.shape, width, 1, case.dtype, layers=1) * (case.strategy in EVICTING)
    residual = width * 2 * case.shape.hidden * dtype_bytes(case.dtype)
    return case.heads * (passing_bytes(case, prompt) + layer - residual) + residual


def passing_bytes(case: Case, prompt: npt.ArrayLike) -> Amount:
    """Bytes that pass through one device while a prompt is read, and leave nothing there.

    Activations with the scratch of attention and, of a cache that lives on the host, two layers:
    one in work, one on its way.
    """
    width, evicts = _in_work(case, count("tokens", prompt)), case.strategy in EVICTING
    scored = case.strategy == "h2o" or (evicts and case.prefill == "chunked")
    scratch = prefill_scratch(
        case.shape, prompt, case.prefill, "h2o" if scored else "full",
        dtype=case.dtype, budget=case.share, chunk=case.chunk,
    )  # fmt: skip
    layers = kv_bytes(case.shape, prompt, 1, case.dtype, layers=2) if case.fetches else 0.0
    return layers + activations(case.shape, width, scratch, 1, case.dtype)


def _in_work(case: Case, prompt: Amount) -> Amount:
    """Tokens of a prompt that are in work at once."""
    return np.minimum(prompt, case.chunk) if case.prefill == "chunked" else prompt


# -- decode ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Seconds of a decode step, by what they go to; `exposed`: what of the link is not hidden."""

    products: Amount
    attention: Amount
    selection: Amount
    elementwise: Amount
    overhead: Amount
    reduce: Amount
    gather: Amount
    transfer: Amount
    total: Amount

    @property
    def compute(self) -> Amount:
        """Seconds in which the device computes."""
        work = self.products + self.attention + self.selection + self.elementwise
        return work + self.overhead + self.reduce

    @property
    def exposed(self) -> Amount:
        """Seconds that gather and transfer add."""
        return self.total - self.compute


def step_time(case: Case, tokens: npt.ArrayLike, batch: npt.ArrayLike = 1) -> Step:
    """Seconds of one decode step of `batch` requests that have `tokens` tokens each: TPOT."""
    stored, rows = count("tokens", tokens), count("batch", batch)
    of, rates, layers = case.machine, case.rates, case.shape.layers
    attended = attended_bytes(case, stored, rows) + sketch_bytes(case, stored, rows)
    passes = 1 / rates.attend + rates.blocks * (case.strategy == "paged")
    compute = Step(
        products=_products(case, rows),
        attention=case.heads * attended * passes / of.bandwidth,
        selection=_selection(case, stored, rows),
        elementwise=_elementwise(case, rows),
        overhead=layers * rates.layer,
        reduce=_reduce(case, rows),
        gather=0.0, transfer=0.0, total=0.0,
    )  # fmt: skip
    gather, transfer, total = _with_fetches(case, stored, rows, compute.compute)
    return replace(compute, gather=gather, transfer=transfer, total=total)


def attended_tokens(case: Case, stored: Amount) -> Amount:
    """Tokens that a layer attends to, on average over the layers."""
    if case.strategy in EVICTING:
        return kept_tokens(stored, case.share)
    part = case.whole / case.shape.layers
    return part * stored + (1 - part) * (picked_tokens(case, stored) + 1)


def picked_tokens(case: Case, stored: Amount) -> Amount:
    """Tokens that InfiniGen fetches in a layer that is not fetched whole."""
    few: Amount = np.maximum(1, np.floor(case.share * stored + 1e-9))
    return few


def attended_bytes(case: Case, stored: Amount, rows: Amount) -> Amount:
    """Keys and values that the attention of a step reads."""
    token = kv_bytes(case.shape, 1, 1, case.dtype)
    return token * attended_tokens(case, stored) * rows


def sketch_bytes(case: Case, stored: Amount, rows: Amount) -> Amount:
    """Bytes of the sketches that a step reads."""
    if case.strategy != "infinigen":
        return 0.0
    layers = (case.shape.layers - case.whole) * case.shape.kv_heads
    token = layers * sketch_rank(case.shape) * dtype_bytes(case.dtype)
    return token * stored * rows


def _products(case: Case, rows: Amount, head: bool = True) -> Amount:
    """Seconds of the products of `rows` tokens with all weights."""
    read = case.shape.read(dtype_bytes(case.dtype), np.ceil(rows))
    return _product(case, read, case.shape.used(head), rows)


def _product(case: Case, read: Amount, used: float, rows: Amount) -> Amount:
    """Seconds of `rows` tokens times `used` weights, of which `read` bytes are read.

    A GPU reads while it computes; a CPU does one after the other.
    """
    of, rates = case.machine, case.rates
    passes: Any = 1 / rates.stream + rates.pack * (np.asarray(rows) > 1)
    reading = passes * read / of.bandwidth / case.gpus
    work = 2 * used * rows / (rates.products * of.flops[case.dtype]) / case.gpus
    both: Amount = reading + work if of.threads else np.maximum(reading, work)
    return both


def _elementwise(case: Case, rows: Amount) -> Amount:
    """Seconds of norms, rotations, gates and sums: some passes over each activation."""
    shape = case.shape
    width = 8 * shape.hidden + 4 * shape.intermediate
    if isinstance(shape, Mixture):
        width += 4 * shape.intermediate * (shape.active - 1)
    moved = shape.layers * width * dtype_bytes(case.dtype) * rows
    return moved / (case.rates.elementwise * case.machine.bandwidth) / case.gpus


def _selection(case: Case, stored: Amount, rows: Amount) -> Amount:
    """Seconds of what decides which tokens to keep or fetch.

    H2O adds to its scores and looks for the least. InfiniGen projects the next layer's query, one
    more product with W_Q, and writes and ranks a score for every query head and token.
    """
    shape, of, rates = case.shape, case.machine, case.rates
    evicts = case.strategy in EVICTING and case.share < 1
    if not evicts and case.strategy != "infinigen":
        return 0.0
    scanned = 12.0 * shape.layers * shape.kv_heads * _on_device(case, stored) * rows
    fixed: Any = rates.evict * shape.layers
    if case.strategy == "infinigen":
        layers = shape.layers - case.whole
        query = shape.hidden * shape.heads * shape.head_dim * layers
        scanned = 12.0 * layers * shape.heads * stored * rows
        fixed = rates.foresee * layers
        fixed = fixed + _product(case, query * dtype_bytes(case.dtype), query, rows)
    total: Amount = case.heads * scanned / (rates.scan * of.bandwidth) + fixed
    return total


def _reduce(case: Case, rows: Amount) -> Amount:
    """Seconds of the two all-reduces a layer of tensor parallelism."""
    if case.gpus == 1:
        return 0.0
    moved = 2 * case.shape.layers * case.shape.hidden * dtype_bytes(case.dtype) * rows
    return moved * 2 * (case.gpus - 1) / case.gpus / case.machine.peer


def fetched_bytes(case: Case, stored: Amount, rows: Amount) -> tuple[Amount, Amount]:
    """Bytes that cross the link in a step: for a layer that is fetched whole, and another one."""
    if not case.fetches:
        return 0.0, 0.0
    token = kv_bytes(case.shape, 1, 1, case.dtype, layers=1)
    return token * stored * rows, token * picked_tokens(case, stored) * rows


def _with_fetches(
    case: Case, stored: Amount, rows: Amount, compute: Amount
) -> tuple[Amount, Amount, Amount]:
    """Seconds of gather, of transfers, and of the whole step.

    Whole layers need no gather. On a CPU, which has no link, the gather takes the device's time.
    """
    whole, picked = fetched_bytes(case, stored, rows)
    layers, few = case.shape.layers, case.shape.layers - case.whole
    gather = 2 * picked / (case.rates.gather * case.machine.host)
    on_cpu = case.machine.threads > 0
    times = [0.0 * moved if on_cpu else _transfer(case, moved) for moved in (whole, picked)]
    sums = gather * few, times[0] * case.whole + times[1] * few
    if on_cpu or not case.overlap:
        return *sums, compute + sums[0] + sums[1]
    layer = compute / layers
    first, later = np.maximum(layer, times[0]), np.maximum(layer, gather + times[1])
    return *sums, case.whole * first + few * later


def _transfer(case: Case, moved: Amount) -> Amount:
    """Seconds in which each device gets its part over a link of its own, from one host for all."""
    if not case.fetches:
        return 0.0
    link, host = case.heads * moved / case.machine.link.bandwidth, moved / case.machine.host
    seconds: Amount = np.maximum(link, host) + case.rates.latency
    return seconds


# -- prefill -----------------------------------------------------------------------------------


def prefill_time(case: Case, tokens: npt.ArrayLike) -> Amount:
    """Seconds to read one prompt: TTFT of a request that finds the device free."""
    prompt, shape = count("tokens", tokens), case.shape
    chunks = np.ceil(prompt / case.chunk) if case.prefill == "chunked" else 1.0
    width = prompt / chunks
    head = shape.used() - shape.used(head=False)
    forward = _products(case, width, head=False) + shape.layers * case.rates.layer
    last = 2 * head / (case.rates.products * case.machine.flops[case.dtype]) / case.gpus
    compute = chunks * forward + last + _elementwise(case, prompt)
    compute = compute + _prefill_attention(case, prompt) + _reduce(case, prompt)
    if not case.fetches or case.machine.threads:
        return compute
    stored = kv_bytes(shape, prompt, 1, case.dtype) * case.heads / case.machine.link.bandwidth
    return np.maximum(compute, stored) if case.overlap else compute + stored


def _prefill_attention(case: Case, prompt: Amount) -> Amount:
    """Seconds of the attention of a whole prompt, over all layers.

    Materialised, the scores are written, turned into weights and read again: four passes over
    T² float32 numbers a query head.
    """
    shape, of, rates = case.shape, case.machine, case.rates
    square = float(shape.layers * shape.heads) * prompt * prompt
    work = 4 * shape.head_dim * square
    if case.prefill == "flash":
        passes = 1.5 if case.strategy == "h2o" and case.share < 1 else 1.0
        return case.heads * passes * work / 2 / (rates.flash * of.flops[case.dtype])
    if case.prefill == "chunked" and case.strategy in EVICTING:
        kept = np.minimum(prompt, kept_tokens(prompt, case.share) + case.chunk)
        square, work = square * kept / prompt, work * kept / prompt
    elif case.prefill == "chunked":
        square, work = square / 2, work / 2
    passed = 4 * 4 * square / of.bandwidth
    return case.heads * (work / of.flops[case.dtype] + passed) / rates.eager


def e2el(
    case: Case, tokens: npt.ArrayLike, output: npt.ArrayLike, batch: npt.ArrayLike = 1
) -> Amount:
    """Seconds from a request to its last token: prefill, then a step of mean length for each."""
    new = count("output", output)
    middle = np.round(count("tokens", tokens) + np.asarray(new) / 2)
    return prefill_time(case, tokens) + (new - 1) * step_time(case, middle, batch).total


# -- capacity ----------------------------------------------------------------------------------


def longest_context(case: Case, batch: int = 1, usable: float = RESERVED) -> int:
    """The most tokens a request may have if `batch` of them are to fit; 0 if none do."""
    return _largest(lambda n: _fits(memory(case, n, batch), case.machine.memory * usable))


def largest_batch(case: Case, tokens: int, usable: float = RESERVED) -> int:
    """The most requests of `tokens` tokens that fit at once; 0 if none does."""
    return _largest(lambda n: _fits(memory(case, tokens, n), case.machine.memory * usable))


def _fits(found: Memory, room: float) -> bool:
    return bool(np.all(found.peak <= room))


def _largest(fits: Callable[[int], bool]) -> int:
    low, high = 0, 1
    while high < 2**40 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
