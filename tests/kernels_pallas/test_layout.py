"""Packing of K and V into words; the reference against the definition."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.ragged_batch import Limits, attention, make_case
from support.suite.slow_matrix import thinned

from pagoda.kernels_pallas.chips import CHIPS, chip_of
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout, ragged_paged_attention
from pagoda.kernels_pallas.ragged_paged_attention.layout import CACHE_DTYPES

LIMITS = Limits()


@partial(jax.jit, static_argnums=0)
def round_trip(layout: PagedKvLayout, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the words of K and V, and what they are unpacked to."""
    words = layout.pack(k, v)
    return words, layout.unpack(words)


SHAPES = [(1, 128), (3, 64), (2, 80), (5, 256), (3, 16), (1, 192)]
TYPES = list(CACHE_DTYPES)


@thinned(  # float32 and int8, whose words hold one number and four, with all shapes, the others in turn
    lambda dtype, shape: dtype in ("float32", "int8") or (TYPES.index(dtype) + SHAPES.index(shape)) % 3 == 0,
    dtype=TYPES,
    shape=SHAPES,
)
def test_unpack_inverts_pack(dtype: str, shape: tuple[int, int]) -> None:
    heads, width = shape
    layout = PagedKvLayout(heads, width, dtype, 16)
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(7, heads, width)) * 9, jnp.float32) for _ in "kv")
    words, whole = round_trip(layout, k, v)
    assert words.shape == (7, layout.rows_per_token, 128)
    assert words.dtype == layout.word_dtype
    narrow = PagedKvLayout(heads, width, dtype, 16, width * 2 // 3)
    _, (first, second) = round_trip(narrow, k, v[..., : narrow.value_dim])
    assert (narrow.rows_per_token < layout.rows_per_token) == (width == 192 and dtype == "float32")
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (first, whole[0])))
    unpacked = whole[1][..., : narrow.value_dim]
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (second, unpacked)))
    for stored, x in zip(whole, (k, v)):
        kept = jnp.round(x) if dtype == "int8" else x
        np.testing.assert_array_equal(np.asarray(stored, np.float32), np.asarray(kept.astype(dtype), np.float32))


def test_bytes_per_page() -> None:
    layout = PagedKvLayout(8, 128, "bfloat16", 128)
    assert layout.bytes_per_page == 128 * 8 * 128 * 2 * 2
    assert layout.shape(2, 3) == (2, 3, 8, 128, 128)
    assert PagedKvLayout(8, 64, "bfloat16", 128).bytes_per_page == layout.bytes_per_page // 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [((1, 128, "float16", 16), "float16"), ((0, 128, "int8", 16), "kv_heads"), ((1, 128, "int8", 12), "multiple of 8")],
)
def test_invalid_layouts(fields: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedKvLayout(*fields)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"window": 5},
        {"softcap": 3.0},
        {"sinks": np.linspace(-2, 2, 6).astype(np.float32)},
        {"slopes": np.linspace(0.1, 1, 6).astype(np.float32)},
    ],
    ids=lambda knobs: next(iter(knobs), "plain"),
)
def test_the_reference_is_the_definition(knobs: dict) -> None:
    layout = PagedKvLayout(3, 64, "float32", 16)
    seqs = [(1, 0), (1, 50), (7, 0), (1, 3), (20, 11)]
    case = make_case(layout, 2, seqs, limits=LIMITS, seed=3, **knobs)
    out, _ = attention(layout, use_kernel=False)(case.arrays, knobs)
    np.testing.assert_allclose(np.asarray(out), case.expected, atol=1e-5)


def test_scales_are_applied() -> None:
    layout = PagedKvLayout(2, 128, "int8", 16)
    case = make_case(layout, 2, [(4, 0)], limits=LIMITS, seed=0)
    arrays = case.arrays | {"k": case.arrays["k"] * 0.5, "v": case.arrays["v"] * 0.25}
    plain, first = attention(layout, use_kernel=False)(case.arrays, {})
    out, second = attention(layout, use_kernel=False)(
        arrays | {"q": case.arrays["q"] * 2}, {"k_scale": 0.5, "v_scale": 0.25}
    )
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
    np.testing.assert_allclose(np.asarray(out, np.float32) * 4, np.asarray(plain, np.float32), rtol=1e-2)


@pytest.mark.parametrize("field", ["k", "cache", "query_start", "page_table", "counts"])
def test_invalid_shapes_are_named(field: str) -> None:
    layout = PagedKvLayout(2, 128, "float32", 16)
    arrays = make_case(layout, 2, [(1, 0)], limits=LIMITS, seed=0).arrays
    wrong = arrays[field][..., :1] if field == "counts" else arrays[field][1:, ...]
    wrong = wrong[:, 1:] if field == "cache" else wrong
    wrong = wrong[:, :, :1] if field == "cache" else wrong
    with pytest.raises(ValueError, match=field):
        ragged_paged_attention(**arrays | {field: wrong}, layout=layout, layer=0, scale=1.0, use_kernel=False)


def test_a_page_table_beyond_scalar_memory_is_refused() -> None:
    layout = PagedKvLayout(1, 128, "bfloat16", 16)
    limits = Limits(tokens=8, seqs=8, max_pages=20_000)
    arrays = make_case(layout, 1, [(1, 0)], limits=limits, seed=0).arrays
    with pytest.raises(ValueError, match="scalar memory"):
        ragged_paged_attention(**arrays, layout=layout, layer=0, scale=1.0)


def test_chips_by_their_device_kind() -> None:
    assert chip_of("TPU v6 lite") is CHIPS["v6e"]
    with pytest.raises(ValueError, match="TPU v2"):
        chip_of("TPU v2")
