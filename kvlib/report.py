"""Executes notebooks into a report folder and renders them as pages that load nothing.

Equal results give byte-equal files: times, machine paths, random ids and progress (stderr) are
left out of the executed notebook, and a page is made from that notebook and its figure alone.
"""

import argparse
import ast
import base64
import csv
import io
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
import zmq
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.reader import NotJSONError
from papermill.exceptions import PapermillExecutionError
from PIL import Image
from traitlets import default
from traitlets.config import Config

TEMPLATES = Path(__file__).parent / "templates"
SIZE_LIMIT = 15 * 2**20
THUMBNAIL_SIZE = (480, 360)
HEADLINE, HEADLINE_SIZE = "12_choosing", (1800, 1200)  # the figure that the index opens with
SHOWN_TYPES = ["text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown"]


class ReportError(Exception):
    """What went wrong, in one line for the reader."""


class OwnKernel(AsyncKernelManager):
    """Starts the kernel with the running interpreter, whatever kernels the user has registered."""

    @default("transport_encryption")
    def _encrypt_where_possible(self) -> str:
        return "auto" if zmq.has("curve") else "disabled"

    @property
    def kernel_spec(self) -> KernelSpec:
        """ipykernel's own description, whose command begins with sys.executable."""
        return KernelSpec(**get_kernel_dict())


@dataclass(frozen=True)
class Page:
    """A notebook's place in the report: file stem, first heading, first sentence, small figure."""

    name: str
    title: str
    question: str
    thumbnail: str | None


def execute(notebook: Path, report: Path, parameters: Mapping[str, Any]) -> Path:
    """Runs `notebook` in the current directory and writes it with its outputs into `report`.

    Of `parameters`, those are passed that are not None and that the notebook's parameters cell
    assigns. Raises ReportError, or papermill's PapermillExecutionError where a cell fails; an older
    notebook in `report` then stays as it was.
    """
    known = parameter_names(read(notebook))
    passed = {k: v for k, v in parameters.items() if v is not None and k in known}
    try:
        executed = papermill.execute_notebook(
            notebook,
            None,
            passed,
            kernel_name="python3",
            language="python",
            kernel_manager_class=OwnKernel,
            progress_bar=False,
            stdout_file=sys.stdout,
            stderr_file=sys.stderr,
        )
    except RuntimeError as error:  # the kernel died, or did not start
        raise ReportError(f"{notebook}: {error}") from error
    target = report / notebook.name
    write(target, nbformat.writes(without_volatile(executed)) + "\n")
    return target


def parameter_names(notebook: NotebookNode) -> set[str]:
    """The names that the cell tagged `parameters` assigns."""
    cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell.source))]
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def without_volatile(notebook: NotebookNode) -> NotebookNode:
    """Drops, in place, what differs between two runs with equal results."""
    for key in ("papermill", "widgets"):
        notebook.metadata.pop(key, None)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if is_stable(o)]
    return notebook


def is_stable(output: NotebookNode) -> bool:
    """False for progress: stderr and live widgets."""
    widget = "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    return not widget and output.get("name") != "stderr"


def render(report: Path, figures: Path) -> Path:
    """Writes an HTML page beside each notebook in `report`, and their index; returns the index.

    The pages hold their images, scripts and styles and work from a file system without network.
    Thumbnails come from `figures`/<notebook>.png, the table of claims from `figures`/claims.csv.
    """
    paths = sorted(report.glob("*.ipynb"))
    if not paths:
        raise ReportError(f"{report}: no executed notebooks")
    notebooks = [read(path) for path in paths]
    pages = [page(n, p.stem, figures) for n, p in zip(notebooks, paths, strict=True)]
    exporter = html_exporter()
    for index, (notebook, path) in enumerate(zip(notebooks, paths, strict=True)):
        html, _ = exporter.from_notebook_node(notebook, {"page": place(pages, index)})
        write(path.with_suffix(".html"), html)
    contents = exporter.environment.get_template("contents.html.j2")
    about = {"pages": pages, "claims": claims(figures), "headline": headline(pages, figures)}
    write(report / "index.html", contents.render(**about) + "\n")
    refuse_large(report)
    return report / "index.html"


def html_exporter() -> HTMLExporter:
    """nbconvert with this package's template: code folded, no prompts, no scripts."""
    settings = {
        "NbConvertBase": {"display_data_priority": [*SHOWN_TYPES, "text/plain"]},
        "CSSHTMLHeaderPreprocessor": {"style": "friendly"},
        "HTMLExporter": {"exclude_anchor_links": True},
        "TemplateExporter": {"exclude_input_prompt": True, "exclude_output_prompt": True},
    }
    return HTMLExporter(
        config=Config(settings),
        template_name="kvlib",
        extra_template_basedirs=[str(TEMPLATES)],
    )


