"""Read a quantised checkpoint: `read_quantization` its config.json, `join_scales` its tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from pagoda.common.errors import ModelError, WeightError, reading
from pagoda.common.weights.dtypes import FLOAT8_E4M3FN, FLOAT8_E5M2, dtype_name
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.quantization.config import WEIGHT, LayerGroup, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.methods import (
    auto_round,
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    fbgemm_fp8,
    fp8,
    gptq,
    hqq,
    modelopt,
    mxfp4,
    mxfp8,
    quark,
    torchao,
)
from pagoda.common.weights.quantization.tensors import Array, QuantizedTensor, Value, and_more

logger = logging.getLogger(__name__)

KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json under which methods describe themselves."""

METHODS: Final[Mapping[str, Callable[[Section], QuantizationConfig]]] = {
    "auto-round": auto_round.read,
    "awq": awq.read,
    "bitnet": bitnet.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fbgemm_fp8.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "hqq": hqq.read,
    "inc": auto_round.read,
    "intel/auto-round": auto_round.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "mxfp4": mxfp4.read,
    "mxfp8": mxfp8.read,
    "quark": quark.read,
    "torchao": torchao.read,
}
"""quant_method -> reader. Raises ModelError for a combination that it does not read."""

ShapeOf = Callable[[str], tuple[int, ...] | None]
"""Name of a stored matrix -> its shape as config.json describes the model; None: not known."""

_NARROW: Final = frozenset(map(np.dtype, (np.int8, np.uint8, np.int32))) | {FLOAT8_E4M3FN, FLOAT8_E5M2}
"""Data types of quantised matrices."""


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with dense weights."""
    return {key: value for key, value in config.items() if key not in KEYS}


def states_quantization(section: object) -> bool:
    """Return whether a section of config.json describes quantised weights: it has a method other than `none`."""
    return section not in (None, {}) and not (isinstance(section, Mapping) and section.get("quant_method") == "none")


def read_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Return how the checkpoint of a config.json is quantised; None: its weights are dense.

    An empty section, and one with the method `none`, mean dense weights. Raises ModelError naming the method for one
    that is not read, or a combination of it.
    """
    for key in KEYS:
        if states_quantization(config.get(key)):
            section = Section(key, config[key])
            method = section.method
            if method is None and modelopt.wrote(section):
                method = "modelopt"
            reader = METHODS.get(str(method))
            if reader is None:
                name = method or "a method it does not name"
                known = ", ".join(METHODS)
                raise ModelError(
                    f"config.json: {key}: the weights are quantised by {name}, which this version does not read (it "
                    f"reads {known}); serve a GGUF file of the model (org/name:Q4_K_M), or its unquantised weights"
                )
            with reading(f"config.json: {key}", "download it again, or serve a GGUF file of the model"):
                return reader(section)
    return None


def join_scales(
    tensors: Iterable[NamedTensor],
    config: QuantizationConfig,
    pieces: Callable[[str], int] = lambda name: 1,
    stored: Collection[str] = (),
    shape_of: ShapeOf = lambda name: None,
) -> Iterator[tuple[str, Value]]:
    """Yield the tensors of a quantised checkpoint, those of each quantised layer joined. Dense ones pass through.

    `pieces`: how many parts of a matrix, by its name, have blocks of scales of their own. `stored`: names of all
    tensors; without them layers that may have more parts are joined last. `shape_of`: the shape of a matrix, by its
    name, as far as it is known; without it padding stays. Tensors that nothing uses are dropped, with
    a log line at the end. Raises WeightError for tensors that the config does not describe, or that do not fit its
    scheme.
    """
    waiting: dict[str, dict[str, Array]] = {}
    joined: set[str] = set()
    unused: list[str] = []
    known = config.parts
    for name, tensor in tensors if config.expand is None else config.expand(tensors):
        module, part = config.split(name, known)
        if part in config.unused:
            unused.append(name)
            continue
        if part not in known or (part == WEIGHT and tensor.dtype not in _NARROW):
            yield name, tensor
            continue
        if module in joined:
            raise _superfluous(config, module, part)
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        group = _group(config, module, parts)
        if group is not None and _expected(config, module, group, stored) <= parts.keys():
            del waiting[module]
            joined.add(module)
            yield _joined(config, module, parts, group, pieces, shape_of)
    for module, parts in waiting.items():
        group = _group(config, module, parts)
        if group is None or not group.parts <= parts.keys():
            raise _incomplete(config, module, parts)
        yield _joined(config, module, parts, group, pieces, shape_of)
    if unused:
        logger.info("%s: not used: activations are not quantised by static scales", and_more(unused))


