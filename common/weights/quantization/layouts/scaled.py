"""Matrices of 8-bit numbers whose scales are per tensor, channel or block: what several methods store."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name, powers_of_two, to_float32
from pagoda.common.weights.quantization.config import Parts
from pagoda.common.weights.quantization.schemes import (
    WHOLE_ROW,
    Activations,
    Float8,
    Group,
    Int8,
    ScaledScheme,
)
from pagoda.common.weights.quantization.tensors import Array, Floats, QuantizedTensor


def scaled_scheme(
    numbers: Literal["float8", "int8"], group: Group, activations: Activations | None = None, *, offsets: bool = False
) -> Float8 | Int8:
    """Return the scheme of numbers of 8 bits; `offsets`: those of int8 have zero points."""
    if numbers == "int8":
        return Int8(group, activations, offsets=offsets)
    assert not offsets, "numbers of float8 have no zero points"
    return Float8(group, activations)


def floats(name: str, values: Array) -> Floats:
    """Return a scale tensor as float32. Raises WeightError for a data type that is no number."""
    try:
        return to_float32(values)
    except TypeError as error:
        raise WeightError(f"tensor {name}: {error}; convert it to float32") from None


def input_scale(module: str, parts: Parts, part: str) -> Floats:
    """Return the static scale of a layer's input, a scalar. Raises WeightError for more than one."""
    scale = floats(f"{module}.{part}", parts[part])
    if scale.size != 1:
        raise WeightError(f"tensor {module}.{part} {list(scale.shape)} is not one scale")
    return scale.reshape(())


def join_scaled(
    module: str, data: Array, scales: Array, scheme: ScaledScheme, pieces: int, scale_name: str
) -> QuantizedTensor:
    """Return a matrix with its scales; the shape of the scales tells the group, except that of blocks.

    Scales of uint8 are the exponents of powers of two (E8M0). Raises WeightError naming the layer if the shapes do not
    fit.
    """
    assert isinstance(scheme, Float8 | Int8)
    if data.ndim != 2:
        raise WeightError(f"tensor {module}.weight {list(data.shape)} is quantised, but not a matrix")
    outputs, inputs = data.shape
    wide = powers_of_two(scales) if scales.dtype == np.uint8 else floats(f"{module}.{scale_name}", scales)
    block = scheme.group
    rows = outputs // pieces
    if isinstance(block, tuple):
        block = block[0], inputs if block[1] == WHOLE_ROW else block[1]
        fits = scales.shape == (-(-rows // block[0]) * pieces, -(-inputs // block[1])) and rows * pieces == outputs
        if fits and pieces == 1:
            return QuantizedTensor(replace(scheme, group=block), data, wide, block)
        if fits:
            of_rows = np.repeat(wide.reshape(pieces, -1, wide.shape[1]), block[0], 1)[:, :rows]
            return QuantizedTensor(scheme, data, of_rows.reshape(outputs, -1), (1, block[1]))
    if scales.size == 1:
        return QuantizedTensor(replace(scheme, group="tensor"), data, wide.reshape(1, 1), (outputs, inputs))
    if scales.shape in ((outputs,), (outputs, 1)):
        return QuantizedTensor(replace(scheme, group="channel"), data, wide.reshape(-1, 1), (1, inputs))
    raise WeightError(
        f"tensor {module}.{scale_name} has shape {list(scales.shape)}, which does not fit {list(data.shape)} "
        f"{dtype_name(data.dtype)} numbers with scales per "
        f"{'block ' + str(list(block)) if isinstance(block, tuple) else block}"
    )


def with_zeros(module: str, tensor: QuantizedTensor, zeros: Array, name: str) -> QuantizedTensor:
    """Return (number - zero) * scale for zero points that are shaped as the scales. Raise WeightError naming them."""
    if zeros.size != tensor.scales.size:
        raise WeightError(
            f"tensor {module}.{name} has {zeros.size} zero points for {tensor.scales.size} scales; download it again"
        )
    return replace(tensor, offsets=-floats(f"{module}.{name}", zeros).reshape(tensor.scales.shape) * tensor.scales)


def not_symmetric(module: str, name: str) -> WeightError:
    """Return the error for zero points where the config states none."""
    return WeightError(
        f"tensor {module}.{name} has zero points other than 0, but quantization_config says that they are "
        "symmetric; download config.json and the weights again"
    )
