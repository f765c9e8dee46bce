"""How much of the true attention InfiniGen's forecast finds, layer by layer, with and without skew.

On the bundled model and real text. For the tokens that a layer fetches: the share of the attention
to past tokens that they cover, beside that of the best, the most recent and random ones.
`python benchmarks/speculation.py [--context 2048] [--cap 0.13] [--steps 8]`
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from kvlib.attachment import attach
from kvlib.caches import KVCache, make_cache
from kvlib.measure import prompt
from kvlib.models import load
from kvlib.skewing import learn_model

Shares = dict[int, list[tuple[float, ...]]]  # layer -> covered, best, recent, random a step
WAYS = ("fetched", "best", "recent", "random")


def covered(cache: KVCache, layer: int, query: Tensor, scale: float) -> tuple[float, ...]:
    """Share of the first row's attention to past tokens that each way of choosing covers."""
    of = cache.layers[layer]
    stored = of.slots["key"][:, :, : max(of.count)]
    grouped = query.reshape(1, stored.shape[1], -1, query.shape[3])
    past = torch.softmax(grouped.float() @ stored.float().mT * scale, -1)[..., :-1]
    share = (past / past.sum(-1, keepdim=True)).mean(2)  # [1, Hkv, S - 1]
    n = of.chosen.shape[-1]
    ways = (share.gather(2, of.chosen), share.topk(n).values, share[..., -n:])
    return (*(way.sum(-1).mean().item() for way in ways), n / share.shape[-1])


def measure(model: Any, ids: Tensor, context: int, knobs: dict[str, Any]) -> Shares:
    """Decode the text behind `context` tokens and look at every speculated layer's attention."""
    shares: Shares = defaultdict(list)
    cache = make_cache("infinigen", model, **knobs)

    def spy(index: int, query: Tensor, scale: float) -> None:
        if cache.layers[index].chosen is not None:
            shares[index].append(covered(cache, index, query, scale))

    with attach(model):
        model(ids[:, :context], past_key_values=cache, logits_to_keep=1)
        for index, layer in enumerate(cache.layers):
            plain = layer.observe
            layer.observe = lambda q, s, m, i=index, f=plain: (spy(i, q, s), f(q, s, m))
        for now in range(context, ids.shape[1]):
            model(ids[:, now : now + 1], past_key_values=cache, logits_to_keep=1)
    return shares


def report(name: str, shares: Shares) -> None:
    """Print one line a layer, and the mean."""
    print(f"{name}\n  layer  " + "".join(f"{way:>9s}" for way in WAYS))
    for layer, steps in shares.items():
        print(
            f"  {layer:5d}  "
            + "".join(f"{sum(x) / len(steps):9.3f}" for x in zip(*steps, strict=True))
        )
    every = [step for steps in shares.values() for step in steps]
    ours, best, recent, random = (sum(x) / len(every) for x in zip(*every, strict=True))
    print(f"   mean  {ours:9.3f}{best:9.3f}{recent:9.3f}{random:9.3f}")
    verdict = "met" if ours >= 0.8 else "NOT met"
    print(f"  mean share covered {ours:.3f}, target ≥ 0.8: {verdict}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--cap", type=float, default=0.13)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(2)
    loaded = load("smollm2")
    text = prompt(loaded.tokenizer, options.context + options.steps, 0)
    with torch.inference_mode():
        skew = learn_model(loaded.model, prompt(loaded.tokenizer, 1024, 9))
        for title, chosen in (("plain columns", None), ("skewed columns", skew)):
            settings = {"alpha": math.inf, "cap": options.cap, "skew": chosen}
            report(title, measure(loaded.model, text, options.context, settings))
