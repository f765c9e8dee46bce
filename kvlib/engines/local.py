"""Continuous batching in this process, over any strategy: a chunk of prefill, then a decode step.

The scheduler is that of Orca (Yu et al., OSDI 2022) with the chunked prefill of Sarathi-Serve
(Agrawal et al., OSDI 2024, https://arxiv.org/abs/2403.02310), each chunk in a forward of its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlib.attachment import attach
from kvlib.caches import KVCache, KVLayer, PagedCache, make_cache
from kvlib.caches.base import one_of
from kvlib.caches.blocks import PoolExhausted
from kvlib.caches.paged import Preempted
from kvlib.engines.base import Progress, Request, Result, refuse_unservable
from kvlib.metrics import Usage
from kvlib.models import kv_token_bytes
from kvlib.packing import Packing
from kvlib.padding import left_padded
from kvlib.tiers import DeviceOutOfMemory, Tiers

GAP = 0.1  # seconds between two looks at the memory, at least


class LocalEngine:
    """Serves requests with `model` under a strategy; rows join and leave between any two tokens.

    tiers           memory limits, unlimited by default
    max_batch       sequences on the device at a time
    chunk           prompt tokens that are read between two decode steps, of one request or several
    preemption      how a paged sequence leaves a full pool: "swap" to the host, or "recompute"
    share_prefixes  do not read again what the pool of a paged cache knows of a prompt
    packed          multiply with packed weights, see `kvlib.packing`: on some CPUs faster
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
        packed: bool = False,
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
        self.packing = Packing(model) if packed else None
        self.usage: list[Usage] = []
        self.prefix_hits = 0

    @property
    def reserved(self) -> int:
        """Device bytes of the block pool of a paged cache; the others take what they need."""
        return self.blank.usage()["reserved"] if isinstance(self.blank, PagedCache) else 0

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Serve all requests; one result each, in their order. The clock is the real one.

        Raises, before the start, ValueError for a request that the model cannot serve and
        PoolExhausted for one that is longer than the pool; later DeviceOutOfMemory for a sequence
        that does not fit even alone.
        """
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        refuse_unservable(requests, limit, config.vocab_size)
        self._refuse_beyond_pool(requests)
        with ExitStack() as stack:
            stack.enter_context(attach(self.model))
            stack.enter_context(torch.inference_mode())
            if self.packing:
                stack.enter_context(self.packing)
            return _Run(self, requests).results()

    def _refuse_beyond_pool(self, requests: Sequence[Request]) -> None:
        if not isinstance(self.blank, PagedCache):
            return
        pool = self.blank.pool
        for index, request in enumerate(requests):
            tokens = len(request.prompt) + request.max_new_tokens - 1  # the last one is not fed
            if (needed := -(-tokens // pool.block)) > pool.blocks:
                error = PoolExhausted(needed, pool.available, pool.blocks, pool.block)
                error.add_note(f"request {index} is longer than the pool")
                raise error

    def empty(self) -> KVCache:
        """A cache without rows; paged ones are all in one pool."""
        if isinstance(self.blank, PagedCache):
            return self.blank.empty()
        return make_cache(self.strategy, self.model, tiers=self.tiers, **self.knobs)

    def forward(self, cache: KVCache, ids: Sequence[Sequence[int]]) -> Tensor:
        """Feed each row of `cache` its ids; the logits after the last ones, [B, V].

        Rows of unequal length must be the first ones that the cache is fed.
        """
        device, options = self.model.device, dict[str, Any]()
        inputs, mask = left_padded(ids, device)
        width = inputs.shape[1]
        if any(len(row) < width for row in ids):
            options["attention_mask"] = mask
        else:
            seen = torch.tensor(cache.timeline.seen or [0] * len(ids), device=device)
            options["position_ids"] = seen[:, None] + torch.arange(width, device=device)
        out = self.model(inputs, past_key_values=cache, logits_to_keep=1, **options)
        logits: Tensor = out.logits[:, -1]
        return logits


class _Run:
    """The state of one run. Whoever is on the device arrived before whoever waits."""

    def __init__(self, engine: LocalEngine, requests: Sequence[Request]) -> None:
        self.engine = engine
        self.sequences = [Progress(i, request) for i, request in enumerate(requests)]
        self.waiting = deque(sorted(self.sequences, key=Progress.order))
        self.reading: list[Progress] = []  # row by row of `fresh`, once that is there
        self.fresh: KVCache | None = None
        self.running: list[Progress] = []  # row by row of `cache`
        self.cache = engine.empty()
        self.crowded = False  # one found no room, and no row has finished since

    def results(self) -> list[Result]:
        self.engine.usage, self.engine.prefix_hits = [], 0
        self.engine.tiers.device.reset_peak()
        self.start = time.perf_counter()
        try:
            while self.waiting or self.reading or self.running:
                self._step()
        except (PoolExhausted, DeviceOutOfMemory) as error:
            there = [s.index for s in (*self.running, *self.reading)]
            error.add_note(
                f"on the device were requests {there}: shorten them, lower max_batch or chunk, or "
                "give the device or the pool more room"
            )
            raise
        finally:  # after an error too, the pool gets its blocks back
            for cache in (self.cache, self.fresh):
                if cache is not None:
                    cache.reset()
        self._look(forced=True)
        return [sequence.result() for sequence in self.sequences]

    def _step(self) -> None:
        if not self.reading:
            while self._may_admit():
                self.reading.append(self.waiting.popleft())
        if self.reading:
            self._read()
        if self.running:
            self._decode()
        elif not self.reading and self.waiting:
            time.sleep(max(self.waiting[0].request.arrival - self._now(), 0))

    def _now(self) -> float:
        return time.perf_counter() - self.start

    # -- who may come, and who must go ------------------------------------------------------

    def _may_admit(self) -> bool:
        """May the next one waiting be read, in one forward with those that are?"""
        if not self.waiting or self.waiting[0].request.arrival > self._now():
            return False
        if not self.running and not self.reading:
            return True
        there = len(self.running) + len(self.reading)
        if there >= self.engine.max_batch or self.crowded:
            return False
        return self._fits_beside(self.waiting[0]) and self._has_room(self.waiting[0])

    def _fits_beside(self, sequence: Progress) -> bool:
        """Can it be read in one forward with those that are to be read?"""
        if not self.reading:
            return True
        group = [*self.reading, sequence]
        if self.engine.share_prefixes or any(one.swapped for one in group):
            return False
        return len(group) * max(len(one.text) for one in group) <= self.engine.chunk

    def _has_room(self, sequence: Progress) -> bool:
        """Paged: for what it has, and a block for each row to go on. Others: to everyone's end."""
        group = [*self.reading, sequence]
        if isinstance(self.cache, PagedCache):
            pool = self.cache.pool
            blocks = sum(-(-len(one.text) // pool.block) for one in group)
            return blocks + len(self.running) <= pool.available
        free, rows = self.engine.tiers.device.free, [*self.running, *group]
        longest = max(len(row.request.prompt) + row.request.max_new_tokens for row in rows)
        if free is None or not self.running:  # what a token takes is not known yet: at most this
            return (
                free is None or 2 * len(rows) * longest * kv_token_bytes(self.engine.model) <= free
            )
        text = len(group) * max(len(one.text) for one in group)
        return _growth(self.cache, len(rows), longest, text) <= free

    def _give_way(self) -> bool:
        """The latest on the device goes back to the queue; False if there is but one."""
        if len(self.running) + len(self.reading) < 2:
            return False
        if self.reading:
            sequence = self.reading.pop()
            if self.fresh is not None:
                self.fresh.reset()
            self.fresh = None
        else:
            row, sequence = max(enumerate(self.running), key=lambda pair: pair[1].order())
            sequence.swapped = self._swapped(row)
            if sequence.swapped is None:
                self.cache.release(row)
            del self.running[row]
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        return True

    def _swapped(self, row: int) -> Preempted | None:
        """Swap a row to the host; None, with nothing changed, where its text is read again."""
        if not self.engine.swaps or not isinstance(self.cache, PagedCache):
            return None
        try:
            return self.cache.preempt(row, swap=True)
        except DeviceOutOfMemory:  # the host is full
            return None

    # -- the two kinds of forward -----------------------------------------------------------

    def _read(self) -> None:
        """One chunk of text; after the last one its rows have their next token, and join.

        What fails here is in a cache of its own, so that the running rows are whole.
        """
        try:
            cache = self._advance()
        except (PoolExhausted, DeviceOutOfMemory):
            self.crowded = self._give_way()
            if not self.crowded:
                raise
            return
        if cache.timeline.pending:
            return
        self._look(forced=any(sequence.finished for sequence in self.reading))
        done, self.reading, self.fresh = self.reading, [], None
        going = _keep_going(cache, done)
        if going and self.running:
            self.cache.insert(cache)
        elif going:
            self.cache = cache
        self.running += going

    def _advance(self) -> KVCache:
        """The cache of those that are read, one chunk of text or one swap further."""
        first, engine = self.reading[0], self.engine
        if first.swapped and isinstance(self.cache, PagedCache):
            self.fresh, first.swapped = self.cache.resume(first.swapped), None
            return self.fresh
        texts = [one.text for one in self.reading]
        if self.fresh is None:
            self.fresh = engine.empty()
            if engine.share_prefixes and isinstance(self.fresh, PagedCache):
                hits = zip(self.reading, self.fresh.share(texts), strict=True)
                engine.prefix_hits += sum(n for one, n in hits if not one.preemptions)
            seen = self.fresh.timeline.seen or [0] * len(texts)
            self.fresh.begin([len(text) - n for text, n in zip(texts, seen, strict=True)])
        done = max(self.fresh.timeline.seen, default=0)  # of a text that is read by itself
        logits = engine.forward(self.fresh, [text[done : done + engine.chunk] for text in texts])
        if not self.fresh.timeline.pending:
            self._emit(self.reading, logits)
        return self.fresh

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
        over = any(sequence.finished for sequence in self.running)
        self._look(forced=over)
        if over:
            self.running = _keep_going(self.cache, self.running)
            self.crowded = False

    def _emit(self, sequences: Sequence[Progress], logits: Tensor) -> None:
        """Give each its next token by logits [B, V], all at the same time."""
        best = logits.argmax(dim=-1).tolist()
        for sequence, token, row in zip(sequences, best, logits, strict=True):
            sequence.choose(token, row)
        now = self._now()
        for sequence in sequences:
            sequence.stamps.append(now)

    def _look(self, forced: bool = False) -> None:
        """Record what the memory holds, where the last look is some time ago."""
        now, usage = self._now(), self.engine.usage
        if usage and not forced and now - usage[-1].at < GAP:
            return
        passing = self.engine.tiers.device.lent_peak if self.running else 0
        swapped = [one.swapped.kv for one in self.sequences if one.swapped]
        used, held, host = passing, passing, sum(kv.nbytes for kv in swapped if kv is not None)
        for cache in (self.cache, self.fresh):
            if cache is not None and cache.timeline.seen:
                holds, taken = cache.in_use(), cache.nbytes()
                used, host = used + holds["device"], host + taken["host"]
                held += taken["kv"] + taken["state"]
        waiting = sum(one.request.arrival <= now for one in self.waiting)
        there = len(self.running) + len(self.reading)
        usage.append(Usage(now, there, waiting, used, held, host))


def _keep_going(cache: KVCache, sequences: Sequence[Progress]) -> list[Progress]:
    """Those that are not finished; the cache drops the rows of the others."""
    rows = [row for row, sequence in enumerate(sequences) if not sequence.finished]
    if not rows:
        cache.reset()
    elif len(rows) < len(sequences):
        cache.batch_select_indices(torch.tensor(rows))
    return [sequences[row] for row in rows]


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
