"""Integers of 2 to 8 bits packed into 32-bit words, with scales and zero points per group of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name
from pagoda.common.weights.quantization.config import LayerGroup
from pagoda.common.weights.quantization.layouts.scaled import floats
from pagoda.common.weights.quantization.schemes import WHOLE_ROW, IntegerScheme
from pagoda.common.weights.quantization.tensors import Array, QuantizedTensor

_WORD: Final = 32
_STORED: Final = 8
"""What is added to numbers of 4 bits."""

Order = npt.NDArray[np.int32]
"""Of the inputs, see `QuantizedTensor.order`."""

Codes = npt.NDArray[np.uint8]
"""Unsigned numbers, half of their range above the number that they mean where there is no zero point."""


@dataclass(frozen=True, slots=True)
class IntegerLayers(LayerGroup):
    """Layers of integers."""

    bits: int = 4
    size: int = WHOLE_ROW  # inputs that share a scale

    @property
    def ordered(self) -> bool:
        """Whether the inputs are reordered."""
        return self.scheme.ordered

    def size_of(self, module: str, inputs: int) -> int:
        """Return how many of a layer's inputs share a scale. Raise WeightError if that does not divide them."""
        size = inputs if self.size == WHOLE_ROW else self.size
        if inputs % size:
            raise WeightError(
                f"layer {module}: groups of {size} inputs do not divide its {inputs}; quantise it again with a group "
                "size that does, or serve it unquantised"
            )
        return size


def check(layer: str, tensor: Array, dtype: npt.DTypeLike, shape: tuple[int, ...], scheme: str) -> None:
    """Raise WeightError if a tensor of a layer, by its whole name, has another type or shape."""
    if tensor.dtype != np.dtype(dtype) or tensor.shape != shape:
        raise WeightError(
            f"tensor {layer} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, but {scheme} weights have "
            f"{dtype_name(np.dtype(dtype))} {list(shape)} there; download config.json and the weights again"
        )


def unpack(words: Array, bits: int, count: int) -> Codes:
    """Return the first `count` numbers of each row of words, packed without gaps from the lowest bit on."""
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    if bits == 8:
        return unsigned.view(np.uint8)[..., :count]
    mask = np.uint32((1 << bits) - 1)
    period = (
        1 if _WORD % bits == 0 else bits
    )  # number of words after which a number begins at the start of a word again
    lacking = -unsigned.shape[-1] % period
    if lacking:
        unsigned = np.concatenate([unsigned, np.zeros((*unsigned.shape[:-1], lacking), np.uint32)], -1)
    rounds = unsigned.reshape(*unsigned.shape[:-1], -1, period)
    numbers = np.empty((*rounds.shape[:-1], _WORD * period // bits), np.uint8)
    for index in range(numbers.shape[-1]):
        word, low = divmod(index * bits, _WORD)
        number = rounds[..., word] >> np.uint32(low)
        if low + bits > _WORD:
            number = number | rounds[..., word + 1] << np.uint32(_WORD - low)
        numbers[..., index] = number & mask
    return numbers.reshape(*unsigned.shape[:-1], -1)[..., :count]


def pairs(codes: Codes) -> Codes:
    """Return numbers of 4 bits [..., I] two per byte, the first in its lower half."""
    packed: Codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def input_order(layer: str, groups_of_inputs: Array, group: int, *, ordered: bool) -> Order | None:
    """Return the order that brings inputs of a group together; None if they are already.

    `groups_of_inputs` [I]: the number of the group of each input. Raise WeightError, by the tensor's name `layer`, if
    groups are not of one size, or if inputs are reordered against `ordered`.
    """
    inputs = len(groups_of_inputs)
    if not ordered:
        if np.array_equal(groups_of_inputs, np.arange(inputs) // group):
            return None
        raise WeightError(
            f"tensor {layer} reorders the inputs, but quantization_config says that they are not (desc_act, actorder); "
            "download config.json and the weights again"
        )
    order = np.argsort(groups_of_inputs, kind="stable").astype(np.int32)
    if not np.array_equal(groups_of_inputs[order], np.arange(inputs) // group):
        raise WeightError(f"tensor {layer} does not divide {inputs} inputs into groups of {group}; download it again")
    return order


def joined_integers(
    module: str,
    codes: Codes,
    scales: Array,
    group: IntegerLayers,
    zeros: npt.NDArray[np.generic] | None = None,
    order: Order | None = None,
) -> QuantizedTensor:
    """Return a matrix of numbers [O, I], or [O, I / 2] of 4 bits in pairs, with scales and zero points [O, groups]."""
    scheme = group.scheme
    bits = group.bits
    assert isinstance(scheme, IntegerScheme)
    middle = 1 << bits - 1
    paired = bits == 4 and order is None
    inputs = codes.shape[1] * (2 if paired else 1)
    size = group.size_of(module, inputs)
    wide = floats(f"{module} scales", scales)
    if wide.shape != (len(codes), inputs // size):
        raise WeightError(
            f"layer {module}: scales {list(wide.shape)} do not fit {bits}-bit weights {[len(codes), inputs]} in groups "
            f"of {size} inputs; download config.json and the weights again"
        )
    if order is not None:
        codes = codes[:, order]
    if scheme.numbers == "int8":
        data: Array = (codes - np.uint8(middle)).view(np.int8)
    else:
        if inputs % 2:
            raise WeightError(f"layer {module}: {bits}-bit weights have {inputs} inputs, an odd number; serve it dense")
        data = codes if paired else pairs(codes + np.uint8(_STORED - middle))
    offsets = None if zeros is None else (middle - zeros.astype(np.float32)) * wide
    if offsets is not None and not scheme.offsets:
        if offsets.any():
            raise WeightError(
                f"layer {module}: {bits}-bit weights have zero points, but quantization_config says that they are "
                "symmetric; download config.json and the weights again"
            )
        offsets = None
    of_matrix = scheme.with_inputs(inputs)
    assert of_matrix is not None
    return QuantizedTensor(of_matrix, data, wide, (1, size), offsets, order=order)
