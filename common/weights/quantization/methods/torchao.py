"""`torchao`: int8, float8 and int4 tensors of torchao in its safetensors form, the parts of each under its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import FLOAT8_E4M3FN
from pagoda.common.weights.quantization.config import Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.integers import IntegerLayers, check, joined_integers
from pagoda.common.weights.quantization.layouts.scaled import floats, join_scaled, not_symmetric, scaled_scheme
from pagoda.common.weights.quantization.schemes import WHOLE_ROW, Activations, Group, integer_scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_DATA: Final = "_weight_qdata"
_SCALE: Final = "_weight_scale"
_ZEROS: Final = "_weight_zero_point"
_INTS: Final[Mapping[str, int]] = {f"int{bits}": bits for bits in range(2, 9)}
_FLOAT8: Final = "float8_e4m3fn"
_READ: Final = (
    "Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig, "
    "Float8DynamicActivationFloat8WeightConfig, Int4WeightOnlyConfig, IntxWeightOnlyConfig, "
    "Int8DynamicActivationIntxWeightConfig"
)


@dataclass(frozen=True, slots=True)
class TorchaoLayers(IntegerLayers):
    """Layers of one of torchao's configs."""

    kind: str = ""


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    section.only("quant_type", "modules_to_not_convert", "include_input_output_embeddings", "untie_embedding_weights",
                 "quant_type_kwargs")  # fmt: skip
    if not isinstance(section.get("quant_type"), dict):
        raise section.refused(
            f"quant_type is {section.get('quant_type')}, whose tensors are pickled; save the model again with torchao "
            "0.14 or later as safetensors"
        )
    if section.get("include_input_output_embeddings"):
        raise section.refused("include_input_output_embeddings: quantised embeddings are not read")
    default = section.part("quant_type").part("default")
    ignored = [*section.names("modules_to_not_convert"), "lm_head"]
    groups = []
    if default.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        data = default.part("_data")
        by_name = data.part("fqn_to_config" if data.get("fqn_to_config") else "module_fqn_to_config")
        for name, config in by_name.values.items():
            target = "Linear" if name == "_default" else name.removesuffix(".weight")
            if config is None:
                ignored.append(target)
            else:
                groups.append(_layers(by_name.part(name), target))
        groups.sort(key=lambda group: "Linear" in group.targets)
    else:
        groups.append(_layers(default, "Linear"))
    return QuantizationConfig("torchao", tuple(groups), tuple(ignored), _join)


def _layers(section: Section, target: str) -> TorchaoLayers:
    kind = str(section.get("_type"))
    data = section.part("_data")
    plain = frozenset({_DATA, _SCALE})
    activations = None
    if kind in ("Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig"):
        activations = Activations("int8", "row")
    match kind:
        case "Int8WeightOnlyConfig" | "Int8DynamicActivationInt8WeightConfig":
            rows = scaled_scheme("int8", _group(data), activations)
            return TorchaoLayers((target,), rows, plain, optional=frozenset({_ZEROS}), kind=kind)
        case "Float8WeightOnlyConfig" | "Float8DynamicActivationFloat8WeightConfig":
            group = _group(data)
            if data.part("weight_dtype").get("_data", _FLOAT8) != _FLOAT8:
                raise data.refused(f"weight_dtype is {data.part('weight_dtype').get('_data')}, only {_FLOAT8} is read")
            if "Dynamic" in kind:
                activations = Activations("float8", "tensor" if group == "tensor" else "row")
            return TorchaoLayers((target,), scaled_scheme("float8", group, activations), plain, kind=kind)
        case "Int4WeightOnlyConfig":
            packing = data.part("int4_packing_format").get("_data", "PLAIN")
            if packing != "PLAIN":
                raise data.refused(f"int4_packing_format is {packing}, which only its own kernels read; use PLAIN")
            size = data.get("group_size", 128)
            if type(size) is not int or size < 1:
                raise data.refused(f"group_size is {size!r}, not a positive number")
            scheme = integer_scheme(4, size, offsets=True)
            return TorchaoLayers((target,), scheme, plain | {_ZEROS}, bits=4, size=size, kind=kind)
        case "IntxWeightOnlyConfig" | "Int8DynamicActivationIntxWeightConfig":
            return _unpacked(data, target, kind, activations)
    raise section.refused(f"quant_type is {kind}, only {_READ} are read")


