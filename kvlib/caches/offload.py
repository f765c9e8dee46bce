"""Offload: all keys and values in host memory, fetched whole for every layer, one layer ahead.

Sheng et al., "FlexGen: High-Throughput Generative Inference of Large Language Models with a
Single GPU", ICML 2023, https://arxiv.org/abs/2303.06865
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlib.caches.base import KV, KVLayer, one_of
from kvlib.caches.timeline import Timeline
from kvlib.caches.view import View
from kvlib.link import Transfer
from kvlib.tiers import Tiers


class HostLayer(KVLayer):
    """Keys and values live on the host; `anticipate` sends for what the attention will need.

    The device holds what two layers fetched at a time: one computes, the next one's is under way.
    """

    home = "host"

    def reset(self) -> None:
        super().reset()
        self.transfer: Transfer | None = None

    def anticipate(self, query: Tensor | None) -> None:
        if self.transfer is None and any(self.count):
            self.transfer = self._fetch_whole(self.count)

    def observe(self, query: Tensor, scale: float, mass: Tensor | None) -> None:
        self.transfer = None
        super().observe(query, scale, mass)

    def select(self, rows: Sequence[int]) -> None:
        self.transfer = None  # it was for other rows
        super().select(rows)

    def join(self, other: KVLayer) -> None:
        self.transfer = None
        super().join(other)

    def crop(self, tokens_to_remove: int) -> None:
        self.transfer = None
        super().crop(tokens_to_remove)

    def _fetch_whole(self, count: Sequence[int]) -> Transfer:
        """Send for the first count[b] tokens of each row."""
        return self._fetch([self.slots[name][:, :, : max(count)] for name in KV], count)

    def _fetch(self, tensors: Sequence[Tensor], count: Sequence[int]) -> Transfer:
        """Send for keys and values [B, Hkv, n, D], of which count[b] tokens are row b's."""
        nbytes = self._bytes(sum(count))
        transfer = self.tiers.link.fetch(tensors, self.device, self.index, nbytes)
        self.tiers.device.lend(nbytes, transfer)
        return transfer

    def _bytes(self, tokens: int) -> int:
        """Keys and values of `tokens` tokens, over all KV heads."""
        heads, size = self.shape
        return 2 * heads * tokens * size * self.dtype.itemsize

    def _write(self, key: Tensor, value: Tensor) -> None:
        self.before = list(self.count)  # what can have been sent for
        self.tiers.link.stored += self._bytes(sum(self.timeline.lengths))
        super()._write(key, value)

    def _show(self, key: Tensor, value: Tensor) -> View:
        """All that is stored: what was sent for, with this forward's tokens behind it."""
        if self.transfer is None and any(self.before):  # nobody looked ahead
            self.transfer = self._fetch_whole(self.before)
        fetched = self.transfer.wait() if self.transfer else [t[:, :, :0] for t in (key, value)]
        if self.device.type == "cpu":  # one RAM: what has arrived never left its place
            return super()._show(key, value)
        stored = self.slots["position"][:, :, : max(self.count)]
        return self._join([*fetched, stored], self.before, key, value)

    def _join(
        self, fetched: Sequence[Tensor], count: Sequence[int], key: Tensor, value: Tensor
    ) -> View:
        """A view of keys, values and positions, count[b] tokens in row b, and the new ones."""
        tokens, lengths = key.shape[2], self.timeline.lengths
        after = [n + new for n, new in zip(count, lengths, strict=True)]
        positions = self.timeline.positions
        assert positions is not None
        new = (key, value, positions[:, None].expand(-1, self.shape[0], -1))
        parts = []
        for old, data in zip(fetched, new, strict=True):
            room = max(after) - old.shape[2]
            if room > 0:
                shape = (*old.shape[:2], room, *old.shape[3:])
                old = torch.cat([old, old.new_zeros(shape)], dim=2)
            self._put(old, data, count, tokens)
            parts.append(old)
        return View(parts[0], parts[1], parts[2], after)


class Offload(HostLayer):
    """Exact attention over a cache that the device cannot hold; each step moves all of it.

    kernel  prefill attention: "flash", or "eager" = the matrix materialised
    """

    def __init__(self, timeline: Timeline, tiers: Tiers, *, kernel: str = "flash") -> None:
        self.kernel = one_of("kernel", kernel, ("flash", "eager"))
        super().__init__(timeline, tiers)
