"""Quantised weights: what a checkpoint holds of each matrix, and the scheme that its config.json states.

`read_quantization` reads `quantization_config`, `parameter_schemes` says which parameters it quantises, `join_scales`
turns the stored tensors into `QuantizedTensor`s. A backend computes with a scheme or dequantises it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.family import Rule
from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import FLOAT8_E4M3FN, dtype_name, to_float32
from pagoda.common.weights.files import NamedTensor

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

Group: TypeAlias = Literal["tensor", "channel"] | tuple[int, int]
"""Numbers that share a scale: all, those of an output channel, or a block of (outputs, inputs)."""


@dataclass(frozen=True, slots=True)
class Float8:
    """float8_e4m3fn numbers times a scale per group."""

    group: Group


@dataclass(frozen=True, slots=True)
class Int8:
    """int8 numbers times a scale per group, without zero points."""

    group: Group


Scheme = Float8 | Int8

_DTYPES: Final[Mapping[type[Scheme], np.dtype[Any]]] = {Float8: FLOAT8_E4M3FN, Int8: np.dtype(np.int8)}

_DEVIATIONS: Final[Mapping[type[Scheme], float]] = {Float8: 0.6, Int8: 74.0}
"""Of the numbers of `random_quantized`, before they are scaled."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A matrix, or a stack of them: `data` times `scales`, as the checkpoint holds them.

    `scales` has as many axes as `data`, with one entry per `group_shape` elements; the last group of an axis may be
    partial.
    """

    scheme: Scheme
    data: Array  # [..., O, I]
    scales: npt.NDArray[np.float32]
    group_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    @property
    def T(self) -> QuantizedTensor:  # noqa: N802
        """The transposed matrix, as views."""
        return QuantizedTensor(self.scheme, self.data.T, self.scales.T, self.group_shape[::-1])

    def __getitem__(self, cut: tuple[slice, ...]) -> QuantizedTensor:
        """Return a part, one slice per leading axis. Groups are divided if it starts inside of one."""
        scales, groups = self.scales, list(self.group_shape)
        for axis, part in enumerate(cut):
            start, stop, _ = part.indices(self.shape[axis])
            size, extent = groups[axis], self.shape[axis]
            if size >= extent:  # one group spans the axis
                groups[axis] = stop - start
                continue
            groups[axis] = gcd(size, start)
            scales = np.repeat(scales, size // groups[axis], axis)
            rows = slice(start // groups[axis], -(-stop // groups[axis]))
            scales = scales[(*[slice(None)] * axis, rows)]
        return QuantizedTensor(self.scheme, self.data[cut], scales, tuple(groups))

    def channel_scales(self) -> npt.NDArray[np.float32] | None:
        """Return the scale of each output channel [..., O]; None if those of its inputs differ."""
        if self.scales.shape[-1] != 1:
            return None
        return np.repeat(self.scales[..., 0], self.group_shape[-2], -1)[..., : self.shape[-2]]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Return the values."""
        scales = self.scales
        for axis, (size, extent) in enumerate(zip(self.group_shape, self.shape)):
            if scales.shape[axis] > 1 and size > 1:
                scales = np.repeat(scales, size, axis)[(*[slice(None)] * axis, slice(extent))]
        return to_float32(self.data) * scales


Value = Array | QuantizedTensor
"""The values of a parameter or of a stored tensor."""


