"""The link: bandwidth as asked, deadlines in order, what is counted and what is hidden."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable

import pytest
import torch
from conftest import batch, generate
from transformers import PreTrainedModel

import kvlib
from kvlib.link import Link
from kvlib.tiers import Tiers

Tiny = Callable[..., PreTrainedModel]

CPU = torch.device("cpu")


def test_transfers_queue_and_are_counted() -> None:
    link = Link.emulated(1e6, latency=0.01)
    first = link.fetch([torch.zeros(2500)], CPU, layer=3)  # 10 kB
    second = link.fetch([torch.zeros(2500)], CPU, layer=4, nbytes=5000)
    one, two = link.trace
    assert (one.layer, one.nbytes, two.layer, two.nbytes) == (3, 10_000, 4, 5000)
    assert one.end - one.start == pytest.approx(0.01 + 0.01)
    assert two.start == one.end  # one path: the second waits for the first
    assert two.end - two.start == pytest.approx(0.01 + 0.005)
    second.wait()
    assert time.perf_counter() >= two.end
    first.wait()
    assert link.fetched == 15_000
    link.reset()
    assert (link.fetched, link.trace) == (0, [])


def test_an_emulated_host_picks_beside_the_computation() -> None:
    """Who gathers goes on at once; the transfer behind it waits for the host, and no other does."""
    link = Link.emulated(1e6, latency=0.0, gather=1e6)
    before = time.perf_counter()
    with link.gathering(300_000):
        pass
    with link.gathering(200_000):  # one host: the second after the first
        pass
    assert link.gather_time == pytest.approx(0.5, rel=1e-3)
    link.fetch([torch.zeros(1)], CPU, layer=1, nbytes=1000)
    link.fetch([torch.zeros(1)], CPU, layer=2, nbytes=1000)
    one, two = link.trace
    assert one.start >= before + 0.5
    assert two.start == one.end
    link.reset()
    link.fetch([torch.zeros(1)], CPU, layer=1, nbytes=1000)
    assert link.trace[0].start < one.start  # nothing is left over
    with pytest.raises(ValueError, match="gather"):
        Link.emulated(1e6, gather=0.0)


def test_whoever_needs_the_data_waits_until_the_deadline() -> None:
    link = Link.emulated(1e8)
    transfer = link.fetch([torch.zeros(250_000)], CPU, 0)  # 10 ms
    assert transfer.wait()[0].shape == (250_000,)
    assert time.perf_counter() >= transfer.move.end
    assert transfer.move.hidden < 0.5  # nothing was done meanwhile
    late = link.fetch([torch.zeros(250)], CPU, 0)
    time.sleep(0.01)
    late.wait()
    assert late.move.hidden == 1.0
    assert math.isnan(link.fetch([torch.zeros(250_000)], CPU, 0).move.hidden)


def test_on_a_cpu_the_real_link_moves_nothing() -> None:
    link, source = Link.real(), torch.ones(5)
    transfer = link.fetch([source], CPU, 0)
    assert transfer.wait()[0] is source
    assert transfer.move.end == transfer.move.start
    assert not link.is_emulated


@pytest.mark.parametrize("bandwidth", [0, -1, math.nan, math.inf])
def test_impossible_links_are_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Link.emulated(bandwidth)
    with pytest.raises(ValueError, match="latency"):
        Link.emulated(1e9, latency=-1)


def test_the_gather_is_timed_apart() -> None:
    link = Link.real()
    with link.gathering(500):
        time.sleep(0.002)
    assert link.gather_time >= 0.002
    assert link.gathered == 500


@pytest.mark.parametrize(
    ("strategy", "knobs"),
    [("offload", {}), ("infinigen", {"alpha": math.inf, "cap": 0.25, "skip_layers": 1})],
)
def test_bytes_over_the_link_are_as_predicted(
    tiny: Tiny, strategy: str, knobs: dict[str, object]
) -> None:
    """Every token goes up once; each step brings down what its layers ask for, and no more."""
    model, prompt, steps = tiny("llama"), 20, 6
    token = 2 * 2 * 8 * 4  # K and V of 2 heads of 8 floats
    tiers = Tiers()
    with kvlib.attach(model):
        cache = kvlib.make_cache(strategy, model, tiers=tiers, **knobs)
        generate(model, *batch([prompt]), steps + 1, past_key_values=cache)
    stored = [prompt + i for i in range(steps)]  # before each decode step
    whole = [prompt, *stored[1:], prompt + steps]  # layer 0 also looks ahead after the last step
    if strategy == "offload":
        expected = sum(whole) + 2 * sum(stored)
    else:
        expected = sum(whole) + 2 * sum(math.floor(n / 4) for n in stored)
    assert tiers.link.fetched == expected * token
    assert tiers.link.stored == 3 * (prompt + steps) * token


def test_fetches_for_the_next_layer_start_before_this_layer_attends(tiny: Tiny) -> None:
    """The trace shows that a copy runs beside the layer in front of the one that needs it."""
    model = tiny("llama")
    tiers = Tiers(link=Link.emulated(1e9))
    with kvlib.attach(model):
        cache = kvlib.make_cache("infinigen", model, tiers=tiers, skip_layers=1)
        generate(model, *batch([64]), 2, past_key_values=cache)
    step = [move for move in tiers.link.trace if not math.isnan(move.needed)][-3:]
    assert [move.layer for move in step] == [0, 1, 2]
    for this, following in itertools.pairwise(step):
        assert following.start <= max(this.needed, this.end)
        assert following.needed > following.start


def test_an_emulated_link_is_for_a_cpu(tiny: Tiny) -> None:
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="CPU"):
            Tiers.of(tiny("llama").to("cuda"), link=Link.emulated(1e9))
    else:
        assert Tiers.of(tiny("llama"), link=Link.emulated(1e9)).link.is_emulated


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("strategy", "knobs"),
    [("offload", {}), ("infinigen", {"alpha": math.inf, "cap": 1.0, "skip_layers": 1})],
)
def test_cuda_copies_on_a_side_stream_change_no_token(
    tiny: Tiny, strategy: str, knobs: dict[str, object]
) -> None:
    """Pinned host memory, a side stream, an event: the tokens are those of the full cache."""
    model = copy.deepcopy(tiny("llama")).cuda()
    ids, mask = (t.cuda() for t in batch([17, 12, 3]))
    with kvlib.attach(model):
        full = kvlib.make_cache("full", model)
        plain = generate(model, ids, mask, 8, past_key_values=full)
        cache = kvlib.make_cache(strategy, model, **knobs)
        ours = generate(model, ids, mask, 8, past_key_values=cache)
        cache.check()
    assert cache.layers[1].slots["key"].is_pinned()
    assert ours.tolist() == plain.tolist()