def place(pages: Sequence[Page], index: int) -> dict[str, Any]:
    """What a page's template shows around its notebook: title and neighbours."""
    return {
        "title": pages[index].title,
        "previous": pages[index - 1] if index else None,
        "next": pages[index + 1] if index + 1 < len(pages) else None,
    }


def page(notebook: NotebookNode, name: str, figures: Path) -> Page:
    """Reads title and question from the notebook's prose, the thumbnail from `figures`."""
    prose = "\n\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    plain = re.sub(r"[*`]|\[(.*?)\]\(.*?\)", r"\1", prose)
    heading = re.search(r"^#+ +(.+)$", plain, re.MULTILINE)
    paragraph = re.search(r"^(?!#)\S.*(\n.+)*", plain, re.MULTILINE)
    text = " ".join(paragraph[0].split()) if paragraph else ""
    sentence = re.match(r".*?[.?!](?=\s|$)", text)
    return Page(
        name=name,
        title=heading[1].strip() if heading else name,
        question=sentence[0] if sentence else text,
        thumbnail=thumbnail(figures / f"{name}.png"),
    )


def headline(pages: Sequence[Page], figures: Path) -> dict[str, Any] | None:
    """The page and the figure that the index opens with; None where it has not been made."""
    found = [page for page in pages if page.name == HEADLINE]
    image = thumbnail(figures / f"{HEADLINE}.png", HEADLINE_SIZE, colours=256)
    return {"page": found[0], "image": image} if found and image else None


def thumbnail(
    figure: Path, size: tuple[int, int] = THUMBNAIL_SIZE, colours: int = 64
) -> str | None:
    """The figure made as small as `size`, as a data URI; None where there is no figure."""
    if not figure.is_file():
        return None
    with Image.open(figure) as image:
        small = image.convert("RGB")
    small.thumbnail(size)
    buffer = io.BytesIO()
    small.quantize(colours).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def claims(figures: Path) -> list[dict[str, str]]:
    """The rows of `figures`/claims.csv; none where it has not been written yet."""
    path = figures / "claims.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def refuse_large(report: Path) -> None:
    """Raises ReportError where the folder has outgrown what a repository should carry."""
    sizes = {path: path.stat().st_size for path in report.iterdir() if path.is_file()}
    if sum(sizes.values()) > SIZE_LIMIT:
        largest = max(sizes, key=lambda path: sizes[path])
        raise ReportError(f"{report} is over {SIZE_LIMIT >> 20} MiB; the largest is {largest.name}")


def read(path: Path) -> NotebookNode:
    """Reads a notebook; raises ReportError where there is none."""
    try:
        notebook: NotebookNode = nbformat.read(path, as_version=4)
    except (OSError, NotJSONError) as error:
        raise ReportError(f"{path}: not a readable notebook") from error
    return notebook


def write(path: Path, text: str) -> None:
    """Writes whole files only: beside `path` first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def unstripped(notebook: Path) -> bool:
    """Whether a code cell holds outputs or an execution count."""
    cells = read(notebook).cells
    return any(c.cell_type == "code" and (c.outputs or c.execution_count) for c in cells)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line: run, render or check."""
    parser = argparse.ArgumentParser(prog="python -m kvlib.report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="execute one notebook")
    run.add_argument("notebook", type=Path)
    run.add_argument("--report", type=Path, required=True, help="folder of executed notebooks")
    run.add_argument("--out", help="folder in which the notebook writes figures/")
    run.add_argument("--profile")
    run.add_argument("--model")
    run.add_argument("--device")
    run.add_argument("--rows", choices=["stored", "measure"])
    pages = commands.add_parser("render", help="write the HTML pages and their index")
    pages.add_argument("--report", type=Path, required=True)
    pages.add_argument("--figures", type=Path, required=True)
    check = commands.add_parser("check", help="fail on notebooks that hold outputs")
    check.add_argument("notebooks", type=Path, nargs="*")
    return parser.parse_args(arguments)


def run_notebook(notebook: Path, report: Path, parameters: Mapping[str, Any]) -> None:
    """Executes one notebook and says how long it took, or which cell failed and how."""
    start = time.monotonic()
    print(f"{notebook}: running", flush=True)
    try:
        execute(notebook, report, parameters)
    except PapermillExecutionError as error:
        print(error, file=sys.stderr)
        where = f"{notebook}: cell {error.cell_index}"
        raise ReportError(f"{where}: {error.ename}: {error.evalue}") from error
    print(f"{notebook}: {time.monotonic() - start:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = parse(arguments)
    try:
        if options.command == "run":
            names = ("profile", "model", "device", "rows", "out")
            settings = {name: getattr(options, name) for name in names}
            run_notebook(options.notebook, options.report, settings)
        elif options.command == "render":
            print(render(options.report, options.figures))
        elif dirty := [str(path) for path in options.notebooks if unstripped(path)]:
            raise ReportError(f"outputs or execution counts in {', '.join(dirty)}")
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
