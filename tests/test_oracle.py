"""The masked simulation of the public H2O code: it lets later tokens vote, which no cache can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from kvlib.oracle import oracle_attention, oracle_scores
from kvlib.policy import Policy
from kvlib.scoring import Pair, Scorer

CONTEXT = tuple(range(3, 43))


def test_with_room_for_all_nothing_is_hidden() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 9, 8, generator=generator)
    key, value = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    out, _ = oracle_attention(torch.nn.Module(), query, key, value, None, 0.3, budget=2.0)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out.transpose(1, 2), exact)


def test_the_models_own_attention_comes_back(tiny: Callable[..., PreTrainedModel]) -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    oracle_scores(model, [Pair(CONTEXT, (50, 51, 52)), Pair(CONTEXT[:7], (9,))], 1.0)
    assert model.config._attn_implementation == before


def test_what_is_hidden_changes_the_score(tiny: Callable[..., PreTrainedModel]) -> None:
    model, pair = tiny("llama"), Pair(CONTEXT, (50, 51))
    full = dict(Scorer(model).scores([pair], Policy.at("full")))[0]
    some = oracle_scores(model, [pair], 0.2)[0]
    assert abs(full.loglikelihood - some.loglikelihood) > 1e-3
    assert some.kept == 8
    assert some.share == pytest.approx(8 / 41)


def test_later_queries_vote_on_what_earlier_ones_see() -> None:
    """Two keys are level until the last query: the one that it asks for is heavy for all."""
    keys = torch.zeros(1, 1, 6, 2)
    keys[0, 0, 0, 0] = keys[0, 0, 1, 1] = 8.0  # key 0 answers to (1, 0), key 1 to (0, 1)
    values = torch.arange(6.0)[None, None, :, None].expand(1, 1, 6, 2)
    queries = torch.zeros(1, 1, 6, 2)
    queries[0, 0, 2, 1] = 4.0  # asks for key 1; key 0 had the first query to itself
    seen = []
    for last in (0, 1):
        queries[0, 0, 5] = 0
        queries[0, 0, 5, last] = 90.0
        heavy = oracle_attention(torch.nn.Module(), queries, keys, values, None, 1.0, budget=0.4)
        seen.append(heavy[0])
    assert not torch.equal(seen[0][0, :5], seen[1][0, :5])


@pytest.mark.parametrize("budget", [0, 1.5, -1])
def test_a_budget_out_of_range_is_refused(
    tiny: Callable[..., PreTrainedModel], budget: float
) -> None:
    with pytest.raises(ValueError, match="share of the tokens"):
        oracle_scores(tiny("llama"), [Pair(CONTEXT, (5,))], budget)
