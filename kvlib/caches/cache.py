"""One cache for one model: a strategy's layers, and the timeline that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvlib.caches.base import KVLayer


class KVCache(Cache):
    """A transformers cache whose layers are one strategy; pass it as `past_key_values`.

    layers  one a decoder layer, all on the same timeline and tiers
    knobs   the parameters that they were made with
    """

    layers: list[Any]  # of KVLayer

    def __init__(self, layers: Sequence[KVLayer], knobs: Mapping[str, Any] | None = None) -> None:
        self.knobs = dict(knobs or {})
        self.timeline, self.tiers = layers[0].timeline, layers[0].tiers
        for index, layer in enumerate(layers):
            layer.index = index
        super().__init__(layers=list(layers))

    def after(self, index: int) -> KVLayer:
        """The layer that runs after layer `index`; after the last one, the next forward's first."""
        layer: KVLayer = self.layers[(index + 1) % len(self.layers)]
        return layer

    def begin(self, prompt_lengths: Sequence[int]) -> None:
        """Open a turn of `prompt_lengths[b]` real tokens for row b, fed in any number of chunks.

        Needed before a prompt that comes in chunks, and before every further turn, where the
        budget is a share of the tokens. Raises ValueError while a turn is incomplete.
        """
        self.timeline.begin(prompt_lengths)

    def advance(
        self,
        batch: int,
        tokens: int,
        device: torch.device,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """Announce a forward of `tokens` columns; refuse input that does not continue this cache.

        attention_mask  [B, columns so far + tokens], pads to the left of each turn
        position_ids    [B or 1, tokens], the true positions
        ids             [B, tokens], the tokens' ids, for caches that share equal prefixes
        """
        self._check_whole(batch)
        lengths = self._real_tokens(batch, tokens, attention_mask, position_ids)
        chunk = tokens > 1 and self.timeline.seen and not self.timeline.announced
        if chunk and any(layer.needs_lengths for layer in self.layers):
            raise ValueError(
                "a second multi-token input, and the budget is a share of the tokens: call "
                "cache.begin(prompt_lengths) before each turn and before a prompt in chunks"
            )
        if position_ids is not None:
            self._check_positions(lengths, tokens, position_ids)
        known = None
        if ids is not None and self.timeline.wants_ids:
            known = [row[tokens - n :] for row, n in zip(ids.tolist(), lengths, strict=True)]
        self.timeline.advance(lengths, tokens, device, known)

    def complete(self) -> None:
        """The forward is over; where it ran through every layer, what it stored may be shared."""
        if {layer.tick for layer in self.layers} == {self.timeline.tick}:
            self.timeline.complete()

    def _check_whole(self, batch: int) -> None:
        seen, ticks = self.timeline.seen, {layer.tick for layer in self.layers}
        if ticks != {self.timeline.tick}:
            raise RuntimeError(
                "an earlier forward, or a change of rows, stopped half-way: reset() this cache"
            )
        if seen and len(seen) != batch:
            raise ValueError(f"this cache holds {len(seen)} rows, the input has {batch}")

    def _real_tokens(
        self, batch: int, tokens: int, mask: Tensor | None, position_ids: Tensor | None
    ) -> list[int]:
        """Real tokens that each row gets, checked against what it has seen."""
        seen, fed = self.timeline.seen or [0] * batch, self.get_seq_length()
        if mask is None:
            if position_ids is None and any(s != fed for s in seen):
                raise ValueError("rows were padded before: pass attention_mask or position_ids")
            return [tokens] * batch
        if mask.dim() != 2:
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)}: only [B, S] is supported"
            )
        if mask.shape[1] != fed + tokens:
            raise ValueError(
                f"this input does not continue the cache: attention_mask covers {mask.shape[1]} "
                f"columns, the cache has seen {fed} and the input adds {tokens}"
            )
        new = mask[:, fed:].bool()
        counts = torch.stack([mask.bool().sum(1), new.sum(1)]).tolist()
        before = [total - n for total, n in zip(*counts, strict=True)]
        if before != list(seen):
            raise ValueError(
                f"this input does not continue the cache: it has seen {list(seen)} real tokens "
                f"a row, attention_mask says {before}"
            )
        lengths: list[int] = counts[1]
        if min(lengths) < tokens:
            _check_left_padded(new, lengths)
            self._check_rows_have_tokens(lengths)
        return lengths

    def _check_rows_have_tokens(self, lengths: Sequence[int]) -> None:
        """Only a row that begin() announced may start with a chunk of nothing but pads."""
        if self.timeline.announced:
            return
        seen = self.timeline.seen or [0] * len(lengths)
        for b, (n, s) in enumerate(zip(lengths, seen, strict=True)):
            if n + s == 0:
                raise ValueError(f"row {b} has no token at all")

    def _check_positions(self, lengths: list[int], tokens: int, position_ids: Tensor) -> None:
        seen = self.timeline.seen or [0] * len(lengths)
        ends = torch.tensor([s + n for s, n in zip(seen, lengths, strict=True)])
        expected = ends[:, None] - tokens + torch.arange(tokens)  # [B, T]
        real = torch.arange(tokens) >= tokens - torch.tensor(lengths)[:, None]
        if not ((position_ids.cpu() == expected) | ~real).all():
            raise ValueError(
                f"this input does not continue the cache: rows have seen {seen} tokens, "
                f"position_ids start at {position_ids[:, 0].tolist()}"
            )

    def fork(self, rows: Sequence[int]) -> KVCache:
        """A cache with copies of these rows; a row may repeat. The original is untouched."""
        for row in rows:
            self._check_row(row)
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.timeline = self.timeline.fork(rows)
        twin.layers = [layer.fork(twin.timeline, rows) for layer in self.layers]
        return twin

    def insert(self, other: KVCache) -> None:
        """Take over the rows of another cache of this strategy, behind these; `other` is emptied.

        Both must be between two turns. Feed position_ids from then on, or a mask in which each
        row's past is its own tokens, padded on the left. Raises ValueError otherwise.
        """
        kinds = {type(layer) for layer in (*self.layers, *other.layers)}
        if len(kinds) > 1 or _plain(self.knobs) != _plain(other.knobs):
            raise ValueError("only caches of one strategy with the same parameters can be joined")
        if other is self or not self.timeline.seen or not other.timeline.seen:
            raise ValueError("one of these caches is empty, or they are the same one")
        self.timeline.check_join(other.timeline)
        with self._all_or_broken():
            self.timeline.join(other.timeline)
            for layer, more in zip(self.layers, other.layers, strict=True):
                layer.join(more)
        self._forget_columns()
        other.reset()

    def release(self, row: int) -> None:
        """Drop a row; those behind it move up. The last one leaves an empty cache."""
        self._check_row(row)
        rest = [r for r in range(len(self.timeline.seen)) if r != row]
        if rest:
            self._select(rest)
            self._forget_columns()
        else:
            self.reset()

    def _check_row(self, row: int) -> None:
        rows = len(self.timeline.seen)
        if not 0 <= row < rows:
            raise ValueError(f"there is no row {row}: this cache holds {rows}, counted from 0")

    def _forget_columns(self) -> None:
        """From now on each row's past is its own tokens, however they came in."""
        for layer in self.layers:
            layer.fed = max(self.timeline.seen)

    @contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        """Rows change in every layer, or the cache is refused until it is reset."""
        tick, self.timeline.tick = self.timeline.tick, -1
        yield
        self.timeline.tick = tick

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.fork(range(len(self.timeline.seen)))

    def reset(self) -> None:
        self.timeline.reset()
        for layer in self.layers:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(torch.arange(len(self.timeline.seen))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([b for b in range(len(self.timeline.seen)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.timeline.shorten(abs(tokens_to_remove))

    def nbytes(self) -> dict[str, int]:
        """Bytes over all layers: `kv` and other `state` on the device, and all on the `host`."""
        layers = [layer.nbytes() for layer in self.layers]
        return {part: sum(n[part] for n in layers) for part in layers[0]}

    def in_use(self) -> dict[str, int]:
        """Bytes behind the stored tokens, over all layers: on the `device`, on the `host`."""
        layers = [layer.in_use() for layer in self.layers]
        return {tier: sum(n[tier] for n in layers) for tier in layers[0]}

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; tests call this after every step."""
        for layer in self.layers:
            layer.check()

    def _select(self, rows: Sequence[int]) -> None:
        if not self.timeline.seen:
            return
        with self._all_or_broken():
            self.timeline.select(rows)
            for layer in self.layers:
                layer.select(rows)


def _plain(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that can be compared: a tensor or a pool is itself, and no other."""
    simple = (bool, int, float, str, type(None))
    return {name: v if isinstance(v, simple) else id(v) for name, v in knobs.items()}


def _check_left_padded(new: Tensor, lengths: Sequence[int]) -> None:
    tokens = new.shape[1]
    first = tokens - torch.tensor(lengths, device=new.device)
    if not (new == (torch.arange(tokens, device=new.device) >= first[:, None])).all():
        raise ValueError("pads must stand to the left of a row's tokens: set padding_side='left'")
