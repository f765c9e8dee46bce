"""What each row of a batch has seen, shared by all layers of a cache.

Tokens *seen* decide positions, tokens *stored* decide memory. Everything here counts tokens seen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor


class Timeline:
    """Counts real tokens a row; a forward pass first calls `advance`, then every layer updates.

    seen      real tokens fed to each row, the current forward included; pads do not count
    targets   tokens at which each row's announced prompt is complete
    lengths   real tokens that the current forward adds to each row
    positions [B, T] int32, true positions of the current forward's tokens, -1 = pad
    tick      number of forwards so far
    """

    wants_ids: ClassVar[bool] = False  # ask for the token ids in `advance`

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[int] = []
        self.targets: list[int] = []
        self.lengths: list[int] = []
        self.positions: Tensor | None = None
        self.announced = False
        self.tick = 0

    def begin(self, prompt_lengths: Sequence[int]) -> None:
        """Open a turn: the coming forwards bring `prompt_lengths[b]` real tokens to row b."""
        lengths = [int(n) for n in prompt_lengths]
        if not lengths or min(lengths) < 1:
            raise ValueError(f"prompt_lengths must be positive, one a row; got {lengths}")
        if self.seen and len(lengths) != len(self.seen):
            raise ValueError(f"{len(lengths)} prompt lengths for {len(self.seen)} rows")
        if self.pending:
            raise ValueError("the turn announced before is not complete yet; feed it, or reset()")
        seen = self.seen or [0] * len(lengths)
        self.targets = [s + n for s, n in zip(seen, lengths, strict=True)]
        self.announced = True

    @property
    def pending(self) -> bool:
        """Is an announced prompt still incomplete?"""
        if not self.announced:
            return False
        seen = self.seen or [0] * len(self.targets)
        return any(s < t for s, t in zip(seen, self.targets, strict=True))

    def advance(
        self,
        lengths: Sequence[int],
        tokens: int,
        device: torch.device,
        ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Row b gets `lengths[b]` real tokens, the last ones of the `tokens` columns fed."""
        self.check_turn(lengths, tokens)
        before = self.seen or [0] * len(lengths)
        seen = [s + n for s, n in zip(before, lengths, strict=True)]
        self.seen, self.lengths = seen, list(lengths)
        if not self.targets or (not self.announced and tokens > 1):
            self.targets = list(seen)
        self.announced = self.pending
        first = torch.tensor([s - tokens for s in seen], dtype=torch.int32, device=device)
        positions = first[:, None] + torch.arange(tokens, dtype=torch.int32, device=device)
        if min(lengths) < tokens:
            start = torch.tensor(before, dtype=torch.int32, device=device)
            positions = positions.masked_fill(positions < start[:, None], -1)
        self.positions = positions  # [B, T]
        self.tick += 1

    def complete(self) -> None:
        """The forward that `advance` announced has run through every layer."""

    def check_turn(self, lengths: Sequence[int], tokens: int) -> None:
        """ValueError where a forward would bring more than the turn announced."""
        if not self.announced:
            return
        before = self.seen or [0] * len(lengths)
        seen = [s + n for s, n in zip(before, lengths, strict=True)]
        if len(self.targets) != len(seen):
            raise ValueError(
                f"begin() announced {len(self.targets)} rows, the input has {len(seen)}"
            )
        over = [b for b, (s, t) in enumerate(zip(seen, self.targets, strict=True)) if s > t]
        if over and tokens > 1:
            b = over[0]
            raise ValueError(
                f"begin() announced {self.targets[b] - before[b]} more tokens for row {b}, "
                f"the input has {seen[b] - before[b]}"
            )

    def fork(self, rows: Sequence[int]) -> Timeline:
        """A timeline of these rows that moves on by itself."""
        twin = copy.copy(self)
        twin.select(rows)
        return twin

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may repeat."""
        self.seen = [self.seen[r] for r in rows]
        self.targets = [self.targets[r] for r in rows]
        self.lengths = [self.lengths[r] for r in rows]
        self.positions = None

    def check_join(self, other: Timeline) -> None:
        """ValueError where the rows of `other` cannot be taken over."""
        if self.pending or other.pending:
            raise ValueError("a prompt is not complete yet: feed it before caches are joined")

    def join(self, other: Timeline) -> None:
        """Take over the rows of another timeline, behind these."""
        self.seen, self.targets = self.seen + other.seen, self.targets + other.targets
        self.lengths, self.positions = self.lengths + other.lengths, None

    def shorten(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every row."""
        self.seen = [s - tokens for s in self.seen]
        if not self.announced:
            self.targets = list(self.seen)
