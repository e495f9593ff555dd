"""Which product a layer with quantised weights has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.quantized.compiled import CompiledLinear, SideBySide, lanes
from pagoda.backends.reference.model.quantized.groups import ScaledMatrix, grouped, is_grouped, stacked
from pagoda.backends.reference.model.quantized.int8 import OnednnLinear
from pagoda.backends.reference.schemes import ops_of
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor

Linear = Callable[[Tensor], Tensor]


def computes(scheme: Scheme, inputs: int, numerics: Numerics) -> bool:
    """Return whether matrices of a scheme are computed with as they are stored.

    With --dtype float32 none are: activations then keep their precision.
    """
    if numerics.weights == torch.float32 or not is_grouped(scheme, inputs):
        return False
    return bool(lanes()) or (ops_of(scheme).any_processor(scheme) and torch.backends.mkldnn.is_available())


def quantized_linear(
    parts: Sequence[QuantizedTensor],
    bias: Tensor | None,
    numerics: Numerics,
    out: torch.dtype,
    precise: bool = False,
) -> Linear | None:
    """Return the layer of matrices one below the other, each of a scheme that `computes`. `bias` [out] of all.

    None: the scales of one are too far apart. `out`: type of the results; `precise`: activations keep 16 bits, unless
    the checkpoint rounds them.
    """
    matrices = [grouped(part) for part in parts]
    if any(matrix is None for matrix in matrices):
        return None
    present = [matrix for matrix in matrices if matrix is not None]
    runs = [stacked(list(run)) for _, run in groupby(present, _kind)]
    sizes = [run.shape[0] for run in runs]
    biases = [None] * len(runs) if bias is None else bias.split(sizes)
    layers = [_layer(run, part, numerics, out, precise) for run, part in zip(runs, biases)]
    if len(layers) == 1:
        return layers[0]
    compiled = [layer for layer in layers if isinstance(layer, CompiledLinear)]
    return SideBySide(compiled) if compiled == layers else lambda x: torch.cat([layer(x) for layer in layers], 1)


def _kind(matrix: ScaledMatrix) -> tuple[object, ...]:
    """Matrices with the same one are computed as one."""
    return matrix.form, None if matrix.order is None else matrix.order.tobytes()


def _layer(matrix: ScaledMatrix, bias: Tensor | None, numerics: Numerics, out: torch.dtype, precise: bool) -> Linear:
    width = lanes()
    if width:
        return CompiledLinear(matrix, bias, numerics.compute, out, width, precise)
    return OnednnLinear(matrix, bias, out)
