"""Token ids of unequal length as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def left_padded(
    rows: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] with pads (0) to the left, and their mask [B, T] of ones and zeros."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    first = width - torch.tensor([len(row) for row in rows], device=device)[:, None]
    return ids, (torch.arange(width, device=device) >= first).long()
