"""Calls a function in a process of its own."""

import io
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil

Result = TypeVar("Result")
TAIL = 12  # lines of a child's output that say what went wrong
WIDTH = 300  # characters that are shown of each
_OUTPUT: list[Path] = []  # in a child: the file that takes its output


class ChildError(RuntimeError):
    """A child process ended without a result; `killed` as the system does when memory runs out.

    The message ends with the last lines of the child's `output`.
    """

    def __init__(self, exitcode: int | None, output: str = "") -> None:
        self.killed = exitcode == -9
        reason = "killed by the system" if self.killed else f"exit code {exitcode}"
        super().__init__(f"{reason}; its last output:\n{output}" if output else reason)


def in_child(
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    timeout: float | None,
    preload: Sequence[str],
) -> Result:
    """The function's result from a fresh process, which is gone with its own children on return.

    Where the system can, children come from a server that has imported the `preload` modules.
    What the child prints is shown only in the error of one that dies. Raises TimeoutError after
    `timeout` seconds, ChildError where there is no result.
    """
    context = _context(preload)
    receiver, sender = context.Pipe(duplex=False)
    with receiver, _output_file() as output:
        child = context.Process(target=_serve, args=(sender, output, function, arguments))
        with _no_main():
            child.start()
        sender.close()
        try:
            result: Result = _receive(receiver, child, output, timeout)
            return result
        finally:
            _end(child)


def _receive(receiver: Connection, child: BaseProcess, output: Path, timeout: float | None) -> Any:
    if not multiprocessing.connection.wait([receiver, child.sentinel], timeout):
        raise TimeoutError(f"no result within {timeout} s")
    with suppress(EOFError):
        if receiver.poll():
            result = receiver.recv()
            child.join(10)  # lets it release what it holds
            return result
    child.join()
    raise ChildError(child.exitcode, _tail(output))


def own_output() -> str:
    """The last lines that this process has written so far; empty unless `in_child` started it."""
    return _tail(_OUTPUT[-1]) if _OUTPUT else ""


def _tail(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - 2**16, 0))
        lines = stream.read().decode(errors="replace").splitlines()
    return "\n".join([line.rstrip()[:WIDTH] for line in lines if line.strip()][-TAIL:])


@contextmanager
def _output_file() -> Iterator[Path]:
    """An empty file, for as long as the `with` block lasts."""
    handle, name = tempfile.mkstemp(prefix="kvlib-child-", suffix=".log")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


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


def _serve(
    sender: Connection, output: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _write_to(output)
    sender.send(function(*arguments))


def _write_to(output: Path) -> None:
    """Send what this process prints to the file, that of libraries and of its children too."""
    _OUTPUT.append(output)
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(handle, number)
    os.close(handle)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what it has printed outlives it


def _end_with_parent() -> None:
    """A killed notebook must not leave a measurement behind that slows the next one down."""
    if parent := multiprocessing.parent_process():
        parent.join()
        for file in _OUTPUT:
            file.unlink(missing_ok=True)
        os._exit(1)


def _end(child: BaseProcess) -> None:
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(child.pid).children(recursive=True):
            process.kill()
    child.kill()
    child.join()
