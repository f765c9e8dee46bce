"""Calls a function in a process of its own."""

import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

import psutil

Result = TypeVar("Result")


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
