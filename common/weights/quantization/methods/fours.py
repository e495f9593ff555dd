"""Floats of 4 bits (e2m1) with scales per block of inputs: what several methods store."""

from __future__ import annotations

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import FLOAT8_E4M3FN, FLOAT8_E8M0FNU, as_uint, powers_of_two, to_float32
from pagoda.common.weights.quantization.methods.integers import check
from pagoda.common.weights.quantization.tensors import Array, Floats, Mxfp4, Nvfp4, QuantizedTensor, Scheme


def join_mxfp4(module: str, packed: Array, exponents: Array, scheme: Scheme) -> QuantizedTensor:
    """Return a matrix of uint8 [O, I / 2] with exponents uint8 [O, I / 32]. Raise WeightError naming the layer."""
    assert isinstance(scheme, Mxfp4)
    outputs, inputs = _shape(module, packed, scheme.group[1], "mxfp4")
    if exponents.dtype == FLOAT8_E8M0FNU:
        exponents = as_uint(exponents)
    check(f"{module}.weight_scale", exponents, np.uint8, (outputs, inputs // scheme.group[1]), "mxfp4")
    return QuantizedTensor(scheme, packed, powers_of_two(exponents), scheme.group)


def join_nvfp4(module: str, packed: Array, scales: Array, tensor_scale: Floats, scheme: Scheme) -> QuantizedTensor:
    """Return a matrix of uint8 [O, I / 2] with scales float8_e4m3fn [O, I / 16] and one for all.

    Raise WeightError naming the layer.
    """
    assert isinstance(scheme, Nvfp4)
    outputs, inputs = _shape(module, packed, scheme.group[1], "nvfp4")
    check(f"{module}.weight_scale", scales, FLOAT8_E4M3FN, (outputs, inputs // scheme.group[1]), "nvfp4")
    if tensor_scale.size != 1:
        raise WeightError(f"layer {module}: nvfp4 weights have {tensor_scale.size} scales of the matrix, not one")
    rows = np.full(outputs, tensor_scale.reshape(()), np.float32)
    return QuantizedTensor(scheme, packed, to_float32(scales), scheme.group, row_scales=rows)


def _shape(module: str, packed: Array, group: int, label: str) -> tuple[int, int]:
    """Return outputs and inputs of a packed matrix."""
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] * 2 % group:
        raise WeightError(
            f"layer {module}: {label} weights are {packed.dtype} {list(packed.shape)}, not bytes of {group} inputs per "
            "scale; quantise the model again, or serve it unquantised"
        )
    return packed.shape[0], packed.shape[1] * 2
