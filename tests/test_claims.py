"""Verdicts on synthetic rows, and the reading of claims.toml."""

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlib import claims

HEAD = """
[[claim]]
id = "X1"
text = "a beats b"
value = "half"
source = ["S"]
checked_against_paper = false
figures = ["01_x"]
combine = "all"
"""
RATIO = """
[[claim.rule]]
name = "a ÷ b"
kind = "ratio"
of = { metric = "size", strategy = "a", tokens = "largest common" }
against = { metric = "size", strategy = "b", tokens = "largest common" }
side = "<"
bound = 1
"""
DIFFERENCE = RATIO.replace('"ratio"', '"difference"').replace("bound = 1", "bound = 0")
VALUE = """
[[claim.rule]]
name = "a alone"
kind = "value"
of = { metric = "size", strategy = "a" }
side = "<"
bound = 2
"""
EQUAL = RATIO.replace('"ratio"', '"equivalence"').partition("side")[0] + "factor = 1.25\n"
STATUS = """
[[claim.rule]]
name = "a fails first"
kind = "status"
of = { strategy = "a" }
of_status = "oom"
against = { strategy = "b" }
against_status = "ok"
"""
MAGNITUDE = """
claimed = 0.5
[claim.rule.magnitude]
factor = 1.25
machine = ["H100"]
parameters = 8e9
"""
BINARY = DIFFERENCE.replace('"size"', '"correct"') + 'interval = "binary"\n'


def read(folder: Path, *rules: str, head: str = HEAD) -> list[claims.Claim]:
    path = folder / "claims.toml"
    path.write_text(head + "".join(rules), encoding="utf-8")
    return claims.load(path)


def rows(strategy: str, values: Sequence[float], **columns: Any) -> pd.DataFrame:
    """One row a value, a repeat each."""
    plain = {"metric": "size", "unit": "B", "source": "measured", "status": "ok", "figure": "01_x"}
    plain |= {"strategy": strategy, "tokens": 8, "model": "m", "machine": "cpu", **columns}
    return pd.DataFrame([plain | {"value": v, "repeat": n} for n, v in enumerate(values)])


def judged(found: list[claims.Claim], *frames: pd.DataFrame) -> dict[str, str]:
    frame = claims.judge(pd.concat(frames, ignore_index=True), found)
    assert list(frame.columns) == claims.COLUMNS
    (verdict,) = frame.to_dict("records")
    return {str(name): text for name, text in verdict.items()}


B = rows("b", [2.0, 2.1, 1.9, 2.0, 2.0])


@pytest.mark.parametrize(
    ("rule", "values", "direction"),
    [
        (RATIO, [1.0, 1.1, 1.0, 0.9, 1.0], "holds"),
        (RATIO, [4.0, 4.1, 4.0, 3.9, 4.0], "does not hold"),
        (RATIO, [1.0, 3.1, 2.0, 2.9, 1.5], "undecided"),
        (DIFFERENCE, [1.0, 1.1, 1.0, 0.9, 1.0], "holds"),
        (DIFFERENCE, [4.0, 4.1, 4.0, 3.9, 4.0], "does not hold"),
        (DIFFERENCE, [1.0, 3.1, 2.0, 2.9, 1.5], "undecided"),
        (VALUE, [1.0, 1.1, 1.0, 0.9, 1.0], "holds"),
        (VALUE, [4.0, 4.1, 4.0, 3.9, 4.0], "does not hold"),
        (VALUE, [1.0, 3.1, 2.0, 2.9, 1.5], "undecided"),
        (EQUAL, [2.0, 2.2, 1.9, 2.1, 2.0], "holds"),
        (EQUAL, [4.0, 4.1, 4.0, 3.9, 4.0], "does not hold"),
        (EQUAL, [2.4, 2.7, 2.3, 2.6, 2.4], "undecided"),
    ],
)
def test_each_kind_flips(tmp_path: Path, rule: str, values: list[float], direction: str) -> None:
    assert judged(read(tmp_path, rule), rows("a", values), B)["direction"] == direction


