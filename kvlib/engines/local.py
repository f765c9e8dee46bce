"""Continuous batching in this process, over any strategy: one chunk of prefill, one decode step.

The scheduler is that of Orca (Yu et al., OSDI 2022) with the chunked prefill of Sarathi-Serve
(Agrawal et al., OSDI 2024, https://arxiv.org/abs/2403.02310), each chunk in a forward of its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlib.attachment import attach
from kvlib.caches import KVCache, KVLayer, PagedCache, make_cache
from kvlib.caches.base import one_of
from kvlib.caches.blocks import PoolExhausted
from kvlib.engines.base import Progress, Request, Result, refuse_unservable
from kvlib.tiers import DeviceOutOfMemory, Tiers


class LocalEngine:
    """Serves requests with `model` under a strategy; rows join and leave between any two tokens.

    tiers           memory limits, unlimited by default
    max_batch       sequences on the device at a time
    chunk           prompt tokens that are read between two decode steps
    preemption      how a paged sequence leaves a full pool: "swap" to the host, or "recompute"
    share_prefixes  do not read again what the pool of a paged cache knows of a prompt
    knobs           the strategy's parameters, as for `make_cache`

    Raises ValueError for a parameter out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        strategy: str | type[KVLayer],
        *,
        tiers: Tiers | None = None,
        max_batch: int = 16,
        chunk: int = 512,
        preemption: str = "swap",
        share_prefixes: bool = False,
        **knobs: Any,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name} {value}: give at least 1")
        self.swaps = one_of("preemption", preemption, ("swap", "recompute")) == "swap"
        self.model, self.strategy, self.knobs = model, strategy, knobs
        self.max_batch, self.chunk, self.tiers = max_batch, chunk, tiers or Tiers()
        self.blank = make_cache(strategy, model, tiers=self.tiers, **knobs)
        self.share_prefixes = share_prefixes
        if share_prefixes and not isinstance(self.blank, PagedCache):
            raise ValueError("share_prefixes=True: only strategy 'paged' shares prefixes")

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Serve all requests; one result each, in their order. The clock is the real one.

        Raises ValueError, before the start, for a request that the model cannot serve, and
        PoolExhausted or DeviceOutOfMemory for a sequence that does not fit even alone.
        """
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        refuse_unservable(requests, limit, config.vocab_size)
        with attach(self.model), torch.inference_mode():
            return _Run(self, requests).results()

    def empty(self) -> KVCache:
        """A cache without rows; paged ones are all in one pool."""
        if isinstance(self.blank, PagedCache):
            return self.blank.empty()
        return make_cache(self.strategy, self.model, tiers=self.tiers, **self.knobs)

    def forward(self, cache: KVCache, ids: Sequence[Sequence[int]]) -> Tensor:
        """Feed ids [B, T], one row of `cache` each; the logits after the last ones, [B, V]."""
        inputs = torch.tensor(ids, device=self.model.device)
        seen = torch.tensor(cache.timeline.seen or [0], device=inputs.device)
        places = seen[:, None] + torch.arange(inputs.shape[1], device=inputs.device)
        out = self.model(inputs, position_ids=places, past_key_values=cache, logits_to_keep=1)
        logits: Tensor = out.logits[:, -1]
        return logits


class _Run:
    """The state of one run. Whoever is on the device arrived before whoever waits."""

    def __init__(self, engine: LocalEngine, requests: Sequence[Request]) -> None:
        self.engine = engine
        self.sequences = [Progress(i, request) for i, request in enumerate(requests)]
        self.waiting = deque(sorted(self.sequences, key=Progress.order))
        self.reading: Progress | None = None
        self.running: list[Progress] = []  # row by row of `cache`
        self.cache = engine.empty()
        self.crowded = False  # one found no room, and no row has finished since

    def results(self) -> list[Result]:
        self.start = time.perf_counter()
        try:
            while self.waiting or self.reading or self.running:
                self._step()
        except (PoolExhausted, DeviceOutOfMemory) as error:
            there = [s.index for s in (*self.running, self.reading) if s]
            error.add_note(
                f"on the device were requests {there}: shorten them, lower max_batch or chunk, or "
                "give the device or the pool more room"
            )
            raise
        finally:  # after an error too, the pool gets its blocks back
            for owner in (self, self.reading):
                if owner and owner.cache:
                    owner.cache.reset()
        return [sequence.result() for sequence in self.sequences]

    def _step(self) -> None:
        if self.reading is None and self._may_admit():
            self.reading = self.waiting.popleft()
        if self.reading is not None:
            self._read(self.reading)
        if self.running:
            self._decode()
        elif self.reading is None and self.waiting:
            time.sleep(max(self.waiting[0].request.arrival - self._now(), 0))

    def _now(self) -> float:
        return time.perf_counter() - self.start

    def _may_admit(self) -> bool:
        if not self.waiting or self.waiting[0].request.arrival > self._now():
            return False
        has_place = len(self.running) < self.engine.max_batch and not self.crowded
        return not self.running or (has_place and self._has_room(self.waiting[0]))

    def _has_room(self, sequence: Progress) -> bool:
        """Paged: for what it has, and a block for each row to go on. Others: to everyone's end."""
        if isinstance(self.cache, PagedCache):
            pool = self.cache.pool
            return -(-len(sequence.text) // pool.block) + len(self.running) <= pool.available
        free, rows = self.engine.tiers.device.free, [*self.running, sequence]
        longest = max(len(row.request.prompt) + row.request.max_new_tokens for row in rows)
        return free is None or _growth(self.cache, len(rows), longest, len(sequence.text)) <= free

    def _give_way(self) -> bool:
        """The latest on the device goes back to the queue; False if there is but one."""
        if len(self.running) + (self.reading is not None) < 2:
            return False
        if self.reading is not None:
            sequence, self.reading = self.reading, None
            if sequence.cache is not None:
                sequence.cache.reset()
            sequence.cache = None
        else:
            row, sequence = max(enumerate(self.running), key=lambda pair: pair[1].order())
            if self.engine.swaps and isinstance(self.cache, PagedCache):
                sequence.swapped = self.cache.preempt(row, swap=True)
            else:
                self.cache.release(row)
            del self.running[row]
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        return True

    def _read(self, sequence: Progress) -> None:
        """One chunk of its text; after the last one it has its next token, and joins the rows.

        What fails here is in a cache of its own, so that the running rows are whole.
        """
        try:
            cache = self._advance(sequence)
        except (PoolExhausted, DeviceOutOfMemory):
            self.crowded = self._give_way()
            if not self.crowded:
                raise
            return
        if cache.timeline.pending:
            return
        self.reading = sequence.cache = None
        if sequence.finished:
            cache.reset()
            return
        if self.running:
            self.cache.insert(cache)
        else:
            self.cache = cache
        self.running.append(sequence)

    def _advance(self, sequence: Progress) -> KVCache:
        """The sequence's own cache, one chunk of text or one swap further."""
        if sequence.swapped and isinstance(self.cache, PagedCache):
            sequence.cache = self.cache.resume(sequence.swapped)
            sequence.swapped = None
            return sequence.cache
        text, engine = sequence.text, self.engine
        if sequence.cache is None:
            sequence.cache = engine.empty()
            if engine.share_prefixes and isinstance(sequence.cache, PagedCache):
                sequence.cache.share([text])
            sequence.cache.begin([len(text) - sum(sequence.cache.timeline.seen)])
        done = sum(sequence.cache.timeline.seen)
        logits = engine.forward(sequence.cache, [text[done : done + engine.chunk]])
        if not sequence.cache.timeline.pending:
            self._emit([sequence], logits)
        return sequence.cache

    def _decode(self) -> None:
        """The next token of every row; where the pool is full, of those that can stay."""
        logits = None
        while logits is None:
            try:
                logits = self.engine.forward(self.cache, [[s.tokens[-1]] for s in self.running])
            except PoolExhausted:  # raised before anything changed
                if not self._give_way():
                    raise
        self._emit(self.running, logits)
        for row in reversed(range(len(self.running))):
            if self.running[row].finished:
                self.cache.release(row)
                del self.running[row]
                self.crowded = False

    def _emit(self, sequences: Sequence[Progress], logits: Tensor) -> None:
        """Give each its next token by logits [B, V], all at the same time."""
        best = logits.argmax(dim=-1).tolist()
        for sequence, token, row in zip(sequences, best, logits, strict=True):
            sequence.choose(token, row)
        now = self._now()
        for sequence in sequences:
            sequence.stamps.append(now)


def _growth(cache: KVCache, rows: int, longest: int, text: int) -> float:
    """Device bytes that a contiguous `cache` may yet take, if it grows to `rows` rows.

    All rows are as wide as the longest one, at the bytes a token as they are now, plus slack. A
    new one is read whole before anything is evicted, and two layers' keys and values move at once.
    """
    held, layer = cache.nbytes(), cache.layers[0]
    now = held["kv"] + held["state"]
    a_token = now / len(cache.timeline.seen) / max(cache.timeline.seen)
    kinds = [kind for kind in layer.kinds().values() if kind.tier == "device"]
    read = sum(kind.dtype.itemsize * math.prod(kind.tail) for kind in kinds)
    read *= len(cache.layers) * layer.shape[0]
    moved = 4 * math.prod(layer.shape) * layer.dtype.itemsize
    return float(rows * longest * (a_token + moved) + (rows * layer.slack + text) * read - now)
