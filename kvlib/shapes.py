"""Model shapes: the sizes of decoder-only models, published or read from a config.

No torch here, nor in the formulas of `memory`, so that a cost is quick to compute.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Count = int | npt.NDArray[np.float64]
T = TypeVar("T")

MODEL_TYPES = ("llama", "qwen3", "mistral", "opt")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def count(name: str, value: npt.ArrayLike) -> Count:
    """An int or a float64 array of whole numbers of 1 or more; anything else is refused."""
    array = np.asarray(value, dtype=np.float64)
    bad = ~((array >= 1) & (array == np.floor(array)) & np.isfinite(array))
    if bad.any():
        raise ValueError(f"{name} must be a whole number, 1 or more, got {array[bad].flat[0]:g}")
    return array if array.ndim else int(array)


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only model, enough to count parameters and bytes.

    positions: longest context. tied: the output head shares the embedding's matrix.
    rope_theta: None where positions are learned. The biases are those of the linear layers.
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int
    tied: bool
    rope_theta: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        check_choice("model type", self.model_type, MODEL_TYPES)
        for item in fields(self):
            if item.type == "int":
                count(item.name, getattr(self, item.name))
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide among {self.kv_heads} KV heads")

    @property
    def learned_positions(self) -> bool:
        """Whether positions are a table of parameters (OPT) instead of rotations."""
        return self.model_type == "opt"

    @property
    def gated(self) -> bool:
        """Whether the MLP has three matrices (gate, up, down) or two (OPT)."""
        return self.model_type != "opt"

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied output head counted once."""
        norm = self.hidden * (2 if self.model_type == "opt" else 1)  # LayerNorm adds a bias
        tables = self._tables * (1 if self.tied else 2)
        if self.learned_positions:
            tables += (self.positions + 2) * self.hidden  # OPT starts counting at 2
        return tables + self.layers * (self._attention + self._mlp + 2 * norm) + norm

    @property
    def _tables(self) -> int:
        """Parameters of one table over the vocabulary: the embedding, or the output head."""
        return self.vocab * self.hidden

    def held(self, size: float) -> float:
        """Bytes of all weights, `size` bytes each."""
        return self.parameters * size

    def read(self, size: float, tokens: npt.ArrayLike = 1) -> float | npt.NDArray[np.float64]:
        """Bytes of the weights that a forward over `tokens` tokens reads.

        That is all of them but an embedding of its own, of which it looks up a few rows.
        """
        return self.held(size) - self._tables * size * (not self.tied)

    def used(self, head: bool = True) -> float:
        """Weights that a token is multiplied with, the output head's where that is asked for."""
        return float(self.parameters - self._tables * (2 - self.tied - head))

    @property
    def _attention(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = queries + 2 * keys + self.hidden if self.attention_bias else 0
        norms = 2 * self.head_dim if self.model_type == "qwen3" else 0
        return 2 * self.hidden * (queries + keys) + bias + norms

    @property
    def _mlp(self) -> int:
        inner = 2 if self.gated else 1
        bias = inner * self.intermediate + self.hidden if self.mlp_bias else 0
        return (inner + 1) * self.hidden * self.intermediate + bias

    @staticmethod
    def from_config(config: Any, name: str = "") -> Shape:
        """Read a transformers config of one of `MODEL_TYPES`; others raise ValueError."""
        check_choice("model type", config.model_type, MODEL_TYPES)
        opt = config.model_type == "opt"
        projected = opt and config.word_embed_proj_dim != config.hidden_size
        if projected or (opt and not config.do_layer_norm_before):
            raise ValueError("OPT is supported with layer norm first and no embedding projection")
        rope = getattr(config, "rope_parameters", None) or {}
        heads = config.num_attention_heads
        bias = bool(opt and config.enable_bias)
        return Shape(
            name=name or config.model_type,
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=config.ffn_dim if opt else config.intermediate_size,
            vocab=config.vocab_size,
            positions=config.max_position_embeddings,
            tied=bool(config.tie_word_embeddings),
            rope_theta=rope.get("rope_theta"),
            attention_bias=bias or bool(getattr(config, "attention_bias", False)),
            mlp_bias=bias or bool(getattr(config, "mlp_bias", False)),
        )


@dataclass(frozen=True)
class Mixture(Shape):
    """A shape of which each token uses `active` of the `experts` MLPs of a layer.

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
        return super()._mlp

    @property
    def _experts(self) -> int:
        """Parameters of all experts in all layers."""
        return self.layers * self.experts * self._expert

    def held(self, size: float) -> float:
        return super().held(size) + self._experts * (self.expert_bytes - size)

    def read(self, size: float, tokens: npt.ArrayLike = 1) -> float | npt.NDArray[np.float64]:
        """As of any shape, but only those experts that at least one token uses, all as likely."""
        spared = (1 - self.active / self.experts) ** np.asarray(count("tokens", tokens))
        return super().read(size) - self._experts * self.expert_bytes * spared

    def used(self, head: bool = True) -> float:
        return super().used(head) - self._experts * (1 - self.active / self.experts)


def _load() -> dict[str, Shape]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    kinds = {name: Mixture if "experts" in row else Shape for name, row in table.items()}
    return {name: kinds[name](name=name, **row) for name, row in table.items()}


SHAPES = _load()


def find_shape(name: str) -> Shape:
    """A public model's shape by name, such as "llama-3.1-8b"; ValueError offers the nearest."""
    return look_up("shape", SHAPES, name)


def look_up(kind: str, table: Mapping[str, T], name: str) -> T:
    key = name.strip().rstrip("/").rstrip().casefold()
    if key in table:
        return table[key]
    near = difflib.get_close_matches(key, table, n=3, cutoff=0.4) or sorted(table)
    raise ValueError(f"no {kind} is called {name!r}; perhaps {', '.join(near)}")
