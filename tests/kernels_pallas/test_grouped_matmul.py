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
from support.kernels.ragged_batch import STRICT, races_found
from support.kernels.small_kernels import compile_for_tpu

from pagoda.benchmarks.tpu.aot.shapes.grouped_matmul import SPECS
from pagoda.common.weights.quantization.schemes import E2M1
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul, kernel
from pagoda.kernels_pallas.grouped_matmul.kernel import MatmulBlockSizes, choose_block_sizes, for_quantized, visits
from pagoda.kernels_pallas.grouped_matmul.quantized import CODES, PER_WORD, QuantizedWeights, packed

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


EXPERTS = 4
"""Groups of quantised weights."""

QUANTISED = {
    "int8": ("int8", None, None),
    "int8-shifted": ("int8", 128, None),
    "float8": ("float8_e4m3b11fnuz", 128, None),
    "int4": ("int4", 128, None),
    "int4-shifted": ("int4", 128, None),
    "int4-whole": ("int4", None, None),
    "int4-scaled": ("int4", 32, 256),
    "int4-scaled-shifted": ("int4", 32, 256),
    "e2m1": ("e2m1", 32, 256),
    "e2m1-small": ("e2m1", 16, 128),
}
"""Numbers, inputs per scale, and inputs of a chunk of weights that are scaled before the product."""


