"""Read an adapter of the library peft: adapter_config.json beside adapter_model.safetensors or adapter_model.bin.

A module `model.layers.0.self_attn.q_proj` of the base model has `lora_A.weight` [R, D] and `lora_B.weight` [F, R], an
embedding `lora_embedding_A` [R, V] and `lora_embedding_B` [D, R]. The family's weight rules tell which parameter a
module fills; of one that fills several, such as a fused q, k, v, each has the same A and rows of its own of B. With
DoRA a module has `lora_magnitude_vector` [F], too, an embedding [D]. A module of `modules_to_save` has its `weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from pagoda.common.config.groups.model import SAVED_MODULES
from pagoda.common.errors import ModelError, reading
from pagoda.common.models.family import Rename, Rule, Split, Stack
from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.files import read_json
from pagoda.common.weights.folder import WeightFile
from pagoda.common.weights.lora.expert_parameters import expert_parameter
from pagoda.common.weights.lora.weights import AdapterWeights, Float32, LowRank, has_factors, rank_bucket
from pagoda.common.weights.rules import match_tensor, split_rows
from pagoda.common.weights.safetensors import SafetensorsFile
from pagoda.common.weights.torch_bin import TorchFile

CONFIG_FILE: Final = "adapter_config.json"
_WEIGHT_FILES: Final = (("adapter_model.safetensors", SafetensorsFile), ("adapter_model.bin", TorchFile))
_PREFIX: Final = "base_model.model."
_PARTS: Final = re.compile(
    r"^(.*)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?$"
)
_SAVED: Final = re.compile(r"^(.*?)(?:\.modules_to_save(?:\.default)?)?\.(weight|bias)$")
_EMBEDDING: Final = "lora_embedding_"
_MAGNITUDE: Final = "lora_magnitude_vector"
_LARGEST: Final = 65504.0  # The largest float16.

# Keys of adapter_config.json that say nothing about what the adapter computes, or that its tensors say again.
_HARMLESS: Final = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"),
        *("target_modules", "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern"),
        *("fan_in_fan_out", "loftq_config", "eva_config", "corda_config", "qalora_group_size", "lora_ga_config"),
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
        *("megatron_core", "runtime_config", "modules_to_save", "bias", "use_dora", "lora_bias", "target_parameters"),
    }
)
_CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights, or their beginnings, with which peft changes the weights of the base model, too."""

_READS_INPUTS: Final = (0, 19)
"""Version of peft from which on lora_A of a parameter has its inputs; written to the config since 0.18."""

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What an adapter is read for."""

    rules: Sequence[Rule]  # Rules for the names of the checkpoint's tensors.
    params: Mapping[str, Param]  # Parameters of the model.
    adaptable: Mapping[str, Param]  # Parameters that an adapter may change.
    max_rank: int  # Value of --max-lora-rank.
    copied: tuple[str, ...] = ()  # Parameters that an adapter may replace, see `LoraOptions.copies`.


@dataclass(frozen=True, slots=True)
class _Config:
    rank: int
    alpha: float
    rank_stabilised: bool  # The scale is alpha / sqrt(rank) instead of alpha / rank.
    ranks: Mapping[str, int]  # Pattern of module names -> rank.
    alphas: Mapping[str, float]
    parameters: tuple[str, ...]  # Last parts of the names in target_parameters.
    reads_inputs: bool  # The matrix lora_A of a parameter has its inputs, see `expert_parameters`.
    scales_rows: bool  # DoRA: every module has magnitudes.
    saved: tuple[str, ...]  # Names of the modules that the adapter has whole, or the last parts of the names.

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's product, whose matrices have that rank. Raises ModelError for another one."""
        rank_of_module = _by_pattern(self.ranks, module, self.rank)
        if rank_of_module != rank:
            raise ModelError(f"{CONFIG_FILE}: r is {rank_of_module} for {module}, its matrices have {rank}")
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return alpha / (sqrt(rank) if self.rank_stabilised else rank)


def _by_pattern(values: Mapping[str, NumberT], module: str, default: NumberT) -> NumberT:
    """Return the value of the first pattern that matches the end of a module's name, as peft does."""
    for pattern, value in values.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ModelError(f"{CONFIG_FILE}: {pattern!r} is not a pattern of module names: {error}") from None
    return default


