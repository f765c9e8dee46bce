"""Looks into caches: at any layer, head and step, which tokens of a text are kept.

`record` runs a model and reads what its cache really stores; `html` colours the text with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlib.attachment import attach
from kvlib.caches import find_strategy, make_cache
from kvlib.measure import states

# What `measure.states` gives for a token, how it is shown, and in which colours.
LOOKS = {
    1.0: ("kept or fetched", "#e69f00", "#000000"),
    0.5: ("on the host", "#56b4e9", "#000000"),
    0.0: ("evicted", "#e5e5e5", "#8a8a8a"),
    -1.0: ("not read yet", "#ffffff", "#c8c8c8"),
}


@dataclass(frozen=True)
class Record:
    """A text and its tokens' states: [steps, layers, heads, tokens], a key of LOOKS each."""

    words: Sequence[str]
    states: npt.NDArray[np.float32]


@torch.inference_mode()
def record(loaded: Any, strategy: str, ids: Tensor, budget: float, steps: int) -> Record:
    """Read ids [1, T], then write `steps` tokens greedily; the state after each forward."""
    knobs = inspect.signature(find_strategy(strategy)).parameters
    options: dict[str, Any] = {knob: budget for knob in ("budget", "cap") if knob in knobs}
    frames, text, ids = [], ids[0].tolist(), ids.to(loaded.model.device)
    with attach(loaded.model):
        cache = make_cache(strategy, loaded.model, **options)
        for _ in range(steps + 1):
            logits = loaded.model(ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            text.append(int(ids[0, 0]))
            depths = range(len(cache.layers))
            frames.append(torch.stack([states(cache, depth) for depth in depths]))
    total = frames[-1].shape[-1]
    padded = [torch.nn.functional.pad(f, (0, total - f.shape[-1]), value=-1.0) for f in frames]
    words = [loaded.tokenizer.decode(token) for token in text[:total]]
    return Record(words, torch.stack(padded).cpu().numpy())


def html(shown: Record, layer: int, head: int, step: int) -> str:
    """The text with each token in its state's colours, and what these mean."""
    state = shown.states[step, layer, head]
    pieces = [_piece(word, float(kind)) for word, kind in zip(shown.words, state, strict=True)]
    held, seen = int((state == 1).sum()), int((state >= 0).sum())
    key = " ".join(
        f'<span style="background:{back};color:{front};border:1px solid #999">{name}</span>'
        for name, back, front in LOOKS.values()
    )
    told = f"layer {layer}, head {head}, step {step}: {held} of {seen} tokens kept or fetched"
    return (
        f"<p>{key}</p><p style='line-height:1.9;max-width:60em'>{''.join(pieces)}</p><p>{told}</p>"
    )


def _piece(word: str, kind: float) -> str:
    name, back, front = LOOKS[kind]
    text = escape(word).replace("\n", "⏎")
    return f'<span title="{name}" style="background:{back};color:{front}">{text}</span>'


def show(records: Mapping[str, Record]) -> Any:
    """Sliders over strategy, layer, head and step, and the text that follows them."""
    import ipywidgets as widgets

    steps, layers, heads, _ = next(iter(records.values())).states.shape
    controls = {
        "strategy": widgets.Dropdown(options=list(records), description="strategy"),
        "layer": widgets.IntSlider(layers // 2, 0, layers - 1, description="layer"),
        "head": widgets.IntSlider(0, 0, heads - 1, description="KV head"),
        "step": widgets.IntSlider(0, 0, steps - 1, description="step"),
    }

    def text() -> str:
        place = {name: controls[name].value for name in ("layer", "head", "step")}
        return html(records[controls["strategy"].value], **place)

    view = widgets.HTML(text())

    def follow(_: Any) -> None:
        view.value = text()

    for control in controls.values():
        control.observe(follow, names="value")
    return widgets.VBox([*controls.values(), view])
