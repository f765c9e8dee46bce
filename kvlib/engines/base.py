"""What every serving engine takes and gives: requests, results, and the times in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvlib.caches.paged import Preempted
from kvlib.metrics import Timing, Usage

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One prompt to be continued. Raises ValueError for what cannot be served.

    prompt          token ids, at least one
    max_new_tokens  tokens to generate at most, at least one
    arrival         seconds from the start of the run at which the engine may know of it
    temperature     0 = greedy; otherwise logits are divided by it, and a token is drawn
    seed            of this request's own draws
    stop            token ids that end the generation, and are part of it
    """

    prompt: list[int]
    max_new_tokens: int
    arrival: float = 0.0
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty: give at least one token")
        for name, ids in (("prompt", self.prompt), ("stop", self.stop)):
            if wrong := [t for t in ids if not isinstance(t, int) or t < 0]:
                raise ValueError(f"{name} has {wrong[0]!r}: token ids are whole numbers from 0 on")
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens!r}: give at least 1")
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise ValueError(f"arrival {self.arrival!r}: give seconds from the start, 0 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature!r}: give 0 for greedy, or more")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed!r}: give a whole number in [0, 2**63)")


def refuse_unservable(requests: Sequence[Request], positions: int | None, vocabulary: int) -> None:
    """ValueError for a request longer than `positions`, or with ids from `vocabulary` on."""
    for index, request in enumerate(requests):
        total = len(request.prompt) + request.max_new_tokens - 1  # the last one is not fed
        if positions is not None and total > positions:
            raise ValueError(
                f"request {index}: {total} tokens, the model has {positions} positions"
            )
        if max(request.prompt) >= vocabulary:
            raise ValueError(f"request {index}: the vocabulary ends at token {vocabulary - 1}")


@dataclass(frozen=True)
class Result(Timing):
    """What became of a request, and when: arrival and stamps are seconds from the run's start.

    request      its place among the requests of the run
    tokens       what was generated, a stop token included; one stamp each
    finished     "stop": by a stop token; "length": by max_new_tokens
    preemptions  how often it had to leave the device for others
    """

    request: int
    tokens: list[int]
    finished: Finish
    preemptions: int


@dataclass(eq=False)
class Progress:
    """A request on its way: what it has got so far, and what it owns while it does not run.

    tokens, stamps  as in Result
    swapped         what it held on the device, if that waits in host memory
    """

    index: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    preemptions: int = 0
    swapped: Preempted | None = None

    def __post_init__(self) -> None:
        self.draws = torch.Generator().manual_seed(self.request.seed)

    def order(self) -> tuple[float, int]:
        """First come, first served."""
        return self.request.arrival, self.index

    def choose(self, best: int, logits: Tensor) -> None:
        """Go on with the `best` token, or with one drawn by logits [V] from its own generator."""
        if self.request.temperature:
            chances = torch.softmax(logits.float().cpu() / self.request.temperature, dim=-1)
            best = int(torch.multinomial(chances, 1, generator=self.draws))
        self.tokens.append(best)

    @property
    def text(self) -> list[int]:
        """The prompt and what was generated."""
        return self.request.prompt + self.tokens

    @property
    def finished(self) -> Finish | None:
        """Why it is over, None while it is not."""
        if self.tokens and self.tokens[-1] in self.request.stop:
            return "stop"
        return "length" if len(self.tokens) == self.request.max_new_tokens else None

    def result(self) -> Result:
        """The result, once it is over."""
        assert self.finished is not None
        return Result(
            self.request.arrival, tuple(self.stamps),
            self.index, self.tokens, self.finished, self.preemptions,
        )  # fmt: skip


class Engine(Protocol):
    """Anything that serves requests.

    usage        of the last run, once an iteration
    reserved     device bytes of a pool for keys and values, used or not; 0 without a pool
    prefix_hits  prompt tokens that the last run found in a prefix cache, and did not read
    """

    usage: list[Usage]
    prefix_hits: int

    @property
    def reserved(self) -> int: ...

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Serve all requests; one result each, in the order of the requests."""
        ...
