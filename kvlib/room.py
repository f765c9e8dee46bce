"""What fits: the longest context and the most requests on a device, found by trying.

A model with random weights reads and writes under a strategy until its emulated device runs out of
memory. The device holds, beside what the cache allocates there, the activations that the formulas
say: those a CPU keeps elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvlib.attachment import attach
from kvlib.caches import KVCache, PagedCache, make_cache
from kvlib.caches.blocks import PoolExhausted
from kvlib.costs import BLOCK, Case, largest_batch, longest_context, memory, passing_bytes
from kvlib.engines.prepare import budget_of, knobs_of, loaded_model, random_ids
from kvlib.hardware import find_machine
from kvlib.measure import Values, feed, value
from kvlib.memory import kv_bytes, weight_bytes
from kvlib.models import shape_of
from kvlib.shapes import Shape
from kvlib.tiers import DeviceOutOfMemory, Tier, Tiers

CLOSE = 0.01  # of the answer: how near the search comes
STEPS = 2  # decode steps that have to fit as well


@torch.inference_mode()
def what_fits(
    *, strategies: str, spare: int, tokens: int, model: str, device: str, seed: int, **_: Any
) -> Values:
    """Longest context of one request, and most requests of `tokens` tokens, on an emulated device.

    strategies: names, as in "paged,h2o". spare: bytes that the device has beside the weights.
    """
    loaded, values = loaded_model(model, "float32", device), list[dict[str, Any]]()
    with attach(loaded.model):
        for strategy in strategies.split(","):
            about = {"strategy": strategy, "budget": budget_of(strategy)}
            found = _room(loaded.model, shape_of(model), strategy, spare, tokens, seed)
            values += [v | about for v in found]
    return values


def _room(model: Any, shape: Shape, strategy: str, spare: int, tokens: int, seed: int) -> Values:
    capacity = int(weight_bytes(shape, "float32")) + spare
    of = replace(find_machine("h100-sxm"), memory=capacity)  # of which only the size counts
    case = Case(shape, of, strategy, budget_of(strategy) or 1.0, "float32")
    attempt = Attempt(model, case, spare, seed)
    expected = longest_context(case, usable=1.0), largest_batch(case, tokens, usable=1.0)
    longest = search(lambda n: attempt(n - STEPS, 1), expected[0], least=STEPS + 1)
    most = search(lambda n: attempt(tokens - STEPS, n), expected[1])
    values = [
        value("longest_context", longest, "tokens", "emulated"),
        value("largest_batch", most, "requests", "emulated"),
        value("requests_per_gb", most / (capacity / 1e9), "requests/GB", "emulated"),
        value("longest_context", expected[0], "tokens", "modelled"),
        value("largest_batch", expected[1], "requests", "modelled"),
    ]
    return [v | {"capacity": capacity} for v in values]


@dataclass(frozen=True)
class Attempt:
    """Does it fit? Reads a prompt for each request, then takes STEPS decode steps."""

    model: Any
    case: Case
    spare: int
    seed: int

    def __call__(self, tokens: int, batch: int) -> bool:
        device = Tier("device", self.case.machine.memory)
        device.fixed = int(self.case.machine.memory) - self.spare
        knobs = knobs_of(self.case.strategy)
        if self.case.strategy == "paged":
            pool = self.spare - int(memory(self.case, tokens).prefill)  # as vLLM sizes its own
            block = int(kv_bytes(self.case.shape, BLOCK, 1, "float32"))
            knobs = {"blocks": max(1, pool // block), "block": BLOCK}
        try:
            cache = make_cache(self.case.strategy, self.model, tiers=Tiers(device), **knobs)
            self._run(cache, tokens, batch)
        except (DeviceOutOfMemory, PoolExhausted):
            return False
        return True

    def _run(self, cache: KVCache, tokens: int, batch: int) -> None:
        passing = int(passing_bytes(self.case, tokens))
        with cache.tiers.device.borrow(passing):
            self._read(cache, tokens, 0)
        for row in range(1, batch):
            with cache.tiers.device.borrow(passing):
                cache.insert(self._another(cache, tokens, row))
        token = torch.ones(batch, 1, dtype=torch.long, device=self.model.device)
        for _ in range(STEPS):
            self.model(token, past_key_values=cache, logits_to_keep=1)

    def _another(self, cache: KVCache, tokens: int, row: int) -> KVCache:
        """One more request: a copy, or where equal prompts share their blocks another prompt."""
        if not isinstance(cache, PagedCache):
            return cache.fork([0])
        fresh = cache.empty()
        self._read(fresh, tokens, row)
        return fresh

    def _read(self, cache: KVCache, tokens: int, row: int) -> None:
        ids = random_ids(tokens, self.case.shape.vocab, self.seed + 1000 * row)
        feed(self.model, cache, torch.tensor([ids], device=self.model.device), "flash")


def search(fits: Callable[[int], bool], guess: int, least: int = 1) -> int:
    """The largest n, to within CLOSE, that fits if all that is smaller does; 0 if `least` does not.

    Steps away from the guess double until the answer lies between two of them.
    """
    low, high, step = 0, 0, max(1, round(guess * CLOSE))
    now = max(least, guess)
    while not (low and high):
        if fits(now):
            low, now = now, now + step
        elif now == least:
            return 0
        else:
            high, now = now, max(least, now - step)
        step *= 2
    while high - low > max(1, CLOSE * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def room_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that `what_fits` takes on two cores, for the estimate before a run."""
    return 4.0 + 8.0 * len(point["strategies"].split(","))
