"""Several rows of a cache read their prompts turn by turn, and answer token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlib.caches import KVCache
from kvlib.models import Loaded
from kvlib.padding import left_padded


class Reader:
    """Feeds a cache of several rows turn by turn; the cache evicts at the end of each."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.mask: Tensor | None = None

    def read(self, turns: Sequence[Sequence[int]]) -> Tensor:
        """One turn a row, in one forward with pads on the left; the last logits [B, V]."""
        ids, new = left_padded(turns, self.model.device)
        self.mask = new if self.mask is None else torch.cat([self.mask, new], dim=1)
        self.cache.begin([len(turn) for turn in turns])
        found: Tensor = self.model(
            ids, attention_mask=self.mask, past_key_values=self.cache, logits_to_keep=1
        ).logits[:, -1]
        return found


def answer(
    loaded: Loaded, cache: KVCache, tails: Sequence[Sequence[int]], new: int
) -> tuple[list[list[int]], Tensor]:
    """Feed each row its tail token by token, then its own greedy tokens, `new` at most.

    Returns the answers, up to the model's end of turn, and the logits behind each tail [B, V].
    Rows whose tail is shorter answer while others still read: no row is ever fed a pad. A row
    that has ended goes on by itself, and nothing reads what it says.
    """
    model, device = loaded.model, loaded.model.device
    ends, answers, first = _ends(loaded), [list[int]() for _ in tails], [Tensor()] * len(tails)
    column = [tail[0] for tail in tails]
    for step in range(max(map(len, tails)) + new - 1):
        at = torch.tensor(cache.timeline.seen, device=device)[:, None]
        ids = torch.tensor(column, device=device)[:, None]
        logits = model(ids, position_ids=at, past_key_values=cache).logits[:, -1]
        column = logits.argmax(-1).tolist()
        for row, tail in enumerate(tails):
            if step + 1 < len(tail):
                column[row] = tail[step + 1]
                continue
            if step + 1 == len(tail):
                first[row] = logits[row].float().cpu()
            if len(answers[row]) < new and not (answers[row] and answers[row][-1] in ends):
                answers[row].append(column[row])
    return answers, torch.stack(first)


def _ends(loaded: Loaded) -> set[int]:
    """Tokens that end an answer."""
    config = getattr(loaded.model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    ends = {found} if isinstance(found, int) else set(found or [])
    own = getattr(loaded.tokenizer, "eos_token_id", None)
    return ends | ({own} if isinstance(own, int) else set())


def kept_share(cache: KVCache, row: int, span: tuple[int, int]) -> float:
    """Share of the tokens in `span` that a row still stores, over all layers and KV heads."""
    first, last = span
    stored = [((p := layer.positions[row]) >= first) & (p < last) for layer in cache.layers]
    found = sum(float(s.sum(-1).float().mean()) for s in stored)
    return found / len(stored) / (last - first)
