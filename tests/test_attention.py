"""The attention function against the matrix written out in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlib import decode_kernels
from kvlib.attention import attention_forward, refuse_extras
from kvlib.caches.view import Pages
from kvlib.kernels import column_mass, explicit_prefill, flash_prefill


def matrix(query: Tensor, key: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Softmax matrix [B, Hq, T, S] in float64 of the last T of S tokens."""
    group, (tokens, stored) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    scores = query.double() @ key.double().repeat_interleave(group, 1).mT * scale
    asking, asked = torch.arange(stored - tokens, stored)[:, None], torch.arange(stored)
    hidden = asked > asking
    if window is not None:
        hidden |= asked <= asking - window
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def random_heads(
    seed: int, batch: int, kv_heads: int, group: int, tokens: int, past: int, size: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, kv_heads * group, tokens, size, generator=generator) * 2
    key, value = torch.randn(2, batch, kv_heads, past + tokens, size, generator=generator)
    return query, key, value


def reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    weights = matrix(query, key, scale, window)
    group = query.shape[1] // key.shape[1]
    out = weights @ value.double().repeat_interleave(group, 1)
    mass = weights.sum(2).unflatten(1, (key.shape[1], group)).sum(2)
    return out, mass


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "batch": st.integers(1, 3),
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 3, 8]),
        "tokens": st.integers(1, 70),
        "past": st.integers(0, 50),
    }
)


@given(shape=shapes, scale=st.sampled_from([1.0, 0.25, 0.05]))
@settings(max_examples=60, deadline=None)
def test_flash_and_its_column_mass_are_the_matrix(shape: dict[str, int], scale: float) -> None:
    query, key, value = random_heads(**shape)
    out, lse = flash_prefill(query, key, value, scale)
    mass = column_mass(query, key, lse, scale)
    expected_out, expected_mass = reference(query, key, value, scale)
    torch.testing.assert_close(out.double(), expected_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mass.double(), expected_mass, atol=1e-4, rtol=1e-5)
    queries = shape["tokens"] * shape["group"]
    assert mass.sum(-1) == pytest.approx(queries, rel=1e-5)  # no attention is lost


