"""Rows of a study: the file that keeps them, and the frame that they make."""

import errno
import json
import os
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from kvlib.provenance import Point, canonical, machine, row_key, setting

if sys.platform != "win32":
    import fcntl


@dataclass(frozen=True)
class Row:
    """One measured point: its values, or the reason why there are none."""

    key: str
    point: dict[str, Any]
    status: str
    values: list[dict[str, Any]]
    seconds: float  # wall time of the whole point, the child's start included
    machine: str
    sources: str
    when: str  # UTC, ISO 8601
    detail: str = ""
    probe: float | None = None  # time of the fixed probe after the point / before it
    origin: dict[str, Any] = field(default_factory=dict)  # commit, dirty, packages

    @classmethod
    def parse(cls, line: bytes) -> "Row":
        """Read one stored line; ValueError or TypeError if it is not a row."""
        row = cls(**json.loads(line))
        if not isinstance(row.point, dict) or not isinstance(row.values, list):
            raise TypeError("point or values have the wrong type")
        return row

    def line(self) -> bytes:
        return canonical(asdict(self)).encode() + b"\n"


class Store:
    """The rows of one study in `folder/data/NAME.jsonl`: one line a point and machine.

    A new row is appended and reaches the disk before `add` returns; where a point was measured
    twice on one machine the later line counts, and `compact` drops the earlier.
    """

    def __init__(self, folder: str | Path, name: str) -> None:
        self.path = Path(folder) / "data" / f"{name}.jsonl"
        self.rows: dict[tuple[str, str], Row] = {}

    def load(self) -> None:
        """Read the file. An interrupted last write is dropped; any other fault is an error."""
        self.rows.clear()
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                self._keep(Row.parse(line))
            except (ValueError, TypeError) as error:
                if number < len(lines):  # a newline follows, so it was written whole
                    raise ValueError(
                        f"{self.path}:{number}: not a stored row ({error}); "
                        "restore the file from git or delete that line"
                    ) from None
                warnings.warn(
                    f"{self.path}:{number}: dropped an interrupted last write", stacklevel=2
                )

    def current(self, point: Point, sources: str) -> Row | None:
        """The point's row of this machine, if it was measured under these sources."""
        row = self.rows.get((canonical(point), machine()))
        return row if row is not None and row.key == row_key(sources, point) else None

    def seconds(self) -> dict[str, float]:
        """How long each setting took, the mean over its rows."""
        taken: dict[str, list[float]] = {}
        for row in self.rows.values():
            taken.setdefault(setting(row.point), []).append(row.seconds)
        return {name: statistics.mean(times) for name, times in taken.items()}

    def choose(self, points: Sequence[Point], sources: str) -> list[Row]:
        """A stored row for each point that has one, of as few machines as possible.

        First comes the machine with rows for most points; among equals the one whose rows are
        current here, then the newest. Other machines fill what is left. LookupError if no
        point has a row.
        """
        wanted = dict.fromkeys(map(canonical, points))
        owners: dict[str, dict[str, Row]] = {}
        for (point, owner), row in self.rows.items():
            if point in wanted:
                owners.setdefault(owner, {})[point] = row

        def rank(owner: str) -> tuple[int, int, str]:
            rows = owners[owner].values()
            current = sum(row.key == row_key(sources, row.point) for row in rows)
            return len(rows), current, max(row.when for row in rows)

        if not owners:
            raise LookupError(
                f"no stored rows for these points in {self.path}: run `make reproduce`, "
                "or measure them with rows='measure'"
            )
        merged: dict[str, Row] = {}
        for owner in sorted(owners, key=rank):
            merged |= owners[owner]
        return [merged[point] for point in wanted if point in merged]

    def add(self, row: Row) -> None:
        """Append a row and wait until it is on the disk; on failure the file is as before."""
        line = row.line()
        with _explained(self.path), self.path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "short write")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
        self._keep(row)

    def compact(self) -> None:
        """Rewrite the file in its one order, if it is not already so."""
        content = b"".join(row.line() for _, row in sorted(self.rows.items()))
        if self.path.exists() and self.path.read_bytes() != content:
            write_atomic(self.path, content)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let one process at a time measure into the folder: two would slow each other down."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if sys.platform == "win32":
            yield
            return
        descriptor = os.open(self.path.parent, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting: another study is measuring into {self.path.parent}", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _keep(self, row: Row) -> None:
        self.rows[canonical(row.point), row.machine] = row


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _explained(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"disk full while writing {path}: what was stored is intact; "
            "free some space and run again, it resumes where it stopped",
        ) from error


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Where the rows of a figure came from; equal rows give an equal summary."""
    rows = list(rows)
    versions = {(name, v) for row in rows for name, v in row.origin.get("packages", {}).items()}
    return {
        "commits": sorted({str(row.origin.get("commit", "unknown")) for row in rows}),
        "dirty": any(row.origin.get("dirty", False) for row in rows),
        "machines": sorted({row.machine for row in rows}),
        "measured": [min(row.when for row in rows), max(row.when for row in rows)] if rows else [],
        "packages": {n: sorted(v for m, v in versions if m == n) for n in sorted(dict(versions))},
        "points": len(rows),
        "seconds": round(sum(row.seconds for row in rows), 1),
        "seeds": sorted({row.point["seed"] for row in rows if "seed" in row.point}),
        "sources": sorted({row.sources for row in rows}),
        "statuses": dict(Counter(row.status for row in rows)),
    }


def table(
    name: str, points: Sequence[Point], rows: Sequence[Row], sources: str, shed: list[str]
) -> pd.DataFrame:
    """Stored rows as a long frame, one value a row; a point without values has one empty row.

    `attrs`: `shed` in words, `missing` (points without a row), `stale` (points of older
    sources), `parameters` (the points' fields) and `provenance`.
    """
    columns = list(dict.fromkeys(field for point in points for field in point))
    empty = {"metric": None, "value": None, "unit": "", "source": "measured"}
    records = [
        {**row.point, **value, "status": row.status, "machine": row.machine, "key": row.key}
        | ({"detail": row.detail} if row.detail else {})
        for row in rows
        for value in row.values or [empty]
    ]
    required = [*columns, *empty, "status", "machine", "key"]
    frame = pd.DataFrame(records) if records else pd.DataFrame(columns=required)
    frame["value"] = pd.to_numeric(frame["value"])
    frame["figure"] = name
    frame.attrs = {
        "shed": shed,
        "missing": len(points) - len(rows),
        "stale": sum(row.sources != sources for row in rows),
        "parameters": columns,
        "provenance": summary(rows),
    }
    return frame


def new_row(point: Point, sources: str, origin: dict[str, Any], **result: Any) -> Row:
    """The row of a point that this machine has just measured."""
    return Row(
        key=row_key(sources, point),
        point=dict(point),
        machine=machine(),
        sources=sources,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        origin=origin,
        **result,
    )
