"""The explorer and the viewer: what they show is what the formulas and the caches say."""

from __future__ import annotations

import re

import matplotlib.pyplot as plt
import numpy as np
import pytest

from kvlib import explorer, measure, viewer
from kvlib.costs import STRATEGIES, memory, step_time
from kvlib.explorer import Choice
from kvlib.models import Loaded


def test_bars_add_up_to_the_cost_model() -> None:
    choice = Choice(context=4096, concurrency=8)
    for case, bar in zip(choice.cases(), explorer.memory_bars(choice), strict=True):
        assert sum(bar.parts) == pytest.approx(float(memory(case, 4096, 8).peak))
    for case, bar in zip(choice.cases(), explorer.time_bars(choice), strict=True):
        assert sum(bar.parts) == pytest.approx(float(step_time(case, 4096, 8).total), rel=1e-6)


def test_every_strategy_has_two_bars_and_what_does_not_fit_says_so() -> None:
    html = explorer.html(Choice(concurrency=256, context=16384))
    for strategy in STRATEGIES:
        assert html.count(f">{strategy}</td>") == 2
    assert "does not fit" in html
    assert "does not fit" not in explorer.html(Choice(concurrency=1, context=512))


def test_any_choice_has_its_place_on_the_sliders() -> None:
    odd = Choice("OPT-125m", "H100-SXM", 10_000, 24, 0.22, 7e9, gpus=3)
    box = explorer.show(odd)
    values = {child.description: child.value for child in box.children[:-1]}
    assert (values["context"], values["concurrency"], values["GPUs"]) == (10_000, 24, 3)
    assert (values["link"], values["machine"]) == (7e9, "h100-sxm")
    assert "opt-125m has 2,048 positions" in box.children[-1].value
    with pytest.raises(ValueError, match="no machine is called"):
        explorer.show(Choice(machine="h1000"))


def test_what_the_host_cannot_hold_does_not_fit() -> None:
    (bar,) = [
        b for b in explorer.memory_bars(Choice(context=131_072, concurrency=256))
        if b.strategy == "offload"
    ]  # fmt: skip
    assert "on the host, does not fit" in bar.note


def test_moving_a_slider_changes_the_bars() -> None:
    box = explorer.show()
    controls = {child.description: child for child in box.children[:-1]}
    view = box.children[-1]
    for name, value in {
        "context": 65536, "concurrency": 2, "budget": 0.5, "link": 450e9, "machine": "gh200",
        "model": "qwen3-8b", "GPUs": 2,
    }.items():  # fmt: skip
        before = view.value
        controls[name].value = value
        assert view.value != before, name


def test_the_picture_and_its_rows_show_every_strategy() -> None:
    figure = plt.figure()
    explorer.picture(figure, Choice())
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == list(STRATEGIES)
    rows = explorer.rows(Choice())
    assert set(rows["strategy"]) == set(STRATEGIES)
    assert set(rows["source"]) == {"modelled"}
    plt.close(figure)


@pytest.fixture(scope="module")
def shown(smollm2: Loaded) -> viewer.Record:
    ids = measure.question(smollm2.tokenizer)
    return viewer.record(smollm2, "h2o", ids, 0.3, 3)


def test_a_record_holds_what_the_cache_keeps(shown: viewer.Record, smollm2: Loaded) -> None:
    steps, layers, heads, tokens = shown.states.shape
    assert (steps, layers, heads, tokens) == (4, 30, 3, len(shown.words))
    prompt = measure.question(smollm2.tokenizer).shape[1]
    for step in range(steps):
        seen = prompt + step
        kept = (shown.states[step] == 1).sum(axis=-1)
        assert (kept == np.ceil(0.3 * seen - 1e-9)).all()
        assert (shown.states[step, :, :, seen:] == -1).all()
    gone = (shown.states[0] == 0) & (shown.states[-1] == 1)
    assert not gone.any()  # what was evicted never comes back


def test_the_text_is_coloured_by_state(shown: viewer.Record) -> None:
    html = viewer.html(shown, 3, 1, 2)
    kept = int((shown.states[2, 3, 1] == 1).sum())
    assert len(re.findall('title="kept or fetched"', html)) == kept
    assert f"layer 3, head 1, step 2: {kept} of" in html


def test_the_viewers_sliders_change_the_text(shown: viewer.Record) -> None:
    box = viewer.show({"h2o": shown})
    view = box.children[-1]
    for control in box.children[1:-1]:
        before = view.value
        control.value = control.max if control.value != control.max else control.min
        assert view.value != before, control.description


def test_infinigen_leaves_tokens_on_the_host(smollm2: Loaded) -> None:
    ids = measure.question(smollm2.tokenizer)
    found = viewer.record(smollm2, "infinigen", ids, 0.3, 2)
    assert {0.5, 1.0} <= set(np.unique(found.states[-1]).tolist())
    assert (found.states[-1, :2] == 1).all()  # the first two layers are fetched whole