def read_adapter(folder: Path, base: BaseModel) -> AdapterWeights:
    """Return the adapter of a folder. Raises ModelError for one that is unsupported, broken or of another model.

    Patterns and names of a hostile one can take hours: of a stranger's, call it in a process with limits.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder}: no {CONFIG_FILE}; is it the folder of an adapter?")
    try:
        with reading(folder, "save the adapter again"):
            return _read(folder, base)
    except ModelError as error:
        if str(folder) in str(error):
            raise
        raise ModelError(f"{folder}: {error}") from error


def _read(folder: Path, base: BaseModel) -> AdapterWeights:
    config = _read_config(folder / CONFIG_FILE, base.max_rank)
    file = _open(folder)
    parts: dict[str, dict[str, Float32]] = {}
    builder = _Builder(base)
    for name in file.sizes:
        if (match := _PARTS.match(name)) is not None:
            parts.setdefault(match[1].removeprefix(_PREFIX), {})[match[2]] = to_float32(file.tensor(name))
        elif (module := _saved_module(name, config.saved)) is not None:
            builder.add_copy(module, to_float32(file.tensor(name)), is_bias=name.endswith(".bias"))
        else:
            _check_other(name, file, base)
    if missing := [name for name in config.saved if not builder.has_copy(name)]:
        raise ModelError(f"{file.path}: modules_to_save has {missing[0]}, of which there is no tensor; save it again")
    if not parts and not config.saved:
        raise ModelError(f"{file.path}: has no LoRA matrices")
    for module, tensors in parts.items():
        if config.scales_rows != (_MAGNITUDE in tensors):
            kind = "is missing, though" if config.scales_rows else "is there, but not"
            raise ModelError(f"module {module}: {_MAGNITUDE} {kind} use_dora is set in {CONFIG_FILE}; save it again")
        if not builder.add_experts(module, tensors, config):
            builder.add(module, tensors, config)
    return builder.weights()


def _read_config(path: Path, max_rank: int) -> _Config:
    values = read_json(path)

    def fail(key: str, reason: str) -> ModelError:
        return ModelError(f"{path}: {key} {reason}")

    if values.get("peft_type") != "LORA":
        raise fail("peft_type", f"is {values.get('peft_type')!r}; only LORA adapters are supported")
    if values.get("bias", "none") != "none" or values.get("lora_bias"):
        raise fail("bias", "is trained: adapters with biases are not supported; merge it into the checkpoint")
    saved = values.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise fail("modules_to_save", f"{saved!r} are not names of modules")
    initial = values.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGED_BASE):
        raise fail(
            "init_lora_weights", f"is {initial!r}: the base model's weights differ, too; convert it to plain LoRA"
        )
    for key, value in values.items():
        if key not in _HARMLESS and value:
            raise fail(key, "is not supported; merge the adapter into the checkpoint")
    rank = values.get("r", 8)
    ranks = values.get("rank_pattern") or {}
    alpha = values.get("lora_alpha", 8)
    alphas = values.get("alpha_pattern") or {}
    if not isinstance(ranks, dict) or not all(_is_rank(value) for value in (rank, *ranks.values())):
        raise fail("r", f"{rank!r} with rank_pattern {ranks!r}: ranks are positive integers")
    if not isinstance(alphas, dict) or not all(isinstance(value, int | float) for value in (alpha, *alphas.values())):
        raise fail("lora_alpha", f"{alpha!r} with alpha_pattern {alphas!r}: not numbers")
    largest = max(rank, *ranks.values()) if ranks else rank
    if largest > max_rank:
        raise fail("r", f"is {largest}, above --max-lora-rank {max_rank}")
    parameters = values.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise fail("target_parameters", f"{parameters!r} are not names of parameters")
    last = tuple(dict.fromkeys(name.rpartition(".")[2] for name in parameters))
    reads_inputs = _version(values.get("peft_version")) >= _READS_INPUTS
    scales_rows = bool(values.get("use_dora"))
    return _Config(
        rank=rank,
        alpha=alpha,
        rank_stabilised=bool(values.get("use_rslora")),
        ranks=ranks,
        alphas=alphas,
        parameters=last,
        reads_inputs=reads_inputs,
        scales_rows=scales_rows,
        saved=tuple(saved),
    )


def _version(value: object) -> tuple[int, ...]:
    """Return the first two numbers of a version; (0,) of what is none."""
    match = re.match(r"(\d+)\.(\d+)", str(value))
    return (0,) if match is None else (int(match[1]), int(match[2]))


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _open(folder: Path) -> WeightFile:
    for name, kind in _WEIGHT_FILES:
        if (folder / name).is_file():
            return kind(folder / name)
    raise ModelError(f"{folder}: no {' or '.join(name for name, _ in _WEIGHT_FILES)}")


def _saved_module(name: str, saved: Sequence[str]) -> str | None:
    """Return the module whose whole weight or bias a tensor is; None if modules_to_save has it not."""
    match = _SAVED.match(name.removeprefix(_PREFIX))
    return match[1] if match is not None and any(_is_named(match[1], each) for each in saved) else None


def _is_named(module: str, name: str) -> bool:
    """Return whether modules_to_save means a module by this name: its own, or the end of it."""
    return module == name or module.endswith(f".{name}")


def _check_other(name: str, file: WeightFile, base: BaseModel) -> None:
    """Raise ModelError for a tensor that is no LoRA matrix, unless it is a copy of the base model's embeddings."""
    module, separator, _ = name.removeprefix(_PREFIX).partition(".base_layer.weight")
    if not separator:
        raise ModelError(f"{file.path}: tensor {name} is no LoRA matrix; merge the adapter into the checkpoint")
    shape = file.tensor(name).shape
    match = match_tensor(base.rules, f"{module}.weight", {**base.params, **base.adaptable})
    if match is None or base.adaptable[match.targets[0]].shape != shape:
        raise ModelError(f"{file.path}: tensor {name} {list(shape)} is not the base model's: its vocabulary differs")


