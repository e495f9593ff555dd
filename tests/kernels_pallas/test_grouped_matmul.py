"""Grouped matmul: the kernel in TPU interpret mode, its reference, and the definition one group at a time."""

from __future__ import annotations

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ragged_batch import STRICT, races_found
from support.small_kernels import compile_for_tpu

from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.grouped_matmul import SPECS, grouped_matmul, kernel
from pagoda.kernels_pallas.grouped_matmul.kernel import MatmulBlockSizes, choose_block_sizes, visits

ROWS, GROUPS, PARTS, INNER, OUTER = 70, 6, 2, 64, 256
LAYER = 1
CALLS: dict = {}
PLANNED = jax.jit(lambda sizes: visits(sizes, 240, 16))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernel, "choose_block_sizes", lambda *_: MatmulBlockSizes(rows=16, columns=128, unit=128, depth=32)
    )


def case(sizes: list[int], dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, stack of weights and products; NaN in every row, matrix and layer that must not be read."""
    rng = np.random.default_rng(seed)
    rows = np.array(jnp.asarray(rng.standard_normal((ROWS, INNER)), dtype), np.float32)
    stack = np.array(jnp.asarray(rng.standard_normal((2, GROUPS, PARTS, INNER, OUTER)), dtype), np.float32)
    rows[sum(sizes) :], stack[1 - LAYER] = np.nan, np.nan
    expected, at = np.zeros((PARTS, sum(sizes), OUTER)), 0
    for group, size in enumerate(sizes):
        if size == 0:
            stack[LAYER, group] = np.nan
        expected[:, at : at + size] = np.einsum("mi,pio->pmo", rows[at : at + size], stack[LAYER, group])
        at += size
    return rows, stack, expected


def product(rows: np.ndarray, stack: np.ndarray, sizes: list[int], dtype: str, transposed: bool) -> np.ndarray:
    """Run the kernel; traced once per dtype."""
    key = dtype, transposed
    if key not in CALLS:
        static = {"transposed": transposed, "out_dtype": jnp.float32, "interpret": STRICT}
        CALLS[key] = jax.jit(partial(grouped_matmul, **static))
    weights = jnp.asarray(stack.swapaxes(3, 4) if transposed else stack, dtype)
    actual = CALLS[key](jnp.asarray(rows, dtype), weights, LAYER, jnp.asarray(sizes))
    return np.asarray(actual)[:, : sum(sizes)]


def split(cuts: list[int]) -> list[int]:
    """Sizes between sorted cuts of the rows."""
    return np.diff([0, *sorted(cuts)]).tolist()


@pytest.mark.parametrize(
    "sizes",
    [[10, 0, 30, 5, 0, 20], [0] * 6, [0, 0, ROWS, 0, 0, 0], [16, 16, 16, 16, 6, 0], [0, 1, 0, 0, 0, 1]],
    ids=str,
)
def test_group_sizes(sizes: list[int]) -> None:
    rows, stack, expected = case(sizes, "bfloat16", 1)
    np.testing.assert_allclose(product(rows, stack, sizes, "bfloat16", True), expected, atol=1e-4)
    assert not races_found()


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS).map(split), st.integers(0, 2**31))
def test_random_groups(sizes: list[int], seed: int) -> None:
    rows, stack, expected = case(sizes, "float32", seed)
    np.testing.assert_allclose(product(rows, stack, sizes, "float32", False), expected, atol=1e-4)
    assert not races_found()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_reference_is_the_definition(transposed: bool) -> None:
    sizes = [10, 0, 30, 5, 0, 20]
    rows, stack, expected = case(sizes, "float32", 2)
    rows, weights = np.nan_to_num(rows), np.nan_to_num(stack.swapaxes(3, 4) if transposed else stack)
    arrays = (jnp.asarray(rows), jnp.asarray(weights), LAYER, jnp.asarray(sizes))
    actual = grouped_matmul(*arrays, transposed=transposed, use_kernel=False)
    np.testing.assert_allclose(np.asarray(actual)[:, : sum(sizes)], expected, atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=GROUPS, max_size=GROUPS))
def test_every_row_is_visited_once_by_its_own_group(sizes: list[int]) -> None:
    plan, live = jax.tree.map(np.asarray, PLANNED(jnp.asarray(sizes)))
    filled = np.flatnonzero(sizes).tolist()
    owner = np.full(sum(sizes), -1)
    for v in range(int(live)):
        low, high = max(0, plan.low[v]), min(16, plan.high[v])
        rows = slice(plan.tile[v] * 16 + low, plan.tile[v] * 16 + high)
        assert low < high
        assert (owner[rows] == -1).all()
        owner[rows] = plan.group[v]
        place = filled.index(plan.group[v])
        assert (plan.number[v], plan.following[v]) == (place, filled[(place + 1) % len(filled)])
    assert owner.tolist() == np.repeat(np.arange(GROUPS), sizes).tolist()


def test_an_injected_race_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    one_buffer = kernel.MatmulKernelBody.copy

    def same(self: kernel.MatmulKernelBody, column, group, slot):
        return one_buffer(self, column, group, 0)  # the next weights land in the buffer that is being read

    monkeypatch.setattr(kernel.MatmulKernelBody, "copy", same)
    rows, stack, expected = case([30, 0, 10, 20, 10, 0], "float32", 3)
    arrays = (jnp.asarray(rows), jnp.asarray(stack), LAYER, jnp.asarray([30, 0, 10, 20, 10, 0]))
    try:
        actual = jax.block_until_ready(grouped_matmul(*arrays, interpret=STRICT))
        caught = races_found() or not np.allclose(actual[:, : expected.shape[1]], expected, atol=1e-4)
    except Exception as error:
        caught = "race" in str(error).lower()
    assert caught


@pytest.mark.parametrize("name", ["rows", "weights", "sizes"])
def test_invalid_shapes_are_named(name: str) -> None:
    arrays = {
        "rows": jnp.zeros((8, 32)),
        "weights": jnp.zeros((1, 4, 1, 32, 128)),
        "layer": 0,
        "sizes": jnp.zeros(4, jnp.int32),
    }
    wrong = {"rows": jnp.zeros((8, 33)), "weights": arrays["weights"].astype(jnp.float16), "sizes": jnp.zeros(5)}
    with pytest.raises(ValueError, match=name):
        grouped_matmul(**arrays | {name: wrong[name]})


def test_a_matrix_too_large_for_vmem_is_refused() -> None:
    with pytest.raises(ValueError, match="VMEM"):
        choose_block_sizes(CHIPS["v5p"], 8, 1, 1 << 18, 100, 2)
    assert (
        choose_block_sizes(CHIPS["v5p"], 4096, 8, 4096, 14336, 2).columns
        < choose_block_sizes(CHIPS["v6e"], 4096, 8, 4096, 14336, 2).columns
    )


DEFAULT = ["v6e/grouped_matmul/8x7b-in-t64", "v5e/grouped_matmul/128x0.2b-out-t8", "v5p/grouped_matmul/fp32"]
MATRIX = [f"{chip}/grouped_matmul/{name}" for chip in ("v5e", "v5p", "v6e") for name in SPECS]
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is missing")


def compiles(triples: list[str]) -> None:
    """Each shape, within the chip and without a copy of the weights."""
    for facts in compile_for_tpu(triples):
        chip, _, name = facts["pair"].split("/")
        shape = SPECS[name]
        assert 0 < facts["vmem"] <= CHIPS[chip].vmem_bytes, facts
        weights = 2 * shape.groups * shape.parts * shape.inner * shape.outer
        assert facts["temp"] < max(1 << 20, weights / 16), facts


@needs_compiler
def test_shapes_compile() -> None:
    compiles(DEFAULT)


@needs_compiler
@pytest.mark.tpu_matrix
def test_every_shape_compiles_for_every_chip() -> None:
    compiles([triple for triple in MATRIX if triple not in DEFAULT])
