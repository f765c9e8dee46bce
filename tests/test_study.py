"""The study: what it stores, when it measures again, and what it does when something fails."""

import contextlib
import errno
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
import study_points as points_of

from kvlib import provenance, store, study
from kvlib.provenance import source_hash
from kvlib.store import Store

POINTS = [{"strategy": "h2o", "tokens": tokens, "repeat": 0} for tokens in (10, 20, 30, 40)]


@pytest.fixture(autouse=True)
def _nothing_measured_yet() -> None:
    points_of.CALLS.clear()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., pd.DataFrame]:
    """Measures in this process into a folder of the test's own."""

    def measured(points: Any = POINTS, measure: Any = points_of.double, **options: Any) -> Any:
        settings = {"folder": tmp_path, "rows": "measure", "isolate": False, "progress": False}
        return study.run("demo", points, measure, **(settings | options))

    return measured


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "demo.jsonl"


def asked() -> list[int]:
    return [call["tokens"] for call in points_of.CALLS]


# -- rows and their file --------------------------------------------------------------------------


def test_one_value_a_row_with_everything_beside_it(run: Any) -> None:
    frame = run()
    assert list(frame["value"]) == [20, 40, 60, 80]
    assert set(frame) == {
        *("strategy", "tokens", "repeat", "metric", "value", "unit", "source"),
        *("status", "machine", "key", "figure"),
    }
    assert set(frame["status"]) == {"ok"}
    assert set(frame["machine"]) == {provenance.machine()}
    assert frame["key"].is_unique
    assert frame.attrs["provenance"]["points"] == 4
    assert set(frame.attrs["provenance"]["packages"]) >= {"python", "torch", "pandas"}


def test_a_second_run_measures_only_what_is_missing(run: Any) -> None:
    run(POINTS[:2])
    frame = run()
    assert asked() == [10, 20, 30, 40]
    assert list(frame["value"]) == [20, 40, 60, 80]


def test_resumes_after_an_interruption(run: Any, file: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(measure=points_of.interrupted)
    assert len(file.read_bytes().splitlines()) == 2
    frame = run(measure=points_of.interrupted)
    assert asked() == [10, 20, 30, 30, 40]
    assert list(frame["tokens"]) == [10, 20, 30, 40]


def test_rows_of_points_not_asked_for_stay_in_the_file(run: Any, file: Path) -> None:
    run()
    assert list(run(POINTS[1:2])["tokens"]) == [20]
    assert len(file.read_bytes().splitlines()) == 4


def test_force_measures_anew_and_replaces(run: Any, file: Path) -> None:
    run()
    run(force=True)
    assert asked() == 2 * [10, 20, 30, 40]
    assert len(file.read_bytes().splitlines()) == 4


def test_equal_points_are_measured_once(run: Any) -> None:
    assert len(run([*POINTS, {**POINTS[0]}])) == 4
    assert asked() == [10, 20, 30, 40]


def test_repeats_are_interleaved(run: Any) -> None:
    grid = [{"tokens": tokens, "repeat": r} for tokens in (1, 2) for r in (0, 1)]
    run(grid)
    assert [(c["repeat"], c["tokens"]) for c in points_of.CALLS] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_the_file_does_not_depend_on_the_order_of_measuring(
    run: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study.time, "perf_counter", lambda: 0.0)
    fixed = store.datetime.now(store.UTC)
    clock = type("Clock", (), {"now": staticmethod(lambda _: fixed)})
    monkeypatch.setattr(store, "datetime", clock)
    run()
    content = file.read_bytes()
    file.unlink()
    run(POINTS[::-1])
    assert file.read_bytes() == content
    run()
    assert file.read_bytes() == content


def test_an_undefined_value_is_stored_as_none(run: Any, file: Path) -> None:
    frame = run(POINTS[:1], points_of.undefined)
    assert frame["value"].isna().all()
    assert json.loads(file.read_bytes())["values"][0]["value"] is None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "no values"),
        ("lacking", "lacks source, unit"),
        ("source", "unknown source 'guessed'"),
        ("infinite", "Out of range"),
    ],
)
def test_a_strange_value_stops_the_run(run: Any, file: Path, kind: str, said: str) -> None:
    with pytest.raises(study.MeasurementError, match=f"demo: kind={kind} failed: .*{said}"):
        run([{"kind": kind}], points_of.strange)
    assert not file.exists()


# -- faults of the file ---------------------------------------------------------------------------


def test_an_interrupted_write_is_repaired(run: Any, file: Path) -> None:
    run()
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    with pytest.warns(UserWarning, match=r"demo.jsonl:4: dropped an interrupted last write"):
        frame = run()
    assert asked() == [10, 20, 30, 40, 40]
    assert list(frame["value"]) == [20, 40, 60, 80]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


