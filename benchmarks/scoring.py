"""What scoring under a strategy costs beside what its tokens cost the bare model.

Predicted: one plain forward of each group's contexts (what they have in common once), and for each
setting the steps of a plain decode with as many rows, on transformers' own cache and attention.
Measured: the same contexts read once and the answers fed under each setting. Both interleaved.
`python benchmarks/scoring.py [--tasks copa,openbookqa] [--questions 20] [--rounds 3]`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvlib import tasks
from kvlib.accuracy import KVLM
from kvlib.models import load
from kvlib.padding import left_padded
from kvlib.policy import Policy
from kvlib.scoring import CROWDED, Pair, Scorer, common_length, unique_prefixes

SETTINGS = [
    Policy.at("full"),
    *(Policy.at(s, b) for s in ("h2o", "streaming", "infinigen") for b in (0.1, 0.5)),
]


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.inference_mode()
def plain_read(model: Any, pairs: Sequence[Pair]) -> None:
    """The tokens that reading the contexts of a group feeds, without any of our code behind it."""
    prefixes = unique_prefixes(pairs)
    common, cache = common_length(prefixes), DynamicCache(config=model.config)
    if common:
        ids = torch.tensor([prefixes[0][:common]])
        model(ids, past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(len(prefixes))
    ids, mask = left_padded([p[common:] for p in prefixes], model.device)
    whole = torch.cat([mask.new_ones(len(prefixes), common), mask], dim=1)
    model(ids, attention_mask=whole, past_key_values=cache, logits_to_keep=1)


@torch.inference_mode()
def plain_steps(model: Any, pairs: Sequence[Pair], batch: int) -> None:
    """Decode steps with as many rows as the pairs have left, behind contexts of their length."""
    unique = sorted(dict.fromkeys(pairs), key=lambda pair: -len(pair.fed))
    for first in range(0, len(unique), batch):
        some = unique[first : first + batch]
        width = max(len(pair.prefix) for pair in some)
        cache = DynamicCache(config=model.config)
        shape = (len(some), model.config.num_key_value_heads, width, model.config.head_dim)
        for layer in range(model.config.num_hidden_layers):
            cache.update(torch.zeros(shape), torch.zeros(shape), layer)
        rows = len(some)
        for step in range(len(some[0].fed)):
            active = sum(len(pair.fed) > step for pair in some)
            if active <= CROWDED * rows:
                rows = active
                cache.batch_select_indices(torch.arange(rows))
            model(torch.ones(rows, 1, dtype=torch.long), past_key_values=cache)


def run(scorer: Scorer, pairs: Sequence[Pair]) -> dict[str, float]:
    """Seconds of one round: predicted parts, and measured ones."""
    groups = [[pairs[n] for n in group] for group in scorer.groups(pairs)]
    model, found = scorer.model, {}
    found["predicted read"] = timed(lambda: [plain_read(model, g) for g in groups])
    found["predicted steps"] = timed(lambda: [plain_steps(model, g, scorer.batch) for g in groups])
    readings: list[Any] = []
    found["read"] = timed(lambda: readings.extend(scorer.read(g) for g in groups))
    for policy in SETTINGS:
        name = f"{policy.strategy} {policy.knobs.get('budget', policy.knobs.get('cap', ''))}"
        found[name] = timed(
            lambda p=policy: [scorer.score(g, p, r) for g, r in zip(groups, readings, strict=True)]
        )
    return found


def report(task: str, rounds: Sequence[dict[str, float]]) -> float:
    """Print medians and ratios of a task; measured ÷ predicted of all its settings together."""
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    read, step = middle.pop("predicted read"), middle.pop("predicted steps")
    print(f"{task}\n  {'':16s}{'s':>8s}{'predicted':>11s}{'ratio':>7s}")
    for name, seconds in middle.items():
        expected = read if name == "read" else step
        print(f"  {name:16s}{seconds:8.2f}{expected:11.2f}{seconds / expected:7.2f}")
    ratio = sum(middle.values()) / (read + step * len(SETTINGS))
    print(f"  all together {ratio:.2f}, target ≤ 1.3: {'met' if ratio <= 1.3 else 'NOT met'}")
    return ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="copa,openbookqa,winogrande")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(2)
    loaded = load("smollm2")
    lm = KVLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=80)
    lm.scorer.room = 20_000
    for task in options.tasks.split(","):
        asked = tasks.questions(task, count=options.questions, shots=options.shots)
        pairs = lm.pairs([request for question in asked for request in question.requests])
        run(lm.scorer, pairs[:4])  # warm up
        report(task, [run(lm.scorer, pairs) for _ in range(options.rounds)])
