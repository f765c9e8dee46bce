"""The sweep of notebooks 02 to 04: one plan for all three, factors, and what its figures say."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import pytest

mpl.use("Agg")
import matplotlib.pyplot as plt

from kvlib import serving_figures, study

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = ("02_memory", "03_throughput", "04_latency")
SIZES: dict[str, Any] = {"requests": 24, "tokens": 128, "output_tokens": 32}
PLAN = SIZES | {"batches": [16, 96], "rates": [1], "seed": 0, "machine": "h100-sxm"}


def frame(*records: dict[str, Any]) -> pd.DataFrame:
    """Rows of a sweep; whatever is not given is the same for all."""
    always = {"metric": "e2el", "unit": "s", "source": "measured", "status": "ok", "batch": 96}
    always |= {"rate": None, "repeat": 0, "model": "smollm2", "dtype": "float32", "machine": "here"}
    always |= SIZES
    rows = [always | {"key": str(n)} | record for n, record in enumerate(records)]
    made = pd.DataFrame(rows).astype({"rate": float, "value": float})
    made.attrs = {"parameters": ["strategy", "batch", "rate"], "target": "h100-sxm", "absent": None}
    return made


def times(**by_strategy: float) -> pd.DataFrame:
    return frame(*({"strategy": s, "value": value} for s, value in by_strategy.items()))


# -- one plan ----------------------------------------------------------------------------------


def test_the_three_notebooks_ask_for_the_same_sweep() -> None:
    cells = [json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"] for name in NAMES]
    asked = ["".join(notebook[2]["source"]) for notebook in cells]
    calls = ["".join(notebook[3]["source"]).partition("frame = ")[2] for notebook in cells]
    assert calls[0]
    assert asked == [asked[0]] * 3
    assert calls == [calls[0]] * 3


def plan(monkeypatch: pytest.MonkeyPatch, reason: str | None, profile: str, rows: str) -> Any:
    """The points that `swept` asks for, and the attributes of its frame."""
    seen: list[dict[str, Any]] = []

    def run(_name: str, points: Any, *_: Any, **__: Any) -> pd.DataFrame:
        seen.extend(points)
        return pd.DataFrame(seen)

    monkeypatch.setattr(study, "run", run)
    monkeypatch.setattr(serving_figures, "installed", lambda: reason)
    monkeypatch.setattr(serving_figures.serving, "serve_seconds", float, raising=False)
    given: dict[str, Any] = {"strategies": ["vllm", "paged"], "repeats": None, "model": None}
    found = serving_figures.swept(
        "02_memory", profile, folder="x", rows=rows, device=None, **given, **PLAN
    )
    return seen, found.attrs


def test_without_vllm_the_study_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    points, attrs = plan(monkeypatch, "no vLLM here", "laptop", "measure")
    assert {p["strategy"] for p in points} == {"paged"}
    assert attrs["absent"] == "no vLLM here"
    points, attrs = plan(monkeypatch, "no vLLM here", "laptop", "stored")
    assert {p["strategy"] for p in points} == {"vllm", "paged"}
    assert attrs["absent"] is None


def test_a_smoke_run_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    points, _ = plan(monkeypatch, None, "smoke", "measure")
    assert {p["batch"] for p in points} == {2, 4, None}
    assert {p["repeat"] for p in points} == {0}
    assert {p["dtype"] for p in points} == {"float32"}


# -- factors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("higher", "values"), [(False, (2, 3, 12)), (True, (6, 4, 1))])
def test_engine_and_strategy_factor_multiply_to_the_whole(
    higher: bool, values: tuple[float, float, float]
) -> None:
    rows = times(**dict(zip(("vllm", "paged", "infinigen"), values, strict=True)))
    table = serving_figures.factors(rows, "e2el", higher).iloc[:, 1:4]
    assert table.loc["infinigen"].tolist() == pytest.approx([6, 1.5, 4])
    assert table.loc["paged"].tolist() == pytest.approx([1.5, 1.5, 1])
    assert table.loc["vllm"].tolist() == [1, 1, 1]


def test_factors_without_vllm_or_where_a_strategy_failed() -> None:
    rows = frame(
        {"strategy": "paged", "value": 3},
        {"strategy": "h2o", "value": 6},
        {"strategy": "full", "value": None, "metric": None, "status": "oom"},
    )
    table = serving_figures.factors(rows, "e2el", False).iloc[:, 1:4]
    assert table.loc["h2o"].isna().tolist() == [True, True, False]
    assert table.loc["h2o"].iloc[2] == 2
    assert table.loc["full"].isna().all()


# -- drawing -----------------------------------------------------------------------------------


def test_panel_draws_what_is_there() -> None:
    rows = frame(
        {"strategy": "paged", "value": 1, "batch": 16},
        {"strategy": "paged", "value": 3, "batch": 96, "status": "noisy"},
        {"strategy": "infinigen", "value": 9, "source": "emulated"},
        {"strategy": "full", "value": None, "metric": None, "status": "oom"},
    )
    fig, axes = plt.subplots(2)
    serving_figures.panel(axes[0], rows, "e2el", tail="e2el_p99")
    serving_figures.panel(axes[1], rows, "goodput", "rate")
    serving_figures.legend(fig)
    shown = [text.get_text() for text in fig.legends[0].get_texts()]
    plt.close(fig)
    assert shown == ["paged", "infinigen (emulated link)"]


def test_small_print_tells_of_emulation_sampling_and_exclusion() -> None:
    rows = frame(
        {"strategy": "infinigen", "value": 1500, "metric": "target_tokens", "source": "modelled"},
        {"strategy": "infinigen", "value": 15, "metric": "generated"},
        {"strategy": "infinigen", "value": 9, "source": "emulated", "excluded": "rho3 differs"},
    )
    rows.attrs["absent"] = "not here"
    text = serving_figures.told(rows)
    for words in ("PCI Express 5", "1,500 tokens", "first 15 tokens", "ρ3 differs", "not here"):
        assert words in text
    assert "Modelled" not in text
    assert "Emulated link" not in serving_figures.told(times(paged=1))