@pytest.mark.parametrize("rule", [RATIO, DIFFERENCE, VALUE, EQUAL, STATUS])
def test_no_rows_is_not_yet_measured(tmp_path: Path, rule: str) -> None:
    found = read(tmp_path, rule)
    assert judged(found, B)["direction"] == "not yet measured"
    (verdict,) = claims.judge(pd.DataFrame(), found)["verdict"]
    assert verdict == "not yet measured"
    elsewhere = rows("a", [1.0, 1.1, 1.0], figure="02_y")
    assert judged(found, elsewhere, B)["direction"] == "not yet measured"


@pytest.mark.parametrize(
    ("a", "b", "direction"),
    [
        (["ok", "oom"], ["ok", "ok"], "holds"),
        (["ok", "oom"], ["ok", "oom"], "does not hold"),
        (["ok", "ok"], ["ok", "oom"], "does not hold"),
        (["ok", "ok"], ["ok", "ok"], "undecided"),
        (["ok", "oom"], ["ok", "refused"], "undecided"),
        (["ok", "timeout"], ["ok", "ok"], "undecided"),
    ],
)
def test_status(tmp_path: Path, a: list[str], b: list[str], direction: str) -> None:
    frames = [
        rows(name, [math.nan], status=status, tokens=tokens)
        for name, found in (("a", a), ("b", b))
        for tokens, status in enumerate(found)
    ]
    found = judged(read(tmp_path, STATUS), *frames)
    assert found["direction"] == direction
    assert "oom against ok at" in found["reason"]


def test_status_compares_the_same_point_only(tmp_path: Path) -> None:
    a, b = rows("a", [math.nan], status="oom", tokens=9), rows("b", [1.0], tokens=8)
    assert judged(read(tmp_path, STATUS), a, b)["direction"] == "undecided"


def test_status_needs_no_repeat_of_a_failure(tmp_path: Path) -> None:
    a, b = rows("a", [math.nan], status="oom"), rows("b", [1.0, 1.0]).iloc[1:]
    assert judged(read(tmp_path, STATUS), a, b)["direction"] == "holds"


def test_modelled_rows_are_shown_but_never_judged(tmp_path: Path) -> None:
    modelled = [rows(name, [v], source="modelled") for name, v in (("a", 1.0), ("b", 4.0))]
    found = judged(read(tmp_path, RATIO), *modelled)
    assert (found["direction"], found["measured"]) == ("not yet measured", "")
    assert found["projected"] == "a ÷ b: m on cpu: 0.25×"
    against = judged(read(tmp_path, RATIO), *modelled, rows("a", [4.0] * 3), rows("b", [2.0] * 3))
    assert against["direction"] == "does not hold"
    half = judged(read(tmp_path, RATIO), modelled[0], rows("b", [2.0] * 3))
    assert half["direction"] == "not yet measured"


def test_emulated_rows_count_only_where_the_rule_says_so(tmp_path: Path) -> None:
    a = rows("a", [1.0, 1.0, 1.0], source="emulated")
    assert judged(read(tmp_path, RATIO), a, B)["direction"] == "not yet measured"
    assert judged(read(tmp_path, RATIO + "emulated = true"), a, B)["direction"] == "holds"


@pytest.mark.parametrize("column", [{"status": "noisy"}, {"excluded": "2 kept tokens"}])
def test_noisy_and_excluded_rows_stay_out(tmp_path: Path, column: dict[str, str]) -> None:
    a = rows("a", [1.0, 1.0, 1.0])
    bad = rows("a", [50.0, 50.0, 50.0], **column)
    bad["repeat"] += 3
    found = judged(read(tmp_path, RATIO), a, bad, rows("b", [2.0] * 6))
    assert found["direction"] == "holds"
    assert found["measured"].endswith("n=3")
    assert judged(read(tmp_path, RATIO), bad, B)["direction"] == "not yet measured"


def test_largest_common_is_the_longest_that_both_have(tmp_path: Path) -> None:
    a = [rows("a", [v] * 3, tokens=t) for t, v in ((1, 9.0), (2, 1.0))]
    b = [rows("b", [2.0] * 3, tokens=t) for t in (1, 2, 4)]
    found = judged(read(tmp_path, RATIO), *a, *b)
    assert found["measured"] == "a ÷ b: 0.5× [0.5, 0.5], n=3"


