"""The measurements of the study: each takes a point of a grid and returns its values.

They are plain functions of JSON scalars, so that `study.run` can give each point a process of
its own and store what it returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from kvlib.attachment import attach
from kvlib.attention import Binding, attention_forward
from kvlib.caches import KVCache, find_strategy, make_cache
from kvlib.caches.timeline import Timeline
from kvlib.kernels import KEY_TILE, QUERY_TILE, explicit_scratch
from kvlib.models import FREE_SHARE, load
from kvlib.shapes import Shape, find_shape, kv_bytes, weight_bytes
from kvlib.study import Refused
from kvlib.texts import long_text
from kvlib.tiers import CPU_CAPACITY, Tier, Tiers

Values = list[dict[str, Any]]

CHUNK = 512  # tokens a chunk
BUDGET = 0.3  # of H2O, as in the study that is reproduced
PREFILLS: dict[str, dict[str, str]] = {
    "eager": {"kernel": "eager"},
    "chunked": {"kernel": "eager", "evict": "chunk"},
    "flash": {"kernel": "flash"},
}


def value(metric: str, amount: float, unit: str, source: str = "measured") -> dict[str, Any]:
    """One value of a row."""
    return {"metric": metric, "value": amount, "unit": unit, "source": source}


def knobs(strategy: str, prefill: str) -> dict[str, Any]:
    """The strategy's parameters for a way of prefilling."""
    chosen: dict[str, Any] = dict(PREFILLS[prefill])
    if strategy == "h2o":
        return chosen | {"budget": BUDGET}
    chosen.pop("evict", None)
    return chosen


@contextmanager
def peak_rss() -> Iterator[list[int]]:
    """Within the block the process's peak RSS is taken; the list then holds the growth in bytes.

    Linux only (the kernel's own high-water mark); elsewhere the list stays empty.
    """
    grown: list[int] = []
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not clear.exists():
        yield grown
        return
    before = psutil.Process().memory_info().rss
    clear.write_text("5")
    yield grown
    line = next(s for s in status.read_text().splitlines() if s.startswith("VmHWM"))
    grown.append(max(0, int(line.split()[1]) * 1024 - before))


# -- one layer's attention: memory -----------------------------------------------------------


def prefill_layer(
    *, strategy: str, prefill: str, tokens: int, shape: str, seed: int, **_: Any
) -> Values:
    """Peak bytes that one layer's attention adds while a prompt is prefilled, and its time.

    Random keys and queries of the shape's sizes in float32. The emulated device holds the
    weights and all other layers' KV too; a point that exceeds it raises DeviceOutOfMemory.
    """
    sizes = find_shape(shape)
    predicted = predicted_peak(sizes, strategy, prefill, tokens)
    device = emulated_device(sizes)
    others = kv_bytes(sizes, tokens, 1, "float32", layers=sizes.layers - 1)
    free = psutil.virtual_memory().available
    if predicted > FREE_SHARE * free:
        raise Refused(f"{predicted / 2**30:.1f} GiB predicted, {free / 2**30:.1f} free", predicted)
    inputs = random_inputs(sizes, tokens, seed)
    run_layer(sizes, strategy, prefill, random_inputs(sizes, 64, seed), Tiers())  # warm up
    kept = BUDGET if strategy == "h2o" else 1.0
    with device.borrow(int(kept * others)), peak_rss() as grown:
        start = time.perf_counter()
        run_layer(sizes, strategy, prefill, inputs, Tiers(device))
        seconds = time.perf_counter() - start
    values = [
        value("attention_time", seconds * sizes.layers, "s"),
        value("prefill_peak_predicted", predicted, "B", "modelled"),
    ]
    return values + [value("prefill_peak", peak, "B") for peak in grown]


def emulated_device(sizes: Shape) -> Tier:
    """A device of five times the weights, as 80 GB is to an 8B model in half precision."""
    weights = weight_bytes(sizes, "float32")
    return Tier("device", CPU_CAPACITY * weights, fixed=weights)


