"""Products with matrices as checkpoints hold them: values, bytes, kernels, rounded activations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.checkpoints.random_stored import FLOAT8_STORED, INT8_STORED, STORED, Stored
from support.suite.slow_matrix import thinned

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.linear import scaled_linear
from pagoda.backends.torch_cuda.kernels.linear.packed_linear import packed_linear
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import quantize_rows_reference
from pagoda.backends.torch_cuda.kernels.linear.scaled_linear import kernel, multiplies, quantized_input
from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix, pack, unpack
from pagoda.backends.torch_cuda.kernels.linear.weight_only import kernel as weight_only
from pagoda.backends.torch_cuda.schemes import packed_scheme
from pagoda.backends.torch_cuda.weights.quantized_layout import as_scheme, form_of, write
from pagoda.common.errors import WeightError
from pagoda.common.weights.gguf.dequantize import block_type
from pagoda.common.weights.quantization.schemes import Blocks
from pagoda.common.weights.quantization.tensors import QuantizedTensor

CHIP = CHIPS["sm_90"]
INPUTS = 384
ROWS = (128, 57)
"""Outputs of the two parts of a fused matrix."""


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)


def parts_of(stored: Stored, inputs: int = INPUTS) -> list[QuantizedTensor]:
    return [stored.tensor(outputs, inputs, seed) for seed, outputs in enumerate(ROWS)]


def packed_of(parts: Sequence[QuantizedTensor]) -> PackedMatrix:
    names = {packed_scheme(part.scheme, experts=False) for part in parts}
    scheme = "int8" if len(names) > 1 else names.pop()
    assert scheme is not None
    firsts = np.cumsum([0, *(part.shape[0] for part in parts)])
    placed = [(int(first), as_scheme(part, scheme)) for first, part in zip(firsts, parts)]
    matrix = form_of(scheme, placed).allocate((int(firsts[-1]), parts[0].shape[1]), poisoned)
    for first, part in placed:
        write(matrix, first, part)
    return matrix


ROUNDED = ("int8-groups", "int4-offsets")
"""Those with scales or offsets that no 16 bits hold."""


def exact(packed: PackedMatrix) -> torch.Tensor:
    """The values, columns in the order of the inputs, float64."""
    values = unpack(packed).double()
    if packed.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, packed.order.long(), values)


def ordered(parts: Sequence[QuantizedTensor]) -> torch.Tensor:
    """The values, columns in the order of the numbers."""
    values = torch.from_numpy(np.concatenate([part.dequantize() for part in parts]))
    return values if parts[0].order is None else values[:, torch.from_numpy(parts[0].order).long()]


@pytest.mark.parametrize("name", STORED)
def test_values_are_the_checkpoints(name: str) -> None:
    parts = parts_of(STORED[name])
    packed = packed_of(parts)
    largest = max([0, *(np.abs(part.offsets).max() for part in parts if part.offsets is not None)])
    atol = float(largest) * 2**-11 if name in ROUNDED else 1e-7
    torch.testing.assert_close(unpack(packed), ordered(parts), rtol=1e-6, atol=atol)
    assert torch.equal(unpack(packed.channels(128, 185)), unpack(packed)[128:])
    want = np.concatenate([part.dequantize() for part in parts])
    torch.testing.assert_close(exact(packed).float(), torch.from_numpy(want), rtol=1e-6, atol=atol)


BITS = {
    **{"fp8-tensor": 8, "fp8-channel": 8, "fp8-blocks": 8, "int8-channel": 8, "int8-static": 8},
    **{"int8-groups": 8 + 32 / 32, "int4": 4 + 16 / 128, "int4-zeros": 4 + 24 / 32, "int4-offsets": 4 + 32 / 64},
    **{"mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16, "nf4": 4 + 16 / 64, "fp4": 4 + 16 / 64},
}
"""Per weight, without what each row or matrix has once."""


@pytest.mark.parametrize("name", BITS)
def test_bytes_in_memory(name: str) -> None:
    packed = packed_of(parts_of(STORED[name], 512))
    numbers = packed.outputs * packed.inputs
    assert BITS[name] <= 8 * packed.num_bytes / numbers < BITS[name] + 0.15


TYPES = {
    "Q4_0": (2, "int4", 32, torch.float16, None),
    "Q4_1": (3, "int4", 32, torch.float16, torch.float16),
    "Q8_0": (8, "int8", 32, torch.float16, None),
    "Q2_K": (10, "int4", 16, torch.float16, torch.float16),
    "Q3_K": (11, "int4", 16, torch.float16, None),
    "Q4_K": (12, "int4", 32, torch.float16, torch.float16),
    "IQ2_XXS": (16, "int8", 32, torch.float16, None),
    "IQ2_XS": (17, "int8", 16, torch.float16, None),
    "IQ3_XXS": (18, "int8", 32, torch.float16, None),
    "IQ1_S": (19, "int8", 32, torch.float16, None),
    "IQ4_NL": (20, "int8", 32, torch.float16, None),
    "IQ3_S": (21, "int8", 32, torch.float16, None),
    "IQ2_S": (22, "int8", 16, torch.float16, None),
    "IQ4_XS": (23, "int8", 32, torch.float16, None),
    "IQ1_M": (29, "int8", 16, torch.float16, None),
    "TQ1_0": (34, "int4", 128, torch.float16, None),
    "TQ2_0": (35, "int4", 128, torch.float16, None),
    "NVFP4": (40, "nvfp4", 16, torch.uint8, None),
    "Q1_0": (41, "int4", 128, torch.float16, None),
}
"""ggml's number of a type, and what the matrix becomes."""