def test_exact_results_need_no_repeats_but_times_do(tmp_path: Path) -> None:
    def measure(unit: str, repeats: int) -> dict[str, str]:
        a, b = (rows(n, [v] * repeats, unit=unit) for n, v in (("a", 1.0), ("b", 2.0)))
        return judged(read(tmp_path, RATIO), a, b)

    assert measure("B", 1)["direction"] == "holds"
    for unit in ("s", "tokens/s", "tokens/s/GB"):
        assert measure(unit, 2)["direction"] == "undecided"
        assert "too few repeats (2)" in measure(unit, 2)["reason"]
        assert measure(unit, 3)["direction"] == "holds"


def test_points_of_one_repeat_are_not_taken_for_repeats(tmp_path: Path) -> None:
    rule = RATIO.replace(', tokens = "largest common"', "")
    frames = [rows(n, [1.0], unit="s", tokens=t) for n in "ab" for t in range(9)]
    assert "too few repeats (1)" in judged(read(tmp_path, rule), *frames)["reason"]


def test_on_the_bound_a_strict_claim_fails(tmp_path: Path) -> None:
    equal = [rows(name, [2.0] * 3) for name in "ab"]
    assert judged(read(tmp_path, RATIO), *equal)["direction"] == "does not hold"


def test_a_test_too_coarse_for_the_claim_is_undecided(tmp_path: Path) -> None:
    values = [0.1, 0.3, 0.12]  # wholly below 1, but the interval spans a factor above 2 each way
    fine, coarse = read(tmp_path, RATIO), RATIO + "claimed = 0.5\n"
    b = rows("b", [1.0] * 3)
    assert judged(fine, rows("a", values), b)["direction"] == "holds"
    found = judged(read(tmp_path, coarse), rows("a", values), b)
    assert found["direction"] == "undecided"
    assert "above the size claimed" in found["reason"]
    assert "smallest effect to be seen ×" in found["reason"]


def test_holm_widens_the_intervals_of_a_claim(tmp_path: Path) -> None:
    a, b = rows("a", [0.65, 0.8, 0.9, 0.9, 0.9]), rows("b", [1.0] * 5)  # p = 0.04
    alone = judged(read(tmp_path, RATIO), a, b)
    assert (alone["direction"], "at 95 %" in alone["reason"]) == ("holds", True)
    head = HEAD.replace('"all"', '"any"')
    found = read(tmp_path, RATIO, RATIO.replace('"size"', '"other"'), head=head)
    noise = [rows("a", [1.0, 1.3, 0.8, 1.1, 0.9], metric="other"), b.assign(metric="other")]
    both = judged(found, a, b, *noise)
    assert (both["direction"], both["reason"].count("at 97.5 %")) == ("undecided", 2)


def test_results_without_spread_take_no_share_of_the_error(tmp_path: Path) -> None:
    exact = VALUE.replace('"size"', '"exact"')
    a = rows("a", [1.0, 1.1, 1.0, 0.9])
    found = judged(read(tmp_path, RATIO, exact), a, B, rows("a", [1.0] * 4, metric="exact"))
    assert "97.5" not in found["reason"]
    assert found["direction"] == "holds"


def test_a_rule_with_too_few_repeats_takes_no_share_of_the_error(tmp_path: Path) -> None:
    found = read(tmp_path, RATIO, RATIO.replace('"size"', '"ttft"'))
    timed = [rows(n, v, metric="ttft", unit="s") for n, v in (("a", [1.0, 1.1]), ("b", [2, 2.0]))]
    reason = judged(found, rows("a", [1.0, 1.1, 1.0, 0.9]), B, *timed)["reason"]
    assert "holds, smallest effect to be seen" in reason
    assert "at 95 %" in reason
    assert "too few repeats (2)" in reason


