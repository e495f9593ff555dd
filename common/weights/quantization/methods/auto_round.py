"""`auto-round`, `inc`: integers packed as GPTQ or AWQ has them, with their own scheme for some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagoda.common.weights.quantization.config import LayerGroup, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.methods import awq, gptq
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_DENSE_BITS: Final = 16
_KEYS: Final = ("bits", "group_size", "sym")
_OFF: Final = ("rotation_config", "super_bits")
"""Keys of what is not read, off by default. All others that are not read here are settings of the search."""


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    for key in _OFF:
        if section.get(key):
            raise section.refused(f"{key} is {section.get(key)!r}, which this version does not read")
    if section.get("data_type", "int") not in ("int", "int_sym", "int_asym"):
        raise section.refused(f"data_type is {section.get('data_type')}, only int is read")
    activations = section.get("act_bits")
    if activations is not None and activations < _DENSE_BITS:
        raise section.refused(f"act_bits is {activations}, only weights of fewer bits are read")
    form = str(section.get("packing_format") or "auto_round:auto_gptq")
    others = section.part("extra_config")
    ignored = ["lm_head"]
    groups: list[LayerGroup] = []
    for name in others.values:
        part = others.part(name)
        target = name if name.replace(".", "").replace("_", "").isalnum() else f"re:{name}"
        if (part.get("bits") or section.get("bits")) >= _DENSE_BITS:
            ignored.append(target)
            continue
        groups.append(_layers(part, section, (target,), form))
        if name == "lm_head":
            ignored.remove(name)
    groups.append(_layers(section, section, ("Linear",), form))
    aliases = ("auto-round", "auto_round", "inc", "gptq_marlin", "awq_marlin", "moe_wna16")
    return QuantizationConfig("auto-round", tuple(groups), tuple(ignored), _join, aliases=aliases[1:])


def _layers(part: Section, default: Section, targets: tuple[str, ...], form: str) -> LayerGroup:
    """Return the layers of a section, whose keys override those of `default`."""
    values: Mapping[str, Any] = {key: part.get(key, default.get(key)) for key in _KEYS}
    section = Section(part.key, {**values, "desc_act": False})
    if "awq" in form:
        return awq.awq_layers(section, section.get("bits"), section.get("group_size"), targets)
    missing = 1 if "gptq" in form and "gptqmodel" not in form else 0
    return gptq.gptq_layers(section, section, targets, missing)


def _join(module: str, parts: Parts, group: LayerGroup, pieces: int) -> QuantizedTensor:
    join = awq.join if isinstance(group, awq.AwqLayers) else gptq.join
    return join(module, parts, group, pieces)
