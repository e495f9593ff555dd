"""The latent attention kernel in TPU interpret mode against the jnp reference, and that against the definition."""

from __future__ import annotations

import importlib.util
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.ragged_batch import STRICT, races_found
from support.kernels.small_kernels import compile_for_tpu

from pagoda.benchmarks.tpu.aot.shapes.latent_attention import SPECS
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.latent_attention import LatentLayout, latent_attention
from pagoda.kernels_pallas.latent_attention.expanded import (
    ExpandedHeads,
    expanded_attention,
    plan_expansion,
    scratch_pages,
)
from pagoda.kernels_pallas.latent_attention.write import write_reference
from pagoda.kernels_pallas.ragged_paged_attention import plan
from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch, make_knobs

TOKENS, SEQS, HEADS, PAGES, MAX_PAGES, LAYER = 48, 8, 3, 48, 6, 1
RANK, ROPE, SCALE = 136, 16, 0.1  # two chunks of lanes for the latent, one for the rotary key
MIXED = [(1, 0), (1, 15), (1, 40), (5, 0), (9, 23), (1, 30), (21, 3)]
"""(new tokens, tokens before) of each sequence; those of one new token that lead are decode rows."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, fetches and passes."""

    class Table(dict):
        def get(self, key, default=None):
            return {"queries": 2 if "decode" in key else 16, "fetch": 16, "tokens": 16}

    monkeypatch.setattr(plan, "_table", lambda: Table())


MOST_BEFORE = 80
"""Tokens of one sequence that are written at once, at most."""


@partial(jax.jit, static_argnums=3)
def write_one(latents: jax.Array, cache: jax.Array, batch: RaggedBatch, layout: LatentLayout) -> jax.Array:
    return write_reference(latents, cache, jnp.int32(LAYER), batch, layout)


