"""What stands around a device: the memory of its host, and its links to other devices.

Units are bytes and B/s; no torch here.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvlib.hardware import Machine


@dataclass(frozen=True)
class Node:
    """peer: to other devices, one direction. host: memory of the host, reads and writes together.

    host_memory: bytes of it for each device. source: where the figures come from.
    """

    peer: float
    host: float
    host_memory: float
    source: str


def _load() -> dict[str, Node]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: Node(**row) for name, row in table.items()}


NODES = _load()


def node_of(machine: Machine) -> Node:
    """The node that a machine usually stands in; one that is not published is its own host."""
    own = Node(machine.bandwidth, machine.bandwidth, machine.memory, machine.source)
    return NODES.get(machine.name, own)