SAME_SIZE = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "NVFP4")


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_of_ggml(kind: str) -> None:
    number, *form = TYPES[kind]
    parts = parts_of(Stored(Blocks(block_type(number))), 512)
    packed = packed_of(parts)
    offset = None if packed.offset is None else packed.offset.dtype
    assert [packed.scheme, packed.group, packed.scale.dtype, offset] == form
    want = ordered(parts)
    error = (unpack(packed) - want).abs().max() / want.abs().max()
    assert error < (2**-10 if kind.endswith(("1", "K", "_XS", "_S", "_M", "_XXS")) else 2e-6)
    bits = 8 * packed.num_bytes / (packed.outputs * packed.inputs)
    if kind in SAME_SIZE:
        assert packed.num_bytes <= 1.15 * sum(part.data.nbytes for part in parts), bits
    else:
        assert bits < (9.1 if packed.scheme == "int8" else 6.1)


def test_numbers_of_4_bits_become_wider_beside_those_of_8() -> None:
    parts = [STORED["int4-zeros"].tensor(64, INPUTS), STORED["int8-groups"].tensor(32, INPUTS)]
    packed = packed_of(parts)
    assert (packed.scheme, packed.group) == ("int8", 32)
    torch.testing.assert_close(unpack(packed), ordered(parts), rtol=1e-6, atol=2**-11)  # of offsets up to 2


def x_of(rows: int, dtype: torch.dtype, inputs: int = INPUTS) -> torch.Tensor:
    """Rows with NaN between and behind them."""
    padded = torch.full((rows + 1, inputs + 16), float("nan"), dtype=dtype)
    padded[:rows, :inputs] = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    return padded[:rows, :inputs]


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize(("rows", "dtype"), [(3, torch.float32), (20, torch.float16), (64, torch.float32)])
def test_few_rows_are_multiplied_as_they_are(name: str, rows: int, dtype: torch.dtype) -> None:
    parts, x = parts_of(STORED[name]), x_of(rows, dtype)
    packed, bias = packed_of(parts), torch.randn(sum(ROWS)).to(dtype)
    product = x.double() @ exact(packed).T
    for given, want in ((None, product), (bias, product + bias.double())):
        atol = want.abs().max().item() * (3e-6 if dtype == torch.float32 else 1e-3)
        actual = packed_linear(x, packed, given, use_kernel=True, chip=CHIP)
        torch.testing.assert_close(actual.double(), want, rtol=0, atol=2 * atol if dtype == torch.float16 else atol)
        definition = packed_linear(x, packed, given, use_kernel=False, chip=CHIP)
        torch.testing.assert_close(definition.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [name for name in STORED if name not in (*FLOAT8_STORED, *INT8_STORED)])
def test_many_rows_by_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only, "SCRATCH", 100 * INPUTS * 4)
    parts, x = parts_of(STORED[name]), x_of(70, torch.float32)
    packed = packed_of(parts)
    actual = packed_linear(x, packed, None, use_kernel=True, chip=CHIP)
    want = x.double() @ exact(packed).T
    torch.testing.assert_close(actual.double(), want, rtol=0, atol=3e-6 * want.abs().max().item())


ROUNDED_STORED = [*FLOAT8_STORED, *INT8_STORED]


@thinned(
    lambda name, dtype: ROUNDED_STORED.index(name) % 2 == (dtype == torch.float16),
    name=ROUNDED_STORED,
    dtype=[torch.float32, torch.float16],
)
def test_many_rows_are_rounded(name: str, dtype: torch.dtype) -> None:
    """Exactly as the definition says: the product itself adds float32's rounding, that of int8 none."""
    rows, inputs = (70, 384) if dtype == torch.float32 else (131, 300)
    parts, x = parts_of(STORED[name], inputs), x_of(rows, dtype, inputs)
    packed, bias = packed_of(parts), torch.randn(sum(ROWS)).to(dtype)
    assert multiplies(packed, CHIP)
    activations = packed.activations
    assert activations is not None
    group = packed.group if packed.group and isinstance(activations.group, int) else None
    rounded = quantize_rows_reference(x, activations.numbers, group=group, scale=packed.input_scale)
    values = rounded.values(group).double()
    assert (values - x.double()).abs().max() > 1e-3
    product = values @ torch.from_numpy(np.concatenate([part.dequantize() for part in parts])).double().T
    for given, want in ((None, product), (bias, product + bias.double())):
        atol = want.abs().max().item() * (3e-6 if dtype == torch.float32 else 1e-3)
        for use_kernel in (True, False):
            actual = packed_linear(x, packed, given, use_kernel=use_kernel, chip=CHIP)
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.double(), want, rtol=0, atol=atol)