def make_case(layout: LatentLayout, seqs: list[tuple[int, int]]) -> tuple[dict[str, Any], np.ndarray]:
    """Return the arguments, everything unused NaN or out of range, and the expected outputs."""
    rng = np.random.default_rng(len(seqs))
    decodes = next((i for i, (new, _) in enumerate(seqs) if new != 1), len(seqs))
    starts = np.full(SEQS + 1, 10**6, np.int32)
    starts[: len(seqs) + 1] = np.cumsum([0] + [new for new, _ in seqs])
    kv_len, table = np.full(SEQS, 10**6, np.int32), np.full((SEQS, MAX_PAGES), 10**6, np.int32)
    q, latents = (np.full(shape, np.nan, np.float32) for shape in ((TOKENS, HEADS, RANK + ROPE), (TOKENS, RANK + ROPE)))
    bits = jnp.float32(np.nan) if layout.packing == 1 else jnp.uint32(0x7FC07FC0)  # words of NaN
    cache, expected = jnp.full(layout.shape(2, PAGES), bits, layout.word_dtype), np.zeros((TOKENS, HEADS, RANK))
    free = list(rng.permutation(PAGES))
    for s, (new, before) in enumerate(seqs):
        rows, kv_len[s] = slice(starts[s], starts[s + 1]), new + before
        q[rows] = rng.normal(size=(new, HEADS, RANK + ROPE))
        full = np.asarray(jnp.asarray(rng.normal(size=(new + before, RANK + ROPE)), layout.dtype), np.float32)
        latents[rows] = full[before:]
        for page in range(-(-(new + before) // layout.page_size)):
            table[s, page] = free.pop()
        for end in sorted({before // 3, before} - {0}):  # in two steps
            start = 0 if end == before // 3 else before // 3
            of_one = [jnp.asarray(x, jnp.int32) for x in ([0, end - start], [end], table[s : s + 1], [0, 1])]
            padded = np.full((MOST_BEFORE, RANK + ROPE), np.nan, np.float32)  # one program for all lengths
            padded[: end - start] = full[start:end]
            cache = write_one(jnp.asarray(padded), cache, RaggedBatch(*of_one), layout)
        rounded = np.asarray(jnp.asarray(q[rows], layout.dtype), np.float32)
        scores = np.einsum("tnc,sc->tns", rounded, full) * SCALE
        seen = np.arange(new + before) <= before + np.arange(new)[:, None]
        weights = np.exp(np.where(seen[:, None], scores, -np.inf))
        expected[rows] = np.einsum("tns,sr->tnr", weights / weights.sum(-1, keepdims=True), full[:, :RANK])
    arrays: dict[str, Any] = {
        "q": jnp.asarray(q, layout.dtype),
        "latents": jnp.asarray(latents, layout.dtype),
        "cache": cache,
        "query_start": jnp.asarray(starts),
        "kv_len": jnp.asarray(kv_len),
        "page_table": jnp.asarray(table),
        "counts": jnp.asarray([decodes, len(seqs)], jnp.int32),
    }
    return arrays, expected


@pytest.mark.parametrize(
    ("dtype", "page_size", "tolerance"),
    [
        pytest.param("float32", 8, 3e-5, marks=pytest.mark.slow_matrix),
        ("bfloat16", 8, 2e-2),
        ("bfloat16", 32, 2e-2),
    ],
)
def test_a_mixed_batch(dtype: str, page_size: int, tolerance: float) -> None:
    check(dtype, page_size, MIXED, tolerance)


@pytest.mark.parametrize("seqs", [[(1, 8), (1, 47), (1, 0)], [(48, 0)], []], ids=str)
def test_batches_of_one_kind(seqs: list[tuple[int, int]]) -> None:
    check("bfloat16", 8, seqs, 2e-2)


@pytest.mark.parametrize("seqs", [[(1, 16), (1, 47), (1, 15), (14, 2), (31, 23)], [(48, 0)]])
def test_tokens_share_words_with_those_half_a_page_before(seqs: list[tuple[int, int]]) -> None:
    check("bfloat16", 32, seqs, 2e-2)


CALLS: dict[tuple[str, int, bool], Any] = {}


def check(dtype: str, page_size: int, seqs: list[tuple[int, int]], tolerance: float) -> None:
    layout = LatentLayout(RANK, ROPE, dtype, page_size)
    arrays, expected = make_case(layout, seqs)
    caches = []
    for use_kernel in (True, False):
        options = {"layout": layout, "layer": LAYER, "scale": SCALE, "interpret": STRICT, "use_kernel": use_kernel}
        call = CALLS.setdefault(
            (dtype, page_size, use_kernel),
            jax.jit(lambda arrays, options=options: latent_attention(**arrays, **options)),
        )
        out, cache = call(arrays)
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=tolerance)
        caches.append(np.asarray(cache).view(np.uint32))
    assert not races_found()
    np.testing.assert_array_equal(*caches)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 3e-5), pytest.param("bfloat16", 5e-2, marks=pytest.mark.slow_matrix)]
)
def test_expanded_heads_attend_as_absorbed_ones(dtype: str, tolerance: float) -> None:
    """The kernel in bfloat16, which has its own pages; the reference in float32. Heads of 12 + 16 and 20 channels."""
    layout, shape = LatentLayout(RANK, ROPE, dtype, 32), ExpandedHeads(HEADS, 12, ROPE, 20)
    arrays, _ = make_case(layout, [(1, 40), (46, 2), (1, 1)])
    rng = np.random.default_rng(1)
    q, kv_up = (
        jnp.asarray(rng.normal(size=size), dtype) for size in ((TOKENS, HEADS, 12 + ROPE), (HEADS, 12 + 20, RANK))
    )
    kv_up = kv_up * RANK**-0.5
    absorbed = jnp.concatenate([jnp.einsum("tnh,nhr->tnr", q[..., :12], kv_up[:, :12]), q[..., 12:]], -1)
    batch = RaggedBatch(*(arrays[name] for name in ("query_start", "kv_len", "page_table", "counts"))).cleaned()
    plan = plan_expansion(batch, TOKENS, layout, shape)
    assert plan is not None
    assert plan.use
    assert plan.count == 2 + 1
    options = {"layout": layout, "use_kernel": dtype == "bfloat16", "interpret": STRICT}
    attend = jax.jit(partial(latent_attention, layer=LAYER, scale=SCALE, **options))
    calls = [{**arrays, "q": absorbed, "expansion": each} for each in (None, plan)]
    (mixed, cache), (decoded, written) = (attend(**call) for call in calls)
    np.testing.assert_array_equal(np.asarray(written).view(np.uint32), np.asarray(cache).view(np.uint32))
    np.testing.assert_array_equal(np.asarray(decoded[0], np.float32), np.asarray(mixed[0], np.float32))
    expected = jnp.einsum("tnr,nvr->tnv", mixed.astype(jnp.float32), kv_up[:, 12:].astype(jnp.float32))
    knobs, layer = make_knobs(SCALE), jnp.int32(LAYER)
    expanded = jax.jit(partial(expanded_attention, heads=shape, chip=CHIPS["v6e"], **options))
    out = expanded(q, kv_up, cache, layer, batch, knobs, plan)
    assert not races_found()
    np.testing.assert_allclose(np.asarray(out[1:48], np.float32), expected[1:48], atol=tolerance)


