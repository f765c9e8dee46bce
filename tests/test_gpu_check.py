"""The check for machines with a GPU, tried on a CPU: every part measures, and a failure stays one.

`benchmarks` is no package, so the script is imported from its folder.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import study_points as points_of
import torch

from kvlib import serving

FOLDER = Path(__file__).parents[1] / "benchmarks"
FETCHING = {"infinigen", "offload"}


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_check

    return gpu_check


def stored(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "data" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_part_measures_and_says_how(gpu_check: ModuleType, tmp_path: Path) -> None:
    assert gpu_check.main(["--tiny", "--out", str(tmp_path)]) == 0
    wanted = {name: points for name, _, points in gpu_check.parts(gpu_check.TINY)}
    for name, points in wanted.items():
        assert len(stored(tmp_path, name)) == len(points)
    for name, metric in (("05_output_length", "e2el"), ("serving", "throughput")):
        rows = stored(tmp_path, name)
        assert {row["point"]["strategy"] for row in rows} == {*gpu_check.STRATEGIES}
        for row in rows:
            assert row["status"] == "ok"
            found = {v["source"] for v in row["values"] if v["metric"] == metric}
            emulated = row["point"]["strategy"] in FETCHING
            assert found == {"emulated" if emulated else "measured"}
            moved = [v["value"] for v in row["values"] if v["metric"] == "bytes_moved"]
            assert len(moved) == emulated
            assert all(value > 0 for value in moved)
    layer, whole = stored(tmp_path, "01_prefill_memory"), stored(tmp_path, "gpu_prefill")
    assert {row["status"] for row in layer} == {"ok", "oom"}  # the failed ones hold up no other
    assert {row["status"] for row in whole} == {"ok"}
    for rows in (layer, whole):
        sources = {(v["metric"], v["source"]) for row in rows for v in row["values"]}
        assert ("prefill_peak", "measured") in sources
        assert ("prefill_peak", "emulated") not in sources


def test_nothing_starts_when_the_time_is_over(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--tiny", "--seconds", "0", "--out", str(tmp_path)]) == 0
    count = sum(len(points) for _, _, points in gpu_check.parts(gpu_check.TINY))
    assert f"{count} points not started after 0 s" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_failure_is_told_and_the_next_point_goes_on(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [{"end": end} for end in ("error", "oom", "fine")]
    monkeypatch.setattr(gpu_check, "parts", lambda size: [("demo", points_of.fate, ends)])
    assert gpu_check.check(gpu_check.TINY, tmp_path, 60) == 1
    assert {row["status"] for row in stored(tmp_path, "demo")} == {"oom", "ok"}
    told, ok = gpu_check.once("demo", points_of.fate, ends[0], tmp_path)
    assert not ok
    assert "Traceback" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    assert "no CUDA GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_whole_check_asks_for_points_of_the_notebooks(gpu_check: ModuleType) -> None:
    """Of a GPU with 8B parameters in half precision, those of most value first."""
    parts = {name: points for name, _, points in gpu_check.parts(gpu_check.WHOLE)}
    assert [*parts] == ["05_output_length", "serving", "01_prefill_memory", "gpu_prefill"]
    assert {p["device"] for points in parts.values() for p in points} == {"cuda"}
    assert {(p["tokens"], p["dtype"]) for p in parts["05_output_length"]} == {(10_000, "bfloat16")}
    assert {p["requests"] for p in parts["serving"]} == {96}
    swept = inspect.signature(serving.serve).parameters.keys() - {"_", "budget"}
    assert all(swept <= p.keys() for p in parts["serving"])  # as 02 to 04 ask for them
    assert max(p["tokens"] for p in parts["01_prefill_memory"]) == 32768
    assert sys.modules["gpu_check"].prefill_whole.__module__ == "gpu_check"  # named, not __main__