def test_a_last_line_without_its_end_alone_is_kept(run: Any, file: Path) -> None:
    run(POINTS[:2], points_of.interrupted)
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    with pytest.raises(KeyboardInterrupt):
        run(POINTS[::-1][:2], points_of.interrupted)
    assert len(run(rows="stored", measure=points_of.interrupted)) == 3


@pytest.mark.parametrize("bad", [b"not json", b"<<<<<<< HEAD", b"5", b"{}", b"\xff\x00"])
@pytest.mark.parametrize("rows", ["measure", "stored"])
def test_a_corrupt_line_is_named_and_nothing_overwritten(
    run: Any, file: Path, bad: bytes, rows: str
) -> None:
    run()
    lines = file.read_bytes().splitlines(keepends=True)
    content = b"".join([lines[0], bad + b"\n", *lines[2:]])
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"demo\.jsonl:2: not a stored row") as caught:
        run(rows=rows)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == content


def test_a_full_disk_leaves_the_file_as_it_was(
    run: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(POINTS[:2])
    content = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"disk full while writing .*free some space") as caught:
            run()
    assert caught.value.errno == errno.ENOSPC
    assert file.read_bytes() == content
    assert [path.name for path in file.parent.iterdir()] == ["demo.jsonl"]
    assert list(run()["value"]) == [20, 40, 60, 80]


def test_a_full_disk_while_compacting_leaves_the_file_as_it_was(
    run: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    content = b"".join(reversed(file.read_bytes().splitlines(keepends=True)))
    file.write_bytes(content)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        run()
    assert file.read_bytes() == content
    assert [path.name for path in file.parent.iterdir()] == ["demo.jsonl"]


def test_two_runs_do_not_measure_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from kvlib.store import Store\n"
        "with Store(sys.argv[1], 'demo').exclusive(): print('in', flush=True)"
    )
    with Store(tmp_path, "other").exclusive():
        command = [sys.executable, "-c", code, str(tmp_path)]
        second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline().startswith("waiting: another study is measuring into")
    assert second.communicate()[0] == "in\n"


# -- stored rows ----------------------------------------------------------------------------------


def test_stored_rows_need_no_measuring(run: Any) -> None:
    run()
    points_of.CALLS.clear()
    frame = run(POINTS[2:], rows="stored")
    assert list(frame["value"]) == [60, 80]
    assert not points_of.CALLS


def test_nothing_stored_says_what_to_do(run: Any) -> None:
    with pytest.raises(LookupError, match=r"no stored rows .*make reproduce.*rows='measure'"):
        run(rows="stored")


def test_an_unknown_mode_is_refused(run: Any) -> None:
    with pytest.raises(ValueError, match="'stored' or 'measure', not 'all'"):
        run(rows="all")


def elsewhere(file: Path, machine: str, numbers: slice = slice(None), when: str = "2000") -> None:
    """Add copies of the rows as if another machine had measured them."""
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    with file.open("a") as out:
        for row in rows[numbers]:
            out.write(json.dumps(row | {"machine": machine, "key": machine, "when": when}) + "\n")


def test_this_machine_comes_first_among_equals(run: Any, file: Path) -> None:
    run()
    elsewhere(file, "theirs", when="2999")
    assert set(run(rows="stored")["machine"]) == {provenance.machine()}


def test_a_whole_set_of_another_machine_comes_before_a_part_of_ours(run: Any, file: Path) -> None:
    run()
    elsewhere(file, "theirs")
    ours = [line for line in file.read_text().splitlines() if '"theirs"' not in line]
    file.write_text(file.read_text().replace(f"{ours[0]}\n", ""))
    assert set(run(rows="stored")["machine"]) == {"theirs"}


def test_others_fill_only_what_is_left_and_the_newest_first(run: Any, file: Path) -> None:
    run()
    elsewhere(file, "older", when="2000")
    elsewhere(file, "newer", when="2001")
    kept = [x for x in file.read_text().splitlines() if '"older"' in x or '"newer"' in x]
    file.write_text("\n".join(kept) + "\n")
    assert set(run(rows="stored")["machine"]) == {"newer"}
    extra = {"strategy": "mine", "tokens": 10, "repeat": 0}
    run([extra])
    frame = run([*POINTS, extra], rows="stored")
    assert list(frame["machine"]) == 4 * ["newer"] + [provenance.machine()]


