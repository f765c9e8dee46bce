"""In a real browser: JupyterLab runs 00 and the explorer, whose sliders work; the report opens."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).resolve().parents[1]
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
QUIET += ("--disable-component-update", "--no-first-run")
PATIENCE = 180_000  # milliseconds that a busy machine may take to run a notebook

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
if not BROWSER:
    pytest.skip("needs Chromium, such as Debian's package", allow_module_level=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab over copies of two notebooks, which write beside themselves."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("00_strategies", "13_explorer"):
        text = (HOME / "notebooks" / f"{name}.ipynb").read_text("utf-8")
        assert text.count('"out = None') == 1
        (folder / f"{name}.ipynb").write_text(
            text.replace('"out = None', f'"out = {str(folder)!r}'), encoding="utf-8"
        )
    own = folder / ".settings" / "@jupyterlab" / "notebook-extension"
    own.mkdir(parents=True)  # cells out of sight stay on the page
    (own / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    (folder / "figures").mkdir()
    shutil.copytree(HOME / "figures" / "data", folder / "figures" / "data")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--ip=127.0.0.1", "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"]
    command += ["--LabApp.news_url=", "--LabApp.check_for_updates_class="
                "jupyterlab.NeverCheckForUpdate"]  # fmt: skip
    settings = {"JUPYTER_CONFIG_DIR": str(folder / ".config"), "HOME": str(folder)}
    settings["JUPYTERLAB_SETTINGS_DIR"] = str(folder / ".settings")
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=_environment(settings))
        try:
            _wait_for(f"http://127.0.0.1:{port}/api", server, folder / "log")
            yield f"http://127.0.0.1:{port}/lab/workspaces"
        finally:
            server.terminate()
            server.wait(20)


def _environment(changes: dict[str, str]) -> dict[str, str]:
    import os

    kept = {"XDG_CACHE_HOME": str(Path.home() / ".cache"), "PYTHONPATH": str(HOME)}
    return {**os.environ, **kept, **changes}


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(120):
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(address, timeout=2).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(log.read_text()[-2000:])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=BROWSER, args=list(QUIET))
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[tuple[Any, list[str]]]:
    """A page, and what went wrong on it so far."""
    opened, errors = browser.new_page(viewport={"width": 1400, "height": 1000}), list[str]()
    opened.set_default_timeout(PATIENCE)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    opened.on("requestfailed", lambda request: errors.append(f"failed: {request.url}"))
    yield opened, errors
    opened.close()


def run_all(page: Any, address: str) -> None:
    """Open a notebook in JupyterLab, run all its cells, and wait until the last one has run."""
    page.goto(address)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.locator(".jp-StatusBar-Widget", has_text="| Idle").first.wait_for()  # its kernel is there
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).first.click()
    page.wait_for_selector(".widget-html-content", state="attached")


def moved(page: Any, label: str, read: Callable[[], str]) -> tuple[str, str]:
    """What `read` gives before and after the slider of that label is moved by a key."""
    before = read()
    row = page.locator(".widget-hslider, .widget-slider", has_text=label).first
    row.scroll_into_view_if_needed()
    row.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    for _ in range(100):
        if read() != before:
            break
        page.wait_for_timeout(50)
    return before, read()


@pytest.mark.parametrize(
    ("notebook", "labels"),
    [("13_explorer", ["context", "concurrency", "budget"]), ("00_strategies", ["layer", "head"])],
)
def test_sliders_move_what_is_shown(
    lab: str, page: tuple[Any, list[str]], notebook: str, labels: list[str]
) -> None:
    opened, errors = page
    run_all(opened, f"{lab}/{notebook}/tree/{notebook}.ipynb")  # nothing else is open there

    def shown() -> str:
        return str(opened.locator(".widget-html-content").first.inner_html())

    for label in labels:
        before, after = moved(opened, label, shown)
        assert before != after, label
    failed = opened.locator("[data-mime-type='application/vnd.jupyter.error']")
    assert failed.count() == 0
    assert not errors


def test_the_report_opens_from_a_file_and_every_link_leads_somewhere(
    page: tuple[Any, list[str]],
) -> None:
    opened, errors = page
    index = (HOME / "report" / "index.html").as_uri()
    opened.goto(index)
    links = opened.eval_on_selector_all("a[href]", "all => all.map(a => a.href)")
    local = sorted({link.partition("#")[0] for link in links if link.startswith("file:")})
    assert len(local) >= 10
    for link in local:
        opened.goto(link)
        assert opened.locator("h1").count() >= 1, link
        broken = opened.eval_on_selector_all(
            "img", "all => all.filter(i => !i.naturalWidth).length"
        )
        assert broken == 0, link
        back = opened.eval_on_selector_all("nav a[href]", "all => all.map(a => a.href)")
        assert index in back or link == index
    assert not errors
