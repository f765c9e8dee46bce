"""What the study measures: peaks of memory, and the formulas beside them."""

import sys

import pytest
import torch

from kvlib.isolate import in_child
from kvlib.measure import Values, prefill_layer
from kvlib.peak import peak_memory, peak_rss

linux = pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from Linux's /proc")
MIB = 2**20


def used(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes * MIB, dtype=torch.uint8)


@linux
def test_a_peak_counts_what_is_freed_again_within_the_block() -> None:
    with peak_rss() as grown:
        used(48)
        kept = used(16)
    assert grown[0] / MIB == pytest.approx(48, abs=4)
    assert len(kept)


@linux
def test_a_peak_counts_pages_that_were_freed_before_the_block() -> None:
    small = [torch.ones(MIB // 8, dtype=torch.uint8) for _ in range(256)]
    del small
    with peak_memory("cpu") as grown:
        again = [torch.ones(MIB // 8, dtype=torch.uint8) for _ in range(256)]
    assert grown[0] / MIB == pytest.approx(32, abs=4)
    assert len(again)


def layer(strategy: str, prefill: str) -> Values:
    return prefill_layer(
        strategy=strategy, prefill=prefill, tokens=4096, shape="smollm2-135m", device="cpu", seed=0
    )


@linux
@pytest.mark.parametrize("prefill", ["flash", "chunked"])
@pytest.mark.parametrize("strategy", ["full", "h2o"])
def test_a_layer_takes_what_the_formulas_say(strategy: str, prefill: str) -> None:
    values = in_child(layer, (strategy, prefill), 120, ["kvlib.measure"])
    found = {value["metric"]: value["value"] for value in values}
    assert found["prefill_peak"] == pytest.approx(found["prefill_peak_predicted"], rel=0.25)