def quantised(name: str, inner: int) -> QuantizedWeights:
    """Weights [2, EXPERTS, PARTS, inner, OUTER] of random numbers."""
    kind, group, _ = QUANTISED[name]
    rng, stack = np.random.default_rng(5), (2, EXPERTS, PARTS)
    scales = jnp.asarray(rng.uniform(0.5, 1.5, (*stack, inner // (group or inner), OUTER)), jnp.float32)
    shifts = jnp.asarray(rng.integers(-8, 8, scales.shape), jnp.float32) if "shifted" in name else None
    if kind in CODES:
        numbers = packed(jnp.asarray(rng.integers(16, size=(*stack, inner, OUTER))))
    elif kind == "int8":
        numbers = jnp.asarray(rng.integers(-127, 128, (*stack, inner, OUTER)), jnp.int8)
    else:
        numbers = jnp.asarray(rng.standard_normal((*stack, inner, OUTER)), kind)
    return QuantizedWeights(numbers, scales, shifts, kind, group or inner)


def shape_of_quantised(name: str, inner: int) -> QuantizedWeights:
    """The same without numbers."""
    kind, group, _ = QUANTISED[name]
    rows = inner // PER_WORD if kind in CODES else inner
    numbers = jax.ShapeDtypeStruct((2, EXPERTS, PARTS, rows, OUTER), jnp.uint32 if kind in CODES else kind)
    return QuantizedWeights(numbers, None, None, kind, group or inner)


def dequantised(weights: QuantizedWeights) -> np.ndarray:
    """The values of layer LAYER in float64, from the definition of the numbers."""
    numbers = np.asarray(weights.numbers[LAYER])
    if weights.kind in CODES:
        nibbles = (numbers[:, :, :, None] >> (4 * np.arange(8, dtype=np.uint32))[:, None]) & 15
        codes = nibbles.reshape(*numbers.shape[:2], -1, OUTER)
        numbers = codes.astype(np.int64) - 8 if weights.kind == "int4" else E2M1[codes]
    groups = weights.scales.shape[3]
    wide = numbers.astype(np.float64).reshape(EXPERTS, PARTS, groups, -1, OUTER)
    wide = wide if weights.shifts is None else wide + np.asarray(weights.shifts[LAYER])[:, :, :, None]
    return (wide * np.asarray(weights.scales[LAYER], np.float64)[:, :, :, None]).reshape(EXPERTS, PARTS, -1, OUTER)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in QUANTISED), ("int4", "float32"), ("e2m1", "float32")]
)
def test_quantised_weights(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and its reference against float64. Scaling weights rounds them to the dtype of the rows."""
    kind, _, scaled = QUANTISED[name]
    inner, sizes = 512, [10, 0, 30, 5]
    blocks = MatmulBlockSizes(16, 128, 128, scaled or 256, scales_weights=scaled is not None)
    monkeypatch.setattr(kernel, "for_quantized", lambda *_: blocks)
    weights = quantised(name, inner)
    rows = jnp.asarray(np.random.default_rng(6).standard_normal((ROWS, inner)), dtype)
    values, owner = dequantised(weights), np.repeat(np.arange(EXPERTS), sizes)
    expected = np.einsum("mi,mpio->pmo", np.asarray(rows, np.float64)[: len(owner)], values[owner])
    size = np.einsum("mi,mpio->pmo", np.abs(np.asarray(rows, np.float64))[: len(owner)], np.abs(values[owner]))
    arrays = rows, weights, LAYER, jnp.asarray(sizes)
    ours = np.asarray(jax.jit(partial(grouped_matmul, out_dtype=jnp.float32, interpret=True))(*arrays))
    rounded = dtype == "bfloat16" and scaled is not None
    close = 2**-7 if rounded else 2**-16 if kind == "int4" else 2**-20  # int4: 136 is subtracted from the sums
    assert (np.abs(ours[:, : len(owner)] - expected) <= size * close).all()
    theirs = np.asarray(jax.jit(partial(grouped_matmul, out_dtype=jnp.float32, use_kernel=False))(*arrays))
    assert (np.abs(theirs[:, : len(owner)] - expected) <= size * 2**-20).all()


def test_products_of_whole_numbers_are_exact() -> None:
    weights = quantised("int8", 256)
    rows = jnp.asarray(np.random.default_rng(7).integers(-127, 128, (ROWS, 256)), jnp.int8)
    sizes = [10, 0, 35, 25]
    owner = np.repeat(np.arange(EXPERTS), sizes)
    sums = np.einsum("mi,mpio->pmo", np.asarray(rows, np.int64), np.asarray(weights.numbers[LAYER], np.int64)[owner])
    expected = sums * np.asarray(weights.scales[LAYER])[owner, :, 0].swapaxes(0, 1)
    ours = grouped_matmul(rows, weights, LAYER, jnp.asarray(sizes), out_dtype=jnp.float32, interpret=True)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_block_sizes_of_quantised_weights() -> None:
    """A chunk has whole groups, and divides the inputs; scales of scaled weights begin at a multiple of 8 rows."""
    blocks = choose_block_sizes(CHIPS["v6e"], 64, 1, 4096, 14336, 1)
    for name in QUANTISED:
        for chip in ("v5e", "v6e"):
            weights = shape_of_quantised(name, 4096)
            chosen = for_quantized(blocks, weights, jnp.bfloat16, CHIPS[chip])
            assert chosen.depth % min(weights.group, chosen.depth) == 0
            assert 4096 % chosen.depth == 0
            if chosen.scales_weights:
                assert chosen.depth // weights.group % 8 == 0


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


DEFAULT = [
    *("v6e/grouped_matmul/8x7b-in-t64", "v5e/grouped_matmul/128x0.2b-out-t8", "v5p/grouped_matmul/fp32"),
    *(
        "v6e/grouped_matmul/int4-g128-shifted-t64",
        "v7x/grouped_matmul/e2m1-g32-t16",
        "v5e/grouped_matmul/int4-g128-t64",
    ),
    "v5p/grouped_matmul/int8-t64",
]
MATRIX = [
    f"{chip}/grouped_matmul/{name}"
    for chip in ("v5e", "v5p", "v6e", "v7x")
    for name, case in SPECS.items()
    if case.kind is not None or chip != "v7x"
    if case.kind is None or not case.kind.startswith("float8") or case.kind == CHIPS[chip].float8
]
COPIES_SCALES = {"v5p/grouped_matmul/128x0.2b-int4-out"}
"""Where XLA copies the scales of all layers in each call, since 6 of them in a column do not fill its tiles of 8."""
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is missing")


def compiles(triples: list[str]) -> None:
    """Each shape, within the chip and without a copy of the weights.

    A copy of the rows is allowed: int4 has them in another order, 2.4 MB for 256 rows of 4096 columns.
    """
    faults = []
    for facts in compile_for_tpu(triples):
        chip, _, name = facts["pair"].split("/")
        is_small = facts["temp"] < max(1 << 21, SPECS[name].weight_bytes / 8)
        if not 0 < facts["vmem"] <= CHIPS[chip].vmem_bytes or is_small == (facts["pair"] in COPIES_SCALES):
            faults.append(facts)
    assert not faults


@needs_compiler
def test_shapes_compile() -> None:
    compiles(DEFAULT)


@needs_compiler
@pytest.mark.tpu_matrix
def test_every_shape_compiles_for_every_chip() -> None:
    compiles([triple for triple in MATRIX if triple not in DEFAULT])
