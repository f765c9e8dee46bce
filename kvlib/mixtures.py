"""Mixtures of experts: shapes whose step reads a part of their weights only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlib.shapes import Count, Shape, count


@dataclass(frozen=True)
class Mixture(Shape):
    """A shape of which each token uses `active` of `experts` MLPs a layer.

    expert_bytes: of one weight of an expert, which may be stored in fewer bits than the rest.
    """

    experts: int = 1
    active: int = 1
    expert_bytes: float = 2.0

    @property
    def _mlp(self) -> int:
        return self.experts * self._expert + self.hidden * self.experts  # and the router

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.intermediate + 2 * self.intermediate + self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters in the experts of all layers."""
        return self.layers * self.experts * self._expert

    def touched(self, tokens: npt.ArrayLike) -> Count:
        """Share of the experts that at least one of `tokens` tokens uses, if all are as likely."""
        miss = (1 - self.active / self.experts) ** np.asarray(count("tokens", tokens))
        share: Count = 1 - miss
        return share


# openai/gpt-oss-20b, config.json: experts in MXFP4, 4 bits and an 8-bit scale for each 32. Its
# sinks and the 128-token window of every other layer are left out: caches count as if without.
GPT_OSS_20B = Mixture(
    name="gpt-oss-20b",
    model_type="llama",
    layers=24,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    intermediate=2880,
    vocab=201088,
    positions=131072,
    tied=False,
    rope_theta=1.5e5,
    attention_bias=True,
    experts=32,
    active=4,
    expert_bytes=4.25 / 8,
)
