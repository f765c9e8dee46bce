"""The recommendation: what brute force over the grid finds, and plain words where nothing fits."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlib import __main__ as command
from kvlib import evidence
from kvlib.advice import NoStrategyError, find_model, recommend
from kvlib.costs import RESERVED, STRATEGIES, Case, memory, prefill_time, step_time
from kvlib.hardware import find_machine
from kvlib.shapes import SHAPES, find_shape

BUDGETS = (0.1, 0.3, 0.5)
EASY = {"model": "llama-3.1-8b", "machine": "h100-sxm", "context": 4096}


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored rows: h2o answers ever worse below 0.5, infinigen hardly, streaming not at all."""
    folder = tmp_path_factory.mktemp("figures")
    lost = {"h2o": {0.1: 40, 0.3: 10, 0.5: 0}, "infinigen": {0.1: 4, 0.3: 2, 0.5: 0}}
    answers = [("full", "", n, 1) for n in range(200)]
    for strategy, by_budget in lost.items():
        for budget, wrong in by_budget.items():
            answers += [(strategy, budget, n, int(n >= wrong)) for n in range(200)]
    with (folder / "06_accuracy.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "metric", "value", "budget", "task", "item", "model"])
        for strategy, budget, item, right in answers:
            writer.writerow([strategy, "correct", right, budget, "copa", item, "smollm2"])
    facts = [("full", 1.0, 1), ("h2o", 0.3, 0), ("infinigen", 0.3, 1)]
    with (folder / "07_retention.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        head = ["strategy", "metric", "value", "budget", "context", "item", "model", "excluded"]
        writer.writerow(head)
        for strategy, budget, right in facts:
            for item in range(60):
                writer.writerow([strategy, "recalled", right, budget, 512, item, "smollm2", ""])
        writer.writerow(["h2o", "recalled", 1, 0.3, 512, 0, "smollm2", "another task"])
    return folder


def brute_force(figures: Path, limits: dict[str, float | None], **asked: Any) -> set[str]:
    """The strategies that meet all limits, by trying every setting."""
    tasks, facts = evidence.accuracy(figures), evidence.recall(figures)
    shape, machine = find_shape(asked["model"]), find_machine(asked["machine"])
    context, rows, output = asked["context"], asked["concurrency"], asked["output"]
    found = set()
    for strategy in STRATEGIES:
        for budget in BUDGETS if strategy in evidence.INEXACT else (1.0,):
            case = Case(shape, machine, strategy, budget)
            held = memory(case, context + output, rows)
            losses = [e.loss(strategy, budget) for e in (tasks, facts)]
            amounts = {
                "ttft": float(prefill_time(case, context)),
                "tpot": float(step_time(case, context + output // 2, rows).total),
                "max_accuracy_loss": losses[0].at_most if losses[0] else float("inf"),
                "max_recall_loss": losses[1].at_most if losses[1] else float("inf"),
            }
            fits = held.peak <= RESERVED * machine.memory and held.host <= machine.host_memory
            if fits and all(limits[n] is None or v <= limits[n] for n, v in amounts.items()):
                found.add(strategy)
    return found


@given(
    model=st.sampled_from(["llama-3.1-8b", "qwen3-8b", "gpt-oss-20b", "llama-3.2-1b"]),
    machine=st.sampled_from(["rtx-4090", "h100-sxm", "gh200"]),
    context=st.sampled_from([512, 8192, 32_000]),
    concurrency=st.sampled_from([1, 16, 64]),
    accuracy=st.sampled_from([None, 1.0, 5.0, 25.0]),
    recall=st.sampled_from([None, 5.0, 100.0]),
    ttft=st.sampled_from([None, 0.05, 1.0]),
    tpot=st.sampled_from([None, 0.005, 0.02, 0.2]),
)
def test_it_agrees_with_brute_force(
    figures: Path, model: str, machine: str, context: int, concurrency: int,
    accuracy: float | None, recall: float | None, ttft: float | None, tpot: float | None,
) -> None:  # fmt: skip
    limits = {"max_accuracy_loss": accuracy, "max_recall_loss": recall, "ttft": ttft, "tpot": tpot}
    asked: dict[str, Any] = {"model": model, "machine": machine, "context": context}
    asked |= {"concurrency": concurrency, "output": 128}
    fitting = brute_force(figures, limits, **asked)
    if not fitting:
        with pytest.raises(NoStrategyError) as error:
            recommend(figures=figures, **asked, **limits)
        assert all(option.reasons for option in error.value.advice.options)
        return
    advice = recommend(figures=figures, **asked, **limits)
    assert {option.strategy for option in advice.options if option.fits} == fitting
    assert len(advice.options) == len(STRATEGIES)
    times = [option.tpot for option in advice.options if option.fits]
    assert times == sorted(times)


def test_a_strategy_comes_with_the_best_budget_that_meets_the_limits(figures: Path) -> None:
    loose = recommend(**EASY, concurrency=32, max_accuracy_loss=None, figures=figures)
    strict = recommend(**EASY, concurrency=32, max_accuracy_loss=3, figures=figures)
    budgets = [
        next(o.budget for o in advice.options if o.strategy == "h2o") for advice in (loose, strict)
    ]
    assert budgets == [0.1, 0.5]
    h2o = next(o for o in strict.options if o.strategy == "h2o")
    assert h2o.accuracy is not None
    assert h2o.accuracy.points == 0
    assert 0 < h2o.accuracy.at_most < 3
    assert "200 questions of 1 tasks, smollm2" in h2o.accuracy.source


def test_what_no_rows_say_does_not_meet_a_limit(figures: Path) -> None:
    advice = recommend(**EASY, max_recall_loss=10, figures=figures)
    streaming = next(o for o in advice.options if o.strategy == "streaming")
    assert not streaming.fits
    assert "recall: unknown, limit 10.0 points" in streaming.reasons
    infinigen = next(o for o in advice.options if o.strategy == "infinigen")
    assert infinigen.fits
    assert infinigen.budget == 0.3


def test_exact_strategies_lose_nothing(figures: Path) -> None:
    advice = recommend(**EASY, max_accuracy_loss=0, max_recall_loss=0, figures=figures)
    assert {o.strategy for o in advice.options if o.fits} == {"full", "paged", "offload"}
    assert advice.best is not None
    assert advice.best.strategy == "paged"  # as fast as full, and smaller


def test_losers_say_what_they_lose_by(figures: Path) -> None:
    advice = recommend(**EASY, concurrency=16, max_accuracy_loss=None, figures=figures)
    first, *others = advice.options
    assert not first.reasons
    assert all(option.reasons for option in others)
    offload = next(o for o in others if o.strategy == "offload")
    assert offload.reasons[0] == f"{offload.tpot / first.tpot:.1f} times the time a token"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct/", "llama-3.1-8b"),
        ("LLAMA-3.1-8B/", "llama-3.1-8b"),
        ("shape:llama-3.1-8b", "llama-3.1-8b"),
        (" llama-3.1-8b", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("facebook/opt-13b", "opt-13b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("smollm2", "smollm2-135m"),
    ],
)
def test_names_are_forgiven(name: str, shape: str) -> None:
    assert find_model(name) is SHAPES[shape]


def test_what_needs_no_host_comes_before_what_hides_it(figures: Path) -> None:
    asked = {"model": "llama-3.1-8b", "machine": "gh200", "context": 1024}
    advice = recommend(**asked, max_accuracy_loss=0, figures=figures)
    order = [option.strategy for option in advice.options if option.fits]
    assert order == ["paged", "full", "offload"]
    offload = advice.options[2]
    assert offload.tpot == pytest.approx(advice.options[0].tpot)
    assert offload.reasons == (f"as fast as paged, {offload.host / 1e9:.1f} GB on the host",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "lama-8b"}, "no shape is called 'lama-8b'; perhaps"),
        ({"machine": "h100"}, "no machine is called 'h100'; perhaps h"),
        ({"link": "pcie5"}, "perhaps pcie-5"),
        ({"context": 0}, "context must be a whole number"),
        ({"context": -5}, "context must be a whole number"),
        ({"context": 2.5}, "context must be a whole number"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"output": None}, "output must be"),
        ({"context": 200_000}, "has 131,072 positions"),
        ({"ttft": 0}, "ttft must be"),
        ({"tpot": -1.0}, "tpot must be"),
        ({"tpot": float("nan")}, "tpot must be"),
        ({"max_accuracy_loss": -1}, "points, 0 to 100"),
        ({"max_recall_loss": 101}, "points, 0 to 100"),
        ({"gpus": 16}, "gpus must be 1 to 8"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_bad_input_is_named(wrong: dict[str, Any], message: str, figures: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        recommend(**{**EASY, "figures": figures, **wrong})
    assert not isinstance(error.value, NoStrategyError)
    assert "\n" not in str(error.value)


def test_an_impossible_limit_is_named_with_how_far_off_it_is(figures: Path) -> None:
    with pytest.raises(NoStrategyError, match=r"no strategy meets TPOT: .* comes nearest") as error:
        recommend(**EASY, tpot=1e-4, figures=figures)
    least = min(option.tpot for option in error.value.advice.options)
    assert f"with {least / 1e-4:.2f} times the limit" in str(error.value)
    assert error.value.advice.best is None
    with pytest.raises(NoStrategyError, match="none excludes every one; nearest is"):
        recommend(**EASY, concurrency=110, max_accuracy_loss=0, tpot=0.1, figures=figures)


def test_limits_on_answers_need_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"make figures/06_accuracy\.svg.*leave out the limit"):
        recommend(**EASY, figures=tmp_path)
    advice = recommend(**EASY, max_accuracy_loss=None, figures=tmp_path)
    assert "?" in str(advice)
    with pytest.raises(ValueError, match="09_capacity"):
        recommend(**{**EASY, "machine": "this"}, max_accuracy_loss=None, figures=tmp_path)


def test_this_machine_is_the_one_of_the_stored_rows(tmp_path: Path) -> None:
    """Its device and host are one memory, which both are held against together."""
    columns = ["strategy", "metric", "value", "source", "status", "model", "tokens", "batch"]
    columns += ["budget", "chip", "machine", "dtype", "prefill"]
    own = {"memory": 16e9, "bandwidth": 20e9, "link": 1e10, "host": 20e9, "host_memory": 16e9}
    rows = [
        {"metric": name, "value": amount, "chip": "a chip", "machine": "m"}
        for name, amount in {**own, "threads": 2, "flops": 3e11}.items()
    ]
    rows[-1]["dtype"] = "float32"
    for tokens in (128, 1024):
        for batch in (1, 8):
            sizes = {"tokens": tokens, "batch": batch, "model": "smollm2", "strategy": "full"}
            seconds = 0.03 + 1e-5 * tokens * batch
            rows.append({"metric": "tpot", "value": seconds, **sizes})
        rows.append({"metric": "ttft", "value": 1e-3 * tokens, **sizes, "batch": 1})
    with (tmp_path / "09_capacity.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({"source": "measured", "status": "ok", **row} for row in rows)
    asked: dict[str, Any] = {"machine": "this", "max_accuracy_loss": None, "figures": tmp_path}
    advice = recommend(model="smollm2", context=512, **asked)
    assert "(float32) on 1 x a chip" in advice.about
    assert advice.best is not None
    assert advice.best.tpot == pytest.approx(0.035, rel=0.2)
    with pytest.raises(NoStrategyError, match="memory"):
        recommend(model="llama-3.2-1b", context=100_000, concurrency=2, **asked)


def test_the_command_prints_a_table_or_json(
    figures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["recommend", "--model", "llama-3.1-8b", "--machine", "H100-SXM", "--context", "2048"]
    asked += ["--figures", str(figures)]
    assert command.main(asked) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].startswith("llama-3.1-8b (bfloat16) on 1 x h100-sxm: 1 request")
    assert all(name in table for name in STRATEGIES)
    assert command.main([*asked, "--json", "--max-accuracy-loss", "any"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] in STRATEGIES
    assert found["error"] is None
    assert {o["strategy"] for o in found["options"]} == set(STRATEGIES)
    assert command.main([*asked, "--json", "--max-accuracy-loss", "0"]) == 0
    assert "Infinity" not in capsys.readouterr().out  # which is not JSON


def test_the_command_says_what_is_wrong_in_a_line(
    figures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["recommend", "--machine", "h100-sxm", "--context", "2048", "--figures", str(figures)]
    assert command.main([*asked, "--model", "lama"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no shape is called 'lama'")
    assert error.count("\n") == 1
    assert command.main([*asked, "--model", "llama-3.1-8b", "--tpot", "1e-6", "--json"]) == 1
    found = capsys.readouterr()
    assert json.loads(found.out)["error"] in found.err
