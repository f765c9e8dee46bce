"""Models to run the study on: the bundled one, a hub model or folder, a shape, a tiny one."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from kvlib.bundled import BUNDLED, bundled_digest, bundled_folder, hash_files
from kvlib.shapes import SHAPES, Mixture, Shape, find_shape

TINY = ("llama", "qwen3", "mistral", "opt", "gpt_neox", "phi3")
FREE_SHARE = 0.8  # of the free memory that weights or a measurement may be predicted to take


@dataclass(frozen=True)
class Loaded:
    """A model ready to run. `digest` names its weights; `tokenizer` is None for random weights."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    digest: str


def load(
    name: str | None = None, dtype: str | torch.dtype = "float32", device: str = "cpu"
) -> Loaded:
    """Load a model in evaluation mode.

    name   "smollm2" (default): SmolLM2-135M-Instruct, which pip brings; a folder or a hub id
           such as "meta-llama/Llama-3.1-8B-Instruct" (safetensors only, no remote code);
           "shape:llama-3.2-1b": random weights of that shape; "tiny:llama": a test model
    dtype  "float32", "bfloat16" or "float16"

    Raises ValueError, in one line, for an unknown or unreachable model, a shape that does not
    fit in memory, or a device that is not there.
    """
    name, kind = name or BUNDLED, torch_dtype(dtype)
    _check_device(device)
    family, _, rest = name.partition(":")
    if family == "shape":
        return _random(name, shape_config(find_shape(rest)), kind, device)
    if family == "tiny":
        return _random(name, tiny_config(rest), kind, device)
    source = str(bundled_folder()) if name == BUNDLED else source_of(name)
    return _pretrained(name, source, kind, device)


def digest_of(name: str, dtype: torch.dtype = torch.float32) -> str:
    """The `digest` that `load` gives a model, without loading its weights.

    The hub's commit, a hash of a folder's files or of the bundled one by content, and the name
    and dtype of random weights. Raises ValueError where the weights are not on this machine.
    """
    if name.partition(":")[0] in ("shape", "tiny"):
        return hashlib.sha256(json.dumps([name, str(dtype)]).encode()).hexdigest()[:16]
    if name == BUNDLED:
        return bundled_digest()
    if Path(name).is_dir():
        return hash_files(sorted(Path(name).glob("*.safetensors")))
    config = try_to_load_from_cache(source_of(name), "config.json")
    if not isinstance(config, str):
        raise ValueError(f"model {name!r} is not on this machine")
    return Path(config).parent.name  # snapshots/COMMIT/config.json


def shape_of(name: str) -> Shape:
    """The sizes of a model that `load` knows, or of a published shape; no weights are loaded."""
    family, _, rest = name.partition(":")
    if family == "tiny":
        return Shape.from_config(tiny_config(rest), name)
    if Path(name).is_dir() or "/" in name.strip("/"):
        return Shape.from_config(AutoConfig.from_pretrained(name, trust_remote_code=False), name)
    return find_shape({BUNDLED: "smollm2-135m"}.get(name, rest or name))


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {dtype!r}: choose from float32, bfloat16, float16")
    return found


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: choose cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: this machine has no CUDA GPU; use device cpu")


# -- weights from files ---------------------------------------------------------------------


def source_of(name: str) -> str:
    if Path(name).is_dir() or "/" in name.strip("/"):
        return name
    known = [BUNDLED, *(f"shape:{s}" for s in SHAPES), *(f"tiny:{t}" for t in TINY)]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"unknown model {name!r}: {hint}give {BUNDLED!r}, a folder, a hub id such as "
        "'org/name', 'shape:NAME' or 'tiny:NAME'"
    )


def _pretrained(name: str, source: str, dtype: torch.dtype, device: str) -> Loaded:
    try:
        with _no_bar():
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(_why_not(name, error)) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    commit = getattr(model.config, "_commit_hash", None)
    return Loaded(name, _ready(model, device), tokenizer, str(commit or digest_of(name)))


@contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' own progress bars; the hub's, of a download, stay."""
    empty: Any = transformers_logging.EmptyTqdm
    before = transformers_logging.set_tqdm_hook(lambda _, args, kwargs: empty(*args, **kwargs))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _ready(model: Any, device: str) -> PreTrainedModel:
    moved: PreTrainedModel = model.to(device).eval()
    return moved


def _why_not(name: str, error: Exception) -> str:
    text = str(error)
    if "gated repo" in text or "401 Client Error" in text:  # a name may hold "gated" too
        return (
            f"model {name!r} is gated: ask for access at https://huggingface.co/{name}, run "
            "`hf auth login`, or use an open model such as HuggingFaceTB/SmolLM2-1.7B-Instruct"
        )
    reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return f"cannot load model {name!r} (a folder or hub id with safetensors is needed): {reason}"


def kv_token_bytes(model: Any) -> int:
    """Bytes of the keys and values of one token in all layers."""
    sizes, size = Shape.from_config(model.config), int(model.dtype.itemsize)
    return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * size


# -- random weights -------------------------------------------------------------------------


def shape_config(shape: Shape) -> PreTrainedConfig:
    """The transformers config of a published shape; ValueError for a mixture of experts."""
    if isinstance(shape, Mixture):
        raise ValueError(f"{shape.name} is known to the cost model only: choose another shape")
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
    }
    if shape.model_type == "opt":
        sizes |= {"ffn_dim": shape.intermediate, "word_embed_proj_dim": shape.hidden}
    else:
        sizes |= {
            "intermediate_size": shape.intermediate,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
        }
        if shape.rope_theta is not None:
            sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    return AutoConfig.for_model(shape.model_type, **sizes)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A model of that architecture small enough for unit tests."""
    if model_type not in TINY:
        raise ValueError(f"unknown tiny model {model_type!r}: choose from {', '.join(TINY)}")
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 4096,
    }
    if model_type == "opt":
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 48}
    elif model_type == "gpt_neox":
        sizes |= {"intermediate_size": 64}
    else:
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    if model_type == "mistral":
        sizes["sliding_window"] = None
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(model_type, **(sizes | changes))


def _random(name: str, config: PreTrainedConfig, dtype: torch.dtype, device: str) -> Loaded:
    with torch.device("meta"):  # shapes without storage
        parameters = AutoModelForCausalLM.from_config(config).parameters()
    _refuse_if_too_big(name, sum(p.numel() for p in parameters) * dtype.itemsize, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Loaded(name, _ready(model, device), None, digest_of(name, dtype))


def _refuse_if_too_big(name: str, needed: int, device: str) -> None:
    if needed > FREE_SHARE * (free := free_memory(device)):
        raise ValueError(
            f"model {name!r} needs {needed / 2**30:.1f} GiB for its weights, "
            f"{free / 2**30:.1f} GiB are free here: choose a smaller shape or dtype"
        )


def free_memory(device: str) -> int:
    """Bytes that are free now, on the GPU or in the machine's RAM."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return psutil.virtual_memory().available
