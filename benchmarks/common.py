"""What several benchmarks do: rows that cost one prefill, and the time of a decode step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvlib.caches import KVCache


def prefill(model: Any, cache: Any, ids: torch.Tensor, chunk: int) -> None:
    """Feed a prompt [1, T] in chunks."""
    if isinstance(cache, KVCache):
        cache.begin([ids.shape[1]])
    for first in range(0, ids.shape[1], chunk):
        model(ids[:, first : first + chunk], past_key_values=cache, logits_to_keep=1)


def repeated(cache: Any, rows: int) -> Any:
    """A cache of `rows` rows like the only one of `cache`, which transformers changes in place."""
    if isinstance(cache, KVCache):
        return cache.fork([0] * rows)
    cache.batch_repeat_interleave(rows)
    return cache


def steps(
    model: Any, cache: Any, rows: int, count: int, warm: Callable[[], object] = lambda: None
) -> list[float]:
    """Seconds of each of `count` decode steps, after a first one; `warm` is called behind that."""
    token, taken = torch.ones(rows, 1, dtype=torch.long), []
    for step in range(count + 1):
        if step == 1:
            warm()
        start = time.perf_counter()
        model(token, past_key_values=cache, logits_to_keep=1)
        taken.append(time.perf_counter() - start)
    return taken[1:]
