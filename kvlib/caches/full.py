"""Full: every token stays on the device, contiguous. The baseline that evicts nothing."""

from __future__ import annotations

from kvlib.caches.base import KVLayer, one_of
from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers


class Full(KVLayer):
    """Keeps all keys and values in preallocated storage that grows in steps.

    Exact, and the memory that every other strategy is measured against:
    2 · Hkv · D · tokens · bytes a layer and row.

    kernel  prefill attention: "flash", or "eager" = the matrix materialised
    """

    def __init__(self, timeline: Timeline, tiers: Tiers, *, kernel: str = "flash") -> None:
        self.kernel = one_of("kernel", kernel, ("flash", "eager"))
        super().__init__(timeline, tiers)
