"""Executed notebooks and their pages: complete, self-contained, and equal when made again."""

import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from papermill.exceptions import PapermillExecutionError
from PIL import Image

from kvlib import report

FIGURE = """
import sys
from pathlib import Path
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
from IPython.display import Image, display
figures = Path(out) / "figures"
figures.mkdir(parents=True, exist_ok=True)
plt.figure(figsize=(4, 3))
plt.plot([1, size])
plt.savefig(figures / f"{name}.png")
display(Image(filename=str(figures / f"{name}.png")))
print("progress 7.3 s", file=sys.stderr)
print(profile, size)
"""


class Page(HTMLParser):
    """Collects what a page would load, its links, and the text inside `details`."""

    LOADS = ("script", "img", "iframe", "source", "object", "embed", "image", "video", "audio")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.folded = self.shown = ""
        self.tags: list[str] = []
        self.depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.depth += tag == "details"
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag == "link" or tag in self.LOADS:
            self.loaded += [str(values[k]) for k in ("src", "href", "data") if values.get(k)]

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "details"

    def handle_data(self, data: str) -> None:
        if self.depth:
            self.folded += data
        else:
            self.shown += data


def make_notebook(path: Path, code: str, title: str = "What does *it* cost?") -> Path:
    """A notebook with prose, a parameters cell and one code cell."""
    parameters = new_code_cell(
        'profile: str = "laptop"\nout = "."\nname, size = "01_cost", 3\nbudgets = [\n    0.1,\n]'
    )
    parameters.metadata["tags"] = ["parameters"]
    prose = new_markdown_cell(
        f"# {title}\n\nMemory is [short](x.md). So is time.\n\n## Next\n\n$x$"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[prose, parameters, new_code_cell(code)]), path)
    return path


def build(folder: Path) -> Path:
    """Executes two notebooks and renders them; returns the report folder."""
    for name in ("01_cost", "02_speed"):
        notebook = make_notebook(folder / "notebooks" / f"{name}.ipynb", FIGURE, f"About {name}")
        settings = {"profile": "smoke", "out": str(folder), "name": name, "device": "cpu"}
        report.execute(notebook, folder / "report", settings)
    columns = "id,claim,direction,magnitude,measured,projected,verdict,reason"
    (folder / "figures" / "claims.csv").write_text(f"{columns}\nC1,a < b,x,y,1,2,undecided,few\n")
    report.render(folder / "report", folder / "figures")
    return folder / "report"


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"))


@pytest.mark.parametrize("name", ["01_cost.html", "02_speed.html", "index.html"])
def test_pages_load_nothing_from_outside(built: Path, name: str) -> None:
    page = Page((built / name).read_text())
    assert page.loaded
    assert all(source.startswith("data:") for source in page.loaded)
    assert "script" not in page.tags
    assert not re.search(r"@import|url\((?!data:)", (built / name).read_text())


def test_code_is_folded_and_results_are_not(built: Path) -> None:
    page = Page((built / "01_cost.html").read_text())
    assert "plt.plot" in page.folded
    assert "plt.plot" not in page.shown
    assert "smoke 3" in page.shown
    assert page.links[:2] == ["index.html", "02_speed.html"]


def test_index_shows_title_question_figure_and_claims(built: Path) -> None:
    html = (built / "index.html").read_text()
    page = Page(html)
    assert "About 01_cost" in page.shown
    assert "Memory is short." in page.shown
    assert "So is time" not in page.shown
    assert "a < b" in page.shown
    assert len(page.loaded) == 2
    assert {"01_cost.html", "02_speed.html"} <= set(page.links)


def test_made_again_is_byte_equal(built: Path) -> None:
    before = digests(built)
    assert digests(build(built.parent)) == before