@given(
    shape=shapes,
    tile=st.integers(1, 80),
    window=st.one_of(st.none(), st.integers(1, 60)),
)
@settings(max_examples=60, deadline=None)
def test_explicit_tiles_are_the_matrix(
    shape: dict[str, int], tile: int, window: int | None
) -> None:
    query, key, value = random_heads(**shape)
    position = torch.arange(key.shape[2], dtype=torch.int32).expand(key.shape[:3])
    out, mass = explicit_prefill(query, key, value, 0.25, position, tile, window)
    expected_out, expected_mass = reference(query, key, value, 0.25, window)
    torch.testing.assert_close(out.double(), expected_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mass.double(), expected_mass, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("tokens", [767, 1025, 2500])
def test_column_mass_across_tiles(tokens: int) -> None:
    query, key, value = random_heads(0, 1, 1, 2, tokens, past=1030)
    _, lse = flash_prefill(query, key, value, 0.25)
    _, expected = reference(query, key, value, 0.25)
    torch.testing.assert_close(
        column_mass(query, key, lse, 0.25).double(), expected, atol=1e-4, rtol=1e-5
    )


def test_bfloat16_mass_equals_eager_mass() -> None:
    query, key, value = (t.bfloat16() for t in random_heads(0, 1, 3, 3, 300, past=0, size=64))
    _, lse = flash_prefill(query, key, value, 0.125)
    position = torch.arange(300, dtype=torch.int32).expand(1, 3, 300)
    _, eager = explicit_prefill(query, key, value, 0.125, position, tile=300)
    torch.testing.assert_close(column_mass(query, key, lse, 0.125), eager, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("extra", ["s_aux", "softcap", "something_new"])
def test_extras_of_attention_are_refused_by_name(extra: str) -> None:
    with pytest.raises(ValueError, match=extra):
        refuse_extras({extra: 1.0}, dropout=0.0)
    refuse_extras({extra: None}, dropout=0.0)


def test_a_module_that_is_not_attached_is_told_so() -> None:
    module = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="not attached"):
        attention_forward(module, *[torch.zeros(1, 1, 1, 1)] * 3, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_kernels_are_the_matrix(dtype: torch.dtype) -> None:
    query, key, value = (t.to(dtype) for t in random_heads(0, 2, 2, 3, 65, past=30, size=64))
    expected_out, expected_mass = reference(query, key, value, 0.125)
    query, key, value = (t.cuda() for t in (query, key, value))
    out, lse = flash_prefill(query, key, value, 0.125)
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double().cpu(), expected_out, atol=close, rtol=close)
    mass = column_mass(query, key, lse, 0.125).double().cpu()
    torch.testing.assert_close(mass, expected_mass, atol=close, rtol=close)


def pages(key: Tensor, value: Tensor, count: list[int], block: int) -> Pages:
    """The same keys and values [B, Hkv, S, D] in blocks in random order."""
    batch, heads, stored, size = key.shape
    each = -(-stored // block)
    order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(1))
    pools = []
    for tensor in (key, value):
        padded = torch.zeros(batch, each * block, heads, size, dtype=key.dtype, device=key.device)
        padded[:, :stored] = tensor.transpose(1, 2)
        pool = torch.empty(batch * each, block, heads, size, dtype=key.dtype, device=key.device)
        pool[order] = padded.reshape(batch * each, block, heads, size)
        pools.append(pool)
    return Pages(*pools, order.view(batch, each).to(key.device), count)


@given(
    seed=st.integers(0, 999),
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    group=st.sampled_from([1, 3]),
    block=st.sampled_from([1, 4, 16]),
    tile=st.sampled_from([8, 64, 4096]),
)
@settings(max_examples=60, deadline=None)
def test_every_way_to_decode_is_the_matrix(
    seed: int, counts: list[int], group: int, block: int, tile: int
) -> None:
    """Products, the flash kernel, and blocks a tile at a time, on rows of unequal length."""
    query, key, value = random_heads(seed, len(counts), 2, group, 1, max(counts) - 1)
    hidden = torch.arange(max(counts)) >= torch.tensor(counts)[:, None, None]
    products = decode_kernels.decode_weights(query, key, value, 0.25, hidden)[0]
    flash = decode_kernels.decode_flash(query, key, value, 0.25, hidden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernels, "PAGE_TILE", tile)
        blocks = decode_kernels.decode_pages(query, pages(key, value, counts, block), 0.25)
    for b, n in enumerate(counts):
        row = slice(b, b + 1)
        expected, _ = reference(query[row], key[row, :, :n], value[row, :, :n], 0.25)
        for out in (products, flash, blocks):
            torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("block", [16, 256])
def test_cuda_decode_is_the_matrix(block: int) -> None:
    """With flash-attn installed, blocks of 256 go through its block tables."""
    query, key, value = (t.bfloat16() for t in random_heads(0, 2, 2, 3, 1, past=600, size=64))
    expected, _ = reference(query, key, value, 0.125)
    query, key, value = (t.cuda() for t in (query, key, value))
    ways = [decode_kernels.decode_flash(query, key, value, 0.125, None)]
    ways.append(decode_kernels.decode_pages(query, pages(key, value, [601, 601], block), 0.125))
    for out in ways:
        torch.testing.assert_close(out.double().cpu(), expected, atol=2e-2, rtol=2e-2)


def test_namespace_has_no_global_switch() -> None:
    """Importing kvlib registers nothing: only attaching a model does."""
    import subprocess
    import sys

    code = (
        "import kvlib.attachment as a, transformers as t; "
        "assert a.NAME not in t.AttentionInterface._global_mapping; print('clean')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "clean"