def stack(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return matrices of equal shapes and groups along a new first axis."""
    first = parts[0]
    data, scales = (np.stack(arrays) for arrays in zip(*((part.data, part.scales) for part in parts)))
    return QuantizedTensor(first.scheme, data, scales, (1, *first.group_shape))


def concatenate(parts: Sequence[Value]) -> Value:
    """Return the rows of all parts, all dense or all quantised. Rows whose groups would be divided get a scale each."""
    dense = [part for part in parts if not isinstance(part, QuantizedTensor)]
    if dense:
        return np.concatenate(dense)
    quantised = [part for part in parts if isinstance(part, QuantizedTensor)]
    first, sizes = quantised[0], {part.group_shape[0] for part in quantised}
    if len(sizes) == 1 and not any(len(part.data) % part.group_shape[0] for part in quantised[:-1]):
        rows, scales = first.group_shape[0], [part.scales for part in quantised]
    else:
        rows, scales = 1, [np.repeat(p.scales, p.group_shape[0], 0)[: len(p.data)] for p in quantised]
    data = np.concatenate([part.data for part in quantised])
    return QuantizedTensor(first.scheme, data, np.concatenate(scales), (rows, *first.group_shape[1:]))


def random_quantized(scheme: Scheme, shape: tuple[int, ...], seed: int, deviation: float) -> QuantizedTensor:
    """Return random values around 0 with this standard deviation. `shape` [..., O, I]."""
    numbers = np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)
    match scheme:
        case Float8():
            numbers &= 0xBF  # up to 1.875, never NaN
            data = numbers.view(FLOAT8_E4M3FN)
        case Int8():
            data = numbers.view(np.int8)
    outputs, inputs = shape[-2:]
    groups: Mapping[object, tuple[int, int]] = {"tensor": (outputs, inputs), "channel": (1, inputs)}
    group = (*[1] * (len(shape) - 2), *groups.get(scheme.group, scheme.group))
    scale = deviation / _DEVIATIONS[type(scheme)]
    scales = np.full([-(-size // part) for size, part in zip(shape, group)], scale, np.float32)
    return QuantizedTensor(scheme, data, scales, group)


def dequantized(weights: Iterable[tuple[str, Value]], backend: str) -> Iterator[NamedTensor]:
    """Yield all parameters as arrays. Logs at the end which ones `backend` dequantised."""
    names: list[str] = []
    for name, value in weights:
        if isinstance(value, QuantizedTensor):
            names.append(name)
            yield name, value.dequantize()
        else:
            yield name, value
    log_dequantized(names, backend)


def log_dequantized(names: Sequence[str], backend: str) -> None:
    """Log that `backend` dequantised these parameters, if any."""
    if names:
        logger.info("%s: dequantised %s: it does not compute with their scheme", backend, _and_more(names))


def _and_more(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


# quantization_config of config.json.

KEYS: Final = ("quantization_config", "compression_config")

_IGNORED_KEYS: Final = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
_REGEX: Final = "re:"
_SUPPORTED: Final = "float8 or int8 weights with scales per tensor, channel or block, and dense KV caches"
_EMBEDDINGS: Final = ("embed", "positions", "token_types")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Linear layers with one scheme."""

    targets: tuple[str, ...]  # `Linear` (all), names, or `re:` patterns of names
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How a checkpoint is quantised."""

    method: str  # quant_method
    groups: tuple[LayerGroup, ...]
    ignored: tuple[str, ...]  # names or `re:` patterns of layers that are not quantised
    scale: str  # last part of the names of scales

    @property
    def names(self) -> tuple[str, ...]:
        """Values of --quantization that name this quantisation."""
        number = {Float8: "fp8", Int8: "int8"}
        numbers = {number[type(group.scheme)] for group in self.groups}
        return tuple(dict.fromkeys((self.method, *(numbers if len(numbers) == 1 else ()))))

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of the linear layer `module`; None: not quantised."""
        if any(_covers(pattern, module) for pattern in self.ignored):
            return None
        for group in self.groups:
            if any(target == "Linear" or _covers(target, module) for target in group.targets):
                return group.scheme
        return None

    def stored_scheme(self, module: str, dtype: np.dtype[Any]) -> Scheme | None:
        """Return the scheme of stored numbers: the module's, else the first with that dtype; None: there is none."""
        schemes = (self.scheme(module), *(group.scheme for group in self.groups))
        return next((scheme for scheme in schemes if scheme is not None and _DTYPES[type(scheme)] == dtype), None)


def _covers(pattern: str, module: str) -> bool:
    """Whether a name or `re:` pattern names a module, a module around it, or its last part."""
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with dense weights."""
    return {key: value for key, value in config.items() if key not in KEYS}


def read_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Return how the checkpoint of a config.json is quantised; None: its weights are dense.

    Raises ModelError naming the method for one that is not read, or a combination of it.
    """
    for key in KEYS:
        if config.get(key) is not None:
            return _Section(key, config[key]).read()
    return None


class _Section:
    """The quantization_config of a config.json."""

    def __init__(self, key: str, section: object) -> None:
        self._key = key
        self._values: Mapping[str, Any] = section if isinstance(section, Mapping) else {}

    def read(self) -> QuantizationConfig:
        match self._values.get("quant_method"):
            case "compressed-tensors":
                return self._compressed_tensors()
            case "fp8":
                return self._fp8()
            case _:
                raise self._refused()

    def _refused(self, problem: str = "") -> ModelError:
        """Return the error for an unknown method, or for a `problem` with a known one."""
        method = self._values.get("quant_method") or "a method it does not name"
        kind = f" ({self._values['format']})" if self._values.get("format") else ""
        limit = f"reads only with {_SUPPORTED}: {problem}" if problem else "does not read"
        return ModelError(
            f"config.json: {self._key}: the weights are quantised by {method}{kind}, which this version {limit}; "
            "serve a GGUF file of the model (org/name:Q4_K_M), or its unquantised weights"
        )

    def _compressed_tensors(self) -> QuantizationConfig:
        known = {"config_groups", "quantization_status", "global_compression_ratio", "version", "format"}
        self._no_others(self._values, known, self._key)
        groups = self._values.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise self._refused("config_groups is missing")
        layers = tuple(self._layer_group(str(name), group) for name, group in groups.items())
        return QuantizationConfig("compressed-tensors", layers, self._ignored(), "weight_scale")

    def _layer_group(self, name: str, group: object) -> LayerGroup:
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise self._refused(f"{name} describes no weights")
        self._no_others(group, {"targets", "weights", "input_activations", "format"}, name)
        activations = group.get("input_activations") or {}
        if not isinstance(activations, Mapping):
            raise self._refused(f"{name} has input_activations that are no object")
        if activations.get("num_bits", 8) != 8:
            raise self._refused(f"{name} has activations of {activations['num_bits']} bits")
        return LayerGroup(
            self._names(f"targets of {name}", group.get("targets")), self._weights(name, group["weights"])
        )

    def _weights(self, name: str, weights: Mapping[str, Any]) -> Scheme:
        kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
        block = _block(weights.get("block_structure"))
        group: Group
        if strategy == "block" and block is not None:
            group = block
        elif strategy in ("tensor", "channel"):
            group = strategy
        else:
            raise self._refused(f"{name} has {bits}-bit {kind} weights, strategy {strategy}")
        if bits != 8 or kind not in ("float", "int"):
            raise self._refused(f"{name} has {bits}-bit {kind} weights, strategy {strategy}")
        if weights.get("symmetric") is False or weights.get("actorder") or weights.get("dynamic"):
            raise self._refused(f"{name} has weights that are asymmetric, reordered or quantised dynamically")
        return Float8(group) if kind == "float" else Int8(group)

    def _fp8(self) -> QuantizationConfig:
        self._no_others(
            self._values, {"activation_scheme", "fmt", "weight_block_size", "scale_fmt", "dequantize"}, self._key
        )
        if self._values.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise self._refused(f"fmt is {self._values['fmt']}")
        block = _block(self._values.get("weight_block_size"))
        if block is None and self._values.get("weight_block_size") is not None:
            raise self._refused(f"weight_block_size is {self._values['weight_block_size']}")
        scheme = Float8(block or "tensor")
        scale = "weight_scale" if block is None else "weight_scale_inv"
        return QuantizationConfig("fp8", (LayerGroup(("Linear",), scheme),), (*self._ignored(), "lm_head"), scale)

    def _no_others(self, values: Mapping[str, Any], known: set[str], name: str) -> None:
        """Raise ModelError for a key whose value is set but not read."""
        known = known | {"quant_method", *_IGNORED_KEYS}
        for key, value in values.items():
            if key not in known and value not in (None, False, {}, []) and value != {"format": "dense"}:
                raise self._refused(f"{name} has {key}")

    def _ignored(self) -> tuple[str, ...]:
        return tuple(name for key in _IGNORED_KEYS for name in self._names(key, self._values.get(key)))

    def _names(self, key: str, value: object) -> tuple[str, ...]:
        """Return a list of names or patterns. Raises ModelError for anything else."""
        names = tuple(str(name) for name in value or ()) if value is None or isinstance(value, list) else None
        if names is None:
            raise self._refused(f"{key} is not a list of layers")
        for name in names:
            try:
                re.compile(name.removeprefix(_REGEX) if name.startswith(_REGEX) else "")
            except re.error:
                raise self._refused(f"{key} has {name!r}, which is not a pattern") from None
        return names


def _block(value: object) -> tuple[int, int] | None:
    """Return a JSON list of two positive sizes; None for anything else."""
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    return None


# The checkpoint's tensors.

_WEIGHT: Final = "weight"
_UNUSED: Final = ("input_scale", "input_zero_point")
"""Last parts of the names of static scales of activations."""


def join_scales(tensors: Iterable[NamedTensor], config: QuantizationConfig) -> Iterator[tuple[str, Value]]:
    """Yield the tensors of a quantised checkpoint, each matrix joined with its scales. Dense ones pass through.

    Static scales of activations are dropped, with a log line at the end. Raises WeightError for numbers that the config
    does not describe, or without scales of a shape that fits.
    """
    waiting: dict[str, dict[str, Array]] = {}
    unused: list[str] = []
    for name, tensor in tensors:
        module, _, part = name.rpartition(".")
        if part in _UNUSED:
            unused.append(name)
            continue
        if part != config.scale and (part != _WEIGHT or tensor.dtype not in _DTYPES.values()):
            yield name, tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        if len(parts) == 2:
            del waiting[module]
            yield f"{module}.{_WEIGHT}", _joined(module, parts[_WEIGHT], parts[config.scale], config)
    for module, parts in waiting.items():
        have, lacks = (_WEIGHT, config.scale) if _WEIGHT in parts else (config.scale, f"quantised {_WEIGHT}")
        raise WeightError(f"tensor {module}.{have}: the checkpoint lacks its {lacks}; download it again")
    if unused:
        logger.info(
            "%s: static scales of activations are not used: activations are not quantised, or by a scale per row",
            _and_more(unused),
        )


def _joined(module: str, data: Array, scales: Array, config: QuantizationConfig) -> QuantizedTensor:
    scheme = config.stored_scheme(module, data.dtype)
    if scheme is None:
        raise WeightError(
            f"tensor {module}.weight is {dtype_name(data.dtype)}, which quantization_config does not name"
        )
    if data.ndim != 2:
        raise WeightError(f"tensor {module}.weight {list(data.shape)} is quantised, but not a matrix")
    outputs, inputs = data.shape
    try:
        wide = to_float32(scales)
    except TypeError as error:
        raise WeightError(f"tensor {module}.{config.scale}: {error}; convert it to float32") from None
    if scales.size == 1:
        return QuantizedTensor(type(scheme)("tensor"), data, wide.reshape(1, 1), (outputs, inputs))
    if scales.shape in ((outputs,), (outputs, 1)):
        return QuantizedTensor(type(scheme)("channel"), data, wide.reshape(-1, 1), (1, inputs))
    block = scheme.group
    if isinstance(block, tuple) and scales.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        return QuantizedTensor(scheme, data, wide, block)
    raise WeightError(
        f"tensor {module}.{config.scale} has shape {list(scales.shape)}, which does not fit {list(data.shape)} numbers "
        f"with scales per {'block ' + str(list(block)) if isinstance(block, tuple) else block}"
    )


def parameter_schemes(
    config: QuantizationConfig, params: Mapping[str, Param], sources: Mapping[str, Sequence[tuple[Rule, str]]]
) -> dict[str, Scheme]:
    """Return the scheme of each quantised parameter.

    `sources`: per parameter the rules that fill it and the tensor names that they read (see `rules.sources`). A
    parameter counts as dense if any of them is ignored, or is stored transposed.
    """
    schemes: dict[str, Scheme] = {}
    for name, param in params.items():
        if len(param.shape) < 2 or name in _EMBEDDINGS:
            continue
        candidates = {_source_scheme(config, rule, source) for rule, source in sources[name]}
        if len(candidates) == 1 and (scheme := candidates.pop()) is not None:
            schemes[name] = scheme
    return schemes


def _source_scheme(config: QuantizationConfig, rule: Rule, source: str) -> Scheme | None:
    transposed = getattr(rule, "transpose", False)
    return None if transposed else config.scheme(source.removesuffix(f".{_WEIGHT}"))