@pytest.mark.parametrize(
    ("seqs", "expands"),
    [([(40, 100)], True), ([(5, 0)], False), ([(2, 100)], False), ([(1, 9), (1, 9)], False)],
    ids=str,
)
def test_heads_are_expanded_where_that_is_cheaper(seqs: list[tuple[int, int]], expands: bool) -> None:
    layout, shape = LatentLayout(RANK, ROPE, "bfloat16", 32), ExpandedHeads(HEADS, 12, ROPE, 20)
    arrays, _ = make_case(layout, seqs)
    batch = RaggedBatch(*(arrays[name] for name in ("query_start", "kv_len", "page_table", "counts"))).cleaned()
    plan = plan_expansion(batch, TOKENS, layout, shape)
    assert plan is not None
    assert bool(plan.use) is expands
    assert scratch_pages(10**6, SEQS, 10**5, layout, shape) == 0


def test_words_are_unpacked_to_what_was_packed() -> None:
    layout = LatentLayout(RANK, ROPE, "bfloat16", 8)
    assert (layout.width, layout.value_width, layout.rows_per_token) == (384, 256, 2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, RANK + ROPE)), jnp.bfloat16)
    np.testing.assert_array_equal(layout.unpack(layout.pack(x)), x)


@pytest.mark.parametrize(("dtype", "page_size", "bytes_per_token"), [("bfloat16", 128, 1280), ("bfloat16", 16, 1536)])
def test_bytes_of_512_and_64_channels(dtype: str, page_size: int, bytes_per_token: int) -> None:
    layout = LatentLayout(512, 64, dtype, page_size)
    assert layout.bytes_per_page == bytes_per_token * page_size == 4 * math.prod(layout.shape(1, 1))


@pytest.mark.parametrize(("change", "problem"), [({"dtype": "int8"}, "latent dtype"), ({"page_size": 12}, "multiple")])
def test_layouts_that_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LatentLayout(**{"rank": 16, "rope_dim": 8, "dtype": "float32", "page_size": 8, **change})


DEFAULT = ["v6e/latent_attention/decode-2"]
MATRIX = [f"{chip}/latent_attention/{name}" for chip in ("v5e", "v5p", "v6e") for name in SPECS]
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is missing")


def compiles(triples: list[str]) -> None:
    """Each shape, within the chip and with the cache updated in place."""
    for facts in compile_for_tpu(triples):
        chip, _, name = facts["pair"].split("/")
        case = SPECS[name]
        assert facts["alias"] == 4 * math.prod(case.layout.shape(case.layers, case.pages)), facts
        assert 0 < facts["vmem"] <= CHIPS[chip].vmem_bytes, facts


@needs_compiler
def test_shapes_compile_in_place() -> None:
    compiles(DEFAULT)


@needs_compiler
@pytest.mark.tpu_matrix
def test_every_shape_compiles_for_every_chip() -> None:
    compiles([triple for triple in MATRIX if triple not in DEFAULT])
