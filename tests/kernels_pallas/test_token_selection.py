"""Selected tokens and attention to them in TPU interpret mode, against the jnp reference and the definition."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.ragged_batch import STRICT, races_found
from support.kernels.small_kernels import compile_for_tpu

from pagoda.benchmarks.tpu.aot.shapes.selected_attention import SPECS as SELECTED_SPECS
from pagoda.benchmarks.tpu.aot.shapes.token_selection import SPECS
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
from pagoda.kernels_pallas.latent_attention.selected import selected_attention
from pagoda.kernels_pallas.latent_attention.write import store_latents, write_reference
from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch, make_knobs
from pagoda.kernels_pallas.token_selection import marks, select_tokens

TOKENS, SEQS, PAGES, MAX_PAGES, LAYER, TOP = 48, 8, 24, 6, 1, 40
INDEX_HEADS, HEADS, RANK, ROPE, SCALE = 4, 3, 136, 16, 0.1
MIXED = [(1, 0), (1, 39), (1, 150), (5, 0), (9, 140), (1, 30), (21, 130)]
"""(new tokens, tokens before) of each sequence; those of one new token that lead are decode rows."""


@pytest.fixture(autouse=True)
def small_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several fetches per sequence."""
    monkeypatch.setattr(marks, "FETCH_TOKENS", 128)


MOST_BEFORE = 100
"""Tokens of one sequence that are written at once, at most."""


@partial(jax.jit, static_argnums=3)
def write_one(latents: jax.Array, cache: jax.Array, batch: RaggedBatch, layout: LatentLayout) -> jax.Array:
    return write_reference(latents, cache, jnp.int32(LAYER), batch, layout)


