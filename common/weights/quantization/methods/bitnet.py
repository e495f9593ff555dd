"""`bitnet`: weights of -1, 0 or 1 with one scale, four to a byte, or dense ones that are rounded to such while loading.

transformers' `bitlinear` divides a product by `weight_scale`, its `autobitlinear` multiplies. Activations are rounded
to 8 bits per token. Source: BitNet b1.58, https://arxiv.org/abs/2402.17764.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import BFLOAT16, dtype_name, to_bfloat16, to_float32
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.quantization.config import WEIGHT, Parts, QuantizationConfig, Section, covers
from pagoda.common.weights.quantization.layouts.integers import Codes, IntegerLayers, joined_integers, pairs
from pagoda.common.weights.quantization.layouts.scaled import floats
from pagoda.common.weights.quantization.schemes import WHOLE_ROW, Activations, integer_scheme
from pagoda.common.weights.quantization.tensors import Array, QuantizedTensor

_SCALE: Final = "weight_scale"
_PER_BYTE: Final = 4
_BITS: Final = 4
"""Bits of the numbers once they are unpacked, which is what kernels multiply."""

_DIVIDES: Final = {"bitlinear": True, "autobitlinear": False}
"""linear_class -> whether products are divided by the scale."""

_PROJECTIONS: Final = r"re:.*_proj$"
_TABLES: Final = ("embed_tokens", "lm_head")
"""Matrices that are not rounded in online mode."""


@dataclass(frozen=True, slots=True)
class BitnetLayers(IntegerLayers):
    """Layers of -1, 0 and 1."""

    divides: bool = True  # The stored scale is the inverse of the factor.


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    section.only("modules_to_not_convert", "linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps")
    if section.get("use_rms_norm"):
        raise section.refused("use_rms_norm is set: norms of the inputs of linear layers are not read")
    kind = section.get("linear_class", "bitlinear")
    mode = section.get("quantization_mode", "offline")
    if kind not in _DIVIDES:
        raise section.refused(f"linear_class is {kind}, only {' and '.join(_DIVIDES)} are read")
    if mode not in ("offline", "online") or (mode == "online" and _DIVIDES[kind]):
        raise section.refused(f"quantization_mode is {mode} with linear_class {kind}")
    ignored = (*section.names("modules_to_not_convert"), "lm_head")
    if mode == "online":
        expand = partial(_rounded, ignored=ignored)
        return QuantizationConfig("bitnet", (), ignored, _join, for_any_model=True, expand=expand)
    scheme = integer_scheme(_BITS, WHOLE_ROW, offsets=False, activations=Activations("int8", "row"))
    parts = frozenset({WEIGHT, _SCALE})
    layers = BitnetLayers(("Linear",), scheme, parts, np.dtype(np.uint8), bits=_BITS, divides=_DIVIDES[kind])
    return QuantizationConfig("bitnet", (layers,), ignored, _join, for_any_model=True)


def _join(module: str, parts: Parts, group: object, pieces: int) -> QuantizedTensor:
    """Join bytes uint8 [O / 4, I], whose four pairs of bits are four blocks of rows, and a scale."""
    assert isinstance(group, BitnetLayers)
    data = parts[WEIGHT]
    scale = floats(f"{module}.{_SCALE}", parts[_SCALE]).reshape(-1)
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] % 2 or scale.size != 1:
        raise WeightError(
            f"layer {module}: weights {dtype_name(data.dtype)} {list(data.shape)} with {scale.size} scales are not "
            "those of bitnet, bytes of four rows with one scale; download config.json and the weights again"
        )
    if ((data >> np.uint8(1)) & data & np.uint8(0x55)).any():
        raise WeightError(f"tensor {module}.{WEIGHT} has numbers other than -1, 0 and 1; download it again")
    if group.divides:
        scale = np.reciprocal(scale)
    ternary = np.concatenate([data >> np.uint8(2 * block) & np.uint8(3) for block in range(_PER_BYTE)])
    codes: Codes = ternary + np.uint8((1 << _BITS - 1) - 1)
    return joined_integers(module, pairs(codes), np.full((len(codes), 1), scale[0], np.float32), group)


def _rounded(tensors: Iterable[NamedTensor], ignored: tuple[str, ...]) -> Iterator[NamedTensor]:
    """Yield all tensors, the matrices of projections rounded to three values. Raises WeightError for other matrices."""
    for name, tensor in tensors:
        module = name.removesuffix(f".{WEIGHT}")
        if tensor.ndim < 2 or any(covers(pattern, module) for pattern in (*ignored, *_TABLES)):
            yield name, tensor
        elif covers(_PROJECTIONS, module) and tensor.ndim == 2:
            yield name, _three_values(tensor)
        else:
            raise WeightError(
                f"tensor {name} {list(tensor.shape)}: bitnet in online mode is read of models whose linear layers are "
                "named *_proj; save the model in offline mode"
            )


def _three_values(tensor: Array) -> Array:
    """Return -s, 0 and s, where s is the mean magnitude of the matrix; in the same data type."""
    wide = to_float32(tensor)
    scale = np.float32(1) / np.maximum(np.abs(wide).mean(dtype=np.float32), np.float32(1e-5))
    values = np.clip(np.rint(wide * scale), -1, 1) / scale
    return to_bfloat16(values) if tensor.dtype == BFLOAT16 else values.astype(tensor.dtype)
