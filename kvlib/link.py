"""The link between host and device: real copies or emulated ones, with byte counts and a trace."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

SPIN = 2e-4  # seconds before a deadline at which sleeping becomes too coarse


@dataclass
class Move:
    """A line of the trace: one transfer from host to device, times in perf_counter seconds."""

    layer: int
    nbytes: int
    start: float
    end: float
    needed: float = math.nan  # when somebody began to wait for it

    @property
    def hidden(self) -> float:
        """Share of an emulated transfer that ran before anybody waited for it; nan if unknown."""
        length = self.end - self.start
        if length <= 0:
            return math.nan
        return min(max((self.needed - self.start) / length, 0.0), 1.0)


@dataclass
class Transfer:
    """Tensors on their way to the device."""

    tensors: Sequence[Tensor]
    move: Move
    event: torch.cuda.Event | None = None

    def wait(self) -> Sequence[Tensor]:
        """The tensors, once they have arrived."""
        if math.isnan(self.move.needed):
            self.move.needed = time.perf_counter()
        if self.event is None:
            sleep_until(self.move.end)
            return self.tensors
        stream = torch.cuda.current_stream()
        stream.wait_event(self.event)
        for tensor in self.tensors:
            tensor.record_stream(stream)
        return self.tensors


class Link:
    """Moves tensors from host to device, one transfer after the other.

    `Link.real()` copies on a side stream of the GPU; on a CPU, where host and device are one RAM,
    nothing moves. `Link.emulated()` gives each transfer a deadline, and whoever needs the data
    sleeps until then, so no copying thread competes with the computation.
    """

    def __init__(
        self, bandwidth: float = math.inf, latency: float = 0.0, gather: float = math.inf
    ) -> None:
        for name, speed in (("bandwidth", bandwidth), ("gather", gather)):
            if not speed > 0:
                raise ValueError(f"{name} {speed!r}: give bytes per second, above 0")
        if not (latency >= 0 and math.isfinite(latency)):
            raise ValueError(f"latency {latency!r}: give seconds, 0 or more")
        self.bandwidth, self.latency, self.gather = float(bandwidth), float(latency), float(gather)
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.reset()

    @classmethod
    def real(cls) -> Link:
        """The true path of this machine."""
        return cls()

    @classmethod
    def emulated(cls, bandwidth: float, latency: float = 1e-5, gather: float = math.inf) -> Link:
        """A path of `bandwidth` bytes per second and `latency` seconds; on a CPU only.

        gather: bytes per second at which the host picks rows, if it is to be slower than this one;
        like the host of a GPU, it does so beside the computation.
        """
        if math.isinf(bandwidth):
            raise ValueError("an emulated link needs a finite bandwidth; use Link.real()")
        return cls(bandwidth, latency, gather)

    @property
    def is_emulated(self) -> bool:
        return math.isfinite(self.bandwidth)

    def reset(self) -> None:
        """Forget the counts and the trace."""
        self.trace: list[Move] = []
        self.stored = 0  # bytes from device to host
        self.gather_time = 0.0  # seconds that the host spent picking rows
        self.gathered = 0  # bytes that it picked
        self.free_at = 0.0
        self.host_free_at = 0.0
        self.picked_at = 0.0  # when the host has picked what is fetched next

    @property
    def fetched(self) -> int:
        """Bytes from host to device so far."""
        return sum(move.nbytes for move in self.trace)

    def fetch(
        self, tensors: Sequence[Tensor], device: torch.device, layer: int, nbytes: int | None = None
    ) -> Transfer:
        """Start to move host `tensors` to `device`; `nbytes` where not all of them need to move."""
        if nbytes is None:
            nbytes = sum(t.numel() * t.element_size() for t in tensors)
        now = time.perf_counter()
        start = max(now, self.free_at, self.picked_at)
        self.picked_at = 0.0
        move = Move(layer, nbytes, start, start + self.latency + nbytes / self.bandwidth)
        moved = Transfer(tensors, move)
        if device.type == "cuda":
            moved = self._copy(tensors, move, device)
        self.free_at = move.end
        self.trace.append(move)
        return moved

    def _copy(self, tensors: Sequence[Tensor], move: Move, device: torch.device) -> Transfer:
        if self.is_emulated:
            raise ValueError("an emulated link is for a CPU; on a GPU use Link.real()")
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        with torch.cuda.stream(stream):
            arrived = [t.to(device, non_blocking=True) for t in tensors]
            event = torch.cuda.Event()
            event.record(stream)
        return Transfer(arrived, move, event)

    @contextmanager
    def gathering(self, nbytes: int) -> Iterator[None]:
        """Time the host's picking of `nbytes`, which the computation waits for.

        It does not wait for what an emulated host takes beyond that; the transfer behind it does.
        """
        start, length = time.perf_counter(), nbytes / self.gather
        yield
        end = time.perf_counter()
        self.host_free_at = max(end, max(start, self.host_free_at) + length)
        self.picked_at = self.host_free_at
        self.gather_time += max(end - start, length)
        self.gathered += nbytes


def sleep_until(deadline: float) -> None:
    """Return at `deadline` on the perf_counter clock, within microseconds."""
    coarse = deadline - time.perf_counter() - SPIN
    if coarse > 0:
        time.sleep(coarse)
    while time.perf_counter() < deadline:
        pass
