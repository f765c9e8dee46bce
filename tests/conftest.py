"""Shared fixtures: tiny random models, greedy generation, the bundled model."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a hub

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvlib.models import Loaded, load, tiny_config

torch.set_num_threads(2)
settings.register_profile("kvlib", deadline=None)  # a busy machine is no failure
settings.load_profile("kvlib")


@pytest.fixture(scope="session")
def tiny() -> Callable[..., PreTrainedModel]:
    """Makes a tiny random model: tiny("llama", num_key_value_heads=1)."""
    made: dict[str, PreTrainedModel] = {}

    def make(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
        key = f"{name} {dtype} {sorted(changes.items())}"
        if key not in made:
            torch.manual_seed(1)
            config = tiny_config(name, initializer_range=0.2, **changes)
            made[key] = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """The bundled model in float32."""
    return load("smollm2")


def batch(lengths: list[int], vocab: int = 128, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded random prompts: input_ids [B, T] and attention_mask [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, vocab, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int, **more: object) -> Tensor:
    """Exactly `new` tokens a row, greedy unless told otherwise; [B, new]."""
    settings: dict[str, object] = {"do_sample": False, **more}
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **settings
    )
    return out[:, ids.shape[1] :]
