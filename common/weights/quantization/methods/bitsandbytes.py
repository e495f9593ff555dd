"""`bitsandbytes`: 4-bit codes of a table (nf4, fp4) per block of a flat matrix, or int8 per output channel."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.quantization.config import WEIGHT, LayerGroup, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.integers import check
from pagoda.common.weights.quantization.layouts.scaled import floats, join_scaled, scaled_scheme
from pagoda.common.weights.quantization.schemes import TABLES, Codes4
from pagoda.common.weights.quantization.tensors import Floats, QuantizedTensor, Value

_BLOCK: Final = 64
_ABSMAX: Final = "weight.absmax"
_TABLE: Final = "weight.quant_map"
_STATE: Final = "weight.quant_state.bitsandbytes__"
_NESTED_ABSMAX: Final = "weight.nested_absmax"
_NESTED_TABLE: Final = "weight.nested_quant_map"
_ROW_SCALES: Final = "SCB"
_LARGEST: Final = np.float32(127)
_HARMLESS: Final = (
    *("_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype"),
    *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_threshold"),
)


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    read_keys = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "llm_int8_skip_modules")
    section.only(*read_keys, *_HARMLESS)
    ignored = (*section.names("llm_int8_skip_modules"), "lm_head")
    if section.get("load_in_8bit") or section.get("_load_in_8bit"):
        parts = frozenset({WEIGHT, _ROW_SCALES})
        rows = LayerGroup(
            ("Linear",), scaled_scheme("int8", "channel"), parts, np.dtype(np.int8), frozenset({"weight_format"})
        )
        return QuantizationConfig("bitsandbytes", (rows,), ignored, _join_rows)
    table = section.get("bnb_4bit_quant_type", "fp4")
    if table not in TABLES:
        raise section.refused(f"bnb_4bit_quant_type is {table}, only {' and '.join(TABLES)} are read")
    if section.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise section.refused(f"bnb_4bit_quant_storage is {section.get('bnb_4bit_quant_storage')}, only uint8 is read")
    nested = {_NESTED_ABSMAX, _NESTED_TABLE} if section.get("bnb_4bit_use_double_quant") else set()
    parts = frozenset({WEIGHT, _ABSMAX, _TABLE, f"{_STATE}{table}", *nested})
    codes = LayerGroup(("Linear",), Codes4(table, (1, _BLOCK)), parts, np.dtype(np.uint8))
    return QuantizationConfig("bitsandbytes", (codes,), ignored, _join_codes)


def _join_rows(module: str, parts: Parts, group: LayerGroup, pieces: int) -> QuantizedTensor:
    """Join int8 [O, I] and the largest values of the rows."""
    scales = floats(f"{module}.{_ROW_SCALES}", parts[_ROW_SCALES]) / _LARGEST
    return join_scaled(module, parts[WEIGHT], scales, group.scheme, pieces, _ROW_SCALES)


def _join_codes(module: str, parts: Parts, group: LayerGroup, pieces: int) -> Value:
    """Join codes uint8 [O * I / 2], the first in the upper half of a byte, and the largest values of the blocks.

    A matrix whose rows are not whole blocks is dequantised.
    """
    scheme = group.scheme
    assert isinstance(scheme, Codes4)
    state = _state(module, parts, f"{_STATE}{scheme.table}")
    shape = tuple(state.get("shape", ()))
    block = state.get("blocksize", _BLOCK)
    count = int(np.prod(shape))
    if len(shape) != 2 or block != _BLOCK or count % 2:
        raise WeightError(
            f"layer {module}: {scheme.table} weights {list(shape)} in blocks of {block}, only matrices in blocks of "
            f"{_BLOCK} are read; quantise it again, or serve it unquantised"
        )
    label = f"bitsandbytes {scheme.table}"
    check(f"{module}.{WEIGHT}", parts[WEIGHT].reshape(-1), np.uint8, (count // 2,), label)
    if not np.allclose(parts[_TABLE], TABLES[scheme.table], atol=1e-4):
        raise WeightError(f"tensor {module}.{_TABLE} is not the table of {scheme.table}; serve it unquantised")
    codes = parts[WEIGHT].reshape(-1)
    codes = codes << np.uint8(4) | codes >> np.uint8(4)
    scales = _scales(module, parts, state, -(-count // block), label)
    outputs, inputs = shape
    if inputs % block == 0:
        return QuantizedTensor(scheme, codes.reshape(outputs, -1), scales.reshape(outputs, -1), scheme.group)
    flat = QuantizedTensor(scheme, codes[None], scales[None], scheme.group)
    return flat.dequantize().reshape(shape)


def _scales(module: str, parts: Parts, state: dict[str, Any], blocks: int, label: str) -> Floats:
    """Return the largest value of each block, which may itself be quantised."""
    absmax = parts[_ABSMAX]
    if _NESTED_ABSMAX not in parts:
        check(f"{module}.{_ABSMAX}", absmax, np.float32, (blocks,), label)
        return floats(f"{module}.{_ABSMAX}", absmax)
    nested = floats(f"{module}.{_NESTED_ABSMAX}", parts[_NESTED_ABSMAX])
    size = int(state.get("nested_blocksize", 256))
    check(f"{module}.{_ABSMAX}", absmax, np.uint8, (blocks,), label)
    check(f"{module}.{_NESTED_TABLE}", parts[_NESTED_TABLE], np.float32, (256,), label)
    check(f"{module}.{_NESTED_ABSMAX}", nested, np.float32, (-(-blocks // size),), label)
    table = floats(f"{module}.{_NESTED_TABLE}", parts[_NESTED_TABLE])
    scales: Floats = table[absmax] * np.repeat(nested, size)[:blocks] + np.float32(state.get("nested_offset", 0))
    return scales


def _state(module: str, parts: Parts, part: str) -> dict[str, Any]:
    """Return the JSON object in a tensor of bytes. Raise WeightError if it is none."""
    try:
        state = json.loads(parts[part].tobytes())
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise WeightError(f"tensor {module}.{part} is not a JSON object; download it again")
    return state
