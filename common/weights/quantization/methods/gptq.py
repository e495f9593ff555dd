"""`gptq`: integers of 2, 3, 4 or 8 bits packed along the inputs, which may be reordered (desc_act)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.quantization.config import Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.integers import (
    Codes,
    IntegerLayers,
    Order,
    check,
    input_order,
    joined_integers,
    unpack,
)
from pagoda.common.weights.quantization.schemes import WHOLE_ROW, integer_scheme
from pagoda.common.weights.quantization.tensors import Array, QuantizedTensor

BITS: Final = (2, 3, 4, 8)
PARTS: Final = frozenset({"qweight", "qzeros", "scales"})
_ORDER: Final = "g_idx"
_FORMATS: Final = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is missing from the zero points as stored."""

_HARMLESS: Final = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "dataset"),
    *("model_file_base_name", "tokenizer", "batch_size", "module_name_preceding_first_block", "cache_block_outputs"),
    *("block_name_to_quantize", "model_seqlen", "pad_token_id", "use_cuda_fp16", "use_exllama", "disable_exllama"),
    *("exllama_config", "max_input_length", "backend", "meta", "quantizer", "hyb_act", "modules_in_block_to_quantize"),
    *("format", "offload_to_disk", "mse", "act_group_aware", "group_aware", "uri", "rotation"),
)


@dataclass(frozen=True, slots=True)
class GptqLayers(IntegerLayers):
    """Layers whose zero points are stored less `missing`."""

    missing: int = 1


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    read_keys = ("bits", "group_size", "desc_act", "sym", "checkpoint_format", "lm_head", "dynamic", "pack_dtype")
    section.only(*read_keys, *_HARMLESS)
    form = section.get("checkpoint_format") or section.get("format") or "gptq"
    if form not in _FORMATS:
        raise section.refused(f"checkpoint_format is {form}, only {' and '.join(_FORMATS)} are read")
    if section.get("pack_dtype", "int32") != "int32":
        raise section.refused(f"pack_dtype is {section.get('pack_dtype')}, only int32 is read")
    rules = section.part("dynamic")
    ignored = [f"re:{pattern[2:]}" for pattern in rules.values if pattern.startswith("-:")]
    groups = [
        gptq_layers(rules.part(pattern), section, (f"re:{pattern.removeprefix('+:')}",), _FORMATS[form])
        for pattern in rules.values
        if not pattern.startswith("-:")
    ]
    groups.append(gptq_layers(section, section, ("Linear",), _FORMATS[form]))
    if not section.get("lm_head"):
        ignored.append("lm_head")
    return QuantizationConfig(
        "gptq", tuple(groups), tuple(ignored), join, aliases=("gptq_marlin", "moe_wna16", "marlin")
    )


def gptq_layers(section: Section, default: Section, targets: tuple[str, ...], missing: int) -> GptqLayers:
    """Return the layers of a section, whose keys override those of `default`. Raises ModelError."""
    read_keys = ("bits", "group_size", "desc_act", "sym")
    bits, size, ordered, symmetric = (section.get(key, default.get(key)) for key in read_keys)
    if bits not in BITS:
        raise section.refused(f"it has {bits}-bit weights, only {', '.join(map(str, BITS))} are read")
    if type(size) is not int or (size < 1 and size != WHOLE_ROW):
        raise section.refused(f"group_size is {size}")
    ordered = bool(ordered) and size != WHOLE_ROW
    scheme = integer_scheme(bits, size, offsets=symmetric is False, ordered=ordered)
    parts, optional = (PARTS | {_ORDER}, frozenset[str]()) if ordered else (PARTS, frozenset({_ORDER}))
    return GptqLayers(targets, scheme, parts, optional=optional, bits=bits, size=size, missing=missing)


def join(module: str, parts: Parts, group: object, pieces: int) -> QuantizedTensor:
    """Join qweight int32 [I * bits / 32, O], scales [groups, O] and qzeros int32 [groups, O * bits / 32]."""
    assert isinstance(group, GptqLayers)
    bits = group.bits
    qweight = parts["qweight"]
    scales = parts["scales"]
    label = f"{bits}-bit gptq"
    if qweight.ndim != 2 or scales.ndim != 2:
        raise WeightError(f"layer {module}: qweight or scales of {label} weights is no matrix; download it again")
    inputs = len(qweight) * 32 // bits
    outputs = scales.shape[1]
    check(f"{module}.qweight", qweight, np.int32, (inputs * bits // 32, outputs), label)
    check(f"{module}.qzeros", parts["qzeros"], np.int32, (len(scales), -(-outputs * bits // 32)), label)
    order = _order(module, parts, group, inputs, label)
    words = np.ascontiguousarray(qweight.T)
    paired = bits == 4 and order is None
    codes = words.view(np.uint8) if paired else unpack(words, bits, inputs)
    zeros = _zeros(parts["qzeros"], bits, outputs, group.missing)
    return joined_integers(module, codes, scales.T, group, zeros.T, order)


def _zeros(words: Array, bits: int, outputs: int, missing: int) -> Codes:
    """Return the zero points [groups, O], `missing` added to each.

    Writers subtract it from whole words, where a zero point of 0 borrows from the next one.
    """
    if 32 % bits == 0:
        ones = np.uint32(sum(missing << shift for shift in range(0, 32, bits)))
        return unpack((np.ascontiguousarray(words).view(np.uint32) + ones).view(np.int32), bits, outputs)
    codes: Codes = (unpack(words, bits, outputs) + np.uint8(missing)) & np.uint8((1 << bits) - 1)
    return codes


def _order(module: str, parts: Parts, group: GptqLayers, inputs: int, label: str) -> Order | None:
    """Return the order of the inputs; None: as they are."""
    if _ORDER not in parts:
        return None
    check(f"{module}.{_ORDER}", parts[_ORDER], np.int32, (inputs,), label)
    return input_order(f"{module}.{_ORDER}", parts[_ORDER], group.size_of(module, inputs), ordered=group.ordered)
