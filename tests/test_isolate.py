"""A child process: what is left of one that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from kvlib.isolate import ChildError, in_child, own_output


def die(how: str) -> Any:
    """Prints at every level, then ends as it is told."""
    for number in range(20):
        print("line", number)
    subprocess.run([sys.executable, "-c", "print('from a process of its own')"], check=True)
    os.write(2, b"from a library\n\n")
    if how == "returns":
        return own_output()
    if how == "raises":
        raise KeyError("no such layer")
    if how == "exits":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))
    return None


def last_words(how: str) -> tuple[str, list[str]]:
    with pytest.raises(ChildError) as caught:
        in_child(die, (how,), 60, ["kvlib.isolate"])
    assert caught.value.killed is (how == "SIGKILL")
    first, *lines = str(caught.value).splitlines()
    return first, lines


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exits", "exit code 3"),
        ("SIGSEGV", "exit code -11"),
        ("SIGKILL", "killed by the system"),
    ],
)
def test_an_error_ends_with_the_last_lines_of_a_child_that_died(how: str, reason: str) -> None:
    said, lines = last_words(how)
    assert said == f"{reason}; its last output:"
    printed = [f"line {number}" for number in range(10, 20)]
    assert lines == [*printed, "from a process of its own", "from a library"]


def test_a_traceback_is_among_the_last_lines() -> None:
    assert last_words("raises")[1][-1] == "KeyError: 'no such layer'"


def test_a_child_reads_its_own_output_and_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert in_child(die, ("returns",), 60, ["kvlib.isolate"]).endswith("\nfrom a library")
    assert "line" not in "".join(capfd.readouterr())
    assert own_output() == ""


def test_a_child_that_said_nothing_leaves_its_exit_code_alone() -> None:
    with pytest.raises(ChildError, match=r"^exit code 4$"):
        in_child(os._exit, (4,), 60, ["kvlib.isolate"])
