"""The blocks that an indexer selects and attention to them: interpreted kernels against the jnp references."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.ragged_batch import STRICT, races_found
from support.kernels.small_kernels import compile_for_tpu

from pagoda.benchmarks.tpu.aot.shapes.block_selection import SPECS
from pagoda.kernels_pallas import block_selection
from pagoda.kernels_pallas.block_selection import BlockRule, attend_to_blocks, kernel, select_blocks, store_heads
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.latent_attention import LatentLayout
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch, make_knobs

CASES: dict[str, tuple[PagedKvLayout, BlockRule]] = {
    "blocks of two pages": (PagedKvLayout(2, 128, "float32", 8), BlockRule(16, 3, 2)),
    "pages of two blocks": (PagedKvLayout(2, 128, "bfloat16", 32), BlockRule(16, 4, 1)),
    "heads that share words": (PagedKvLayout(3, 64, "bfloat16", 16), BlockRule(16, 2, 1)),
}
LENGTHS, NEW = [1, 70, 90, 9], [1, 1, 5, 9]
"""Tokens of each sequence, and those of the step, after which one token is padding."""
GROUP, CHANNELS = 2, 24


def step(case: str, *, decode: bool) -> dict[str, Any]:
    """Return the arguments of a step, over scattered pages of caches that are NaN where no token is."""
    layout, rule = CASES[case]
    page, rng = layout.page_size, np.random.default_rng(0)
    lengths, new = (LENGTHS[:2], NEW[:2]) if decode else (LENGTHS, NEW)
    columns = -(-max(LENGTHS) // page)
    tables = rng.permutation(len(lengths) * columns).astype(np.int32).reshape(len(lengths), columns)
    index = LatentLayout(CHANNELS, 0, layout.dtype, page)
    keys = rng.standard_normal((tables.size * page, CHANNELS), np.float32)
    values = rng.standard_normal((2, tables.size * page, layout.kv_heads, layout.head_dim), np.float32)
    at = [table[n // page] * page + n % page for table, length in zip(tables, lengths) for n in range(length)]
    unused = np.setdiff1d(np.arange(tables.size * page), at)
    keys[unused], values[:, unused] = np.nan, np.nan
    starts = np.concatenate([[0], np.cumsum(new), [sum(new)]]).astype(np.int32)
    batch = RaggedBatch(
        jnp.asarray(starts),
        jnp.asarray([*lengths, 0], jnp.int32),
        jnp.asarray(np.concatenate([tables, tables[:1]])),
        jnp.asarray([len(new) if decode else 0, len(new)], jnp.int32),
    ).cleaned()
    tokens = sum(new) + 1
    narrow = layout.compute_dtype
    return {
        "queries": jnp.asarray(rng.standard_normal((tokens, layout.kv_heads, CHANNELS)), narrow),
        "q": jnp.asarray(rng.standard_normal((tokens, layout.kv_heads * GROUP, layout.head_dim)), narrow),
        "keys": pages_of(index, jnp.asarray(keys)),
        "cache": pages_of(layout, *map(jnp.asarray, values)),
        "new": jnp.asarray(rng.standard_normal((2, tokens, layout.kv_heads, layout.head_dim)), narrow),
        "batch": batch,
        "layouts": (layout, index),
        "rule": rule,
    }


@partial(jax.jit, static_argnums=0)
def pages_of(layout: LatentLayout | PagedKvLayout, *numbers: jax.Array) -> jax.Array:
    """Numbers of P * B tokens -> the second of two layers [2, P, ...]; the first is all ones."""
    words = layout.pack(*numbers)
    pages = words.reshape(-1, layout.page_size, *words.shape[1:]).swapaxes(1, 2)
    if layout.sections == 2:
        half = layout.page_size // 2
        pages = pages[..., :half, :] | pages[..., half:, :] << 16
    return jnp.stack([jnp.ones_like(pages), pages])


def run(arguments: dict[str, Any], *, decode: bool, **options: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the selected blocks, the attention to them, and the cache with new keys and values."""
    (layout, index), rule = arguments["layouts"], arguments["rule"]
    knobs = make_knobs(0.1)

    @jax.jit
    def both(
        queries: jax.Array, keys: jax.Array, q: jax.Array, new: jax.Array, cache: jax.Array, batch: RaggedBatch
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        shared: dict[str, Any] = {"layer": jnp.int32(1), "batch": batch, "rule": rule, **options}
        selected = select_blocks(queries, keys, layout=index, decode_only=decode, **shared)
        cache = store_heads(*new, cache, jnp.int32(1), batch, layout, **options)
        return selected, *attend_to_blocks(q, cache, selected, layout=layout, knobs=knobs, **shared)

    return both(*(arguments[name] for name in ("queries", "keys", "q", "new", "cache", "batch")))


@pytest.mark.parametrize(
    ("case", "decode"), [*((case, False) for case in CASES), ("blocks of two pages", True)], ids=[*CASES, "decode"]
)
def test_the_kernels_compute_what_the_references_do(case: str, decode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two blocks; decode in two calls, of three sequences of 6 pages each, the last two of padding."""
    monkeypatch.setattr(kernel, "MIN_BLOCKS", 2)
    if decode:
        monkeypatch.setattr(block_selection, "MAX_TABLE", 18)
    arguments = step(case, decode=decode)
    want, attended, stored = run(arguments, decode=decode, use_kernel=False)
    got, ours, cache = run(arguments, decode=decode, interpret=STRICT)
    assert not races_found()
    real = int(arguments["batch"].query_start[-1])
    np.testing.assert_array_equal(got[:real], want[:real])
    np.testing.assert_array_equal(cache, stored)
    tolerance = 2e-5 if arguments["layouts"][0].dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.float32(ours), np.float32(attended), atol=tolerance)
    assert not np.float32(ours)[real:].any()
    assert np.float32(attended)[:real].std() > 0.1


def test_the_references_attend_to_the_best_blocks() -> None:
    """By the formulas, for a token of a sequence with more blocks than are selected."""
    arguments = step("blocks of two pages", decode=False)
    (layout, index), rule = arguments["layouts"], arguments["rule"]
    selected, attended, cache = run(arguments, decode=False, use_kernel=False)
    token, position = 4, LENGTHS[2] - NEW[2] + 2
    pages = arguments["batch"].page_table[2]
    keys = index.unpack_pages(arguments["keys"][1, pages])[0][: position + 1, 0]
    k, v = (each[: position + 1] for each in layout.unpack_pages(cache[1, pages]))
    own = position // rule.tokens
    scores = np.einsum("kh,ch->kc", arguments["queries"][token], keys)
    for head in range(layout.kv_heads):
        best = [scores[head, block * rule.tokens : (block + 1) * rule.tokens].max() for block in range(own - 1)]
        chosen = sorted([int(np.argmax(best)), own - 1, own])
        assert selected[token, head].tolist() == chosen
        seen = np.isin(np.arange(position + 1) // rule.tokens, chosen)
        heads = arguments["q"][token, head * GROUP : (head + 1) * GROUP]
        weights = jax.nn.softmax(jnp.where(seen, 0.1 * heads @ k[:, head].T, -jnp.inf))
        np.testing.assert_allclose(attended[token, head * GROUP : (head + 1) * GROUP], weights @ v[:, head], atol=2e-5)


def test_queries_that_see_few_blocks_select_all() -> None:
    """Of six blocks in the page table; a query at token 69 sees five."""
    arguments = step("blocks of two pages", decode=False)
    rule = replace(arguments["rule"], top=20)
    selected, *_ = run(arguments | {"rule": rule}, decode=False, use_kernel=False)
    assert selected.shape[2] == 6
    assert selected[1, 0].tolist() == [*range(5), 6]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is missing")
@pytest.mark.parametrize(
    "triples",
    [
        ["v6e/block_selection/decode-1kv", "v5e/block_selection/mixed-pages-of-256"],
        pytest.param(
            [f"{chip}/block_selection/{name}" for chip in CHIPS for name in SPECS], marks=pytest.mark.tpu_matrix
        ),
    ],
    ids=["some", "all"],
)
def test_shapes_compile_within_the_chip(triples: list[str]) -> None:
    for facts in compile_for_tpu(triples):
        assert 0 < facts["vmem"] <= CHIPS[facts["pair"].split("/")[0]].vmem_bytes, facts
