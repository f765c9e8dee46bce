"""The measurements of the study: each takes a point of a grid and returns its values.

They are plain functions of JSON scalars, so that `study.run` can give each point a process of
its own and store what it returns.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvlib.attachment import attach
from kvlib.attention import Binding, attention_forward
from kvlib.caches import InfiniGen, KVCache, Paged, find_strategy, make_cache
from kvlib.caches.timeline import Timeline
from kvlib.memory import BUDGET, kv_bytes, layer_prefill_peak, weight_bytes
from kvlib.memory import STRATEGIES as PREDICTED
from kvlib.models import FREE_SHARE, free_memory, load, shape_of
from kvlib.peak import peak_memory
from kvlib.shapes import Shape
from kvlib.study import Refused
from kvlib.texts import long_text
from kvlib.tiers import CPU_CAPACITY, Tier, Tiers

Values = list[dict[str, Any]]

CHUNK = 512  # tokens a chunk
PREFILLS: dict[str, dict[str, str]] = {
    "eager": {"kernel": "eager"},
    "chunked": {"kernel": "eager", "evict": "chunk"},
    "flash": {"kernel": "flash"},
}


def value(metric: str, amount: float, unit: str, source: str = "measured") -> dict[str, Any]:
    """One value of a row."""
    return {"metric": metric, "value": amount, "unit": unit, "source": source}


def knobs(strategy: str, prefill: str) -> dict[str, Any]:
    """The strategy's parameters for a way of prefilling, as far as it has them."""
    has = inspect.signature(find_strategy(strategy)).parameters
    wanted: dict[str, Any] = {**PREFILLS[prefill], "budget": BUDGET}
    return {name: chosen for name, chosen in wanted.items() if name in has}


# -- one layer's attention: memory -----------------------------------------------------------


def prefill_layer(
    *, strategy: str, prefill: str, tokens: int, shape: str, device: str, seed: int, **_: Any
) -> Values:
    """Peak bytes that one layer's attention adds while a prompt is prefilled, and its time.

    Random keys and queries of the shape's sizes in float32. The emulated device holds the
    weights and all other layers' KV too; a point that exceeds it raises DeviceOutOfMemory.
    """
    sizes = shape_of(shape)
    predicted = 0
    if strategy in PREDICTED:
        predicted = predicted_peak(sizes, strategy, prefill, tokens, device)
    room = emulated_device(sizes)
    others = kv_bytes(sizes, tokens, 1, "float32", layers=sizes.layers - 1)
    if predicted > FREE_SHARE * (free := free_memory(device)):
        raise Refused(f"{predicted / 2**30:.1f} GiB predicted, {free / 2**30:.1f} free", predicted)
    short, inputs = (random_inputs(sizes, n, seed, device) for n in (64, tokens))
    run_layer(sizes, strategy, prefill, short, Tiers())  # warm up
    kept = BUDGET if strategy == "h2o" else 1.0
    with room.borrow(int(kept * others)), peak_memory(device) as grown:
        start = time.perf_counter()
        run_layer(sizes, strategy, prefill, inputs, Tiers(room))
        finish(device)
        seconds = time.perf_counter() - start
    values = [value("attention_time", seconds * sizes.layers, "s")]
    if predicted:
        values.append(value("prefill_peak_predicted", predicted, "B", "modelled"))
    return values + [value("prefill_peak", peak, "B") for peak in grown]


def finish(device: str | torch.device) -> None:
    """Wait for what a GPU still computes."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def emulated_device(sizes: Shape) -> Tier:
    """A device of five times the weights, as 80 GB is to an 8B model in half precision."""
    weights = weight_bytes(sizes, "float32")
    return Tier("device", CPU_CAPACITY * weights, fixed=weights)


def predicted_peak(sizes: Shape, strategy: str, prefill: str, tokens: int, device: str) -> int:
    """Bytes that `prefill_layer` should find.

    Left unexplained: about 1.3 MiB of H2O's flash prefill at any length, perhaps what the matrix
    library keeps. Eager stays below by its output, not yet written when the scores are largest.
    """
    threads = torch.get_num_threads() if torch.device(device).type == "cpu" else 0
    peak = layer_prefill_peak(
        sizes, tokens, prefill, strategy,
        dtype="float32", budget=BUDGET, chunk=CHUNK, threads=threads,
    )  # fmt: skip
    return int(peak)


def random_inputs(
    sizes: Shape, tokens: int, seed: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [1, Hq, T, D], key and value [1, Hkv, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    query, key, val = (
        torch.randn(1, h, tokens, sizes.head_dim, generator=generator).to(device) for h in heads
    )
    return query, key, val


def run_layer(
    sizes: Shape, strategy: str, prefill: str, inputs: tuple[Tensor, Tensor, Tensor], tiers: Tiers
) -> KVCache:
    """Prefill a cache of one layer with these inputs, in chunks if so asked."""
    layer = find_strategy(strategy)
    if issubclass(layer, Paged):
        raise ValueError(f"{strategy} has one pool for a whole model: leave it out of strategies")
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
    """The prompt of the introductory notebook, in the model's chat form if it has one, [1, T]."""
    facts = (
        "My sister Ana lives in Lisbon and keeps two grey cats. Her neighbour bakes bread every "
        "morning and plays the cello at night. Last week they took the train to Porto together. "
    )
    asked = facts + "Where does my sister live?"
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, and reads no text: choose another model")
    if tokenizer.chat_template is None:
        return torch.as_tensor(tokenizer(asked, return_tensors="pt")["input_ids"])
    messages = [{"role": "user", "content": asked}]
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
    """The state of each token in one KV head after each step, and in all heads at the end.

    `kept` is 1 for a token that is kept on the device or was fetched, 0.5 for one left on the
    host, 0 for one that is gone; `device_share` is the share of a layer's heads where it is 1.
    """
    loaded = load(model, "float32", device)
    ids = question(loaded.tokenizer).to(device)
    knobs = inspect.signature(find_strategy(strategy)).parameters
    options: dict[str, Any] = {knob: budget for knob in ("budget", "cap") if knob in knobs}
    values: Values = []
    with attach(loaded.model):
        cache = make_cache(strategy, loaded.model, **options)
        for step in range(steps + 1):
            logits = loaded.model(ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            held = states(cache, layer)[head].tolist()
            values += [_at(step, layer, p, "kept", x) for p, x in enumerate(held)]
    for depth in range(len(cache.layers)):
        shares = (states(cache, depth) == 1).float().mean(0).tolist()
        values += [_at(steps, depth, p, "device_share", x) for p, x in enumerate(shares)]
    return values


def states(cache: KVCache, layer: int) -> Tensor:
    """The first row's tokens [Hkv, seen]: 1 kept on the device or fetched, 0.5 not, 0 gone."""
    of, seen = cache.layers[layer], cache.timeline.seen[0]
    stored = kept_mask(of.positions, seen)[0].float()
    if not isinstance(of, InfiniGen) or of.chosen is None:
        return stored
    fetched = of.positions.gather(2, of.chosen)
    newest = of.positions[:, :, -1:]
    return stored / 2 + kept_mask(torch.cat([fetched, newest], dim=2), seen)[0] / 2


def _at(step: int, depth: int, position: int, metric: str, amount: float) -> dict[str, Any]:
    return value(metric, amount, "1") | {"step": step, "depth": depth, "position": position}
