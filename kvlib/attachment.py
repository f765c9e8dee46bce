"""Plugs kvlib's caches into a transformers model, and takes them out again."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvlib.attention import NAME, Binding, attention_forward, mask_untouched
from kvlib.caches.cache import KVCache
from kvlib.projection import attention_modules, find_hidden, find_rope, project_query

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


class Attachment:
    """An attached model; a context manager that detaches at the end of the block."""

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse_unsupported(model)
        AttentionInterface.register(NAME, attention_forward)
        AttentionMaskInterface.register(NAME, mask_untouched)
        self.model, self.binding = model, Binding()
        self._before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        self._modules: list[Any] = [*attention_modules(model)]
        decoder = model.get_decoder()
        self._hooks = [
            decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            decoder.register_forward_hook(self._leave, always_call=True),
        ]
        for module in self._modules:
            module.kv_binding = self.binding
            self._hooks.append(module.register_forward_pre_hook(self._ahead, with_kwargs=True))

    def detach(self) -> None:
        """Give the model back its own attention. Calling it twice does no harm."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module.__dict__.pop("kv_binding", None)
        self._hooks, self._modules = [], []
        if self.model.config._attn_implementation == NAME:
            self.model.set_attn_implementation(self._before)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def _enter(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the decoder runs: check that the input continues its cache, and bind that.

        Where no position_ids are given the cache's true positions are, so that a padded row
        gets the positions of the row alone.
        """
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, KVCache):
            raise ValueError(
                "an attached model needs a kvlib cache: pass past_key_values=kvlib.make_cache(…), "
                f"not {type(cache).__name__}"
            )
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions=True: the attention matrix is never materialised")
        inputs = _inputs(args, kwargs)
        batch, tokens = inputs.shape[:2]
        _refuse_too_long(self.model, cache, tokens)
        cache.advance(
            batch, tokens, inputs.device, kwargs.get("attention_mask"), kwargs.get("position_ids"),
            None if inputs.is_floating_point() else inputs,
        )  # fmt: skip
        self.binding.cache = cache
        if kwargs.get("position_ids") is not None:
            return args, kwargs
        positions = cache.timeline.positions
        assert positions is not None
        return args, {**kwargs, "position_ids": positions.clamp(min=0).long()}

    def _ahead(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a layer's attention: let the next layer fetch, by the query that this foretells.

        The last layer is followed by the first one of the next forward, which nothing foretells.
        """
        cache = self.binding.cache
        if cache is None:
            return
        following, query = cache.after(module.layer_idx), None
        if module.layer_idx == 0:  # in case the last forward did not look ahead, or rows changed
            cache.layers[0].anticipate(None)
        if following.wants_query and following.index > module.layer_idx:
            hidden = find_hidden(args, kwargs)
            if hidden.shape[1] == 1:
                successor = self._modules[following.index]
                query = project_query(successor, hidden, find_rope(args, kwargs))
        following.anticipate(query)

    def _leave(self, *_: Any) -> None:
        if self.binding.cache is not None:
            self.binding.cache.complete()
        self.binding.cache = None


def attach(model: PreTrainedModel) -> Attachment:
    """Let `model` run on kvlib caches until `detach()` or the end of a `with` block.

    Raises ValueError for a model that has no exchangeable attention, or a kind that kvlib
    cannot serve exactly.

    >>> with attach(model):                                           # doctest: +SKIP
    ...     model.generate(**inputs, past_key_values=make_cache("h2o", model, budget=0.2))
    """
    return Attachment(model)


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; kvlib serves decoder-only models")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} does not use transformers' attention interface, so its attention cannot be "
            "exchanged; choose another model, such as a Llama, Qwen3, Mistral or OPT"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - SUPPORTED_LAYERS:
        raise ValueError(f"{name} has layers of kind {', '.join(sorted(kinds - SUPPORTED_LAYERS))}")
    if config._attn_implementation == NAME:
        raise ValueError(f"this {name}, or one that shares its config, is attached already")


def _refuse_too_long(model: PreTrainedModel, cache: KVCache, tokens: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    total = max(cache.timeline.seen, default=0) + tokens
    if limit is not None and total > limit:
        raise ValueError(
            f"{total} tokens, but this model has {limit} positions: shorten the prompt"
        )


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The decoder's input ids or embeddings, whichever way they were passed."""
    for candidate in (kwargs.get("input_ids"), args[0] if args else None):
        if candidate is not None:
            return torch.as_tensor(candidate)
    return torch.as_tensor(kwargs["inputs_embeds"])
