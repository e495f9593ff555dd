"""`hqq`: integers of 1 to 8 bits with a scale and a zero point per group of inputs, packed along the groups.

A matrix [O, I] is [O * I / g, g], a row per group of g inputs; blocks of consecutive rows share the bits of a number of
`W_q`, the first block in the highest ones. Source: https://github.com/mobiusml/hqq.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name
from pagoda.common.weights.quantization.config import Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.integers import Codes, IntegerLayers, joined_integers, pairs
from pagoda.common.weights.quantization.layouts.scaled import floats
from pagoda.common.weights.quantization.schemes import WHOLE_ROW, integer_scheme
from pagoda.common.weights.quantization.tensors import Array, QuantizedTensor

_DATA: Final = "W_q"
_SCALE: Final = "scale"
_ZERO: Final = "zero"
_SHAPE: Final = "shape"
_CHECKED: Final = ("nbits", "axis")
"""Settings that a layer's tensors repeat; they must be those of config.json."""

_REPEATED: Final = (
    *(*_CHECKED, "group_size", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero"),
    *("compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize"),
    "round_zero",
)
_FIELDS: Final[Mapping[int, tuple[int, int]]] = {
    8: (8, 1),
    6: (8, 1),
    5: (8, 1),
    4: (4, 2),
    3: (3, 10),
    2: (2, 4),
    1: (1, 8),
}
"""nbits -> bits of a number as it is packed, and numbers per entry of `W_q`."""

_AXIS: Final = 1


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    section.only("quant_config", "skip_modules")
    settings = section.part("quant_config")
    ignored = (*section.names("skip_modules"), "lm_head")
    groups: tuple[IntegerLayers, ...]
    if "weight_quant_params" in settings.values:
        groups = (_layers(settings, "Linear"),)
    else:  # Settings by the names of layers; what is not named is not quantised.
        groups = tuple(_layers(settings.part(name), name) for name in settings.values)
    if not groups:
        raise section.refused("quant_config is missing")
    return QuantizationConfig("hqq", groups, ignored, _join)


def _layers(settings: Section, target: str) -> IntegerLayers:
    settings.only("weight_quant_params", "scale_quant_params", "zero_quant_params", "offload_meta")
    for key in ("scale_quant_params", "zero_quant_params"):
        if settings.get(key):
            raise settings.refused(f"{key} is set: scales and zero points that are quantised themselves are not read")
    params = settings.part("weight_quant_params")
    params.only("nbits", "channel_wise", "group_size", "optimize", "round_zero", "axis", "view_as_float")
    bits = params.get("nbits")
    size = params.get("group_size", WHOLE_ROW)
    size = WHOLE_ROW if size is None else size
    if type(bits) is not int or bits not in _FIELDS:
        raise params.refused(f"nbits is {bits}, only {', '.join(map(str, _FIELDS))} are read")
    if params.get("axis") != _AXIS:
        raise params.refused(f"axis is {params.get('axis')}, only {_AXIS} is read: groups of inputs, not of outputs")
    if type(size) is not int or (size < 1 and size != WHOLE_ROW):
        raise params.refused(f"group_size is {size!r}, not a positive number")
    if params.get("view_as_float") or params.get("channel_wise") is False:
        raise params.refused("view_as_float and scales of a whole matrix (channel_wise false) are not read")
    scheme = integer_scheme(bits, size, offsets=True)
    parts = frozenset({_DATA, _SCALE, _ZERO, _SHAPE})
    return IntegerLayers((target,), scheme, parts, optional=frozenset(_REPEATED), bits=bits, size=size)


def _join(module: str, parts: Parts, group: object, pieces: int) -> QuantizedTensor:
    """Join `W_q` [rows, g] with scales and zero points, one per row of the unpacked matrix [O * I / g, g]."""
    assert isinstance(group, IntegerLayers)
    bits = group.bits
    label = f"{bits}-bit hqq"
    expected = {"nbits": bits, "axis": _AXIS}
    for name in _CHECKED:
        if name in parts and parts[name].reshape(-1).tolist() != [expected[name]]:
            raise WeightError(f"tensor {module}.{name} is not {expected[name]}, as quantization_config says")
    sizes = parts[_SHAPE].reshape(-1).tolist()
    if len(sizes) != 2 or parts[_SHAPE].dtype.kind not in "iu" or min(sizes) < 1:
        raise WeightError(f"tensor {module}.{_SHAPE} {sizes} is not the two sizes of a matrix; download it again")
    outputs, inputs = sizes
    size = group.size_of(module, inputs)
    rows = outputs * inputs // size
    codes = _unpacked(module, parts[_DATA], bits, (rows, size), label).reshape(outputs, inputs)
    factors = {name: floats(f"{module}.{name}", parts[name]) for name in (_SCALE, _ZERO)}
    for name, values in factors.items():
        if values.size != rows:
            raise WeightError(
                f"tensor {module}.{name} {list(values.shape)} has not one value for each of the {rows} groups of "
                f"{size} inputs; download it again"
            )
    scales, zeros = (values.reshape(outputs, -1) for values in factors.values())
    return joined_integers(module, pairs(codes) if bits == 4 else codes, scales, group, zeros)


def _unpacked(module: str, data: Array, bits: int, shape: tuple[int, int], label: str) -> Codes:
    """Return the numbers [rows, g]. Raise WeightError for another data type or shape."""
    width, per_entry = _FIELDS[bits]
    rows, size = shape
    dtype: np.dtype[Any] = np.dtype(np.int32 if bits == 3 else np.uint8)
    packed = -(-rows // per_entry), size
    if data.dtype != dtype or data.shape != packed:
        raise WeightError(
            f"tensor {module}.{_DATA} is {dtype_name(data.dtype)} {list(data.shape)}, but {label} weights have "
            f"{dtype.name} {list(packed)} there; download config.json and the weights again"
        )
    mask = (1 << width) - 1
    blocks = [(data >> width * (per_entry - 1 - block) & mask).astype(np.uint8) for block in range(per_entry)]
    return np.concatenate(blocks)[:rows]