def _pair(module: str, tensors: dict[str, Float32], config: _Config, max_rank: int) -> tuple[Float32, Float32]:
    """Return a [R, D] and b [F, R] with the scale. Raises ModelError for missing ones, or of another rank."""
    a, b, embedding = _factors(module, tensors)
    rank = a.shape[0]
    scale = np.float32(_scale(module, rank, config, max_rank))
    a, b = (b.T, a.T * scale) if embedding else (a, b * scale)
    _check_range(module, a, b)
    return a, b


def _factors(module: str, tensors: dict[str, Float32]) -> tuple[Float32, Float32, bool]:
    """Return A, B, and whether they are of embeddings. Raises ModelError unless both are there and fit."""
    embedding = any(part.startswith(_EMBEDDING) for part in tensors)
    first, second = (f"{_EMBEDDING}A", f"{_EMBEDDING}B") if embedding else ("lora_A", "lora_B")
    if tensors.keys() - {_MAGNITUDE} != {first, second}:
        raise ModelError(f"module {module}: {first} or {second} is missing")
    a = tensors[first]
    b = tensors[second]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise ModelError(f"module {module}: {first} {list(a.shape)} and {second} {list(b.shape)} are not factors")
    return a, b, embedding


def _scale(module: str, rank: int, config: _Config, max_rank: int) -> float:
    """Return the factor of a module's product. Raises ModelError for a rank above the limit, or not the stated one."""
    if rank > max_rank:
        raise ModelError(f"module {module}: rank {rank} is above --max-lora-rank {max_rank}")
    return config.scale(module, rank)


def _check_range(module: str, *matrices: Float32) -> None:
    """Raise ModelError for numbers that half precision does not hold, or NaN."""
    if not all(np.abs(matrix).max() <= _LARGEST for matrix in matrices):
        raise ModelError(f"module {module}: numbers beyond {_LARGEST:.0f}, or none; the adapter is broken")