def test_rows_of_other_machines_survive_measuring_here(run: Any, file: Path) -> None:
    run()
    elsewhere(file, "theirs")
    run(force=True)
    assert [b'"theirs"' in x for x in file.read_bytes().splitlines()].count(True) == 4


def test_stale_rows_are_shown_as_such_and_replaced(
    run: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    monkeypatch.setattr(provenance, "source_hash", lambda _: "new code")
    old = run(rows="stored")
    assert old.attrs["stale"] == 4
    new = run()
    assert asked() == 2 * [10, 20, 30, 40]
    assert new.attrs["stale"] == 0
    assert not set(old["key"]) & set(new["key"])
    assert len(file.read_bytes().splitlines()) == 4


# -- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose `measure` imports `a`, which imports `b.deep`; `other` stands apart."""
    root = tmp_path / "toy"
    (root / "b").mkdir(parents=True)
    (root / "__init__.py").write_text("from toy import other\n")
    (root / "measure.py").write_text("import toy.a\nimport json\n")
    (root / "a.py").write_text("def run():\n    from .b import deep\n    return deep\n")
    (root / "b" / "__init__.py").write_text("")
    (root / "b" / "deep.py").write_text("'''Doc.'''\nx = 1\n")
    (root / "other.py").write_text("y = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    source_hash.cache_clear()
    yield root
    source_hash.cache_clear()


def rehash() -> str:
    source_hash.cache_clear()
    return source_hash("toy.measure", "toy")


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("b/deep.py", "'''Another.'''\n\n# a remark\nx  =  1  # one\n", False),
        (
            "a.py",
            'def run():\n    """Doc."""\n    from .b import deep\n\n    return (deep)\n',
            False,
        ),
        ("other.py", "y = 2\n", False),
        ("b/deep.py", "x = 2\n", True),
        ("a.py", "def run():\n    from .b import deep\n    return [deep]\n", True),
        ("measure.py", "import toy.a\nimport json, os\n", True),
        ("measure.py", "import toy.a\nimport json\nfrom toy import other\n", True),
        ("b/deep.toml", "rate = 1\n", True),
    ],
)
def test_only_code_that_is_imported_counts(
    package: Path, name: str, text: str, counts: bool
) -> None:
    before = rehash()
    (package / name).write_text(text)
    assert (rehash() != before) == counts


def test_remarks_in_settings_do_not_count(package: Path) -> None:
    (package / "a.toml").write_text("rate = 1\n")
    before = rehash()
    (package / "a.toml").write_text("# GB/s\nrate = 1\n")
    assert rehash() == before


def test_a_name_from_a_package_brings_the_package(package: Path) -> None:
    (package / "measure.py").write_text("from toy import anything\n")
    before = rehash()
    (package / "other.py").write_text("y = 2\n")
    assert rehash() != before


def test_a_module_from_a_package_brings_only_the_module(package: Path) -> None:
    (package / "measure.py").write_text("from toy import a\n")
    before = rehash()
    (package / "__init__.py").write_text("from toy import other\nz = 1\n")
    assert rehash() == before
    (package / "a.py").write_text("z = 1\n")
    assert rehash() != before


def test_a_module_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no source file for module '__main__'"):
        source_hash("__main__")


