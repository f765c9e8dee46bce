"""KV-cache strategies for any transformers model, measured alike.

The names below are the whole public interface; each is imported when it is first used, so that
the parts without torch stay quick to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlib.advice import recommend
    from kvlib.attachment import attach
    from kvlib.caches import STRATEGIES, EvictingLayer, KVCache, KVLayer, make_cache
    from kvlib.link import Link
    from kvlib.models import load
    from kvlib.tiers import DeviceOutOfMemory, Tiers

__version__ = "0.1.0"

_HOME = {
    "attach": "kvlib.attachment",
    "make_cache": "kvlib.caches",
    "STRATEGIES": "kvlib.caches",
    "EvictingLayer": "kvlib.caches",
    "KVCache": "kvlib.caches",
    "KVLayer": "kvlib.caches",
    "Link": "kvlib.link",
    "load": "kvlib.models",
    "recommend": "kvlib.advice",
    "DeviceOutOfMemory": "kvlib.tiers",
    "Tiers": "kvlib.tiers",
}

__all__ = [
    "STRATEGIES",
    "DeviceOutOfMemory",
    "EvictingLayer",
    "KVCache",
    "KVLayer",
    "Link",
    "Tiers",
    "attach",
    "load",
    "make_cache",
    "recommend",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlib' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