class _Builder:
    """Collects the matrices of parameters."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._known = dict(base.params) | dict(base.adaptable)
        self._dense: dict[str, LowRank] = {}
        self._magnitudes: dict[str, Float32] = {}
        self._copies: dict[str, Float32] = {}
        self._copied: list[str] = []  # Modules of which there is a copy.
        self._experts: dict[str, dict[int, LowRank]] = {}

    def add(self, module: str, tensors: dict[str, Float32], config: _Config) -> None:
        """Enter a module's factors. Raises ModelError if the model has no such module, or cannot adapt it.

        The config's patterns are tried on names of the model's modules only.
        """
        match = match_tensor(self._base.rules, f"{module}.weight", self._known)
        if match is None:
            raise ModelError(f"the model has no module {module}; is the adapter of another base model?")
        for target in match.targets:
            if target not in self._base.adaptable:
                raise ModelError(f"module {module} ({target}) cannot have an adapter; merge it into the checkpoint")
        params = [self._base.adaptable[target] for target in match.targets]
        a, b = _pair(module, tensors, config, self._base.max_rank)
        if config.scales_rows:
            self._add_magnitudes(module, tensors, match.rule, params)
        match match.rule:
            case Rename():
                self._dense[params[0].name] = _checked(module, params[0], params[0].shape, a, b)
            case Stack():
                expert = match.numbers["e"]
                if expert >= params[0].shape[0]:
                    raise ModelError(f"the model has {params[0].shape[0]} experts, so no module {module}")
                factors = _checked(module, params[0], params[0].shape[1:], a, b)
                self._experts.setdefault(params[0].name, {})[expert] = factors
            case Split(axis=0):
                total = sum(param.shape[0] for param in params)
                _checked(module, params[0], (total, *params[0].shape[1:]), a, b)
                parts = [replace(param, shape=(param.shape[0], b.shape[1])) for param in params]
                for param, rows in split_rows(module, b, match.rule, parts):
                    self._dense[param] = _checked(module, self._known[param], self._known[param].shape, a, rows)
            case rule:
                raise ModelError(f"module {module}: adapters of {type(rule).__name__} are not supported; merge it")

    def _add_magnitudes(self, module: str, tensors: Mapping[str, Float32], rule: Rule, params: Sequence[Param]) -> None:
        """Enter DoRA's magnitudes of a module. Raises ModelError for experts, or if they do not fit."""
        values = tensors[_MAGNITUDE].reshape(-1)
        if not all(has_factors(param) for param in params):
            raise ModelError(f"module {module}: DoRA of experts is not supported; merge it into the checkpoint")
        axis = 1 if params[0].name == "embed" else 0
        expected = sum(param.shape[axis] for param in params)
        if len(values) != expected:
            raise ModelError(f"module {module}: {_MAGNITUDE} has {len(values)} numbers, the model's has {expected}")
        _check_range(module, values)
        if isinstance(rule, Split):
            columns = [replace(param, shape=(param.shape[0], 1)) for param in params]
            for name, rows in split_rows(module, values[:, None], rule, columns):
                self._magnitudes[name] = np.ascontiguousarray(rows[:, 0])
        else:
            self._magnitudes[params[0].name] = values
        for param in params:
            self._magnitudes[param.name] = self._magnitudes[param.name] * np.float32(abs(param.scale))

    def has_copy(self, name: str) -> bool:
        """Return whether a module that modules_to_save calls so was entered."""
        return any(_is_named(module, name) for module in self._copied)

    def add_copy(self, module: str, weight: Float32, *, is_bias: bool) -> None:
        """Enter the whole weight of a module. Raises ModelError if it cannot be replaced, or has another shape."""
        match = None if is_bias else match_tensor(self._base.rules, f"{module}.weight", self._known)
        target = match.targets[0] if match is not None and isinstance(match.rule, Rename) else ""
        flags = [flag for flag, parameter in SAVED_MODULES.items() if parameter == target]
        if not flags or target not in self._base.adaptable:
            kind = "bias" if is_bias else "weight"
            raise ModelError(
                f"modules_to_save: the {kind} of {module} cannot be replaced per request, only the weights of "
                f"{' and '.join(SAVED_MODULES)} can; merge the adapter into the checkpoint"
            )
        if target not in self._base.copied:
            raise ModelError(
                f"modules_to_save: a copy of {module} needs room in every slot; start the server with "
                f"--lora-modules-to-save {flags[0]}, or merge the adapter into the checkpoint"
            )
        param = self._base.adaptable[target]
        if weight.shape != param.shape:
            raise ModelError(f"modules_to_save: {module} is {list(weight.shape)}, in the model {list(param.shape)}")
        _check_range(module, weight)
        self._copies[target] = weight if param.scale == 1 else weight * np.float32(param.scale)
        self._copied.append(module)

    def add_experts(self, module: str, tensors: dict[str, Float32], config: _Config) -> bool:
        """Enter the factors of a parameter of all experts; False if the module is another. Raises ModelError."""
        if not config.parameters:
            return False
        a, b, _ = _factors(module, tensors)
        shape = a.shape[1], b.shape[0]
        parameter = expert_parameter(module, shape, config.parameters, self._base.rules, self._known)
        if parameter is None:
            return False
        if config.scales_rows:
            raise ModelError(f"{parameter.name}: DoRA of experts is not supported; merge it into the checkpoint")
        for param in parameter.params:
            if param.name not in self._base.adaptable:
                raise ModelError(f"{parameter.name} ({param.name}) cannot have an adapter; merge it")
        rank, rest = divmod(a.shape[0], parameter.experts)
        if rest:
            raise ModelError(
                f"{parameter.name}: lora_A {list(a.shape)} has no whole rank for {parameter.experts} experts"
            )
        scale = _scale(parameter.name, rank, config, self._base.max_rank)
        _check_range(parameter.name, a, b * np.float32(scale))
        self._dense |= parameter.factors(a, b * np.float32(scale), reads_inputs=config.reads_inputs)
        return True

    def weights(self) -> AdapterWeights:
        """Return all matrices, padded to one rank."""
        every = [*self._dense.values(), *(matrix for experts in self._experts.values() for matrix in experts.values())]
        rank = rank_bucket(max((matrix.a.shape[-2] for matrix in every), default=1))
        matrices = {name: _padded(factors, rank) for name, factors in self._dense.items()}
        for name, experts in self._experts.items():
            matrices[name] = _stacked(
                self._base.adaptable[name], {e: _padded(f, rank) for e, f in experts.items()}, rank
            )
        for name, factors in list(matrices.items()):
            values = f"{name.removesuffix('.k')}.v"
            if name.endswith(".k") and values in self._base.adaptable and values not in self._base.params:
                matrices[values] = factors  # The values are the keys.
                if name in self._magnitudes:
                    self._magnitudes[values] = self._magnitudes[name]
        for name, copy in self._copies.items():
            if name in matrices:
                raise ModelError(f"modules_to_save: the adapter has a copy of {name}, and low-rank matrices of it, too")
            outputs, inputs = copy.shape
            a = np.zeros((rank, inputs), np.float32)
            matrices[name] = LowRank(a, np.zeros((outputs, rank), np.float32), copy=copy)
        return AdapterWeights(rank, matrices, self._magnitudes)


def _checked(module: str, param: Param, shape: tuple[int, ...], a: Float32, b: Float32) -> LowRank:
    """Return the factors of a matrix of that shape, times the parameter's scale."""
    if (b.shape[0], a.shape[1]) != shape:
        raise ModelError(
            f"module {module} is [{b.shape[0]}, {a.shape[1]}] in the adapter and {list(shape)} in the model; "
            "the adapter is of another base model"
        )
    return LowRank(a, b if param.scale == 1 else b * np.float32(param.scale))


def _padded(factors: LowRank, rank: int) -> LowRank:
    more = (0, rank - factors.a.shape[-2])
    stack = ((0, 0),) * (factors.a.ndim - 2)
    a = np.pad(factors.a, (*stack, more, (0, 0)))
    b = np.pad(factors.b, (*stack, (0, 0), more))
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b))


def _stacked(param: Param, experts: Mapping[int, LowRank], rank: int) -> LowRank:
    """Return the factors of all experts; those without are zero."""
    count, rows, columns = param.shape
    a = np.zeros((count, rank, columns), np.float32)
    b = np.zeros((count, rows, rank), np.float32)
    for expert, factors in experts.items():
        a[expert] = factors.a
        b[expert] = factors.b
    return LowRank(a, b)
