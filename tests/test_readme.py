"""The examples of README.md run as printed."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import batch, generate
from transformers import PreTrainedModel

import kvlib

TEXT = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_each_example_has_its_test_here() -> None:
    assert len(BLOCKS) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        (0, ["ms a token", "longest context"]),
        (1, ["The capital of France is Paris", "'kv': "]),
        (2, ["bytes fetched", "Move(layer="]),
        (3, ["tokens/s, TTFT", "bytes used at most"]),
        (4, ["accuracy"]),
    ],
)
def test_an_example_runs(tmp_path: Path, example: int, printed: list[str]) -> None:
    file = tmp_path / "example.py"
    file.write_text(BLOCKS[example], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for text in printed:
        assert text in done.stdout


def test_the_last_example_is_a_strategy(
    tmp_path: Path, tiny: Callable[..., PreTrainedModel]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(BLOCKS[5], encoding="utf-8")
    model = tiny("llama")
    with kvlib.attach(model):
        cache = kvlib.make_cache(f"{file}:SinksAndRecent", model, budget=8)
        generate(model, *batch([30]), new=3, past_key_values=cache)
    kept = torch.tensor([0, 1, 2, 3, 28, 29, 30, 31])
    for layer in cache.layers:
        assert layer.positions.sort().values.equal(kept.expand(1, 2, 8).int())