class Batch:
    """Sequences in a poisoned cache of each layout, and the numbers that they were made of."""

    def __init__(self, seqs: list[tuple[int, int]], dtype: str, page_size: int, dim: int) -> None:
        rng = np.random.default_rng(len(seqs))
        self.seqs, self.dtype = seqs, dtype
        decodes = next((i for i, (new, _) in enumerate(seqs) if new != 1), len(seqs))
        starts, lengths = np.full(SEQS + 1, 10**6, np.int32), np.full(SEQS, 10**6, np.int32)
        starts[: len(seqs) + 1] = np.cumsum([0] + [new for new, _ in seqs])
        lengths[: len(seqs)] = [new + before for new, before in seqs]
        free = rng.permutation(-(-PAGES * 32 // page_size))
        width = -(-MAX_PAGES * 32 // page_size)
        table, used = np.full((SEQS, width), 10**6, np.int32), 0
        for row, length in zip(table, lengths[: len(seqs)]):
            own = -(-int(length) // page_size)
            row[:own], used = free[used : used + own], used + own
        self.starts, self.lengths = starts, lengths
        counts = np.array([decodes, len(seqs)], np.int32)
        self.batch = RaggedBatch(*map(jnp.asarray, (starts, lengths, table, counts))).cleaned()
        self.keys = LatentLayout(dim, 0, dtype, page_size)
        self.latents = LatentLayout(RANK, ROPE, dtype, page_size)
        self.full = {layout: self.rounded(rng, layout, lengths[: len(seqs)]) for layout in (self.keys, self.latents)}
        self.pages = len(free)
        self.queries = np.asarray(jnp.asarray(rng.integers(-2, 3, (TOKENS, INDEX_HEADS, dim)), dtype))
        self.weights = np.asarray(jnp.asarray(rng.integers(-1, 3, (TOKENS, INDEX_HEADS)), dtype))
        self.heads = np.asarray(jnp.asarray(rng.normal(size=(TOKENS, HEADS, RANK + ROPE)), dtype))

    def rounded(self, rng: np.random.Generator, layout: LatentLayout, lengths: np.ndarray) -> list[np.ndarray]:
        """Return whole numbers, so that scores are exact and many are equal."""
        return [rng.integers(-2, 3, (length, layout.channels)).astype(np.float32) for length in lengths]

    def cache(self, layout: LatentLayout) -> jax.Array:
        """Return the cache before the step."""
        bits = jnp.float32(np.nan) if layout.packing == 1 else jnp.uint32(0x7FC07FC0)  # words of NaN
        cache = jnp.full(layout.shape(2, self.pages), bits, layout.word_dtype)
        for s, ((_, before), full) in enumerate(zip(self.seqs, self.full[layout])):
            for start, end in ((0, before // 3), (before // 3, before)):
                if start < end:
                    table = self.batch.page_table[s : s + 1]
                    one = RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in ([0, end - start], [end], table, [0, 1])))
                    padded = np.full((MOST_BEFORE, layout.channels), np.nan, np.float32)  # one program for all lengths
                    padded[: end - start] = full[start:end]
                    cache = write_one(jnp.asarray(padded), cache, one, layout)
        return cache

    def new(self, layout: LatentLayout) -> jax.Array:
        """Return what the step adds, NaN in its padding."""
        rows = np.full((TOKENS, layout.channels), np.nan, np.float32)
        for s, ((_, before), full) in enumerate(zip(self.seqs, self.full[layout])):
            rows[self.starts[s] : self.starts[s + 1]] = full[before:]
        return jnp.asarray(rows, layout.dtype)

    def selected(self, top: int) -> np.ndarray:
        """Return the definition: bool [tokens, context]."""
        marks = np.zeros((TOKENS, MAX_PAGES * 32), bool)
        for s, (new, before) in enumerate(self.seqs):
            for i in range(new):
                token, seen = self.starts[s] + i, before + i + 1
                keys = self.full[self.keys][s][:seen]
                heads = np.maximum(self.queries[token].astype(np.float32) @ keys.T, 0)
                scores = self.weights[token].astype(np.float32) @ heads
                marks[token, np.argsort(-scores, kind="stable")[:top]] = True
        return marks


@partial(jax.jit, static_argnums=(8, 9))
def step(
    keys: jax.Array,
    latents: jax.Array,
    new_keys: jax.Array,
    new_latents: jax.Array,
    queries: jax.Array,
    weights: jax.Array,
    q: jax.Array,
    batch: RaggedBatch,
    key_layout: LatentLayout,
    use_kernel: bool,
) -> Any:
    """Store keys and latents, select tokens, attend to them: one program for all batches of a layout."""
    options: dict[str, Any] = {"use_kernel": use_kernel, "interpret": STRICT}
    layout, layer = LatentLayout(RANK, ROPE, key_layout.dtype, key_layout.page_size), jnp.int32(LAYER)
    keys = store_latents(new_keys, keys, layer, batch, key_layout, **options)
    latents = store_latents(new_latents, latents, layer, batch, layout, **options)
    shared = {"layer": layer, "batch": batch, "top": TOP, **options}
    selection = select_tokens(queries, weights, keys, layout=key_layout, **shared)
    options |= {"layout": layout, "decode_only": False, "chip": CHIPS["v6e"]}
    knobs = make_knobs(SCALE)
    return keys, latents, selection, selected_attention(q, latents, layer, batch, knobs, selection, **options)


@pytest.mark.parametrize(
    ("dtype", "page_size", "seqs"),
    [
        ("float32", 32, [(1, 150), (37, 30)]),
        ("bfloat16", 32, MIXED),
        ("bfloat16", 32, []),
    ],
)
def test_the_best_tokens_are_selected_and_attended_to(dtype: str, page_size: int, seqs: list[tuple[int, int]]) -> None:
    case = Batch(seqs, dtype, page_size, dim=24)
    expected, outs, stored = case.selected(TOP), [], []
    real, decodes = sum(new for new, _ in seqs), int(case.batch.counts[0])
    queries, weights, q = (jnp.asarray(x, dtype) for x in (case.queries, case.weights, case.heads))
    arrays = (case.cache(case.keys), case.cache(case.latents), case.new(case.keys), case.new(case.latents))
    for use_kernel in (True, False):
        keys, latents, selection, out = step(*arrays, queries, weights, q, case.batch, case.keys, use_kernel)
        chosen = np.asarray(selection.of_tokens(TOKENS, case.batch.counts[0]))[:real, : expected.shape[1]]
        for s, (new, before) in enumerate(seqs):
            rows = slice(case.starts[s], case.starts[s + 1])
            np.testing.assert_array_equal(chosen[rows, : new + before], expected[rows, : new + before])
        outs.append(np.asarray(out, np.float32))
        stored.append([np.asarray(x).view(np.uint32) for x in (keys, latents)])
    assert not races_found()
    assert decodes <= real
    for kernel, reference in zip(*stored):
        np.testing.assert_array_equal(kernel, reference)
    np.testing.assert_array_equal(outs[0][real:], 0)
    attended = np.zeros((real, HEADS, RANK))
    for s, (new, before) in enumerate(seqs):
        rows = slice(case.starts[s], case.starts[s + 1])
        full = case.full[case.latents][s]
        scores = np.einsum("tnc,sc->tns", case.heads[rows].astype(np.float32), full) * SCALE
        weights = np.exp(np.where(expected[rows, None, : new + before], scores, -np.inf))
        attended[rows] = np.einsum("tns,sr->tnr", weights / weights.sum(-1, keepdims=True), full[:, :RANK])
    for out in outs:
        np.testing.assert_allclose(out[:real], attended, atol=3e-5 if dtype == "float32" else 3e-2)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is missing")
@pytest.mark.parametrize(
    "triples",
    [
        ["v6e/token_selection/decode-64", "v6e/selected_attention/mixed-128"],
        pytest.param(
            [
                f"{chip}/{package}/{name}"
                for chip in CHIPS
                for package, specs in (("token_selection", SPECS), ("selected_attention", SELECTED_SPECS))
                for name in specs
            ],
            marks=pytest.mark.tpu_matrix,
        ),
    ],
    ids=["some", "all"],
)
def test_shapes_compile_within_the_chip(triples: list[str]) -> None:
    for facts in compile_for_tpu(triples):
        assert 0 < facts["vmem"] <= CHIPS[facts["pair"].split("/")[0]].vmem_bytes, facts
