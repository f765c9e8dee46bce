"""A strategy as it is put to the test: its parameters, and how it is fed.

mode "decode"     one token at a time; evicts, or fetches, at every step
mode "block"      the continuation in one forward, without eviction inside: faster, and close for
                  answers of a few tokens; of longer ones it sees more than the budget
mode "streaming"  the context is read under the budget too, in chunks, by each strategy for itself
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from kvlib.caches import InfiniGen, KVCache, check_knobs, find_strategy, make_cache
from kvlib.caches.base import one_of
from kvlib.caches.timeline import Timeline
from kvlib.tiers import Tiers

MODES = ("decode", "block", "streaming")


@dataclass(frozen=True)
class Policy:
    """A strategy with its parameters, and how continuations are fed to it (see above).

    Raises ValueError for an unknown strategy, mode or parameter, or one out of range.
    """

    strategy: str
    knobs: dict[str, Any] = field(default_factory=dict)
    mode: str = "decode"

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        layer = find_strategy(self.strategy)
        check_knobs(layer, self.knobs)
        layer(Timeline(), Tiers(), **self.knobs)
        if self.mode == "block" and issubclass(layer, InfiniGen):
            raise ValueError(
                f"{self.strategy} fetches for one token at a time: use mode 'decode', not 'block'"
            )

    @classmethod
    def at(
        cls, strategy: str, budget: float | str | None = None, mode: str = "decode", **knobs: Any
    ) -> Policy:
        """A strategy at a budget, whatever it calls that.

        InfiniGen fetches up to the budget at each step; what keeps everything takes none. A budget
        of 1 is all tokens, also as it comes from a command line, where 1.0 may be written 1.
        """
        layer = find_strategy(strategy)
        has = inspect.signature(layer).parameters
        if str(budget) == "1":
            budget = 1.0
        if budget is not None:
            if "cap" in has:
                knobs = {"alpha": "inf", "cap": budget} | knobs
            elif "budget" in has:
                knobs = {"budget": budget} | knobs
            else:
                raise ValueError(f"{strategy} keeps every token: leave out the budget")
        return cls(strategy, knobs, mode)

    def cache(self, model: PreTrainedModel) -> KVCache:
        """A fresh cache; one that reads in chunks evicts after each, where it has the choice."""
        has = inspect.signature(find_strategy(self.strategy)).parameters
        more = {"evict": "chunk"} if self.mode == "streaming" and "evict" in has else {}
        return make_cache(self.strategy, model, **{**self.knobs, **more})