def predicted_peak(sizes: Shape, strategy: str, prefill: str, tokens: int) -> int:
    """Bytes: the layer's KV, its output, and the kernel's scratch (see `attention`)."""
    stored = kv_bytes(sizes, tokens, 1, "float32", layers=1)
    output = 4 * sizes.heads * sizes.head_dim * tokens
    state = 8 * sizes.kv_heads * tokens if strategy == "h2o" else 0
    if prefill == "flash":
        tiles = 2 * 4 * QUERY_TILE * KEY_TILE if strategy == "h2o" else 0
        return int(stored + state + output + 4 * sizes.heads * tokens + tiles)
    if prefill == "chunked":
        part = 4 * sizes.heads * sizes.head_dim * CHUNK
        held = tokens if strategy == "full" else min(tokens, int(BUDGET * tokens) + CHUNK)
        share = held / tokens
        return int(share * (stored + state) + part + explicit_scratch(1, sizes.heads, CHUNK, held))
    return int(stored + state + output + explicit_scratch(1, sizes.heads, tokens, tokens))


def random_inputs(sizes: Shape, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [1, Hq, T, D], key and value [1, Hkv, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    query, key, val = (
        torch.randn(1, h, tokens, sizes.head_dim, generator=generator) for h in heads
    )
    return query, key, val


def run_layer(
    sizes: Shape, strategy: str, prefill: str, inputs: tuple[Tensor, Tensor, Tensor], tiers: Tiers
) -> KVCache:
    """Prefill a cache of one layer with these inputs, in chunks if so asked."""
    layer = find_strategy(strategy)
    options = knobs(strategy, prefill)
    cache = KVCache([layer(Timeline(), tiers, **options)])
    module: Any = nn.Module()
    module.layer_idx, module.kv_binding = 0, Binding(cache)
    tokens = inputs[0].shape[2]
    cache.begin([tokens])
    step = CHUNK if prefill == "chunked" else tokens
    for first in range(0, tokens, step):
        query, key, val = (t[:, :, first : first + step] for t in inputs)
        cache.advance(1, query.shape[2], query.device)
        stored = cache.update(key, val, 0)
        attention_forward(module, query, *stored, None, sizes.head_dim**-0.5)
    return cache


def layer_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that `prefill_layer` takes on two cores, for the estimate before a run."""
    quadratic = 1.0 if point["prefill"] == "flash" else 4.5
    return float(0.2 + quadratic * (point["tokens"] / 8192) ** 2)


def model_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that a measurement on the whole bundled model takes on two cores."""
    passes = 1 if "prefill" in point else 3
    return float(1.5 + passes * 4.0 * point["tokens"] / 2048)


# -- the whole model: time to first token, and what is kept ------------------------------------


def prompt(tokenizer: Any, tokens: int, seed: int) -> Tensor:
    """`tokens` tokens of bundled Wikipedia text, [1, tokens]; the seed picks where it begins."""
    ids = tokenizer(long_text(seed)[: tokens * 12], return_tensors="pt")["input_ids"]
    if ids.shape[1] < tokens:
        raise ValueError(f"the bundled text from article {seed} on is shorter than {tokens} tokens")
    return torch.as_tensor(ids[:, :tokens])


@torch.inference_mode()
def prefill_model(
    *, strategy: str, prefill: str, tokens: int, model: str, device: str, seed: int, **_: Any
) -> Values:
    """TTFT of one prompt on the whole model, in float32; a first, short prompt warms up."""
    loaded = load(model, "float32", device)
    ids = prompt(loaded.tokenizer, tokens, seed).to(device)
    with attach(loaded.model):
        feed(loaded.model, make_cache(strategy, loaded.model, **knobs(strategy, prefill)),
             ids[:, :64], prefill)  # fmt: skip
        cache = make_cache(strategy, loaded.model, **knobs(strategy, prefill))
        start = time.perf_counter()
        feed(loaded.model, cache, ids, prefill)
        seconds = time.perf_counter() - start
    return [value("ttft", seconds, "s"), value("kv_bytes", cache.nbytes()["kv"], "B")]


def feed(model: Any, cache: KVCache, ids: Tensor, prefill: str) -> Tensor:
    """Feed a prompt [1, T], in chunks if so asked; the last token's logits, on the CPU."""
    tokens = ids.shape[1]
    cache.begin([tokens])
    step = CHUNK if prefill == "chunked" else tokens
    for first in range(0, tokens, step):
        out = model(ids[:, first : first + step], past_key_values=cache, logits_to_keep=1)
    return torch.as_tensor(out.logits[:, -1]).cpu()


@torch.inference_mode()
def keep_agreement(*, tokens: int, model: str, device: str, seed: int, **_: Any) -> Values:
    """Share of the tokens that eager one-pass H2O keeps which each other prefill keeps too."""
    loaded = load(model, "float32", device)
    ids = prompt(loaded.tokenizer, tokens, seed).to(device)
    kept = {}
    with attach(loaded.model):
        for prefill in PREFILLS:
            cache = make_cache("h2o", loaded.model, **knobs("h2o", prefill))
            feed(loaded.model, cache, ids, prefill)
            kept[prefill] = torch.stack(
                [kept_mask(layer.positions, tokens) for layer in cache.layers]
            )
    most = kept["eager"].sum().item()
    return [
        value("keep_agreement", (kept[p] & kept["eager"]).sum().item() / most, "1")
        | {"strategy": "h2o", "prefill": p}
        for p in PREFILLS
    ]


def kept_mask(positions: Tensor, tokens: int) -> Tensor:
    """[B, Hkv, tokens] bool: which tokens are stored."""
    mask = torch.zeros((*positions.shape[:2], tokens + 1), dtype=torch.bool)
    mask.scatter_(2, positions.cpu().long() + 1, True)
    return mask[..., 1:]


# -- what is kept, token by token --------------------------------------------------------------


def question(tokenizer: Any) -> Tensor:
    """The prompt of the introductory notebook in the model's chat form, [1, T]."""
    facts = (
        "My sister Ana lives in Lisbon and keeps two grey cats. Her neighbour bakes bread every "
        "morning and plays the cello at night. Last week they took the train to Porto together. "
    )
    messages = [{"role": "user", "content": facts + "Where does my sister live?"}]
    return torch.as_tensor(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    )


@torch.inference_mode()
def kept_tokens(
    *, strategy: str, budget: float, steps: int, layer: int, head: int, model: str, device: str,
    **_: Any,
) -> Values:  # fmt: skip
    """What one KV head holds after each step, and the share of heads of each layer at the end."""
    loaded = load(model, "float32", device)
    ids = question(loaded.tokenizer).to(device)
    options: dict[str, Any] = {} if strategy == "full" else {"budget": budget}
    values: Values = []
    with attach(loaded.model):
        cache = make_cache(strategy, loaded.model, **options)
        for step in range(steps + 1):
            logits = loaded.model(ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            held = kept_by(cache, layer)[head]
            values += [_at(step, layer, p, "kept", float(x)) for p, x in enumerate(held)]
    for depth in range(len(cache.layers)):
        shares = kept_by(cache, depth).float().mean(0)
        values += [_at(steps, depth, p, "kept_share", float(x)) for p, x in enumerate(shares)]
    return values


def kept_by(cache: KVCache, layer: int) -> Tensor:
    """[Hkv, seen] bool: which tokens of the first row each KV head of a layer holds."""
    return kept_mask(cache.layers[layer].positions, cache.timeline.seen[0])[0]


def _at(step: int, depth: int, position: int, metric: str, amount: float) -> dict[str, Any]:
    return value(metric, amount, "1") | {"step": step, "depth": depth, "position": position}
