"""Quantise dense matrices while they are loaded: the methods of --quantization, and which matrices they quantise.

Rounding needs no data of the model's use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.quantization.rounding import Rounded, round_asymmetric, round_symmetric
from pagoda.common.weights.quantization.schemes import (
    ROUNDED,
    RoundedScheme,
    ScaledScheme,
    Scheme,
    group_shape,
    integer_scheme,
)
from pagoda.common.weights.quantization.tensors import Array, Floats, QuantizedTensor, Value, stack

METHODS: Final = tuple(ROUNDED)
"""Values of --quantization that quantise dense matrices while they are loaded."""

_EXPERTS_ONLY: Final = ("experts_int8",)
_HEAD: Final[Mapping[str, Scheme]] = {"int8": ROUNDED["int8_per_channel_weight_only"]}
"""Methods that quantise the output head, too."""

_MATRICES: Final = frozenset({"q", "k", "v", "o", "q_a", "q_b", "kv_a", "gate", "up", "down"})
"""Last parts of the names of layers' matrices. Not the router's, which is small and sensitive."""

_OTHERS: Final = (".indexer.", ".blocks.", ".per_layer.")
"""Parts of the names of small matrices that choose tokens or are tables."""

_CHUNK: Final = 1 << 22
"""Numbers rounded at a time: each takes a dozen bytes of temporary memory."""


def scheme_of(method: str, inputs: int) -> RoundedScheme | None:
    """Return the scheme of a matrix with this number of inputs; None if no group size divides it: it stays dense."""
    return ROUNDED[method].fitting(inputs)


def schemes_on_the_fly(method: str, params: Mapping[str, Param], head: bool = False) -> dict[str, Scheme]:
    """Return the scheme of each parameter that a method quantises: matrices of layers, those of experts included.

    `head`: the model has an output head, which has a scheme as "head" even where its weight is the embedding table.
    """
    schemes: dict[str, Scheme] = {"head": _HEAD[method]} if head and method in _HEAD else {}
    for name, param in params.items():
        experts = ".experts." in name
        if is_matrix(param) and (experts or method not in _EXPERTS_ONLY):
            scheme = scheme_of(method, param.shape[-1])
            if scheme is not None:
                schemes[name] = scheme
    return schemes


def is_matrix(param: Param) -> bool:
    """Whether a parameter is a matrix of a layer that may be quantised."""
    name = param.name
    layered = name.startswith("layers.") and name.rpartition(".")[2] in _MATRICES
    return layered and len(param.shape) > 1 and not param.float32 and not any(part in name for part in _OTHERS)


def quantized(weights: Iterable[tuple[str, Value]], schemes: Mapping[str, Scheme]) -> Iterator[tuple[str, Value]]:
    """Yield all parameters, those with a scheme quantised, from their values where they are quantised by another."""
    for name, value in weights:
        if (scheme := schemes.get(name)) is not None:
            value = quantize(value.dequantize() if isinstance(value, QuantizedTensor) else value, scheme)
        yield name, value


def quantize_on_the_fly(name: str, array: Array, method: str) -> Value:
    """Return a matrix, or a stack of them, [..., O, I] as `method` quantises it; unchanged if no group divides I.

    `name`: the canonical parameter; embeddings, routers and the head stay dense, see `is_matrix`.
    """
    scheme = schemes_on_the_fly(method, {name: Param(name, array.shape, "." * array.ndim)}).get(name)
    return array if scheme is None else quantize(array, scheme)


def quantize(array: Array, scheme: Scheme) -> QuantizedTensor:
    """Return a matrix, or a stack of them, [..., O, I] in a scheme of `scheme_of`."""
    assert isinstance(scheme, RoundedScheme), "nothing is rounded to other schemes"
    if array.ndim > 2:
        return stack([quantize(part, scheme) for part in array])
    outputs, inputs = array.shape
    group = group_shape(scheme.group, outputs, inputs)
    return _in_chunks(array, scheme, group, lambda wide: scheme.rounded(wide, group))


def rounded_int4(array: Array, group: int, *, symmetric: bool) -> QuantizedTensor:
    """Return a matrix [O, I] in int4 as checkpoints have it: offsets are zero points 0 to 15, or none if `symmetric`.

    `group` divides I. Of several scales and zero points per group those with the smallest squared error count; the
    error of the group's sum counts beside those of its values. Scales are bfloat16.
    """
    rounding = round_symmetric if symmetric else round_asymmetric
    scheme = integer_scheme(4, group, offsets=not symmetric)
    return _in_chunks(array, scheme, (1, group), lambda wide: rounding(wide, group))


def _in_chunks(
    array: Array, scheme: ScaledScheme, group: tuple[int, int], rounding: Callable[[Floats], Rounded]
) -> QuantizedTensor:
    """Return a matrix [O, I] in a scheme, of which `rounding` rounds some rows at a time: whole groups of them."""
    rows = max(1, _CHUNK // array.shape[1] // group[0]) * group[0]
    parts = [rounding(to_float32(array[start : start + rows])) for start in range(0, len(array), rows)]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return QuantizedTensor(
        scheme,
        np.concatenate([part.data for part in parts]),
        np.concatenate([part.scales for part in parts]),
        group,
        offsets=np.concatenate(offsets) if offsets else None,
    )
