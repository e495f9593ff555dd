"""Floats of 4 bits (e2m1) with scales per block of inputs: what several methods store."""

from __future__ import annotations

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import FLOAT8_E4M3FN, FLOAT8_E8M0FNU, as_uint, powers_of_two, to_float32
from pagoda.common.weights.quantization.layouts.integers import check
from pagoda.common.weights.quantization.schemes import Activations, Mxfp4, Nvfp4, ScaledScheme
from pagoda.common.weights.quantization.tensors import Array, Floats, QuantizedTensor


def mxfp4_scheme(activations: Activations | None = None) -> Mxfp4:
    """Return the scheme of numbers with a power of two per 32 inputs."""
    return Mxfp4(activations)


def nvfp4_scheme(activations: Activations | None = None) -> Nvfp4:
    """Return the scheme of numbers with a float8 scale per 16 inputs."""
    return Nvfp4(activations)


def join_mxfp4(module: str, packed: Array, exponents: Array, scheme: ScaledScheme) -> QuantizedTensor:
    """Return a matrix of uint8 [O, I / 2] with exponents uint8 [O, I / 32]. Raise WeightError naming the layer."""
    label, group = _label_and_group(scheme)
    outputs, inputs = _shape(module, packed, group[1], label)
    if exponents.dtype == FLOAT8_E8M0FNU:
        exponents = as_uint(exponents)
    check(f"{module}.weight_scale", exponents, np.uint8, (outputs, inputs // group[1]), label)
    return QuantizedTensor(scheme, packed, powers_of_two(exponents), group)


def join_nvfp4(
    module: str, packed: Array, scales: Array, tensor_scale: Floats, scheme: ScaledScheme
) -> QuantizedTensor:
    """Return a matrix of uint8 [O, I / 2] with scales float8_e4m3fn [O, I / 16] and one for all.

    Raise WeightError naming the layer.
    """
    label, group = _label_and_group(scheme)
    outputs, inputs = _shape(module, packed, group[1], label)
    check(f"{module}.weight_scale", scales, FLOAT8_E4M3FN, (outputs, inputs // group[1]), label)
    if tensor_scale.size != 1:
        raise WeightError(f"layer {module}: {label} weights have {tensor_scale.size} scales of the matrix, not one")
    rows = np.full(outputs, tensor_scale.reshape(()), np.float32)
    return QuantizedTensor(scheme, packed, to_float32(scales), group, row_scales=rows)


def _label_and_group(scheme: ScaledScheme) -> tuple[str, tuple[int, int]]:
    """Return the name and the group (1, inputs) of a scheme of e2m1 numbers."""
    assert scheme.numbers == "e2m1"
    assert isinstance(scheme.group, tuple)
    return scheme.name, scheme.group


def _shape(module: str, packed: Array, group: int, label: str) -> tuple[int, int]:
    """Return outputs and inputs of a packed matrix."""
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] * 2 % group:
        raise WeightError(
            f"layer {module}: {label} weights are {packed.dtype} {list(packed.shape)}, not bytes of {group} inputs per "
            "scale; quantise the model again, or serve it unquantised"
        )
    return packed.shape[0], packed.shape[1] * 2
