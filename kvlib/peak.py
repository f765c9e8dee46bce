"""The most memory that a block of code takes: of this process, or of a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


@contextmanager
def peak_memory(device: str) -> Iterator[list[int]]:
    """As `peak_rss`; on a GPU what PyTorch has allocated there at most."""
    if torch.device(device).type == "cpu":
        with peak_rss() as grown:
            yield grown
        return
    torch.cuda.reset_peak_memory_stats(device)
    before, grown = torch.cuda.memory_allocated(device), list[int]()
    yield grown
    grown.append(torch.cuda.max_memory_allocated(device) - before)


@contextmanager
def peak_rss() -> Iterator[list[int]]:
    """Within the block the process's peak RSS is taken; the list then holds the growth in bytes.

    Pages of program files that are read in meanwhile do not count. Linux only (the kernel's own
    high-water mark); elsewhere the list stays empty.
    """
    grown: list[int] = []
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        yield grown
        return
    _hold_nothing_freed()
    clear.write_text("5")
    before, files = _status("VmRSS"), _status("RssFile")
    yield grown
    grown.append(max(0, _status("VmHWM") - before - max(0, _status("RssFile") - files)))


def _status(field: str) -> int:
    """Bytes of this process, by a name in Linux's /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _hold_nothing_freed() -> None:
    """Have glibc give freed memory back: else it is used again uncounted, or counted though free.

    From here on, too: the size from which it does so, at first 128 KiB, no longer grows.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**17)
        libc.malloc_trim(0)


@contextmanager
def resident_peak() -> Iterator[list[int]]:
    """The list then holds the most bytes that the process had resident within the block.

    Unlike `peak_rss` it leaves the allocator alone, so that times can be taken beside it. Linux
    only; elsewhere the list stays empty.
    """
    most: list[int] = []
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
    yield most
    if clear.exists():
        most.append(_status("VmHWM"))
