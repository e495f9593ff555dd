"""Every block format, bit-identical to the gguf package."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from support.suite.rows import each_row

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.gguf.dequantize import block_type, dequantize, stored_dtype
from pagoda.common.weights.gguf.groups import as_groups, group_format, write_values
from pagoda.common.weights.quantization.schemes import Blocks, Int4, Int8, Mxfp4, Nvfp4
from pagoda.common.weights.quantization.tensors import QuantizedTensor

DEQUANTISABLE = sorted(gguf.quants._type_traits, key=int)
OWN = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.MXFP4, Type.NVFP4)


def _blocks(kind: Type, rows: int, blocks_per_row: int) -> np.ndarray:
    """Random bytes: every bit pattern of the format, infinite and undefined scales included."""
    rng = np.random.default_rng(int(kind))
    return rng.integers(0, 256, (rows, blocks_per_row * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)


CASES = [(kind, shape) for kind in DEQUANTISABLE for shape in ((1, 1), (7, 3))] + [(kind, (40, 130)) for kind in OWN]


@each_row(("kind", "shape"), CASES, ids=lambda part: getattr(part, "name", str(part)))
def test_equals_the_gguf_package(kind: Type, shape: tuple[int, int]) -> None:
    data, known = _blocks(kind, *shape), block_type(int(kind))
    assert known is not None
    assert (known.name, known.elements, known.bytes) == (kind.name, *GGML_QUANT_SIZES[kind])
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, kind)
        got = dequantize(data.reshape(-1), known, (shape[0], shape[1] * known.elements))
    assert got.shape == expected.shape
    assert got.dtype == stored_dtype(known)
    got = to_float32(got)
    # NaN compares by being NaN: which of its bit patterns an operation yields is the processor's choice.
    same = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    assert same.all()


@each_row("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_dequantised_values_are_near_the_originals(kind: Type) -> None:
    values = np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)
    known = block_type(int(kind))
    assert known is not None
    got = dequantize(gguf.quants.quantize(values, kind).reshape(-1), known, values.shape)
    assert np.abs(got - values).max() < {Type.Q8_0: 0.02, Type.Q5_0: 0.2, Type.Q5_1: 0.12}.get(kind, 0.4)


def test_plain_types_are_not_copied() -> None:
    data = np.arange(64, dtype=np.float32).view(np.uint8)
    known = block_type(int(Type.F32))
    assert known is not None
    assert np.shares_memory(dequantize(data, known, (8, 8)), data)


def test_empty_tensor() -> None:
    known = block_type(int(Type.Q4_K))
    assert known is not None
    assert dequantize(np.empty(0, np.uint8), known, (0, 256)).shape == (0, 256)


GROUPS = {
    **dict.fromkeys((Type.Q4_0, Type.Q4_1, Type.Q4_K), Int4((1, 32))),
    **dict.fromkeys((Type.Q5_0, Type.Q5_1, Type.Q5_K, Type.Q8_0, Type.IQ4_NL, Type.IQ4_XS), Int8((1, 32))),
    **dict.fromkeys((Type.Q2_K, Type.Q3_K), Int4((1, 16))),
    **dict.fromkeys((Type.TQ1_0, Type.TQ2_0), Int4((1, 256))),
    **dict.fromkeys((Type.IQ1_S, Type.IQ2_XXS, Type.IQ3_XXS, Type.IQ3_S), Int8((1, 32))),
    **dict.fromkeys((Type.Q6_K, Type.IQ1_M, Type.IQ2_XS, Type.IQ2_S), Int8((1, 16))),
    Type.Q1_0: Int4((1, 128)),
    Type.MXFP4: Mxfp4(),
    Type.NVFP4: Nvfp4(),
}


@each_row("kind", GROUPS, ids=lambda kind: kind.name)
def test_blocks_become_numbers_with_scales(kind: Type) -> None:
    known = block_type(int(kind))
    assert known is not None
    blocks = _blocks(kind, 40, 130).reshape(-1, known.bytes)
    with np.errstate(all="ignore"):
        values = dequantize(blocks.reshape(-1), known, (len(blocks), known.elements))
    finite = (blocks[:, 0] < 250) if kind is Type.MXFP4 else np.isfinite(values).all(-1)
    count = int(finite.sum()) // 12 * 12
    assert count > 3000  # several chunks of the longer blocks
    expected = values[finite][:count].reshape(2, 3, -1)
    stored = blocks[finite][:count].reshape(2, 3, -1)
    tensor = QuantizedTensor(Blocks(known), stored, np.empty(0, np.float32), ())
    got = as_groups(tensor)
    assert got is not None
    form = group_format(known)
    assert form is not None
    assert got.scheme == form.scheme == GROUPS[kind]
    assert (got.offsets is None) == (form.offsets is None)
    assert got.shape == tensor.shape == expected.shape
    assert got.group_shape == (1, 1, got.scheme.group[1])
    assert got.data.size == expected.size // (1 if isinstance(got.scheme, Int8) else 2)
    if kind not in (Type.Q4_1, Type.Q4_K):
        np.testing.assert_array_equal(got.dequantize(), expected)
        if not isinstance(got.scheme, Mxfp4 | Nvfp4):
            written = np.empty((2 * 3 * stored.shape[2] // known.bytes, known.elements), np.float32)
            write_values(stored.reshape(-1, known.bytes), known, written)
            np.testing.assert_array_equal(written.reshape(expected.shape), expected)
        return
    error = np.abs(got.dequantize() - expected).reshape(*got.scales.shape, -1).max(-1)
    ends = np.stack([got.offsets + number * got.scales for number in (-8, 7)])
    assert (error <= 2.0**-22 * np.abs(ends).max(0)).all()
    assert (error == 0).mean() > 0.2  # with random scales, few of which are near their offsets


def test_other_blocks_do_not() -> None:
    """Types of activations, which no file has."""
    for kind in (Type.Q8_1, Type.Q8_K):
        known = block_type(int(kind))
        assert known is not None
        assert group_format(known) is None
        assert as_groups(QuantizedTensor(Blocks(known), _blocks(kind, 2, 3), np.empty(0, np.float32), ())) is None


def test_one_bit_is_a_sign() -> None:
    """Q1_0, of which the gguf package knows the size only: a float16 and 128 bits, the lowest of a byte first."""
    known = block_type(int(Type.Q1_0))
    assert known is not None
    assert (known.elements, known.bytes) == GGML_QUANT_SIZES[Type.Q1_0]
    signs = np.random.default_rng(0).integers(0, 2, (3, 128), dtype=np.uint8)
    scales = np.array([[0.5], [-2.0], [0.0]], np.float16)
    data = np.concatenate([scales.view(np.uint8), np.packbits(signs, axis=1, bitorder="little")], 1)
    expected = np.where(signs, 1, -1) * scales.astype(np.float32)
    np.testing.assert_array_equal(dequantize(data.reshape(-1), known, (3, 128)), expected)


def test_unknown_number() -> None:
    assert block_type(9999) is None


def test_a_less_common_type_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightError, match=r"ggml type 23 .*pagoda\[gguf\]"):
        block_type(int(Type.IQ4_XS))
    assert block_type(int(Type.Q4_K)) is not None
