"""Packed linear layers: the plain products, whatever is called when, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvlib import packing
from kvlib.engines import LocalEngine, Request
from kvlib.packing import Packing

Tiny = Callable[..., PreTrainedModel]
WORKS = Packing(nn.Sequential(nn.Linear(8, 8))).layers > 0
HALF = WORKS and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
FAMILIES = ["llama", "qwen3", "opt", "gpt_neox", "phi3"]
LAYERS = {"llama": 22, "qwen3": 22, "opt": 19, "gpt_neox": 13, "phi3": 13}  # of three blocks
SHAPES = [(1,), (2,), (17,), (1, 1), (2, 1), (3, 5)]  # rows before the features
TIE = 1e-4  # logits that are closer may swap places by rounding

pytestmark = pytest.mark.skipif(not WORKS, reason="this PyTorch has no packed product")


@pytest.fixture(params=[True, False], ids=["one row plain", "one row packed"])
def one_row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way that a single row may be multiplied, whichever is faster here."""
    seconds = cycle([1.0, 2.0] if request.param else [2.0, 1.0])  # of the plain way, of the packed
    monkeypatch.setattr(packing, "_seconds", lambda run: next(seconds))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def untouched(model: nn.Module) -> bool:
    return not any("forward" in vars(module) for module in model.modules())


def same(found: Tensor, expected: Tensor, relative: float) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative * scale)


def check_outputs(model: nn.Module, dtype: torch.dtype, relative: float) -> None:
    """Layers one after another, as they are in the model: siblings get the very same input."""
    packed = Packing(model)
    assert packed.layers == len(linears(model))
    for shape in SHAPES:
        sizes = {layer.in_features for layer in linears(model)}
        inputs = {size: random(*shape, size, dtype=dtype) for size in sizes}
        with torch.inference_mode():
            expected = [layer(inputs[layer.in_features]) for layer in linears(model)]
            with packed:
                found = [layer(inputs[layer.in_features]) for layer in linears(model)]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == dtype
            same(ours, theirs, relative)


@pytest.mark.usefixtures("one_row")
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_outputs_are_the_plain_ones(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    assert len(linears(model)) == LAYERS[family]
    check_outputs(model, torch.float32, 1e-5)


@pytest.mark.skipif(not HALF, reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_outputs_are_as_near_as_it_can_tell(tiny: Tiny, family: str) -> None:
    check_outputs(tiny(family, torch.bfloat16), torch.bfloat16, 2**-7)


@pytest.mark.usefixtures("one_row")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_s_logits_stay_the_same(tiny: Tiny, family: str) -> None:
    model, packed = tiny(family), Packing(tiny(family))
    for batch, tokens in [(1, 1), (1, 7), (3, 4), (17, 1)]:
        ids = torch.arange(3, 3 + batch * tokens).view(batch, tokens) % 128
        with torch.inference_mode():
            expected = model(ids).logits
            with packed:
                same(model(ids).logits, expected, 1e-5)


def test_biases_count_even_where_only_some_layers_have_one() -> None:
    """Siblings of two kinds are multiplied alone."""
    model = nn.Module()
    model.q_proj, model.k_proj, model.v_proj = (nn.Linear(6, n, bias=n != 4) for n in (8, 4, 2))
    model.gate_proj, model.up_proj = nn.Linear(6, 3), nn.Linear(6, 5)
    check_outputs(model, torch.float32, 1e-5)


def test_what_reads_the_same_input_is_one_product(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []
    make = packing._product

    def counted(group: Any) -> packing.Product:
        product = make(group)

        def call(x: Tensor) -> Tensor:
            products.append(len(group))
            return product(x)

        return call

    monkeypatch.setattr(packing, "_product", counted)
    model = tiny("llama")
    packed = Packing(model)
    products.clear()
    with torch.inference_mode(), packed:
        model(torch.tensor([[3, 4, 5]]))
    assert products == [3, 1, 2, 1] * 3 + [1]


# -- siblings that are not called one after another with the same input ------------------------


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, n) for n in (8, 4, 2))


@pytest.mark.parametrize(
    "calls",
    [
        ["q x", "k y", "v x"],  # as in cross-attention
        ["q x", "k y", "v y"],
        ["q x", "v x", "k x"],
        ["k x", "v x", "q x"],
        ["q x", "q y", "k x", "v y"],
        ["q x", "k x", "q y", "v x", "v y"],
        ["q x", "k x", "k x", "v x", "v x"],
        ["k y"],
    ],
)
def test_any_order_of_calls_is_right(calls: list[str]) -> None:
    model, inputs = Siblings(), {"x": random(3, 6, seed=1), "y": random(3, 6, seed=2)}

    def outputs() -> list[Tensor]:
        layers = (getattr(model, f"{call[0]}_proj")(inputs[call[2]]) for call in calls)
        return list(layers)

    with torch.inference_mode():
        expected = outputs()
        with Packing(model):
            found = outputs()
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs, 1e-5)


