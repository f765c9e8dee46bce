"""The command line: `python -m kvlib recommend …` and `python -m kvlib lm_eval …`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from kvlib.advice import NEAR, NoStrategyError, recommend

USAGE = """usage: python -m kvlib recommend --model MODEL --machine MACHINE --context TOKENS [...]
       python -m kvlib lm_eval [--data auto|bundled|hub] ARGUMENTS

recommend ranks the strategies for a model on a machine; `recommend --help` lists its limits.

lm_eval takes lm-eval's own ARGUMENTS; `--model kvlib` scores through a cache strategy:

  python -m kvlib lm_eval --model kvlib --tasks copa,piqa --limit 20 \\
      --model_args pretrained=smollm2,strategy=h2o,budget=0.2

--data  where questions come from: bundled where they are (auto), always, or the hub"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if command not in ("lm_eval", "recommend"):
        print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    try:
        if command == "recommend":
            return advise(rest)
        from kvlib.lm_eval_command import main as lm_eval  # with all that lm-eval brings along

        return lm_eval(rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def advise(arguments: Sequence[str]) -> int:
    """Print what is recommended; 1 where no strategy meets all limits."""
    options = vars(parser().parse_args(arguments))
    as_json = options.pop("json")
    try:
        advice, failed = recommend(**options), ""
    except NoStrategyError as error:
        advice, failed = error.advice, str(error)
    if as_json:
        print(json.dumps(advice.to_dict() | {"error": failed or None}, indent=1, allow_nan=False))
    else:
        print(advice)
    if failed:
        print(f"error: {failed}", file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `recommend`, named as its parameters are."""
    made = argparse.ArgumentParser(
        prog="python -m kvlib recommend",
        description="Which KV-cache strategy to run a model with, and what it costs.",
    )
    add = made.add_argument
    add("--model", required=True, help="such as llama-3.1-8b, or a hub id of that name")
    add("--machine", required=True, help='such as h100-sxm, or "this": the one of the stored rows')
    add("--context", required=True, type=int, help="tokens of a request that are read")
    add("--concurrency", type=int, default=1, help="requests at once")
    add("--output", type=int, default=256, help="tokens that are generated for each")
    add("--max-accuracy-loss", type=points, default=NEAR, metavar="POINTS",
        help='on lm-eval tasks, or "any"; default: %(default)g')  # fmt: skip
    add("--max-recall-loss", type=points, metavar="POINTS",
        help="on facts stated early in a conversation")  # fmt: skip
    add("--ttft", type=float, metavar="SECONDS", help="to the first token, at most")
    add("--tpot", type=float, metavar="SECONDS", help="for each further token, at most")
    add("--gpus", type=int, default=1, help="devices, by tensor parallelism")
    add("--link", help="in place of the machine's: pcie-3 to pcie-6, nvlink-c2c")
    add("--dtype", help="float32, bfloat16 or float16")
    add("--figures", metavar="FOLDER", help="that has the stored rows")
    add("--json", action="store_true", help="all numbers, for programs")
    return made


def points(text: str) -> float | None:
    return None if text == "any" else float(text)


if __name__ == "__main__":
    sys.exit(main())
