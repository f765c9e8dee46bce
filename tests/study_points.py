"""Measurements for the tests of the study, importable by its child processes."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from kvlib.study import Refused

CALLS: list[dict[str, Any]] = []  # what was measured in this process


class DeviceOutOfMemory(RuntimeError):  # noqa: N818
    """Known to the study by its name alone."""


def value(number: float) -> list[dict[str, Any]]:
    return [{"metric": "time", "value": number, "unit": "s", "source": "measured"}]


def double(**point: Any) -> list[dict[str, Any]]:
    CALLS.append(point)
    return value(2.0 * point["tokens"])


def interrupted(**point: Any) -> list[dict[str, Any]]:
    """As `double`, but stopped by the user when it comes to 30 tokens for the first time."""
    CALLS.append(point)
    if point["tokens"] == 30 and sum(call == point for call in CALLS) == 1:
        raise KeyboardInterrupt
    return value(2.0 * point["tokens"])


def process(**point: Any) -> list[dict[str, Any]]:
    return value(os.getpid())


def endless(file: str, **_: Any) -> list[dict[str, Any]]:
    """Says in `file` which process it is, then sleeps."""
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)
    return value(1.0)


def fate(end: str, **_: Any) -> list[dict[str, Any]]:
    """Ends as it is told."""
    if end == "oom":
        raise DeviceOutOfMemory("64 MiB over")
    if end == "memory":
        raise MemoryError
    if end == "refused":
        raise Refused("9.0 GiB needed", nbytes=9 * 2**30)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "timeout":
        time.sleep(600)
    if end == "exit":
        os._exit(3)
    if end == "error":
        raise KeyError("no such layer")
    return value(1.0)


def strange(kind: str, **_: Any) -> list[dict[str, Any]]:
    """Returns what a measurement must not."""
    good = value(1.0)[0]
    return {
        "empty": [],
        "lacking": [{"metric": "time", "value": 1.0}],
        "source": [good | {"source": "guessed"}],
        "infinite": [good | {"value": float("inf")}],
    }[kind]


def undefined(**_: Any) -> list[dict[str, Any]]:
    return value(float("nan"))