def test_a_row_does_not_depend_on_the_others() -> None:
    """In a product of rounded rows, with tiles of one size."""
    packed, x = packed_of(parts_of(STORED["fp8-blocks"])), x_of(140, torch.float32)
    whole = packed_linear(x, packed, None, use_kernel=True, chip=CHIP)
    assert torch.equal(packed_linear(x[7:139], packed, None, use_kernel=True, chip=CHIP), whole[7:139])


def test_static_scales_of_fused_parts_are_their_maximum() -> None:
    parts = parts_of(STORED["fp8-tensor"])
    packed = packed_of(parts)
    assert packed.input_scale is not None
    assert packed.input_scale.item() == max(float(part.input_scale) for part in parts if part.input_scale is not None)


@pytest.mark.parametrize("name", FLOAT8_STORED)
def test_a_chip_without_float8_rounds_nothing(name: str) -> None:
    parts, x = parts_of(STORED[name]), x_of(70, torch.float32)
    packed = packed_of(parts)
    assert not multiplies(packed, CHIPS["sm_80"])
    actual = packed_linear(x, packed, None, use_kernel=True, chip=CHIPS["sm_80"])
    want = x.double() @ ordered(parts).double().T
    torch.testing.assert_close(actual.double(), want, rtol=0, atol=3e-6 * want.abs().max().item())


def test_many_rows_in_float8_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operands in float8, a scale for each row of both; rounding x is the only difference."""
    x, bias = x_of(72, torch.bfloat16, 64), torch.randn(32).to(torch.bfloat16)
    packed = packed_of([STORED["fp8-channel"].tensor(32, 64)])
    rounded = quantize_rows_reference(x, "float8")
    want = rounded.values() @ unpack(packed).T
    # The interpreter has no bfloat16.
    monkeypatch.setattr(scaled_linear, "quantize_rows", lambda *_, **__: rounded)
    monkeypatch.setattr(kernel, "linear", None)
    for given, add in ((None, 0), (bias, bias.float())):
        actual = packed_linear(x, packed, given, use_kernel=True, chip=CHIP)
        torch.testing.assert_close(actual.float(), want + add, rtol=0.01, atol=0.05)
    assert kernel.supports_torch(x.dtype, packed)
    assert not kernel.supports_torch(x.half(), packed)
    assert not kernel.supports_torch(x, packed_of([STORED["fp8-channel"].tensor(33, 64)]))
    assert not kernel.supports_torch(x, packed_of([STORED["int8-channel"].tensor(32, 64)]))
    assert not kernel.supports_torch(x, packed_of([STORED["fp8-small-blocks"].tensor(32, 64)]))


def test_activations_are_rounded_only_where_the_matrix_says_so() -> None:
    assert not multiplies(packed_of(parts_of(STORED["fp8-weight-only"])), CHIP)
    assert not multiplies(packed_of(parts_of(STORED["int8-zeros"])), CHIP), "offsets need sums of x"
    assert not multiplies(pack(torch.ones(8, 64), "int8"), CHIP)
    packed = packed_of(parts_of(STORED["fp8-blocks-rows"]))
    assert quantized_input(x_of(3, torch.float32), packed, use_kernel=False, chip=CHIP).scales.shape == (3, 1)


def test_parts_that_do_not_fit() -> None:
    first, second = parts_of(STORED["int4-ordered"])
    other = Stored(first.scheme, "integers").tensor(8, INPUTS)
    assert other.order is not None
    placed = [(0, first), (128, second)]
    matrix = form_of("int4", placed).allocate((185, INPUTS), poisoned)
    write(matrix, 0, first)
    matrix.order.copy_(matrix.order.flip(0)) if matrix.order is not None else None
    with pytest.raises(WeightError, match=r"another order \(desc_act\) than those of the matrix it is fused with"):
        write(matrix, 128, second)
    plain = parts_of(STORED["int4"])
    matrix = form_of("int4", [(0, plain[0])]).allocate((128, INPUTS), poisoned)
    with pytest.raises(WeightError, match="it has offsets, unlike the weights that were loaded first"):
        write(matrix, 0, STORED["int4-zeros"].tensor(128, INPUTS))
    with pytest.raises(WeightError, match="int8 groups of 8 inputs are not multiplied"):
        form_of("int8", [(0, STORED["int8-groups"].tensor(8, INPUTS)[:, 8:40])])


def test_shapes_that_do_not_fit() -> None:
    packed, stack = pack(torch.ones(8, 64), "int8"), pack(torch.ones(2, 8, 64), "int8")
    for x, matrix in ((torch.ones(2, 60), packed), (torch.ones(2, 3, 64), packed), (torch.ones(2, 64), stack)):
        with pytest.raises(ValueError, match="does not fit a matrix of 8 by 64"):
            packed_linear(x, matrix, None, use_kernel=False, chip=CHIP)
