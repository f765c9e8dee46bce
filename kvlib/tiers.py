"""Device and host memory: what is allocated, what it may grow to, and who is refused.

On a CPU both tiers are the same RAM; they are counted apart all the same, so that a strategy
meets the limits that it would meet on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kvlib.link import Link

CPU_CAPACITY = 5  # device capacity on a CPU, in weights: 80 GB is to an 8B model's 16 GB as 5 to 1


class DeviceOutOfMemory(MemoryError):  # noqa: N818, as torch and CUDA call it
    """A tier was asked for more bytes than it has left."""

    def __init__(self, tier: str, needed: int, free: int, capacity: int) -> None:
        super().__init__(
            f"{tier} memory is full: {_mib(needed)} needed, {_mib(free)} free of {_mib(capacity)}; "
            "use a shorter prompt, a smaller batch or budget, or raise the capacity"
        )
        self.tier, self.needed, self.free, self.capacity = tier, needed, free, capacity

    def __reduce__(self) -> tuple[type, tuple[str, int, int, int]]:
        return type(self), (self.tier, self.needed, self.free, self.capacity)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: a view or a mask over them frees nothing."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@dataclass
class Tier:
    """One memory: `capacity` bytes (None: unlimited), of which `fixed` are taken by the weights."""

    name: str
    capacity: int | None = None
    fixed: int = 0
    used: int = 0  # bytes, beside `fixed`
    peak: int = 0  # highest `used` so far, scratch included
    lent: int = 0  # bytes of `used` that are on loan to something that passes through
    lent_peak: int = 0

    @property
    def free(self) -> int | None:
        """Bytes left, None where the tier has no limit."""
        return None if self.capacity is None else self.capacity - self.fixed - self.used

    def empty(
        self,
        *shape: int,
        dtype: torch.dtype,
        device: torch.device,
        fill: float = 0,
        pin: bool = False,
    ) -> Tensor:
        """A tensor of `shape` filled with `fill`, counted until it is collected.

        pin: page-locked, from where a GPU can copy beside its computation.
        Raises DeviceOutOfMemory before anything is allocated.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._take(nbytes)
        make = torch.zeros if fill == 0 else torch.empty
        with torch.inference_mode(False):  # so that it can be written to in any mode
            tensor = make(shape, dtype=dtype, device=device, pin_memory=pin)
        weakref.finalize(tensor, self._give, nbytes)
        return tensor if fill == 0 else tensor.fill_(fill)

    def lend(self, nbytes: int, owner: object) -> None:
        """Count `nbytes` until `owner` is collected."""
        self._take(nbytes)
        self.lent += nbytes
        self.lent_peak = max(self.lent_peak, self.lent)
        weakref.finalize(owner, self._end_loan, nbytes)

    def _end_loan(self, nbytes: int) -> None:
        self.lent -= nbytes
        self._give(nbytes)

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[None]:
        """Count `nbytes` of scratch for the length of a `with` block."""
        self._take(nbytes)
        try:
            yield
        finally:
            self._give(nbytes)

    def reset_peak(self) -> None:
        """Start a new measurement of the peaks."""
        self.peak, self.lent_peak = self.used, self.lent

    def _take(self, nbytes: int) -> None:
        if self.capacity is not None and self.free is not None and nbytes > self.free:
            raise DeviceOutOfMemory(self.name, nbytes, self.free, self.capacity)
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def _give(self, nbytes: int) -> None:
        self.used -= nbytes


@dataclass
class Tiers:
    """The two memories that a strategy may use, and the link between them."""

    device: Tier = field(default_factory=lambda: Tier("device"))
    host: Tier = field(default_factory=lambda: Tier("host"))
    link: Link = field(default_factory=Link.real)

    @classmethod
    def of(cls, model: nn.Module, capacity: int | None = None, link: Link | None = None) -> Tiers:
        """The tiers of `model`'s machine, its weights counted.

        capacity  bytes; by default the GPU's memory, on a CPU five times the weights
        link      the real one by default; an emulated one is refused on a GPU
        """
        weights = storage_bytes(model.parameters())
        device, link = next(model.parameters()).device, link or Link.real()
        if link.is_emulated and device.type == "cuda":
            raise ValueError("an emulated link is for a CPU; on a GPU use Link.real()")
        if capacity is None:
            on_gpu = device.type == "cuda"
            total = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
            capacity = total if on_gpu else CPU_CAPACITY * weights
        if capacity <= weights:
            raise DeviceOutOfMemory("device", weights, capacity, capacity)
        return cls(Tier("device", capacity, fixed=weights), link=link)