def _unpacked(data: Section, target: str, kind: str, activations: Activations | None) -> TorchaoLayers:
    """Return layers of integers with a byte each."""
    packing = data.part("intx_packing_format").get("_data", "UNPACKED_TO_INT8")
    bits = _INTS.get(str(data.part("weight_dtype").get("_data")))
    if packing != "UNPACKED_TO_INT8" or bits is None:
        raise data.refused(f"weight_dtype is {data.get('weight_dtype')}, intx_packing_format {packing}")
    group = _group(data, "weight_granularity" if "weight_granularity" in data.values else "granularity")
    mapping = data.part("weight_mapping_type" if "weight_mapping_type" in data.values else "mapping_type")
    size = group[1] if isinstance(group, tuple) else WHOLE_ROW
    scheme = integer_scheme(bits, size, offsets=mapping.get("_data") == "ASYMMETRIC", activations=activations)
    return TorchaoLayers((target,), scheme, frozenset({_DATA, _SCALE, _ZEROS}), bits=bits, size=size, kind=kind)


def _group(data: Section, key: str = "granularity") -> Group:
    """Return what shares a scale. Raises ModelError for other granularities."""
    value: Any = data.get(key)
    if isinstance(value, list):  # The list has the value for activations, then that for weights.
        value = value[-1]
    section = Section(f"{data.key}.{key}", value if isinstance(value, dict) else {"_type": "PerRow"})
    match section.get("_type"):
        case "PerRow" | "PerAxis":
            return "channel"
        case "PerTensor":
            return "tensor"
        case "PerGroup" if type(size := section.part("_data").get("group_size")) is int:
            return 1, size
    raise section.refused(f"granularity {section.get('_type')} is not read")


def _join(module: str, parts: Parts, group: object, pieces: int) -> QuantizedTensor:
    assert isinstance(group, TorchaoLayers)
    data = parts[_DATA]
    scales = parts[_SCALE]
    if data.ndim != 2:
        raise WeightError(f"tensor {module}.{_DATA} {list(data.shape)} is no matrix; serve the model unquantised")
    if group.kind == "Int4WeightOnlyConfig":
        return _join_int4(module, parts, group)
    dtype = FLOAT8_E4M3FN if group.scheme.numbers == "float8" else np.dtype(np.int8)
    check(f"{module}.{_DATA}", data, dtype, data.shape, f"torchao {group.kind}")
    if "Intx" in group.kind:
        middle = 1 << group.bits - 1
        codes = (data.view(np.uint8) + np.uint8(middle)).astype(np.uint8)
        zeros = parts[_ZEROS].astype(np.int16) + middle
        return joined_integers(module, _paired(codes, group), scales, group, zeros)
    if _ZEROS in parts and parts[_ZEROS].any():
        raise not_symmetric(module, _ZEROS)
    return join_scaled(module, data, scales, group.scheme, pieces, _SCALE)


def _paired(codes: np.ndarray[Any, np.dtype[np.uint8]], group: TorchaoLayers) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return numbers of 4 bits in pairs, as they are joined."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4) if group.bits == 4 else codes


def _join_int4(module: str, parts: Parts, group: TorchaoLayers) -> QuantizedTensor:
    """Join two's complements of 4 bits [O, I / 2], scales [groups, O] and offsets [groups, O]."""
    data = parts[_DATA].view(np.uint8) ^ np.uint8(0x88)
    tensor = joined_integers(module, data, parts[_SCALE].T, group)
    offsets = floats(f"{module}.{_ZEROS}", parts[_ZEROS]).T
    if offsets.shape != tensor.scales.shape:
        raise WeightError(
            f"tensor {module}.{_ZEROS} {list(parts[_ZEROS].shape)} does not fit scales {list(parts[_SCALE].shape)}; "
            "download it again"
        )
    return QuantizedTensor(tensor.scheme, tensor.data, tensor.scales, tensor.group_shape, offsets)