def _expected(config: QuantizationConfig, module: str, group: LayerGroup, stored: Collection[str]) -> frozenset[str]:
    """Return the parts to wait for."""
    if not stored:
        return group.parts | group.optional
    return group.parts | {part for part in group.optional if f"{module}{config.separator}{part}" in stored}


def _joined(
    config: QuantizationConfig,
    module: str,
    parts: Parts,
    group: LayerGroup,
    pieces: Callable[[str], int],
    shape_of: ShapeOf,
) -> tuple[str, Value]:
    for part in sorted(parts.keys() - group.parts - group.optional):
        raise _superfluous(config, module, part)
    name = f"{module}{config.suffix}"
    with reading(f"layer {module}", "download config.json and the weights again"):
        tensor = config.join(module, parts, group, pieces(name))
    _check_finite(module, tensor)
    return name, _without_padding(tensor, group.padding, shape_of(name))


def _without_padding(tensor: Value, padding: tuple[int, int], shape: tuple[int, ...] | None) -> Value:
    """Return the outputs and inputs of a matrix of this shape; unchanged if they are not padded as `padding` says."""
    if padding == (1, 1) or shape is None or len(shape) != len(padding):
        return tensor
    if tensor.shape != tuple(-(-size // multiple) * multiple for size, multiple in zip(shape, padding)):
        return tensor  # The reader of the tensor names both shapes.
    return tensor[tuple(slice(size) for size in shape)]


def _check_finite(module: str, tensor: Value) -> None:
    """Raise WeightError for a scale or zero point that is no number: what it scales would be none either."""
    parts: dict[str, Array | None] = {"values": tensor} if isinstance(tensor, np.ndarray) else _factors(tensor)
    for kind, values in parts.items():
        if values is not None and not np.isfinite(values).all():
            raise WeightError(
                f"layer {module}: its {kind} have values that are not finite numbers; download the weights again, or "
                "quantise the model again"
            )


def _factors(tensor: QuantizedTensor) -> dict[str, Array | None]:
    """Return what the numbers of a matrix are scaled by and moved by."""
    names = ("scales", "offsets", "row_scales", "input_scale")
    return {name.replace("_", " "): getattr(tensor, name) for name in names}


def _group(config: QuantizationConfig, module: str, parts: Parts) -> LayerGroup | None:
    """Return the group of a layer; of one that the config does not name, the first with its tensors."""
    if (group := config.group(module)) is not None:
        return group
    if WEIGHT in parts:
        return next((group for group in config.groups if group.dtype == parts[WEIGHT].dtype), None)
    return next((group for group in config.groups if WEIGHT not in group.parts and parts.keys() <= group.parts), None)


def _superfluous(config: QuantizationConfig, module: str, part: str) -> WeightError:
    return WeightError(
        f"tensor {module}{config.separator}{part}: {config.method} weights have no {part} as quantization_config "
        "describes this layer; download config.json and the weights again"
    )


def _incomplete(config: QuantizationConfig, module: str, parts: Parts) -> WeightError:
    have = f"{module}{config.separator}{next(iter(parts))}"
    group = _group(config, module, parts)
    if group is None:
        dtype = dtype_name(next(iter(parts.values())).dtype)
        return WeightError(f"tensor {have} is {dtype}, but quantization_config does not quantise this layer")
    lacks = ", ".join(sorted(group.parts - parts.keys()))
    return WeightError(f"tensor {have}: the checkpoint lacks its {lacks}; download it again")