@pytest.mark.parametrize(
    ("combine", "first", "second", "direction"),
    [
        ("all", 1.0, 1.0, "holds"),
        ("all", 1.0, 3.0, "does not hold"),
        ("all", 1.0, None, "undecided"),
        ("all", 3.0, None, "does not hold"),
        ("any", 1.0, 3.0, "holds"),
        ("any", 3.0, 3.0, "does not hold"),
        ("any", 3.0, None, "undecided"),
        ("any", 1.0, None, "holds"),
    ],
)
def test_parts_combine(
    tmp_path: Path, combine: str, first: float, second: float | None, direction: str
) -> None:
    head = HEAD.replace('"all"', f'"{combine}"')
    found = read(tmp_path, VALUE, VALUE.replace('"size"', '"other"'), head=head)
    other = [] if second is None else [rows("a", [second], metric="other")]
    assert judged(found, rows("a", [first]), *other)["direction"] == direction


def test_settings_are_judged_apart_and_must_agree(tmp_path: Path) -> None:
    def both(second: float) -> dict[str, str]:
        frames = [rows("a", [1.0] * 3), rows("b", [2.0] * 3)]
        frames += [rows(n, [v] * 3, model="n") for n, v in (("a", second), ("b", 2.0))]
        return judged(read(tmp_path, RATIO), *frames)

    assert both(0.5)["direction"] == "holds"
    assert both(0.5)["measured"].count("n=3") == 2
    assert both(4.0)["direction"] == "undecided"
    assert "(n on cpu): does not hold" in both(4.0)["reason"]


def test_rows_that_match_twice_or_differ_in_unit_are_undecided(tmp_path: Path) -> None:
    found = read(tmp_path, RATIO)
    a = rows("a", [1.0] * 3)
    assert "several rows" in judged(found, a, a, B)["reason"]
    found_unit = judged(found, a.assign(unit="GB"), B)
    assert (found_unit["direction"], "units differ" in found_unit["reason"]) == ("undecided", True)
    zero = judged(found, rows("a", [0.0] * 3), B)
    assert "above zero" in zero["reason"]


def test_what_the_selectors_tell_apart_is_not_paired(tmp_path: Path) -> None:
    rule = RATIO.replace('strategy = "a"', 'strategy = "a", budget = 0.3')
    a = [rows("a", [v] * 3, budget=budget) for budget, v in ((0.3, 1.0), (0.5, 9.0))]
    assert judged(read(tmp_path, rule), *a, B)["direction"] == "holds"


# ---------------------------------------------------------------- questions


def answers(strategy: str, correct: Sequence[int], **columns: Any) -> pd.DataFrame:
    frame = rows(strategy, list(correct), metric="correct", unit="0/1", **columns)
    return frame.assign(item=frame["repeat"], repeat=0)


def test_paired_answers(tmp_path: Path) -> None:
    found, b = read(tmp_path, BINARY), answers("b", [1] * 100)
    worse = judged(found, answers("a", [0] * 20 + [1] * 80), b)
    assert worse["direction"] == "holds"
    assert worse["measured"].startswith("a ÷ b: -20 points [-2")
    assert judged(found, answers("a", [0] + [1] * 99), b)["direction"] == "undecided"
    better = judged(found, b.assign(strategy="a"), answers("b", [0] * 20 + [1] * 80))
    assert better["direction"] == "does not hold"


