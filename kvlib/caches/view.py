"""What a forward attends over, as a cache layer shows it to the attention function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class View:
    """What a forward attends over: row b's tokens in slots 0 … count[b]-1 of each KV head."""

    key: Tensor  # [B, Hkv, S, D]
    value: Tensor  # [B, Hkv, S, D]
    position: Tensor  # [B, Hkv, S] int32, true positions; beyond count[b] they mean nothing
    count: list[int]

    @property
    def is_uniform(self) -> bool:
        """Do all rows have equally many tokens?"""
        return min(self.count) == max(self.count)

    def empties(self) -> Tensor:
        """[B, 1, S] bool: slots beyond a row's count."""
        return empty_slots(self.count, self.key.device)


@dataclass
class Pages(View):
    """A view whose keys and values lie in the blocks of a pool, [blocks, block, Hkv, D]."""

    table: Tensor  # [B, n] block of each block's worth of tokens; beyond count[b] it means nothing

    def __init__(self, key: Tensor, value: Tensor, table: Tensor, count: list[int]) -> None:
        self.key, self.value, self.table, self.count = key, value, table, count

    def rows(
        self, rows: Sequence[int], first: int, last: int, space: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens first … last-1 of these rows, where `first` begins a block: two [B, Hkv, n, D].

        space: two tensors of blocks to gather into, large enough; they are overwritten.
        """
        block = self.key.shape[1]
        blocks = self.table[rows, first // block : -(-last // block)].reshape(-1)
        parts = []
        for i, stored in enumerate((self.key, self.value)):
            out = space[i][: len(blocks)] if space else None
            picked = torch.index_select(stored.flatten(1), 0, blocks, out=out)
            tokens = picked.view(len(rows), -1, *stored.shape[2:])[:, : last - first]
            parts.append(tokens.transpose(1, 2))
        return parts[0], parts[1]

    def gathered(self) -> View:
        """All rows in one piece."""
        key, value = self.rows(range(len(self.count)), 0, max(self.count))
        position = torch.arange(key.shape[2], dtype=torch.int32, device=key.device)
        return View(key, value, position.expand(key.shape[:3]), self.count)


def empty_slots(count: Sequence[int], device: torch.device) -> Tensor:
    """[B, 1, S] bool: slots that lie beyond their row's count."""
    slot = torch.arange(max(count), device=device)
    return slot >= torch.tensor(count, device=device)[:, None, None]
