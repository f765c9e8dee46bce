"""Machines and the links between host and device, published or measured.

Units are bytes, B/s and FLOP/s. torch is imported only by `Machine.measure`.
"""

from __future__ import annotations

import platform
import statistics
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from kvlib.shapes import check_choice, check_positive, look_up


@dataclass(frozen=True)
class Link:
    """A path between host and device. `bandwidth`: B/s in one direction, nominal if published."""

    name: str
    bandwidth: float
    source: str


@dataclass(frozen=True)
class Machine:
    """A device that computes. `source` says where the figures come from.

    memory: bytes. bandwidth: B/s of device memory, reads and writes counted together.
    flops: dense matrix-product FLOP/s by dtype. link: its default path to host memory.
    host: B/s of that memory, of the socket that the device hangs on. host_memory: bytes of it for
    one device. peer: B/s to other devices, one direction; 0 where there are none. around: the
    source of these three.
    threads: CPU threads that the figures were measured with, 0 for a GPU.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    link: Link
    host: float
    host_memory: float
    source: str
    around: str = ""
    peer: float = 0.0
    threads: int = 0

    @staticmethod
    def measure(seconds: float = 3.0, device: str = "cpu") -> Machine:
        """Measure this machine in about `seconds`; `device` is "cpu" or "cuda", the current GPU."""
        check_choice("device", device, ("cpu", "cuda"))
        check_positive("seconds", seconds)
        import torch

        cuda = device == "cuda"
        if cuda and not torch.cuda.is_available():
            raise ValueError("device cuda needs a GPU and a CUDA build of torch")
        properties = torch.cuda.get_device_properties(device) if cuda else None
        copy, rates, transfer = _measured_rates(seconds / 4, cuda)
        host = _measured_rates(seconds / 4, cuda=False)[0] if cuda else copy
        return Machine(
            name=properties.name if properties else _cpu_name(),
            memory=properties.total_memory if properties else _memory_limit(),
            bandwidth=copy,
            flops=rates,
            link=Link("host to device" if cuda else "memory", transfer, "measured"),
            host=host,
            host_memory=_memory_limit(),
            source=f"measured on {device}, torch {torch.__version__}",
            around="measured",
            threads=0 if cuda else torch.get_num_threads(),
        )


def _measured_rates(share: float, cuda: bool) -> tuple[float, dict[str, float], float]:
    """Copy B/s (read + write), matmul FLOP/s by dtype and host link B/s, `share` seconds each.

    On a CPU device and host are one memory, so a transfer moves half of what a copy touches.
    """
    import torch

    device, size, side = ("cuda", 2**30, 8192) if cuda else ("cpu", 2**28, 1024)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / _median_time(lambda: target.copy_(source), share, cuda)
    rates, seeded = {}, torch.Generator(device).manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.rand(side, side, dtype=dtype, device=device, generator=seeded)
        out = torch.empty_like(square)
        took = _median_time(partial(torch.mm, square, square, out=out), share, cuda)
        rates[str(dtype).removeprefix("torch.")] = 2 * side**3 / took
    if not cuda:
        return copy, rates, copy / 2
    host = torch.ones(size, dtype=torch.uint8).pin_memory()
    took = _median_time(lambda: target.copy_(host, non_blocking=True), share, cuda)
    return copy, rates, size / took


def _median_time(call: Callable[[], object], seconds: float, cuda: bool) -> float:
    """Median seconds a call over `seconds`, at least 3 calls, after one that is thrown away."""
    call()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        times.append(_cuda_time(call) if cuda else _wall_time(call))
    return statistics.median(times)


def _wall_time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cuda_time(call: Callable[[], object]) -> float:
    import torch

    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _memory_limit(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes of RAM that this process may use: the machine's, or a lower cgroup limit (v1, v2)."""
    limits = [psutil.virtual_memory().total]
    for line in proc.read_text().splitlines() if proc.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        group = root / controllers / path.lstrip("/")
        for folder in (group, *group.parents):
            for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                text = file.read_text().strip() if file.exists() else ""
                limits += [int(text)] if text.isdigit() else []
    return min(limits)


def _load() -> tuple[dict[str, Link], dict[str, Machine]]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    links = {name: Link(name=name, **row) for name, row in table["links"].items()}
    machines = {
        name: Machine(name=name, link=links[row.pop("link")], **row)
        for name, row in table["machines"].items()
    }
    return links, machines


LINKS, MACHINES = _load()


def find_link(name: str) -> Link:
    """A published link by name, such as "pcie-5"; ValueError offers the nearest names."""
    return look_up("link", LINKS, name)


def find_machine(name: str) -> Machine:
    """A published machine by name, such as "h100-sxm"; ValueError offers the nearest names."""
    return look_up("machine", MACHINES, name)
