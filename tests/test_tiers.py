"""Memory tiers: what is counted, what comes back, and what a refusal says."""

from __future__ import annotations

import gc
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import batch, generate
from transformers import PreTrainedModel

import kvlib
from kvlib.kernels import explicit_scratch
from kvlib.tiers import DeviceOutOfMemory, Tier, Tiers, storage_bytes

Tiny = Callable[..., PreTrainedModel]

CPU = torch.device("cpu")
MIB = 2**20


def floats(tier: Tier, *shape: int, **more: Any) -> torch.Tensor:
    return tier.empty(*shape, dtype=torch.float32, device=CPU, **more)


def test_a_full_tier_refuses_with_numbers() -> None:
    tier = Tier("host", capacity=10 * MIB, fixed=4 * MIB)
    held = floats(tier, MIB // 2)  # 2 MiB
    assert (tier.used, tier.free) == (2 * MIB, 4 * MIB)
    with pytest.raises(DeviceOutOfMemory) as caught:
        floats(tier, 2, MIB)
    error = caught.value
    assert (error.tier, error.needed, error.free, error.capacity) == (
        "host", 8 * MIB, 4 * MIB, 10 * MIB,
    )  # fmt: skip
    assert str(error).startswith(
        "host memory is full: 8.0 MiB needed, 4.0 MiB free of 10.0 MiB; use a shorter prompt"
    )
    assert (tier.used, tier.peak) == (2 * MIB, 2 * MIB)  # a refusal takes nothing
    rest = floats(tier, MIB)  # the last byte may be used
    assert tier.free == 0
    assert held.shape != rest.shape


def test_a_tier_without_a_limit_counts_all_the_same() -> None:
    tier = Tier("device")
    held = tier.empty(3, 5, dtype=torch.bfloat16, device=CPU)
    assert (tier.free, tier.used, held.numel()) == (None, 30, 15)


@pytest.mark.parametrize("fill", [0, 1.5, -torch.inf])
def test_storage_comes_filled(fill: float) -> None:
    made = floats(Tier("device"), 4, 3, fill=fill)
    assert made.tolist() == [[fill] * 3] * 4


def test_bytes_come_back_when_the_tensor_is_collected() -> None:
    tier = Tier("device")
    first, second = floats(tier, 100), floats(tier, 10)
    view = first[:1]
    del first
    gc.collect()
    assert tier.used == 440  # the view still holds the storage
    del view
    gc.collect()
    assert tier.used == 40
    assert tier.peak == 440
    tier.reset_peak()
    assert tier.peak == tier.used == storage_bytes([second]) == 40


def test_borrowed_bytes_come_back_also_after_an_error() -> None:
    tier = Tier("device", capacity=1000)

    def fail() -> None:
        with tier.borrow(600):
            assert tier.used == 600
            with pytest.raises(DeviceOutOfMemory), tier.borrow(401):
                raise AssertionError("lent what it has not got")
            with tier.borrow(400):
                assert tier.free == 0
            assert tier.used == 600
            raise KeyError("anything")

    with pytest.raises(KeyError, match="anything"):
        fail()
    assert (tier.used, tier.peak) == (0, 1000)


def test_storage_bytes_counts_each_storage_once_and_whole() -> None:
    one, two = torch.zeros(100), torch.zeros(10, dtype=torch.int32)
    assert storage_bytes([one, one[:3], one.view(10, 10), two]) == 440
    assert storage_bytes([one[:3]]) == 400  # a view keeps all of it alive
    assert storage_bytes([]) == 0


def test_the_refusal_survives_a_process_boundary() -> None:
    error = DeviceOutOfMemory("device", 5 * MIB, MIB, 3 * MIB)
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is DeviceOutOfMemory
    assert isinstance(twin, MemoryError)
    assert (str(twin), twin.__dict__) == (str(error), error.__dict__)


@pytest.mark.parametrize(
    ("strategy", "knobs"),
    [("full", {}), ("h2o", {"budget": 0.3}), ("h2o", {"budget": 6, "kernel": "eager"})],
)
def test_used_is_what_the_cache_stores(tiny: Tiny, strategy: str, knobs: dict[str, Any]) -> None:
    model = tiny("llama")
    tiers = Tiers()
    with kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model, tiers=tiers, **knobs)
        generate(model, *batch([23, 9, 1]), 14, past_key_values=cache)
        stored = storage_bytes(t for layer in cache.layers for t in layer.slots.values())
        assert tiers.device.used == stored == sum(cache.nbytes().values()) > 0
        twin = cache.fork([2, 0])
        both = stored + sum(twin.nbytes().values())
        assert tiers.device.used == both
        assert tiers.device.peak >= both
    del cache
    gc.collect()
    assert tiers.device.used == both - stored
    twin.reset()
    gc.collect()
    assert (tiers.device.used, tiers.host.used, tiers.host.peak) == (0, 0, 0)


def test_a_small_budget_holds_less_than_full(tiny: Tiny) -> None:
    """In bytes that are really there, not in a mask over them."""
    model, used = tiny("llama"), {}
    with kvlib.attach(model):
        for name, knobs in (("full", {}), ("h2o", {"budget": 0.2})):
            tiers = Tiers()
            cache = kvlib.make_cache(name, model, tiers=tiers, **knobs)
            model(batch([500])[0], past_key_values=cache)
            used[name] = tiers.device.used
            token = 2 * 2 * 8 * 4 + 2 * 4 * (2 if name == "h2o" else 1)  # K, V and state, 2 heads
            slots = 101 if name == "h2o" else 500
            assert used[name] == 3 * token * slots
    assert used["h2o"] < 0.25 * used["full"]


def test_eager_prefill_needs_the_matrix_and_flash_does_not(tiny: Tiny) -> None:
    model, tokens = tiny("llama"), 300
    matrix = explicit_scratch(1, 6, tokens, tokens)
    ids = batch([tokens])[0]
    with kvlib.attach(model):
        for budget, kernel in itertools.product((0.2, 50), ("flash", "eager")):
            tiers = Tiers(Tier("device", capacity=matrix))
            cache = kvlib.make_cache("h2o", model, tiers=tiers, budget=budget, kernel=kernel)
            if kernel == "flash":
                model(ids, past_key_values=cache)
                cache.check()
                continue
            with pytest.raises(DeviceOutOfMemory) as caught:
                model(ids, past_key_values=cache)
            assert (caught.value.needed, caught.value.capacity) == (matrix, matrix)
            del caught
            cache.reset()
            gc.collect()
            assert tiers.device.used == 0
        roomy = Tiers(Tier("device", capacity=2 * matrix))
        cache = kvlib.make_cache("h2o", model, tiers=roomy, kernel="eager")
        model(ids, past_key_values=cache)
        assert roomy.device.peak > matrix > roomy.device.used
