"""The strategies by name, and how to make a cache of one."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvlib.caches.base import KVLayer
from kvlib.caches.cache import KVCache
from kvlib.caches.evicting import Budget, EvictingLayer
from kvlib.caches.full import Full
from kvlib.caches.h2o import H2O
from kvlib.caches.infinigen import InfiniGen
from kvlib.caches.offload import Offload
from kvlib.caches.paged import Paged, PagedCache
from kvlib.caches.pool import Pool
from kvlib.caches.streaming import Streaming
from kvlib.tiers import Tiers

__all__ = [
    "H2O",
    "STRATEGIES",
    "Budget",
    "EvictingLayer",
    "Full",
    "InfiniGen",
    "KVCache",
    "KVLayer",
    "Offload",
    "Paged",
    "PagedCache",
    "Pool",
    "Streaming",
    "check_knobs",
    "make_cache",
]

STRATEGIES: dict[str, type[KVLayer]] = {
    "full": Full,
    "h2o": H2O,
    "infinigen": InfiniGen,
    "offload": Offload,
    "paged": Paged,
    "streaming": Streaming,
}


def make_cache(
    strategy: str | type[KVLayer],
    model: PreTrainedModel,
    *,
    tiers: Tiers | None = None,
    **knobs: Any,
) -> KVCache:
    """A fresh cache of `strategy` for `model`, to pass as `past_key_values`.

    strategy  a name in STRATEGIES, a KVLayer subclass, or "path.py:Class"
    tiers     memory limits; unlimited by default
    knobs     the strategy's own parameters, such as budget=0.2

    Raises ValueError for an unknown strategy or knob, or a knob out of range.
    """
    layer = strategy if isinstance(strategy, type) else find_strategy(strategy)
    check_knobs(layer, knobs)
    kind = PagedCache if issubclass(layer, Paged) else KVCache
    return kind(layer.build(model, tiers or Tiers(), **knobs), knobs)


def check_knobs(layer: type[KVLayer], knobs: Iterable[str]) -> None:
    """ValueError that lists a strategy's parameters if `knobs` names others."""
    known = inspect.signature(layer).parameters.keys() - {"timeline", "tiers"}
    if unknown := sorted(set(knobs) - known):
        has = ", ".join(sorted(known)) or "none"
        raise ValueError(f"{layer.__name__} has no parameter {', '.join(unknown)}; it has: {has}")


def find_strategy(name: str) -> type[KVLayer]:
    """The class behind a name of STRATEGIES or "path.py:Class"; ValueError if there is none."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    path, _, cls = name.rpartition(":")
    if not path.endswith(".py"):
        near = difflib.get_close_matches(name.lower(), STRATEGIES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown strategy {name!r}: {hint}choose from {', '.join(STRATEGIES)}, "
            "or give your own as path.py:Class"
        )
    if not Path(path).is_file():
        raise ValueError(f"strategy {name!r}: there is no file {path}")
    return _load_class(Path(path), cls)


def _load_class(path: Path, cls: str) -> type[KVLayer]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, cls, None)
    if not (isinstance(found, type) and issubclass(found, KVLayer)):
        raise ValueError(f"{path} has no KVLayer subclass called {cls}")
    return found
