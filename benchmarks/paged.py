"""Paged decode on scattered blocks against the same attention on contiguous storage.

Everything is a ratio within one run, on the bundled model.
`python benchmarks/paged.py [--context 1024] [--batch 16] [--rounds 5]`
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from common import prefill, repeated, steps
from tqdm import tqdm
from transformers import DynamicCache, GenerationConfig, QuantizedCache

from kvlib import decode_kernels
from kvlib.attachment import attach
from kvlib.caches import KVCache, make_cache
from kvlib.caches.paged import PagedCache
from kvlib.caches.view import Pages
from kvlib.models import load
from kvlib.peak import peak_rss

BLOCKS = (16, 128)
STEPS = 4
MIX = [1, 2, 3, 5, 30, 31, 64, 100, 170, 333, 400, 512, 700, 1000, 1023, 1024]  # tokens a row


def filled(model: Any, cache: Any, ids: torch.Tensor, batch: int) -> Any:
    """One row's prefill, repeated to `batch` rows that share nothing."""
    prefill(model, cache, ids, ids.shape[1])
    if isinstance(cache, PagedCache):
        return scattered(cache, batch)
    return repeated(cache, batch)


def scattered(cache: PagedCache, batch: int) -> PagedCache:
    """Rows with copies of the only row of `cache`, in blocks in random order."""
    pool, source = cache.pool, cache.timeline.tables[0].blocks
    random.seed(0)
    random.shuffle(pool._blank)
    rows = cache.empty()
    for _ in range(batch):
        gone = cache.fork([0]).preempt(0)
        one = cache.resume(gone)
        if rows.timeline.seen:
            rows.insert(one)
        else:
            rows = one
    assert all(table.blocks != source for table in rows.timeline.tables)
    return rows


