"""Every block format, bit-identical to the gguf package."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.gguf.dequantize import block_type, dequantize, stored_dtype

DEQUANTISABLE = sorted(gguf.quants._type_traits, key=int)
OWN = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K)


def _blocks(kind: Type, rows: int, blocks_per_row: int) -> np.ndarray:
    """Random bytes: every bit pattern of the format, infinite and undefined scales included."""
    rng = np.random.default_rng(int(kind))
    return rng.integers(0, 256, (rows, blocks_per_row * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)


CASES = [(kind, shape) for kind in DEQUANTISABLE for shape in ((1, 1), (7, 3))] + [(kind, (40, 130)) for kind in OWN]


@pytest.mark.parametrize(("kind", "shape"), CASES, ids=lambda part: getattr(part, "name", str(part)))
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


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda kind: kind.name)
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


def test_unknown_number() -> None:
    assert block_type(9999) is None


def test_a_less_common_type_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightError, match=r"ggml type 23 .*pagoda\[gguf\]"):
        block_type(int(Type.IQ4_XS))
    assert block_type(int(Type.Q4_K)) is not None
