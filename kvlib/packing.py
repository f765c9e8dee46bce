"""Linear layers with their weights in oneDNN's own layout: an optional fast path on CPUs.

PyTorch multiplies a few rows by a weight as it lies, and rearranges parts of it each time. A copy
in the layout that oneDNN prefers takes the weights' bytes once more and saves that; layers that
read the same input, such as query, key and value, are multiplied as one. Float32 results differ in
the last bits. What is not there is left alone: a GPU, another build of PyTorch, other layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

ROWS = 128  # rows of input that the layout is chosen for; it serves any number
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # called one after another

Product = Callable[[Tensor], Tensor]


class Packing:
    """A model whose linear layers multiply with packed weights inside a `with` block.

    `layers` is the number of layers packed, 0 where this machine cannot. The copies are made once,
    and live as long as this object; weights that change meanwhile are not seen, nor is an input
    that changes between the layers that read it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forwards: dict[nn.Module, Product] = {}
        groups = _groups(model)
        if not groups or not _works(groups[0][0]):
            return
        products = [_product(group) for group in groups]
        alone = _plain_is_faster(groups, products)
        for group, product in zip(groups, products, strict=True):
            self._forwards |= dict(zip(group, _forwards(group, product, alone), strict=True))

    @property
    def layers(self) -> int:
        return len(self._forwards)

    def __enter__(self) -> Packing:
        self._before = {module: module.__dict__.get("forward") for module in self._forwards}
        for module, forward in self._forwards.items():
            module.forward = forward
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for module, before in self._before.items():
            module.__dict__.pop("forward", None)
            if before is not None:
                module.forward = before


def _groups(model: nn.Module) -> list[list[nn.Linear]]:
    """The layers that can be packed, those that read the same input together."""
    groups: list[list[nn.Linear]] = []
    for parent in model.modules():
        rest = {n: m for n, m in parent.named_children() if type(m) is nn.Linear and _fits(m)}
        for names in SIBLINGS:
            if set(names) <= rest.keys() and len({_kind(rest[name]) for name in names}) == 1:
                groups.append([rest.pop(name) for name in names])
        groups += [[module] for module in rest.values()]
    return groups


def _fits(layer: nn.Linear) -> bool:
    if "forward" in vars(layer):  # somebody else's
        return False
    weight = layer.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(half or weight.dtype == torch.float32)


def _kind(layer: nn.Linear) -> tuple[int, bool]:
    """What layers must share to be multiplied as one."""
    return layer.in_features, layer.bias is None


def _works(layer: nn.Linear) -> bool:
    """Is the packed product there, and right?"""
    try:
        x = torch.linspace(-1, 1, 2 * layer.in_features, dtype=layer.weight.dtype).view(2, -1)
        with torch.inference_mode():
            expected, found = layer(x).float(), _product([layer])(x).float()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def _product(group: Sequence[nn.Linear]) -> Product:
    """The outputs of a group side by side: x [..., K] → [..., N1 + N2 + …]."""
    weight = torch.cat([layer.weight.detach() for layer in group])
    biases = [layer.bias.detach() for layer in group if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor) -> Tensor:
        out: Tensor = multiply(x, packed, bias, "none", [], "")
        return out

    return product


def _forwards(group: Sequence[nn.Linear], product: Product, alone: bool) -> list[Product]:
    """What each layer of a group computes instead: the first one for all of them.

    alone: a single row is multiplied by PyTorch's own product.
    """
    plain = [_plain(layer) for layer in group]
    sizes, made = [layer.out_features for layer in group], list[tuple[Tensor, list[Tensor]]]()

    def first(x: Tensor) -> Tensor:
        made.clear()
        if alone and x.numel() == x.shape[-1]:
            return plain[0](x)
        parts: list[Tensor] = list(product(x).split(sizes, dim=-1))
        if len(parts) > 1:
            made.append((x, parts))
        return parts[0]

    def later(n: int) -> Product:
        def forward(x: Tensor) -> Tensor:
            if not made or made[0][0] is not x:
                return plain[n](x)
            part = made[0][1][n]
            if n == len(group) - 1:  # nothing is kept alive beyond its use
                made.clear()
            return part

        return forward

    return [first, *(later(n) for n in range(1, len(group)))]


def _plain(layer: nn.Linear) -> Product:
    return lambda x: nn.functional.linear(x, layer.weight, layer.bias)


def _plain_is_faster(groups: Sequence[Sequence[nn.Linear]], products: Sequence[Product]) -> bool:
    """Is PyTorch's own product faster on a single row?

    All layers in turn, as a model has them: a weight must not be in the processor's cache yet.
    """
    firsts = [group[0] for group in groups]
    rows = [torch.ones(1, layer.in_features, dtype=layer.weight.dtype) for layer in firsts]

    def plain() -> None:
        for group, row in zip(groups, rows, strict=True):
            for layer in group:
                _plain(layer)(row)

    def packed() -> None:
        for product, row in zip(products, rows, strict=True):
            product(row)

    return _seconds(plain) < _seconds(packed)


def _seconds(run: Callable[[], None]) -> float:
    """The best of a few runs."""
    best = float("inf")
    with torch.inference_mode():
        for _ in range(4):
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
    return best