def test_an_equal_input_that_is_another_tensor() -> None:
    """A tensor at the address of one that is gone, as an allocator gives it, is not that one."""
    model = Siblings()
    with torch.inference_mode(), Packing(model):
        for seed in range(20):
            model.q_proj(random(3, 6, seed=seed))
            other = random(3, 6, seed=seed + 100)
            same(model.k_proj(other), nn.functional.linear(other, *model.k_proj.parameters()), 1e-5)


# -- before, behind, and where it is not there -------------------------------------------------


def test_every_forward_comes_back(tiny: Tiny) -> None:
    model = tiny("llama")
    packed = Packing(model)
    assert untouched(model)
    for _ in range(2):  # it can be entered again
        with packed as entered:
            assert entered is packed
            assert all("forward" in vars(layer) for layer in linears(model))
        assert untouched(model)
    with pytest.raises(RuntimeError, match="on purpose"), packed:
        raise RuntimeError("on purpose")
    assert untouched(model)


def test_a_block_within_another_and_a_forward_of_somebody_else(tiny: Tiny) -> None:
    model = tiny("llama")
    layer = next(iter(linears(model)))
    layer.forward = lambda x: x  # type: ignore[method-assign]
    try:
        packed = Packing(model)
        assert packed.layers == len(linears(model)) - 1
        assert "forward" in vars(layer)
    finally:
        del layer.forward
    outer, inner = Packing(model), Packing(model)
    with outer:
        with inner:
            pass
        assert not untouched(model)  # the outer one goes on
    assert untouched(model)


def test_the_engine_leaves_the_model_as_it_was(tiny: Tiny) -> None:
    model = tiny("llama")
    engine = LocalEngine(model, "paged", packed=True, block=4, blocks=4)
    with pytest.raises(MemoryError):
        engine.run([Request([3] * 30, 2)])
    assert untouched(model)


def test_a_model_on_which_it_cannot_work_is_left_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tiny("llama", torch.float16)
    with torch.device("meta"):
        elsewhere = nn.Sequential(nn.Linear(8, 8))
    other = nn.Sequential(nn.Embedding(8, 8), type("Own", (nn.Linear,), {})(8, 8))
    for model in (half, elsewhere, other, nn.Sequential()):
        with Packing(model) as packed:
            assert packed.layers == 0
            assert untouched(model)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert Packing(tiny("llama")).layers == 0


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, RuntimeError, TypeError])
def test_a_build_without_the_product(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def product(group: Any) -> packing.Product:
        raise error("no such operator")

    monkeypatch.setattr(packing, "_product", product)
    assert Packing(tiny("llama")).layers == 0


def test_a_wrong_product_is_not_used(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    make = packing._product
    monkeypatch.setattr(packing, "_product", lambda group: lambda x: make(group)(x) * 1.1)
    assert Packing(tiny("llama")).layers == 0


# -- in the engine -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full", "paged"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_engine_s_tokens_but_for_near_ties(tiny: Tiny, family: str, strategy: str) -> None:
    model = tiny(family)
    requests = [Request([3 + (7 * n + i) % 120 for i in range(4 + 5 * n)], 12) for n in range(5)]
    runs = [
        LocalEngine(model, strategy, chunk=64, max_batch=4, packed=packed).run(requests)
        for packed in (False, True)
    ]
    for request, plain, packed in zip(requests, *runs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt + packed.tokens])).logits[0]  # [T, V]
        logits = logits[len(request.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(packed.tokens)[:, None])[:, 0]
        below = logits.max(dim=1).values - chosen
        assert below.max() < TIE
        assert packed.tokens == plain.tokens or logits.topk(2).values.diff().abs().min() < TIE
