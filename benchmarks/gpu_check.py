"""The study's points that need a GPU, in minutes: an 8B model's shape over the real link.

Random weights of Llama-3.1-8B's shape in bfloat16 serve long outputs (as in notebook 05) and many
requests at once (02 to 04); then come prefills by length (01), of one layer and of the whole model.
InfiniGen fetches the same share of the tokens at every step, whatever the weights. The dearest
points come last, none starts once `--seconds` are over, and one that fails holds up no other.

Rows go to `figures/data`, or to `--out`, as those of the notebooks do, under this machine's name;
what is there already is not measured again. No network is needed: kvlib installed, or
`PYTHONPATH=. python benchmarks/gpu_check.py [--seconds 330] [--out figures] [--tiny]`
`--tiny` tries everything on a CPU, with a test model over an emulated link.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlib import serving, study
from kvlib.attachment import attach
from kvlib.caches import make_cache
from kvlib.engines.prepare import loaded_model, random_ids
from kvlib.measure import PREFILLS, Values, feed, finish, knobs, prefill_layer, value
from kvlib.peak import peak_memory
from kvlib.study import MeasurementError
from kvlib.tiers import Tiers

STRATEGIES = ["paged", "infinigen", "h2o", "full", "offload"]
WARM_UP = 64  # tokens of a first prompt
TOLD = ("strategy", "prefill", "tokens", "batch", "through")  # of a point, in a line of output
WORTH = ("throughput", "tpot", "ttft", "bytes_moved", "gather_time", "prefill_peak")
Point = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """What is run. output, requests: tokens in, and out; lengths: of prompts to be prefilled."""

    model: str
    device: str
    dtype: str
    output: tuple[int, str]
    together: int
    requests: tuple[int, int]
    layer_lengths: Sequence[int]
    model_lengths: Sequence[int]


WHOLE = Size(
    "shape:llama-3.1-8b", "cuda", "bfloat16", (10_000, "64,128,256"), 96, (128, 64),
    [2048, 8192, 32768], [8192, 32768],
)  # fmt: skip
TINY = Size("tiny:llama", "cpu", "float32", (24, "4,8"), 4, (16, 4), [64, 256], [64])


def parts(size: Size) -> Iterator[tuple[str, Callable[..., Values], list[Point]]]:
    """Store, measurement and points, those of most value first."""
    of: Point = {"model": size.model, "device": size.device}
    more = of | {"dtype": size.dtype, "machine": "h100-sxm"}  # emulated on a CPU only
    tokens, lengths = size.output
    long = serving.outputs(STRATEGIES, 1, 0, tokens=tokens, output_tokens=lengths, **more)
    long.sort(key=lambda p: p["through"])
    yield "05_output_length", serving.long_output, long
    tokens, new = size.requests
    many = serving.sweep(
        STRATEGIES, [size.together], [], 1, 0,
        requests=size.together, tokens=tokens, output_tokens=new, chunk=2048,
        limit_ttft=10.0, limit_tpot=0.25, **more,
    )  # fmt: skip
    yield "serving", serving.serve, many
    ways: dict[str, Any] = {"strategy": ["full", "h2o"], "prefill": [*PREFILLS]}
    where = {name: [chosen] for name, chosen in of.items()}
    layer = study.grid(1, 0, tokens=size.layer_lengths, shape=[size.model], **ways, **where)
    yield "01_prefill_memory", prefill_layer, layer
    whole = study.grid(1, 0, tokens=size.model_lengths, **ways, **where, dtype=[size.dtype])
    yield "gpu_prefill", prefill_whole, whole


@torch.inference_mode()
def prefill_whole(
    *, strategy: str, prefill: str, tokens: int, model: str, device: str, dtype: str, seed: int,
    **_: Any,
) -> Values:  # fmt: skip
    """TTFT of one prompt of random ids on the whole model, and the bytes that it adds at most."""
    loaded = loaded_model(model, dtype, device)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    ids = torch.tensor([random_ids(tokens, vocabulary, seed)], device=device)
    tiers, options = Tiers.of(loaded.model), knobs(strategy, prefill)
    with attach(loaded.model):
        short = make_cache(strategy, loaded.model, tiers=tiers, **options)
        feed(loaded.model, short, ids[:, :WARM_UP], prefill)
        del short
        cache = make_cache(strategy, loaded.model, tiers=tiers, **options)
        with peak_memory(device) as grown:
            finish(device)
            start = time.perf_counter()
            feed(loaded.model, cache, ids, prefill)
            seconds = time.perf_counter() - start
    values = [value("ttft", seconds, "s"), value("kv_bytes", cache.nbytes()["kv"], "B")]
    return values + [value("prefill_peak", peak, "B") for peak in grown]


def check(size: Size, out: Path, seconds: float) -> int:
    """Measure what is missing in `out`; the exit status, 1 where a point failed with an error."""
    start, left_out, failed = time.perf_counter(), 0, 0
    with torch.device(size.device):  # where the weights are made: 8B of them are slow on a CPU
        loaded_model(size.model, size.dtype, size.device)
    finish(size.device)
    print(f"{size.model} on {size.device} after {time.perf_counter() - start:.0f} s", flush=True)
    for name, measure, points in parts(size):
        for point in points:
            if time.perf_counter() - start > seconds:
                left_out += 1
                continue
            began = time.perf_counter()
            told, ok = once(name, measure, point, out)
            failed += not ok
            about = " ".join(f"{k}={point[k]}" for k in TOLD if point.get(k) is not None)
            taken = time.perf_counter() - began
            print(f"{name:18s} {taken:5.1f} s  {about}: {told}", flush=True)
            clear(size.device)
    if left_out:
        print(f"{left_out} points not started after {seconds:.0f} s: run again to add them")
    return 1 if failed else 0


def once(name: str, measure: Callable[..., Values], point: Point, out: Path) -> tuple[str, bool]:
    """Measure and store a point; what came of it in words, and False where that is an error."""
    try:
        frame = study.run(
            name, [point], measure, folder=out, rows="measure", isolate=False, progress=False
        )
    except MeasurementError as error:
        return f"{error}\n{error.__cause__}", False
    status = frame["status"].iloc[0]
    if status != "ok":
        return f"{status}, {frame.get('detail', frame['status']).iloc[0]}", True
    last = frame.groupby("metric")[["value", "unit"]].last()  # of the longest output
    found = [f"{m} {last.value[m]:.4g} {last.unit[m]}" for m in WORTH if m in last.index]
    return ", ".join(found), True


def clear(device: str) -> None:
    """Give back what the last point held."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)  # raises where the GPU is lost: what follows would fail too
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a test model on the CPU")
    parser.add_argument("--seconds", type=float, default=330, help="after which no point starts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "figures")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print("no CUDA GPU here, so nothing is measured; `--tiny` tries the script on a CPU")
        return 0
    return check(TINY if options.tiny else WHOLE, options.out, options.seconds)


if __name__ == "__main__":
    import gpu_check  # by its name, under which rows record the module that measured them

    sys.exit(gpu_check.main())