def compare(kind: str, context: int, batch: int, rounds: int) -> None:
    """Print one dtype's table."""
    model = load("smollm2", kind).model
    ids = torch.randint(100, 40000, (1, context), generator=torch.Generator().manual_seed(0))
    others = {"DynamicCache": DynamicCache(), **quantized(model)}
    caches = {name: filled(model, cache, ids, batch) for name, cache in others.items()}
    with attach(model):
        caches["contiguous"] = filled(model, make_cache("full", model), ids, batch)
        for block in BLOCKS:
            count = (batch + 2) * (context // block + 2)
            cache = make_cache("paged", model, block=block, blocks=count)
            caches[f"paged, {block}"] = filled(model, cache, ids, batch)
    taken: dict[str, list[float]] = {name: [] for name in caches}
    for _ in tqdm(range(rounds), f"{kind} rounds", leave=False):
        for name, cache in caches.items():
            if isinstance(cache, KVCache):
                with attach(model):
                    taken[name] += steps(model, cache, batch, STEPS)
            else:
                taken[name] += steps(model, cache, batch, STEPS)
    middle = {name: statistics.median(seconds) for name, seconds in taken.items()}
    print(f"\n{kind}, context {context:,}, batch {batch}")
    print(*(f"  {name:14s} {1e3 * s:7.1f} ms a step" for name, s in middle.items()), sep="\n")
    for block in BLOCKS:
        ratio = middle["contiguous"] / middle[f"paged, {block}"]
        line(f"speed of blocks of {block} ÷ contiguous", ratio, 0.6)
        attention(caches["contiguous"], caches[f"paged, {block}"], batch)


def quantized(model: Any) -> dict[str, Any]:
    """transformers' QuantizedCache, if a backend of it is installed."""
    try:
        return {"QuantizedCache": QuantizedCache("quanto", model.config)}
    except ImportError as error:
        print(f"QuantizedCache left out: {error}")
        return {}


@torch.no_grad()
def batching(rows: int = 8, prompt: int = 64, new: int = 8, rounds: int = 2) -> None:
    """Print the speed of `generate` on blocks against transformers' own continuous batching."""
    model = load("smollm2").model
    ids = torch.randint(100, 40000, (rows, prompt))
    config = GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def theirs() -> None:
        done = model.generate_batch(
            inputs=ids.tolist(), generation_config=config, progress_bar=False
        )
        assert [len(one.generated_tokens) for one in done.values()] == [new] * rows

    def ours() -> None:
        with attach(model):
            cache = make_cache("paged", model, blocks=rows * 8)
            out = model.generate(ids, past_key_values=cache, generation_config=config)
        assert out.shape == (rows, prompt + new)

    taken: dict[str, list[float]] = {"theirs": [], "ours": []}
    for _ in range(rounds + 1):  # the first one warms up
        for run in (theirs, ours):
            start = time.perf_counter()
            run()
            taken[run.__name__].append(time.perf_counter() - start)
    middle = {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}
    line("speed ÷ generate_batch", middle["theirs"] / middle["ours"], 1.0)


def attention(full: KVCache, paged: PagedCache, batch: int) -> None:
    """Print the speed of one layer's attention alone."""
    heads, size = full.layers[0].shape
    query = torch.randn(batch, 3 * heads, 1, size).to(full.layers[0].dtype)
    taken: dict[str, list[float]] = {"full": [], "paged": []}
    views = [layer._show(query, query) for layer in full.layers]
    pages = [
        Pages(*layer._storage_of(), paged.timeline.table, list(layer.count))
        for layer in paged.layers
    ]
    for view, page in zip(views, pages, strict=True):
        for name, run in (
            ("full", lambda v=view: decode_kernels.decode(query, v.key, v.value, 1.0, None)),
            ("paged", lambda p=page: decode_kernels.decode_pages(query, p, 1.0)),
        ):
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    full_time, paged_time = (statistics.median(taken[name]) for name in ("full", "paged"))
    print(f"  attention alone: {full_time / paged_time:.2f} of contiguous speed")


@torch.no_grad()
def scratch(context: int, batch: int) -> None:
    """Print what decode takes beside the cache; last, as measuring it slows allocation down."""
    for block in BLOCKS:
        table = torch.randperm(batch * context // block).view(batch, -1)
        key, value = torch.randn(2, table.numel(), block, 3, 64)
        pages = Pages(key, value, table, [context] * batch)
        with peak_rss() as grown:
            decode_kernels.decode_pages(torch.randn(batch, 9, 1, 64), pages, 1.0)
        for peak in grown:
            layer = peak / (key.nbytes + value.nbytes)
            print(f"scratch of blocks of {block}: {peak / 2**20:.1f} MiB, {layer:.2f} of a layer")
            line("scratch ÷ the cache of 30 layers", layer / 30, 1 / 8, above=False)


def waste(block: int) -> None:
    """Print what blocks waste on rows of many lengths, and what padding would."""
    model = load("smollm2").model
    width = max(MIX)
    ids = torch.ones(len(MIX), width, dtype=torch.long)
    mask = (torch.arange(width) >= width - torch.tensor(MIX)[:, None]).long()
    with attach(model):
        cache = make_cache("paged", model, block=block, blocks=2000)
        assert isinstance(cache, PagedCache)
        model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
    usage = cache.usage()
    print(f"rows of {min(MIX)} to {width} tokens: padding wastes {1 - sum(MIX) / mask.numel():.1%}")
    line(f"waste of blocks of {block}", usage["wasted"] / usage["held"], 0.04, above=False)


def line(name: str, value: float, bound: float, above: bool = True) -> None:
    good = value >= bound if above else value <= bound
    sign = "≥" if above else "≤"
    print(f"  {name:38s} {value:6.3f}  target {sign} {bound}: {'met' if good else 'NOT met'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(2)
    with torch.inference_mode():
        for dtype in ("float32", "bfloat16"):
            compare(dtype, options.context, options.batch, options.rounds)
        waste(16)
    batching()
    scratch(options.context, options.batch)