def test_executed_notebook_keeps_no_times_or_progress(built: Path) -> None:
    notebook = nbformat.read(built / "01_cost.ipynb", as_version=4)
    nbformat.validate(notebook)
    text = json.dumps(notebook)
    assert "papermill" not in notebook.metadata
    assert "start_time" not in text
    assert "progress 7.3 s" not in str([c.get("outputs") for c in notebook.cells])
    assert any("injected-parameters" in c.metadata.get("tags", []) for c in notebook.cells)


def test_passes_only_set_parameters_that_the_notebook_has(tmp_path: Path) -> None:
    notebook = make_notebook(tmp_path / "n.ipynb", "print(profile, budgets, 'device' in dir())")
    values: dict[str, Any] = {"profile": None, "device": "cpu", "budgets": [0.3]}
    path = report.execute(notebook, tmp_path / "report", values)
    cells = nbformat.read(path, as_version=4).cells
    assert cells[-1].outputs[0].text == "laptop [0.3] False\n"


def test_runs_this_interpreter_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys\nprint(sys.prefix, os.getcwd())"
    notebook = make_notebook(tmp_path / "deep" / "n.ipynb", code)
    monkeypatch.chdir(tmp_path)
    path = report.execute(notebook, tmp_path / "report", {})
    text = nbformat.read(path, as_version=4).cells[-1].outputs[0].text
    assert text == f"{sys.prefix} {tmp_path}\n"


@pytest.mark.parametrize("code", ["1 / 0", "import os\nos._exit(3)"])
def test_a_failure_keeps_the_older_notebook(
    tmp_path: Path, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = make_notebook(tmp_path / "n.ipynb", code)
    old = tmp_path / "report" / "n.ipynb"
    old.parent.mkdir()
    old.write_text("old")
    assert report.main(["run", str(notebook), "--report", str(old.parent)]) == 1
    assert old.read_text() == "old"
    assert list(old.parent.iterdir()) == [old]
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"error: {notebook}: ")
    assert "division by zero" in last or "died" in last


def test_a_failing_cell_raises_papermills_error(tmp_path: Path) -> None:
    notebook = make_notebook(tmp_path / "n.ipynb", "1 / 0")
    with pytest.raises(PapermillExecutionError, match="ZeroDivisionError"):
        report.execute(notebook, tmp_path / "report", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "absent.ipynb", "--report", "report"], "absent.ipynb: not a readable notebook"),
        (["render", "--report", "nowhere", "--figures", "x"], "nowhere: no executed notebooks"),
        (["check", "absent.ipynb"], "absent.ipynb"),
        (["check", "broken.ipynb"], "broken.ipynb"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.ipynb").write_text("no json")
    assert report.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_check_names_notebooks_with_outputs(
    tmp_path: Path, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = make_notebook(tmp_path / "clean.ipynb", "1")
    counted = make_notebook(tmp_path / "counted.ipynb", "1")
    notebook = nbformat.read(counted, as_version=4)
    notebook.cells[1].execution_count = 4
    nbformat.write(notebook, counted)
    assert report.main(["check", str(clean)]) == 0
    executed = built / "01_cost.ipynb"
    assert report.main(["check", str(clean), str(counted), str(executed)]) == 1
    error = capsys.readouterr().err
    assert str(counted) in error
    assert str(executed) in error
    assert "clean.ipynb" not in error


def test_a_report_too_large_for_a_repository_is_refused(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SIZE_LIMIT", 2**20)
    report.refuse_large(built)
    monkeypatch.setattr(report, "SIZE_LIMIT", 2**10)
    with pytest.raises(report.ReportError, match="the largest is"):
        report.refuse_large(built)


def test_thumbnail_is_small_and_optional(tmp_path: Path) -> None:
    assert report.thumbnail(tmp_path / "none.png") is None
    Image.effect_noise((1600, 1200), 50).save(tmp_path / "big.png")
    uri = report.thumbnail(tmp_path / "big.png")
    assert uri is not None
    assert uri.startswith("data:image/png;base64,")
    assert len(uri) < 200_000
