"""What the public H2O code scores on lm-eval's tasks: a mask with which later tokens vote.

Its "global statistics" sum each key's attention over *all* queries of a text, the answer's too,
and then hide the keys of lowest sum from every query; nothing is evicted. No cache can do that:
it shows how far a simulation is from the strategy. https://github.com/FMInference/H2O
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvlib.attention import mask_untouched
from kvlib.scoring import Pair, Score

NAME = "kvlib-oracle"  # under which transformers knows this attention


@torch.inference_mode()
def oracle_scores(model: PreTrainedModel, pairs: Sequence[Pair], budget: float) -> list[Score]:
    """Scores of the pairs if each query sees, of the whole text, `budget` of its tokens.

    Half of them have the highest sums over all queries, half are the most recent ones.
    Raises ValueError for a budget that is no share in (0, 1].
    """
    if not 0 < budget <= 1:
        raise ValueError(f"budget {budget!r}: give a share of the tokens in (0, 1]")
    with _masked(model, budget):
        return [_score(model, pair, budget) for pair in pairs]


def _score(model: PreTrainedModel, pair: Pair, budget: float) -> Score:
    ids = torch.tensor([[*pair.prefix, *pair.fed]], device=model.device)
    targets = torch.tensor(pair.continuation, device=model.device)
    out = model(ids, use_cache=False, logits_to_keep=len(targets))
    logs = out.logits[0].float().log_softmax(dim=-1)  # [T, V]
    own = logs.gather(1, targets[:, None]).double().sum().item()
    greedy = bool((logs.argmax(dim=-1) == targets).all())
    kept = 2 * each(budget, ids.shape[1])
    return Score(own, greedy, kept, min(1.0, kept / ids.shape[1]))


def each(budget: float, tokens: int) -> int:
    """Heavy hitters, and as many recent tokens, at a budget."""
    return int(budget / 2 * tokens)


def oracle_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    budget: float = 1.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of query [1, Hq, T, D] over its own keys, masked → [1, T, Hq, D]."""
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    scores = (torch.matmul(query, key.mT) * scale).masked_fill(later, -torch.inf)  # [1, Hq, T, T]
    count = each(budget, tokens)
    heavy = scores.softmax(dim=-1, dtype=torch.float32).sum(dim=2).topk(count, dim=-1).indices
    seen = torch.zeros(*scores.shape[:2], tokens, dtype=torch.bool, device=query.device)
    seen = seen.scatter(2, heavy, True)[:, :, None] | later.T.tril(-count - 1).logical_not()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.matmul(weights, value).transpose(1, 2), None


@contextmanager
def _masked(model: PreTrainedModel, budget: float) -> Iterator[None]:
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, functools.partial(oracle_attention, budget=budget))
    AttentionMaskInterface.register(NAME, mask_untouched)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
