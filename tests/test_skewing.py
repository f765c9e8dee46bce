"""Skewing leaves attention as it is, gathers energy, and keeps one whole file a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kvlib
from kvlib import skewing
from kvlib.models import Loaded
from kvlib.projection import attention_modules, find_hidden, find_rope, project_query
from kvlib.skewing import learn, skew_of

Tiny = Callable[..., PreTrainedModel]
IDS = batch([40])[0]


def grouped(query: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, T, D] -> [Hkv, B·G·T, D]"""
    rows, heads, tokens, size = query.shape
    split = query.reshape(rows, kv_heads, heads // kv_heads, tokens, size)
    return split.transpose(0, 1).reshape(kv_heads, -1, size)


def top_energy(columns: Tensor, share: float = 0.3) -> Tensor:
    """Of [Hkv, N, D]: the part of all energy in each head's strongest columns, [Hkv]."""
    energy = columns.square().sum(1)
    return energy.topk(round(share * energy.shape[-1])).values.sum(-1) / energy.sum(-1)


def queries_of(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Every layer's queries [B, Hq, T, D]."""
    found: list[Tensor] = []

    def observe(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(project_query(module, find_hidden(args, kwargs), find_rope(args, kwargs)))

    modules = attention_modules(model)
    hooks = [m.register_forward_pre_hook(observe, with_kwargs=True) for m in modules]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("tokens", [1, 3, 50])  # also fewer than there are columns
def test_products_stay_and_energy_gathers(tokens: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, tokens, 16) @ torch.randn(16, 16)
    key = torch.randn(2, 2, 30, 16).repeat_interleave(3, 1)
    skew = learn(query, 2)
    assert (skew.shape, skew.dtype) == ((2, 16, 16), torch.float32)
    turn = skew.repeat_interleave(3, 0)
    before, after = query @ key.mT, (query @ turn) @ (key @ turn).mT
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    columns = grouped(query, 2)
    assert (top_energy(columns @ skew) >= top_energy(columns) - 1e-6).all()
    energy = (columns @ skew).square().sum(1)
    assert (energy.diff(dim=-1) <= 1e-4 * energy[:, :1]).all()  # strongest first


def test_the_columns_are_the_right_singular_vectors() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 4, 20, 8)
    skew = learn(query, 2)
    for head, columns in enumerate(grouped(query, 2)):
        right = torch.linalg.svd(columns).Vh
        torch.testing.assert_close((right @ skew[head]).abs(), torch.eye(8), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_a_models_skew(tiny: Tiny, tmp_path: Path, name: str) -> None:
    model = tiny(name)
    skew = skew_of(model, IDS, tmp_path, "d1")
    kv_heads = 6 if name == "opt" else 2
    assert skew.shape == (3, kv_heads, 8, 8)
    for layer, query in zip(skew, queries_of(model, IDS), strict=True):
        columns = grouped(query, kv_heads)
        assert (top_energy(columns @ layer) > top_energy(columns)).all()
    assert [p.name for p in tmp_path.iterdir()] == ["skew-d1.safetensors"]


def test_a_model_whose_config_names_no_kv_heads(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 128}
    config = AutoConfig.for_model("gpt_neox", num_attention_heads=4, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert skew_of(model, IDS, tmp_path, "d1").shape == (2, 4, 8, 8)


def test_the_model_runs_once(tiny: Tiny, tmp_path: Path) -> None:
    model, runs = tiny("llama"), []
    hook = model.get_decoder().register_forward_hook(lambda *_: runs.append(1))
    first, again = (skew_of(model, IDS, tmp_path / "new", "d1") for _ in range(2))
    hook.remove()
    assert first.equal(again)
    assert runs == [1]
    assert not attention_modules(model)[0]._forward_pre_hooks


def test_an_attached_model_can_be_learned_too(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama")
    plain = skew_of(model, IDS, tmp_path, "d1")
    with kvlib.attach(model):
        attached = skew_of(model, IDS, tmp_path, "d2")
    for one, other, query in zip(plain, attached, queries_of(model, IDS), strict=True):
        columns = grouped(query, 2)
        torch.testing.assert_close(top_energy(columns @ one), top_energy(columns @ other))


@pytest.mark.parametrize("where", ["save_file", "learn"])
def test_an_interruption_leaves_no_file(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model = tiny("llama")

    def interrupted(tensors: object, path: object, *_: object) -> None:
        if where == "save_file":
            Path(str(path)).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(skewing, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            skew_of(model, IDS, tmp_path, "d1")
    assert list(tmp_path.iterdir()) == []
    assert not attention_modules(model)[0]._forward_pre_hooks
    assert skew_of(model, IDS, tmp_path, "d1").isfinite().all()


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def store(shape: tuple[int, ...], digest: str = "d1", scale: float = 1.0) -> Callable[[Path], None]:
    """What writes a skew file of unit matrices times `scale`."""
    skew = (scale * torch.eye(shape[-1])).expand(shape).contiguous()
    return lambda path: save_file({"skew": skew}, path, {"digest": digest})


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (half, "damaged"),
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "no safetensors": (lambda path: path.write_text("something else"), "damaged"),
    "no skew": (lambda path: save_file({"x": IDS}, path, {"digest": "d1"}), "damaged"),
    "no digest": (lambda path: save_file({"skew": torch.eye(8)}, path), "another model, None"),
    "other model": (store((3, 2, 8, 8), "d2"), "another model, d2 and not d1"),
    "other layers": (store((4, 2, 8, 8)), r"\[4, 2, 8, 8\], the model has \[3, 2, 8, 8\]"),
    "not orthogonal": (store((3, 2, 8, 8), scale=1.001), "not orthogonal"),
    "not a number": (store((3, 2, 8, 8), scale=float("nan")), "not orthogonal"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_wrong_file_is_named_and_left_alone(tiny: Tiny, tmp_path: Path, damage: str) -> None:
    model, path = tiny("llama"), tmp_path / "skew-d1.safetensors"
    skew_of(model, IDS, tmp_path, "d1")
    write, message = DAMAGED[damage]
    write(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message) as error:
        skew_of(model, IDS, tmp_path, "d1")
    assert f"delete {path}" in str(error.value)
    assert path.read_bytes() == before
    path.unlink()
    assert skew_of(model, IDS, tmp_path, "d1").shape == (3, 2, 8, 8)


@pytest.mark.slow
def test_the_bundled_models_energy_gathers(smollm2: Loaded, tmp_path: Path) -> None:
    ids = batch([128], vocab=40_000)[0]
    skew = skew_of(smollm2.model, ids, tmp_path, smollm2.digest)
    for layer, query in zip(skew, queries_of(smollm2.model, ids), strict=True):
        columns = grouped(query, layer.shape[0])
        assert (top_energy(columns @ layer) >= top_energy(columns)).all()
