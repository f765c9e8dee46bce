"""Throughput of the local engine against the real vLLM and both ways of transformers.

On the bundled model; all requests arrive at once, and no two rounds have the same. Each engine
lives in a process of its own, which waits while the others run. What counts is the ratio within a
round: its geometric mean over the rounds, with a 95 % interval.
`python benchmarks/serving.py [--concurrency 1 4 16 32] [--prompt 128] [--new 128] [--rounds 5]
[--dtypes float32 bfloat16] [--contenders full paged vllm generate generate_batch]`
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvlib.engines.base import Engine, Request
from kvlib.engines.local import LocalEngine
from kvlib.engines.vllm import VLLMEngine, installed
from kvlib.intervals import Estimate, mean_effect
from kvlib.metrics import pair
from kvlib.models import load
from kvlib.workloads import arrivals, fixed, requests

Run = Callable[[list[Request]], int]  # serves requests; the number of tokens generated

THREADS = 2
CHUNK = 2048  # tokens of a step, at most
PAGE = 256  # tokens of a block of `generate_batch`
WARM_UP = 4  # tokens that each request of the first round generates
PAUSE = 0.3  # seconds after which the threads of who ran last are asleep

OURS = ("full", "paged")
RIVALS = ("vllm", "generate", "generate_batch")
MEANS = {"vllm": 0.8}  # targets of the geometric mean over all concurrencies


def target(rival: str, concurrency: int) -> float:
    """What a ratio to a rival has to reach at this concurrency."""
    if rival == "generate":
        return 1.3 if concurrency >= 4 else 1.0
    return {"vllm": 0.65, "generate_batch": 1.2}[rival]


# -- in the children ---------------------------------------------------------------------------


def opened(name: str, dtype: str, options: argparse.Namespace) -> Run:
    """An engine by its name, with room for the highest concurrency."""
    most = max(options.concurrency)
    if name == "vllm":
        return running(VLLMEngine("smollm2", dtype, max_batch=most, chunk=CHUNK, threads=THREADS))
    model: Any = load("smollm2", dtype).model
    if name == "generate":
        return lambda asked: generate(model, asked)
    if name == "generate_batch":
        room = ContinuousBatchingConfig(
            page_size=PAGE, max_batch_tokens=CHUNK, max_requests_per_batch=most,
            num_blocks=most * (2 + (options.prompt + options.new) // PAGE),
        )  # fmt: skip
        return lambda asked: generate_batch(model, asked, room)
    return running(LocalEngine(model, name, max_batch=most, chunk=CHUNK, packed=True))


def running(engine: Engine) -> Run:
    return lambda asked: sum(len(result.tokens) for result in engine.run(asked))


def greedy(asked: list[Request]) -> GenerationConfig:
    """Exactly as many tokens as the requests ask for."""
    return GenerationConfig(
        max_new_tokens=asked[0].max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


@torch.inference_mode()
def generate(model: Any, asked: list[Request]) -> int:
    """All requests as one batch."""
    ids = torch.tensor([request.prompt for request in asked])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, generation_config=greedy(asked))
    return int(out[:, ids.shape[1] :].numel())


def generate_batch(model: Any, asked: list[Request], room: ContinuousBatchingConfig) -> int:
    """Continuous batching in transformers; its cache outlives the call."""
    done = model.generate_batch(
        inputs=[request.prompt for request in asked], generation_config=greedy(asked),
        continuous_batching_config=room, persistent_manager=True,
    )  # fmt: skip
    if errors := [one.error for one in done.values() if one.error]:
        raise RuntimeError(errors[0])
    return sum(len(one.generated_tokens) for one in done.values())


def child(pipe: Connection, name: str, dtype: str, options: argparse.Namespace) -> None:
    """Answer each list of requests with tokens per second, an error with what it says."""
    with Path(os.devnull).open("w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    torch.set_num_threads(THREADS)
    try:
        run = opened(name, dtype, options)
        pipe.send(0.0)
        while asked := pipe.recv():
            start = time.perf_counter()
            tokens = run(asked)
            taken = time.perf_counter() - start
            if tokens != (wanted := sum(request.max_new_tokens for request in asked)):
                raise RuntimeError(f"{tokens} tokens, not the {wanted} that were asked for")
            pipe.send(tokens / taken)
    except EOFError:  # nobody asks any more
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


# -- in the parent -----------------------------------------------------------------------------


class Contender:
    """An engine in a child process."""

    def __init__(self, name: str, dtype: str, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=child, args=(end, name, dtype, options))
        self.process.start()
        end.close()
        self._answer()

    def run(self, asked: list[Request]) -> float:
        """Tokens per second. RuntimeError from a child that failed."""
        time.sleep(PAUSE)
        self.pipe.send(asked)
        return self._answer()

    def _answer(self) -> float:
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended, code {self.process.exitcode}") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return float(answer)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(10)
        self.process.kill()


class Field(dict[str, Contender]):
    """The contenders that have not failed, by name."""

    def enter(self, name: str, dtype: str, options: argparse.Namespace) -> None:
        if name == "vllm" and (reason := installed()):
            print(f"  vllm left out: {reason}")
            return
        try:
            self[name] = Contender(name, dtype, options)
        except RuntimeError as error:
            print(f"  {name} left out: {error}")

    def ask(self, asked: list[Request], first: int) -> dict[str, float]:
        """The speed of each, the `first` one first; who fails is left out from now on."""
        names, speeds = list(self), dict[str, float]()
        first %= max(1, len(names))
        for name in (*names[first:], *names[:first]):
            try:
                speeds[name] = self[name].run(asked)
            except (OSError, RuntimeError) as error:
                tqdm.write(f"  {name} left out: {error}")
                self.pop(name).close()
        return speeds


@contextmanager
def contenders(dtype: str, options: argparse.Namespace) -> Iterator[Field]:
    """All of them, started one after the other."""
    field = Field()
    try:
        for name in options.contenders:
            field.enter(name, dtype, options)
        yield field
    finally:
        for one in field.values():
            one.close()


def measured(dtype: str, options: argparse.Namespace) -> pd.DataFrame:
    """Tokens per second (value) by round, concurrency and engine; round 0 warms up."""
    rows, tokenizer = list[dict[str, Any]](), load("smollm2").tokenizer
    with contenders(dtype, options) as field:
        for turn in tqdm(range(options.rounds + 1), f"{dtype}, rounds", leave=False):
            for count in options.concurrency:
                lengths = fixed(count, options.prompt, options.new if turn else WARM_UP)
                seed = 1000 * turn + count
                when = arrivals(count, "together", seed=seed)
                speeds = field.ask(requests(tokenizer, lengths, when, seed), turn)
                rows += [
                    {"round": turn, "concurrency": count, "engine": name, "value": speed}
                    for name, speed in speeds.items() if turn
                ]  # fmt: skip
        found = pd.DataFrame(rows, columns=["round", "concurrency", "engine", "value"])
        return found[found["engine"].isin(list(field))]


def report(dtype: str, options: argparse.Namespace) -> None:
    """Measure one dtype and print what came out."""
    print(f"\n{dtype}, {options.prompt} tokens in, {options.new} out, {THREADS} threads")
    found = measured(dtype, options)
    middle = found.pivot_table("value", "engine", "concurrency", "median", sort=False)
    print(f"  tokens/s by concurrency, medians of {options.rounds} rounds")
    print(*(f"    {line}" for line in middle.to_string(float_format="%.1f").split("\n")), sep="\n")
    for name in (name for name in OURS if name in middle.index):
        for rival in (rival for rival in RIVALS if rival in middle.index):
            compare(found, name, rival)
    if {"vllm", "generate"} <= {*middle.index}:  # what a well-kept engine reaches here
        compare(found, "vllm", "generate", judged=False)


def compare(found: pd.DataFrame, name: str, rival: str, judged: bool = True) -> None:
    """Print the ratio to one rival at each concurrency, and the mean of all."""
    ours, theirs = (found[found["engine"] == engine] for engine in (name, rival))
    pairs = pair(ours, theirs, ["round", "concurrency"])
    print(f"  {name} ÷ {rival}")
    for count, some in pairs.groupby("concurrency"):
        effect = mean_effect(some, "ratio", ["round"])
        line(f"concurrency {count}", effect, target(rival, int(str(count))) if judged else None)
    bound = MEANS.get(rival) if judged else None
    line("geometric mean", mean_effect(pairs, "ratio", ["round"]), bound)


def line(what: str, ratio: Estimate, bound: float | None) -> None:
    verdict = "" if bound is None else f"target ≥ {bound}: "
    if bound is not None:
        verdict += "met" if ratio.value >= bound else "NOT met"
    print(f"    {what:15s} {ratio.text('1'):34s} {verdict}".rstrip())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    everyone = [*OURS, *RIVALS]
    parser.add_argument("--contenders", nargs="+", choices=everyone, default=everyone)
    settings = parser.parse_args()
    for kind in settings.dtypes:
        report(kind, settings)