def test_equal_answers_are_near_only_if_there_are_enough_of_them(tmp_path: Path) -> None:
    rule = BINARY.replace('"difference"', '"equivalence"').replace('side = "<"\nbound = 0\n', "")
    found = read(tmp_path, rule + "margin = 0.03\n")
    for n, direction in ((40, "undecided"), (400, "holds")):
        frames = [answers(name, [1, 0] * (n // 2)) for name in "ab"]
        assert judged(found, *frames)["direction"] == direction


def test_a_question_asked_again_is_no_new_question(tmp_path: Path) -> None:
    a, b = answers("a", [0] * 6 + [1] * 14), answers("b", [1] * 20)
    again = [frame.assign(repeat=n) for n in range(1, 5) for frame in (a, b)]
    assert judged(read(tmp_path, BINARY), a, b) == judged(read(tmp_path, BINARY), a, b, *again)


def test_unpaired_changes(tmp_path: Path) -> None:
    rule = DIFFERENCE.replace('strategy = "a", tokens = "largest common"', 'task = "deep"')
    rule = rule.replace('strategy = "b", tokens = "largest common"', 'task = ["x", "y"]')
    found = read(tmp_path, rule.replace('"size"', '"correct"') + 'interval = "welch"\n')
    deep, flat = [-1] * 15 + [0] * 15, [-1, 0, 0, 1, 0] * 8
    others = answers("a", flat, task="x"), answers("a", flat, task="y")
    assert judged(found, answers("a", deep, task="deep"), *others)["direction"] == "holds"
    same = judged(found, answers("a", [0] * 30, task="deep"), *others)
    assert (same["direction"], "spread" in same["reason"]) == ("undecided", True)


# ---------------------------------------------------------------- magnitude


def test_magnitude_only_in_the_papers_class(tmp_path: Path) -> None:
    found = read(tmp_path, RATIO + MAGNITUDE)
    a, b = rows("a", [1.0] * 3), rows("b", [2.0] * 3)
    paper = {"machine": "x86, NVIDIA H100 80GB HBM3", "parameters": 8.03e9}

    def at(**columns: Any) -> dict[str, str]:
        return judged(found, a.assign(**columns), b.assign(**columns))

    for here in ({}, {**paper, "machine": "cpu"}, {**paper, "parameters": 1.3e8}):
        assert at(**here)["magnitude"] == "cannot be tested here"
        assert at(**here)["verdict"] == "holds"
    assert at(**paper)["magnitude"] == "holds"
    assert at(**paper)["verdict"] == "holds in direction and magnitude"
    off = judged(found, a.assign(value=0.2, **paper), b.assign(**paper))
    assert (off["magnitude"], off["verdict"]) == ("does not hold", "holds in direction only")
    assert judged(read(tmp_path, RATIO), a, b)["magnitude"] == "none claimed"


def test_magnitude_takes_no_emulated_rows(tmp_path: Path) -> None:
    found = read(tmp_path, RATIO + "emulated = true" + MAGNITUDE)
    paper = {"machine": "H100", "parameters": 8e9, "source": "emulated"}
    verdict = judged(found, rows("a", [1.0] * 3, **paper), rows("b", [2.0] * 3, **paper))
    assert (verdict["direction"], verdict["magnitude"]) == ("holds", "cannot be tested here")


def test_magnitude_at_its_own_point_and_selectors(tmp_path: Path) -> None:
    text = MAGNITUDE + 'at = { tokens = { from = 90, to = 110 } }\nagainst = { strategy = "c" }\n'
    found = read(tmp_path, RATIO + text)
    paper = {"machine": "H100", "parameters": 8e9}
    frames = [rows("a", [1.0] * 3, **paper), rows("b", [4.0] * 3, **paper)]
    assert judged(found, *frames)["magnitude"] == "not yet measured"
    frames += [rows(n, [v] * 3, tokens=100, **paper) for n, v in (("a", 1.0), ("c", 2.0))]
    held = judged(found, *frames)
    assert held["magnitude"] == "holds"
    assert "a ÷ b, as published: 0.5×" in held["measured"]


def test_the_model_of_the_papers_machine_projects_and_nothing_more(tmp_path: Path) -> None:
    found = read(tmp_path, RATIO + MAGNITUDE)
    target = {"source": "modelled", "target": "H100 SXM", "parameters": 8e9}
    frames = [rows("a", [1.0], **target), rows("b", [2.0], **target)]
    verdict = judged(found, *frames, rows("a", [1.0] * 3), rows("b", [8.0] * 3))
    assert verdict["magnitude"] == "cannot be tested here"
    assert verdict["projected"] == "a ÷ b, as published: m on H100 SXM: 0.5×"
    assert verdict["measured"] == "a ÷ b: 0.125× [0.125, 0.125], n=3"


def test_a_reported_value_may_be_a_magnitude_only(tmp_path: Path) -> None:
    alone = VALUE.partition("side")[0].replace("alone", "as told") + MAGNITUDE
    found = read(tmp_path, VALUE, alone)
    frame = rows("a", [0.5] * 3, machine="H100", parameters=8e9)
    assert judged(found, frame)["verdict"] == "holds in direction and magnitude"
    with pytest.raises(ValueError, match="claim X1: rule: none of them tests a direction"):
        read(tmp_path, alone)


# ---------------------------------------------------------------- properties


@given(
    st.lists(st.floats(0.05, 20), min_size=2, max_size=6),
    st.integers(1, 6),
)
def test_more_of_the_same_ratio_never_turns_a_verdict(ratios: list[float], more: int) -> None:
    (claim,) = [c for c in claims.load() if c.id == "C10"]
    same = math.exp(float(np.mean(np.log(ratios))))

    def direction(values: list[float]) -> str:
        about = {"metric": "e2el", "figure": "04_latency", "batch": 96}
        of = rows("infinigen", values, budget=0.3, **about)
        frame = pd.concat([of, rows("paged", [1.0] * len(values), **about)])
        return str(claims.judge(frame, [claim])["direction"].item())

    before, after = direction(ratios), direction([*ratios, *[same] * more])
    assert {before, after} != {"holds", "does not hold"}
    if before != "undecided" and len(set(ratios)) > 1:
        assert after == before


# ---------------------------------------------------------------- the file, and what is written


def test_all_fifteen_claims_are_there_and_unchecked() -> None:
    found = claims.load()
    assert [claim.id for claim in found] == [f"C{n}" for n in range(1, 16)]
    assert not any(claim.checked_against_paper for claim in found)
    assert {s for claim in found for s in claim.source} == {"T", "S"}
    assert all(len(claim.text) < 160 and claim.text.endswith(".") for claim in found)


def prefill(**peaks: float) -> list[pd.DataFrame]:
    about = {"figure": "01_prefill", "metric": "prefill_peak", "tokens": 1024}
    return [rows("h2o", [v] * 3, prefill=name, **about) for name, v in peaks.items()]


def agreement(name: str, value: float) -> pd.DataFrame:
    about = {"figure": "01_prefill", "metric": "keep_agreement", "unit": "1", "tokens": 1024}
    return rows("h2o", [value] * 3, prefill=name, **about)


@pytest.mark.parametrize(
    ("agreed", "flash", "direction"),
    [
        (1.0, 10.0, "does not hold"),
        (0.999, 10.0, "does not hold"),
        (0.9, 10.0, "holds"),
        (1.0, 200.0, "holds"),
    ],
)
def test_h2o_with_flash(agreed: float, flash: float, direction: str) -> None:
    frame = pd.concat([*prefill(flash=flash, eager=100.0), agreement("flash", agreed)])
    assert claims.judge(frame, only=["C4"])["direction"].item() == direction


@pytest.mark.parametrize(
    ("agreed", "chunked", "direction"),
    [(0.9, 50.0, "holds"), (1.0, 50.0, "does not hold"), (0.9, 150.0, "does not hold")],
)
def test_h2o_when_chunked(agreed: float, chunked: float, direction: str) -> None:
    frame = pd.concat([*prefill(chunked=chunked, eager=100.0), agreement("chunked", agreed)])
    assert claims.judge(frame, only=["C5"])["direction"].item() == direction


def test_eager_runs_out_of_memory_and_flash_saves() -> None:
    failed = rows("full", [math.nan], prefill="eager", figure="01_prefill", tokens=4096)
    failed = failed.assign(metric=None, unit="", status="oom")
    frames = [failed]
    for metric, unit, chunked in (("prefill_peak", "B", 9e8), ("ttft", "s", 3.0)):
        about = {"figure": "01_prefill", "metric": metric, "unit": unit, "tokens": 4096}
        draw = np.random.default_rng(0).normal(1, 0.01, size=(2, 5))
        frames.append(rows("full", (chunked * draw[0]).tolist(), prefill="chunked", **about))
        frames.append(rows("full", (chunked * draw[1] / 5).tolist(), prefill="flash", **about))
    found = claims.judge(pd.concat(frames), only=["C3"]).iloc[0]
    assert (found["direction"], found["magnitude"]) == ("holds", "cannot be tested here")
    calm = claims.judge(pd.concat(frames[1:]), only=["C3"]).iloc[0]
    assert calm["direction"] == "undecided"
    assert "eager out of memory where flash is not: no usable rows" in calm["reason"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "X1"', 'number = "X1"', "claim number 1: id: missing"),
        ('text = "a beats b"', "", "claim X1: text: missing"),
        ('value = "half"', "value = 3", "claim X1: value: 3 is of the wrong type"),
        ("paper = false", "paper = 1", "claim X1: checked_against_paper: 1 is of the wrong type"),
        ('"all"', '"most"', "claim X1: combine: 'most' is not one of all, any"),
        ('["S"]', "[1]", "claim X1: source: an item of it is of the wrong type"),
        ('kind = "ratio"', "", "claim X1: rule 1: kind: missing"),
        ('"ratio"', '"ratoi"', "claim X1: rule 1: kind: 'ratoi' is not one of ratio, difference"),
        ('side = "<"', "", "claim X1: rule 1: side: missing"),
        ("bound = 1", "", "claim X1: rule 1: bound: missing"),
        ("bound = 1", "bound = true", "claim X1: rule 1: bound: True is of the wrong type"),
        ("bound = 1", "bound = 0", "claim X1: rule 1: bound: a ratio is held against"),
        ("bound = 1", "limit = 1", "claim X1: rule 1: limit: unknown here"),
        ("claimed = 0.5", "claimed = 2", "claim X1: rule 1: claimed: 2 lies off the side"),
        ("claimed = 0.5", "", "claim X1: rule 1: magnitude: claimed: missing in the rule"),
        ("factor = 1.25", "", "claim X1: rule 1: magnitude: factor: give a factor above 1"),
        ('machine = ["H100"]', "", "claim X1: rule 1: magnitude: machine: missing"),
        ("[[claim.rule]]", "[claim.rule]", "claim X1: rule: {"),
        ("[[claim]]", "[[claims]]", "claims: unknown here"),
        ('id = "X1"', "id = ", "Invalid value"),
    ],
)
def test_errors_name_claim_and_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = HEAD + RATIO + MAGNITUDE
    assert old in text
    with pytest.raises(ValueError, match=r"^claims\.toml: ") as caught:
        read(tmp_path, text.replace(old, new, 1), head="")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_id_is_given_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="claim X1: id: given twice"):
        read(tmp_path, VALUE, HEAD, VALUE)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("source", "guessed", "unknown source"), ("status", "fine", "unknown status")],
)
def test_strange_rows_are_refused(column: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        claims.judge(B.assign(**{column: value}))
    with pytest.raises(ValueError, match=f"lack the columns {column}"):
        claims.judge(B.drop(columns=column))


def test_a_part_of_the_claims() -> None:
    frame = claims.table(B, ["C3", "C5"])
    assert frame.index.tolist() == ["C3", "C5"]
    assert claims.judge(B, only=["C5"])["id"].tolist() == ["C5"]
    with pytest.raises(ValueError, match="unknown claims: C99"):
        claims.table(B, ["C3", "C99"])


def test_saved_verdicts_are_whole_and_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "figures" / "claims.csv"
    claims.save(claims.judge(B), path)
    first = path.read_bytes()
    claims.save(claims.judge(B.sample(frac=1, random_state=1)), path)
    assert path.read_bytes() == first
    assert first.splitlines()[0].decode() == ",".join(claims.COLUMNS)
    assert [p.name for p in path.parent.iterdir()] == ["claims.csv"]


def test_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    found, frame = read(tmp_path, RATIO), pd.concat([rows("a", [1.0, 1.1, 0.9]), B])
    expected = claims.judge(frame, found)
    pd.testing.assert_frame_equal(claims.judge(frame.iloc[::-1], found), expected)


def test_claims_know_nothing_of_torch() -> None:
    code = "import sys, kvlib.claims; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
