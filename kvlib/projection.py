"""The query that an attention module would use, from its input and its own weights alone.

InfiniGen wants a layer's query before that layer runs. transformers' attention modules differ in
how they make one, so it is checked first what a module's forward refers to: a name that is not
listed here may stand for a step that changes the query, and the module is refused.

Shapes: B rows, Hq query heads, T tokens, D head size, C hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Rope = tuple[Tensor, Tensor]  # cos and sin, [B or 1, T, the part of D that is rotated] each

# All that the forwards of Llama, Mistral, Qwen2, Qwen3, OPT, GPT-NeoX, Phi-3 and Olmo2 refer to.
KNOWN_NAMES = """
    q_proj k_proj v_proj o_proj out_proj qkv_proj query_key_value dense q_norm k_norm
    apply_rotary_pos_emb chunk contiguous getattr reshape shape size transpose update view
    config head_dim head_size layer_idx num_attention_heads num_heads num_key_value_heads
    scaling sliding_window attention_dropout dropout training
    ALL_ATTENTION_FUNCTIONS _attn_implementation eager_attention_forward get_interface
"""
# The same names otherwise used: rotation in some layers only; the norm after the rotation.
OTHER_STEPS = frozenset({"Cohere2Attention.forward", "NanoChatAttention.forward"})


def project_query(module: nn.Module, hidden: Tensor, rope: Rope | None) -> Tensor:
    """The query that `module` would hand to its attention function, [B, Hq, T, D].

    module  an attention module of a transformers decoder
    hidden  its input, layer-normed, [B, T, C]
    rope    what the decoder passes as `position_embeddings`; None for a model without rotation

    Raises ValueError, with the module's class, where the query might be made in another way.
    """
    kind: Any = type(module)
    rotate = find_rotation(kind)
    if (rotate is None) != (rope is None):
        needs = "got no" if rope is None else "does not take"
        raise ValueError(f"{kind.__name__} {needs} position_embeddings")
    query = _project(module, hidden)
    if rotate is None or rope is None:
        return query
    rotated: Tensor = rotate(query, query[:, :0], *rope)[0]  # it wants keys too: none of them
    return rotated


@cache
def find_rotation(kind: type[nn.Module]) -> Any:
    """The `apply_rotary_pos_emb` that a class of attention uses (families differ), or None.

    Raises ValueError for a class whose forward does anything that is not known here.
    """
    forward = _forward_of(kind)
    names = forward.__code__.co_names
    if "ALL_ATTENTION_FUNCTIONS" not in names:
        raise _unknown(kind, "it does not use transformers' attention interface")
    unknown = sorted(set(names).difference(KNOWN_NAMES.split()))
    if unknown:
        raise _unknown(kind, f"it uses {', '.join(unknown)}")
    if forward.__qualname__ in OTHER_STEPS:
        raise _unknown(kind, "its steps come in another order")
    return forward.__globals__["apply_rotary_pos_emb"] if "apply_rotary_pos_emb" in names else None


def _forward_of(kind: type[nn.Module]) -> FunctionType:
    forward = inspect.unwrap(kind.forward)  # without transformers' decorators
    assert isinstance(forward, FunctionType)
    return forward


def _project(module: Any, hidden: Tensor) -> Tensor:
    """The query before rotation, [B, Hq, T, D]."""
    if hasattr(module, "q_proj"):
        return _project_alone(module, hidden)
    if hasattr(module, "query_key_value"):  # GPT-NeoX: query, key and value of each head in turn
        fused, split = module.query_key_value, (-1, 3, module.head_size)
        return _project_rows(module, fused, hidden, lambda t: t.unflatten(0, split)[:, 0])
    if hasattr(module, "qkv_proj"):  # Phi-3: the queries of all heads first
        fused, heads, size = module.qkv_proj, module.config.num_attention_heads, module.head_dim
        return _project_rows(
            module, fused, hidden, lambda t: t[: heads * size].unflatten(0, (heads, size))
        )
    raise _unknown(type(module), "it has no q_proj, query_key_value or qkv_proj")


def _project_alone(module: Any, hidden: Tensor) -> Tensor:
    """By a q_proj of its own, with the norm and the scaling that some families add."""
    query = module.q_proj(hidden)
    norm, size = getattr(module, "q_norm", None), module.head_dim
    width = size if norm is None else norm.weight.numel()
    if width not in (size, query.shape[-1]):
        raise _unknown(type(module), f"its q_norm spans {width} of {query.shape[-1]} columns")
    if norm is not None:  # over each head, or over all heads at once as in Olmo2
        query = norm(query.unflatten(-1, (-1, width))).flatten(2)
    if hasattr(module, "out_proj"):  # OPT scales here, and asks attention not to
        query = query * module.scaling
    heads: Tensor = query.unflatten(-1, (-1, size)).transpose(1, 2)
    return heads


def _project_rows(
    module: nn.Module, fused: nn.Module, hidden: Tensor, pick: Callable[[Tensor], Tensor]
) -> Tensor:
    """By the query's rows of a fused projection; `pick` views [Hq·3·D, …] as its [Hq, D, …].

    A product a head, as the rows of GPT-NeoX lie apart: one product would copy the weights.
    """
    if type(fused) is not nn.Linear:  # adapters and packed weights hold more than a weight
        raise _unknown(type(module), f"its fused projection is a {type(fused).__name__}")
    weight = pick(fused.weight)
    flat = hidden.flatten(0, 1).expand(len(weight), -1, -1)
    query = torch.bmm(flat, weight.mT)  # [Hq, B·T, D]
    if fused.bias is not None:
        query = query + pick(fused.bias)[:, None]
    heads: Tensor = query.unflatten(1, hidden.shape[:2]).transpose(0, 1)
    return heads


def _unknown(kind: type[nn.Module], why: str) -> ValueError:
    return ValueError(f"how {kind.__name__} makes its query is not known: {why}")


# -- where the modules are, and what a pre-hook on one sees ------------------------------------


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of each decoder layer, in order.

    Raises ValueError, with the model's class, unless each layer has exactly one that calls an
    attention function.
    """
    found: list[Any] = [
        module
        for module in model.get_decoder().modules()
        if hasattr(module, "layer_idx")
        and "ALL_ATTENTION_FUNCTIONS" in _forward_of(type(module)).__code__.co_names
    ]
    depth = model.config.get_text_config().num_hidden_layers
    where = [module.layer_idx for module in found]
    if where != list(range(depth)):
        raise ValueError(
            f"{type(model).__name__} has {depth} layers, but modules that call an attention "
            f"function in layers {where}"
        )
    return found


def check_foretold(model: PreTrainedModel) -> None:
    """ValueError unless a layer's query can be told from the input of the layer in front of it."""
    for module in attention_modules(model):
        kind: Any = type(module)
        find_rotation(kind)
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if any(isinstance(part, Mapping) for part in rope.values()):
        raise ValueError(
            f"{type(model).__name__} rotates its layers in different ways: a layer does not see "
            "how the next one does"
        )


def find_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """An attention module's input [B, T, C], from what its forward pre-hook sees.

    Raises ValueError where there is none.
    """
    hidden = kwargs.get("hidden_states", args[0] if args else None)  # GPT-NeoX: by position
    if not isinstance(hidden, Tensor):
        raise ValueError("an attention module was called without hidden_states")
    return hidden


def find_rope(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rope | None:
    """The (cos, sin) that a forward pre-hook sees its module called with; None without rotation."""
    for rope in (kwargs.get("position_embeddings"), *args[1:]):
        if isinstance(rope, tuple) and len(rope) == 2 and isinstance(rope[0], Tensor):
            return rope
    return None
