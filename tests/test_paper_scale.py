"""The paper's setting: the blind prediction stays as committed, and what closes the gap does."""

from __future__ import annotations

import pytest

from kvlib import paper_scale
from kvlib.paper_scale import PUBLISHED, Figure, miss


@pytest.mark.parametrize(("name", "overlap"), [("overlapped", True), ("serial", False)])
def test_the_blind_prediction_is_what_the_model_says(name: str, overlap: bool) -> None:
    """To 0.1 %: the model has counted a few spare slots more since it was committed."""
    committed = paper_scale.blind()[name]
    assert paper_scale.predict(paper_scale.cases(overlap=overlap)) == pytest.approx(
        committed, rel=1e-3
    )
    assert committed.keys() == {figure.name for figure in PUBLISHED}


def test_what_would_close_the_gap_closes_it() -> None:
    found = paper_scale.explain()
    launches = paper_scale.predict(found["launches"][0])
    assert launches["h2o_ratio"] == pytest.approx(3.0)
    for name in ("slow gather", "waiting"):
        predicted = paper_scale.predict(found[name][0])
        assert predicted["h2o_ratio"] == pytest.approx(3.0)
        assert predicted["infinigen_ratio"] == pytest.approx(17.0)
    explanation = found["launches"][1]
    assert explanation.plausible == (explanation.low <= explanation.value <= explanation.high)


def test_a_miss_is_a_factor_outside_the_reported_range() -> None:
    figure = Figure("x", "x", 10.0, 20.0, "s")
    assert [miss(value, figure) for value in (5.0, 10.0, 15.0, 40.0)] == [0.5, 1.0, 1.0, 2.0]
    assert figure.reported == "10 to 20 s"
    assert Figure("x", "x", 1e5, float("inf"), "tokens").reported == "at least 100,000 tokens"
