"""Loading models: what is refused and how, the bundled model's export, random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import kvlib.models
from kvlib import bundled
from kvlib.bundled import bundled_folder
from kvlib.models import (
    TINY,
    Loaded,
    digest_of,
    load,
    shape_config,
    shape_of,
    tiny_config,
)
from kvlib.shapes import MODEL_TYPES, SHAPES, Mixture, Shape

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "near name": (("smolm2",), "did you mean 'smollm2'"),
    "near shape": (("llama-3.2-1b",), "did you mean 'shape:llama-3.2-1b'"),
    "unlike any": (("zzzz",), "unknown model 'zzzz': give 'smollm2', a folder"),
    "tiny": (("tiny:gpt",), "choose from llama, qwen3, mistral, opt, "),
    "shape": (("shape:llama-9",), "perhaps llama-3"),
    "no folder": (("/no/such/folder",), "cannot load model '/no/such/folder'"),
    "no hub here": (("org/name",), "cannot load model 'org/name'"),
    "dtype": (("tiny:llama", "float8"), "float32, bfloat16, float16"),
    "dtype object": (("tiny:llama", torch.int8), "float32, bfloat16, float16"),
    "no dtype at all": (("tiny:llama", "nn"), "float32, bfloat16, float16"),
    "device": (("tiny:llama", "float32", "tpu"), "choose cpu or cuda"),
    "other device": (("tiny:llama", "float32", "mps"), "choose cpu or cuda"),
    "device number": (("tiny:llama", "float32", "cuda:x"), "choose cpu or cuda"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_in_one_line(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        load(*arguments)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA GPU; use device cpu"):
        load("tiny:llama", device="cuda:0")


def test_a_shape_that_cannot_fit_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = SimpleNamespace(available=12 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    make = AutoModelForCausalLM.from_config

    def sizes_only(*arguments: Any, **options: Any) -> Any:
        assert torch.get_default_device().type == "meta", "made"
        return make(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", sizes_only)
    with pytest.raises(ValueError, match=r"needs 15\.0 GiB .* 12\.0 GiB are free"):
        load("shape:llama-3.1-8b", "bfloat16")
    free.available = 10_000
    with pytest.raises(ValueError, match=r"0\.0 GiB are free here"):
        load("tiny:llama")


@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str) -> None:
    before = torch.random.get_rng_state()
    loaded, again = load(f"tiny:{name}", "bfloat16"), load(f"tiny:{name}", torch.bfloat16)
    assert torch.random.get_rng_state().equal(before)
    model = loaded.model
    if name in MODEL_TYPES:
        assert model.num_parameters() == Shape.from_config(tiny_config(name)).parameters
    assert (model.dtype, model.training, loaded.tokenizer) == (torch.bfloat16, False, None)
    twins = zip(model.parameters(), again.model.parameters(), strict=True)
    assert all(one.equal(other) for one, other in twins)
    assert loaded.digest == again.digest != load(f"tiny:{name}", "float32").digest


@pytest.mark.parametrize("name", [n for n, s in SHAPES.items() if not isinstance(s, Mixture)])
def test_shapes_become_models_of_that_size(name: str) -> None:
    shape = SHAPES[name]
    config = shape_config(shape)
    assert Shape.from_config(config, name) == shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == shape.parameters


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and a GGUF file that stands for the bundled one."""
    gguf = tmp_path / "bundled.gguf"
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(bundled, "_bundled_gguf", lambda: gguf)
    monkeypatch.setenv("KVLIB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RuntimeError])
def test_an_interrupted_export_leaves_nothing_and_a_second_try_works(
    monkeypatch: pytest.MonkeyPatch, store: Path, error: type[BaseException]
) -> None:
    def stop(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error("stopped")

    monkeypatch.setattr(bundled, "_export", stop)
    with pytest.raises(error, match="stopped"):
        bundled_folder()
    assert list(store.iterdir()) == []
    made: list[Path] = []

    def export(gguf: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(bundled, "_export", export)
    folder = bundled_folder()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert bundled_folder() == folder
    assert len(made) == 1  # the second call finds it
    assert list(store.iterdir()) == [folder]


def test_two_processes_that_export_at_once(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    def overtaken(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"mine")
        first = store / f"smollm2-{bundled.hash_files([gguf])}"
        first.mkdir()
        (first / "model.safetensors").write_bytes(b"theirs")

    monkeypatch.setattr(bundled, "_export", overtaken)
    folder = bundled_folder()
    assert (folder / "model.safetensors").read_bytes() == b"theirs"
    assert list(store.iterdir()) == [folder]


GATED = (
    "You are trying to access a gated repo.\nMake sure to have access to it at "
    "https://huggingface.co/meta-llama/Llama-3.1-8B.\n401 Client Error. (Request ID: Root=1)"
)


def test_a_gated_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(GATED)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(
        ValueError, match=r"is gated: ask for access at .* `hf auth login`"
    ) as caught:
        load("meta-llama/Llama-3.1-8B")
    assert "\n" not in str(caught.value)


def test_a_folder_whose_name_says_gated_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "delegated-401"
    folder.mkdir()
    with pytest.raises(ValueError, match="safetensors is needed"):
        load(str(folder))


def test_a_folder_is_known_by_its_content(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "hi": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<unk>")),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    model = load("tiny:llama").model
    digests = []
    for name in ("one", "other"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        loaded = load(str(tmp_path / name))
        assert loaded.tokenizer is not None
        assert (loaded.tokenizer.padding_side, loaded.tokenizer.pad_token) == ("left", "</s>")
        digests.append(loaded.digest)
        pairs = zip(model.parameters(), loaded.model.parameters(), strict=True)
        assert all(a.equal(b) for a, b in pairs)
    shutil.copytree(tmp_path / "one", tmp_path / "changed")
    loaded.model.lm_head.weight.data[0, 0] += 1
    loaded.model.save_pretrained(tmp_path / "changed")
    assert digests[0] == digests[1] != load(str(tmp_path / "changed")).digest
    assert "Loading weights" not in capfd.readouterr().err
    for name in ("one", "changed"):
        assert digest_of(str(tmp_path / name)) == load(str(tmp_path / name)).digest
    assert shape_of(str(tmp_path / "one")).parameters == model.num_parameters()


def test_a_digest_and_a_shape_need_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    loaded = [load("tiny:qwen3", dtype).digest for dtype in dtypes]
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda *_, **__: pytest.fail("made"))
    assert [digest_of("tiny:qwen3", dtype) for dtype in dtypes] == loaded
    assert shape_of("tiny:opt").parameters == Shape.from_config(tiny_config("opt")).parameters
    assert shape_of("shape:opt-1.3b") is shape_of("opt-1.3b") is SHAPES["opt-1.3b"]
    assert shape_of("smollm2") is SHAPES["smollm2-135m"]
    with pytest.raises(ValueError, match="no shape is called"):
        shape_of("zzzz")


def test_a_hub_model_is_known_by_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = str(tmp_path / "snapshots" / "0123abc" / "config.json")
    monkeypatch.setattr(kvlib.models, "try_to_load_from_cache", lambda *_: config)
    assert digest_of("org/name") == "0123abc"
    monkeypatch.setattr(kvlib.models, "try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ValueError, match="'org/name' is not on this machine"):
        digest_of("org/name")


@pytest.mark.slow
def test_the_bundled_model_and_its_digits(smollm2: Loaded) -> None:
    assert digest_of("smollm2") == smollm2.digest == bundled_folder().name
    assert shape_of("smollm2").parameters == smollm2.model.num_parameters()
    assert smollm2.model.num_parameters() == SHAPES["smollm2-135m"].parameters
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id is not None
    assert tokenizer.tokenize("40961") == list("40961")
    for text in ("Room 1024, floor 38.", "x=7 y=77"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert max(sum(c.isdigit() for c in tokenizer.decode([i])) for i in ids) == 1


def test_a_mixture_of_experts_is_for_the_cost_model_only() -> None:
    with pytest.raises(ValueError, match="gpt-oss-20b is known to the cost model only"):
        load("shape:gpt-oss-20b")