def test_the_readers_strategy_file_counts(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    point = {"strategy": f"{mine}:Mine"}
    mine.write_text("x = 1\n")
    first = provenance.row_key("s", point)
    mine.write_text("x = 1  # better\n")
    assert provenance.row_key("s", point) == first
    mine.write_text("x = 2\n")
    assert provenance.row_key("s", point) != first


@pytest.mark.parametrize("change", [{"seed": 1}, {"model_hash": "b"}, {"repeat": 1}, {"new": None}])
def test_every_field_of_a_point_counts(change: dict[str, Any]) -> None:
    point = {"seed": 0, "model_hash": "a", "repeat": 0}
    assert provenance.row_key("s", point) == provenance.row_key("s", dict(reversed(point.items())))
    assert provenance.row_key("s", point) != provenance.row_key("s", point | change)


def test_the_weights_behind_a_name_count(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    point = {"model": str(tmp_path)}
    keys = set()
    for content in (b"one", b"another", b"one"):
        weights.write_bytes(content)
        keys.add(provenance.row_key("s", point))
    assert len(keys) == 2


def test_a_model_that_is_not_here_has_a_key_all_the_same() -> None:
    assert provenance.row_key("s", {"model": "m"}) != provenance.row_key("s", {"model": "n"})


def test_the_machine_and_its_packages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {provenance.row_key("s", {})}
    monkeypatch.setattr(provenance, "machine", lambda: "another")
    keys.add(provenance.row_key("s", {}))
    monkeypatch.setattr(provenance, "packages", lambda: {"torch": "99"})
    keys.add(provenance.row_key("s", {}))
    assert len(keys) == 3


# -- statuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(("end", "status"), [("oom", "oom"), ("memory", "oom"), ("fine", "ok")])
def test_status_of_a_point(run: Any, end: str, status: str, isolate: bool) -> None:
    frame = run([{"end": end}], points_of.fate, isolate=isolate)
    assert list(frame["status"]) == [status]
    assert list(frame["value"].isna()) == [status == "oom"]


def test_a_refused_point_states_its_size(run: Any) -> None:
    row = run([{"end": "refused"}], points_of.fate).iloc[0]
    assert (row["status"], row["metric"], row["source"]) == (
        "refused",
        "predicted_bytes",
        "modelled",
    )
    assert (row["value"], row["detail"]) == (9 * 2**30, "9.0 GiB needed")


def test_fates_of_a_child(run: Any) -> None:
    ends = [{"end": "killed"}, {"end": "fine"}]
    assert list(run(ends, points_of.fate, isolate=True)["status"]) == ["oom", "ok"]
    slow = run([{"end": "timeout"}], points_of.fate, isolate=True, timeout=0.5)
    assert list(slow["status"]) == ["timeout"]
    assert slow["detail"].iloc[0] == "no result within 0.5 s"


def test_failed_points_are_not_measured_again(run: Any, file: Path) -> None:
    run([{"end": "oom"}], points_of.fate)
    content = file.read_bytes()
    run([{"end": "oom"}], points_of.fate)
    assert file.read_bytes() == content


def test_each_point_has_a_process_of_its_own(run: Any) -> None:
    frame = run(POINTS, points_of.process, isolate=True)
    assert frame["value"].nunique() == 4
    assert os.getpid() not in set(frame["value"])


@pytest.mark.parametrize("isolate", [True, False])
def test_any_other_error_stops_the_run_and_keeps_the_rows(run: Any, isolate: bool) -> None:
    ends = [{"end": "fine", "repeat": 0}, {"end": "error", "repeat": 1}]
    with pytest.raises(study.MeasurementError) as caught:
        run(ends, points_of.fate, isolate=isolate)
    said = "demo: end=error repeat=1 failed: KeyError: 'no such layer'"
    assert str(caught.value) == said
    assert "study_points.py" in str(caught.value.__cause__)
    assert len(run(ends[:1], points_of.fate, rows="stored")) == 1


def test_a_child_that_ends_itself_is_an_error(run: Any) -> None:
    with pytest.raises(study.MeasurementError, match="end=exit failed: exit code 3"):
        run([{"end": "exit"}], points_of.fate, isolate=True)


def script(folder: Path, measure: str, point: str) -> subprocess.Popen[str]:
    """A script without a guard for its main part, which measures one point in a child."""
    path = folder / "script.py"
    path.write_text(
        "import study_points\nfrom kvlib import study\n"
        f"frame = study.run('demo', [{point}], study_points.{measure}, "
        f"folder={str(folder)!r}, rows='measure', progress=False)\n"
        "print('status', *frame['status'])\n"
    )
    here = os.pathsep.join([str(Path(study.__file__).parents[1]), str(Path(__file__).parent)])
    env = os.environ | {"PYTHONPATH": here}
    return subprocess.Popen([sys.executable, path], env=env, stdout=subprocess.PIPE, text=True)


def test_a_script_without_a_guard_can_measure(tmp_path: Path) -> None:
    assert script(tmp_path, "process", "{'n': 1}").communicate(timeout=120)[0] == "status ok\n"


def test_a_child_ends_with_a_killed_parent(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    parent = script(tmp_path, "endless", f"{{'file': {str(file)!r}}}")
    deadline = time.monotonic() + 120
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = psutil.Process(int(file.read_text()))
    parent.kill()
    parent.wait()
    try:
        child.wait(timeout=60)  # raises if it goes on
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
        parent.communicate()


# -- drift ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probes", "status", "calls"),
    [
        ([1.0, 1.1], "ok", 1),
        ([1.0, 1.3, 1.0, 1.0], "ok", 2),
        ([1.0, 1.3, 1.0, 0.7], "noisy", 2),
    ],
)
def test_a_disturbed_point_is_measured_once_more(
    run: Any, monkeypatch: pytest.MonkeyPatch, probes: list[float], status: str, calls: int
) -> None:
    monkeypatch.setattr(study, "probe", itertools.chain(probes).__next__)
    frame = run(POINTS[:1], timed=True)
    assert list(frame["status"]) == [status]
    assert len(points_of.CALLS) == calls


def test_the_probe_is_stored_where_a_point_is_timed(run: Any, file: Path) -> None:
    run(POINTS[:1], timed=True)
    assert json.loads(file.read_bytes())["probe"] > 0
    run(POINTS[:1], force=True)
    assert json.loads(file.read_bytes())["probe"] is None


# -- time -----------------------------------------------------------------------------------------


def cost(point: Any) -> float:
    return float(point["tokens"])


def test_all_is_kept_within_the_limit() -> None:
    grid = study.grid(repeats=5, tokens=[1, 10])
    assert study.shed(grid, cost, 55) == (grid, [])
    assert study.shed(grid, cost, None) == (grid, [])


def test_repeats_are_shed_from_the_last_before_any_point() -> None:
    kept, dropped = study.shed(study.grid(repeats=5, tokens=[1, 10]), cost, 54)
    assert {p["repeat"] for p in kept} == {0, 1, 2, 3}
    assert dropped == ["repeat 4 of every point"]


def test_points_are_shed_dearest_first_once_repeats_are_at_their_least() -> None:
    kept, dropped = study.shed(study.grid(repeats=5, tokens=[1, 100, 10]), cost, 40)
    assert sorted((p["tokens"], p["repeat"]) for p in kept) == [
        (tokens, repeat) for tokens in (1, 10) for repeat in (0, 1, 2)
    ]
    assert dropped == [
        "repeat 4 of every point",
        "repeat 3 of every point",
        "tokens=100 (about 5 min)",
    ]


def test_stored_repeats_count_towards_the_least() -> None:
    pending = [p for p in study.grid(repeats=5, tokens=[10]) if p["repeat"] in (3, 4)]
    kept, dropped = study.shed(pending, cost, 15, levels=range(5))
    assert [p["repeat"] for p in kept] == [3]
    assert dropped == ["repeat 4 of every point"]


def test_a_run_says_its_time_and_what_it_shed(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    grid = study.grid(repeats=4, strategy=["full"], tokens=[60])
    frame = run(grid, estimate=cost, limit_seconds=200, progress=True)
    assert "demo: 3 points to measure, about 3 min\n" in capsys.readouterr().err
    assert frame.attrs["shed"] == ["repeat 3 of every point"]
    assert frame.attrs["missing"] == 1
    assert sorted(frame["repeat"]) == [0, 1, 2]


def test_without_an_estimate_stored_times_serve(
    run: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = study.grid(repeats=2, tokens=[10, 20])
    run(grid[:1], progress=True)
    assert "1 points to measure, time unknown" in capsys.readouterr().err
    row = json.loads(file.read_bytes()) | {"seconds": 300.0}
    file.write_text(json.dumps(row) + "\n")
    run(grid, progress=True)
    assert "3 points to measure, about 15 min" in capsys.readouterr().err


def test_a_grid_has_all_combinations_each_repeat_with_its_seed() -> None:
    grid = study.grid(repeats=2, seed=7, strategy=["full", "h2o"], tokens=[1, 2, 3])
    assert len(grid) == 12
    assert {(p["repeat"], p["seed"]) for p in grid} == {(0, 7), (1, 8)}
    assert grid[1] == {"strategy": "full", "tokens": 2, "repeat": 0, "seed": 7}


# -- profiles, verify -----------------------------------------------------------------------------


def test_profiles() -> None:
    for name in ("smoke", "laptop", "laptop-full", "gpu"):
        assert study.profile(name).name == name
    assert study.profile("laptop").limit("05_output_length") == 240
    assert study.profile("laptop").repeats >= 5
    with pytest.raises(ValueError, match="unknown profile 'lap': choose from smoke, laptop, "):
        study.profile("lap")


def test_verify_runs_each_notebook_into_a_scratch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("01_a.ipynb", "02_b.ipynb", "notes.txt"):
        (tmp_path / name).touch()
    commands: list[list[str]] = []

    def fake(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode="02_b" in command[4])

    monkeypatch.setattr(study, "subprocess", SimpleNamespace(run=fake))
    folders = ["--figures", str(tmp_path / "none"), "--notebooks", str(tmp_path)]
    assert study.main(["verify", "--profile", "smoke", *folders]) == 1
    assert [Path(command[4]).name for command in commands] == ["01_a.ipynb", "02_b.ipynb"]
    for command in commands:
        assert command[command.index("--profile") + 1] == "smoke"
        assert command[command.index("--rows") + 1] == "measure"
        assert not Path(command[command.index("--out") + 1]).exists()
    said = capsys.readouterr()
    assert "reproduced 0 of 0" in said.out
    assert "failed to run" in said.err
    assert "01_a" not in said.err
