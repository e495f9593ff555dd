"""How a checkpoint is quantised: which scheme each of its linear layers has.

`methods/` reads one `quant_method` per file: the section of config.json, and the tensors that a layer is stored in.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from pagoda.common.errors import ModelError
from pagoda.common.models.family import Rule
from pagoda.common.models.primitives import Param
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.quantization.schemes import ScaledScheme
from pagoda.common.weights.quantization.tensors import Array, Value

_REGEX: Final = "re:"
EMBEDDINGS: Final = ("embed", "positions", "token_types")
_MATRIX: Final = 2
"""Axes of a matrix; more: a stack of them."""

WEIGHT: Final = "weight"
"""Last part of the name of a layer's matrix, stored or joined."""

Parts: TypeAlias = Mapping[str, Array]
"""The tensors of a linear layer, by the last part of their names, which may have several words."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Linear layers with one scheme."""

    targets: tuple[str, ...]  # `Linear` (all), names, or `re:` patterns of names
    scheme: ScaledScheme  # with `WHOLE_ROW` in place of the number of inputs
    parts: frozenset[str]  # last parts of the names of a layer's tensors
    dtype: np.dtype[Any] | None = None  # data type of `weight` if dense layers have that part, too; None: any
    optional: frozenset[str] = frozenset()  # parts that some files leave out
    padding: tuple[int, int] = (1, 1)  # outputs and inputs are padded to multiples of these


Join = Callable[[str, Parts, LayerGroup, int], Value]
"""(module, its tensors, its group, pieces) -> its weight. `pieces`: parts of the matrix with blocks of their own.

Raises WeightError for tensors that do not fit the scheme, naming the layer.
"""


Expand = Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]
"""Tensors of a checkpoint as they are stored -> as the groups describe them."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How a checkpoint is quantised."""

    method: str  # the value of quant_method
    groups: tuple[LayerGroup, ...]  # the first that names a layer counts
    ignored: tuple[str, ...]  # names or `re:` patterns of layers that are not quantised
    join: Join = field(compare=False, repr=False)
    unused: frozenset[str] = frozenset()  # last parts of names of tensors that are dropped, which the log says
    separator: str = "."  # between a module and the last part of a tensor's name
    suffix: str = f".{WEIGHT}"  # of a joined weight's name
    aliases: tuple[str, ...] = ()  # other values of --quantization that name the method
    for_any_model: bool = False  # Dequantised, the tensors are those of the dense model, without rules of a family.
    expand: Expand | None = field(default=None, compare=False, repr=False)  # Applied to tensors before they are joined.
    fp8_cache: bool = False  # it was calibrated with a KV cache of float8, a scale per layer

    @property
    def names(self) -> tuple[str, ...]:
        """Values of --quantization that name this quantisation."""
        numbers = {group.scheme.name for group in self.groups}
        return tuple(dict.fromkeys((self.method, *self.aliases, *(numbers if len(numbers) == 1 else ()))))

    @property
    def parts(self) -> frozenset[str]:
        """Last parts of the names of the tensors of quantised layers."""
        return frozenset().union(*(group.parts | group.optional for group in self.groups))

    def split(self, name: str, parts: Collection[str]) -> tuple[str, str]:
        """Return the module and the part of a tensor's name: one of `parts` where it ends so, else the last word."""
        at = len(name)
        while (at := name.rfind(self.separator, 0, at)) >= 0:
            if (part := name[at + len(self.separator) :]) in parts:
                return name[:at], part
        module, _, part = name.rpartition(self.separator)
        return module, part

    def group(self, module: str) -> LayerGroup | None:
        """Return the group of the linear layer `module`; None: not quantised."""
        if any(covers(pattern, module) for pattern in self.ignored):
            return None
        for group in self.groups:
            if any(target == "Linear" or covers(target, module) for target in group.targets):
                return group
        return None

    def scheme(self, module: str) -> ScaledScheme | None:
        """Return the scheme of the linear layer `module`; None: not quantised."""
        group = self.group(module)
        return None if group is None else group.scheme


def covers(pattern: str, module: str) -> bool:
    """Whether a name or `re:` pattern names a module, a module around it, or its last part."""
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


class Section:
    """The quantization_config of a config.json, or a part of it."""

    def __init__(self, key: str, values: object) -> None:
        self.key = key
        self.values: Mapping[str, Any] = values if isinstance(values, Mapping) else {}

    @property
    def method(self) -> object:
        return self.values.get("quant_method")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        return self.values.get(key, default)

    def refused(self, problem: str) -> ModelError:
        """Return the error for a combination that is not read."""
        return ModelError(
            f"config.json: {self.key}: {problem}; serve a GGUF file of the model (org/name:Q4_K_M), "
            "or its unquantised weights"
        )

    def part(self, key: str) -> Section:
        """Return the object under a key, empty without one. Raises ModelError if it is no object."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refused(f"{key} is not an object")
        return Section(f"{self.key}.{key}", value)

    def only(self, *known: str) -> None:
        """Raise ModelError for a key that is set but not among `known`."""
        for key, value in self.values.items():
            if key not in (*known, "quant_method") and value not in (None, False, {}, []):
                raise self.refused(f"{key} is {value!r}, which this version does not read")

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the names or patterns in the lists under `keys`. Raises ModelError for anything else."""
        return tuple(name for key in keys for name in self._list(key))

    def patterns(self, *keys: str) -> tuple[str, ...]:
        """Return `names` where those with wildcards are shell patterns of whole names."""
        return tuple(
            f"{_REGEX}{fnmatch.translate(name)}"
            if any(c in name for c in "*?[") and not name.startswith(_REGEX)
            else name
            for name in self.names(*keys)
        )

    def _list(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.refused(f"{key} is not a list of layers")
        for name in value:
            try:
                re.compile(str(name).removeprefix(_REGEX) if str(name).startswith(_REGEX) else "")
            except re.error:
                raise self.refused(f"{key} has {name!r}, which is not a pattern") from None
        return tuple(str(name) for name in value)

    def block(self, key: str) -> tuple[int, int] | None:
        """Return a list of two positive sizes; None without one. Raises ModelError for anything else."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
            return value[0], value[1]
        raise self.refused(f"{key} is {value}")


def parameter_schemes(
    config: QuantizationConfig,
    params: Mapping[str, Param],
    sources: Mapping[str, Sequence[tuple[Rule, str]]],
    stored: Collection[str] = (),
) -> dict[str, ScaledScheme]:
    """Return the scheme of each quantised parameter.

    `sources`: per parameter the rules that fill it and the tensor names that they read (see `rules.sources`). A
    parameter counts as dense if any of them is ignored, or is a stack stored transposed; only names with the config's
    suffix count. `stored`: names of the checkpoint's tensors where they are known; other names do not count, and layers
    without scales among them are dense.
    """
    modules = _quantised_modules(config, stored)
    present = (modules or frozenset()) | {name.removesuffix(config.suffix) for name in stored}
    schemes: dict[str, ScaledScheme] = {}
    for name, param in params.items():
        if len(param.shape) < 2 or name in EMBEDDINGS:
            continue
        any_suffix = config.suffix == f".{WEIGHT}"
        read = [(rule, source) for rule, source in sources[name] if any_suffix or source.endswith(config.suffix)]
        read = [(rule, source) for rule, source in read if _is_among(_module(config, source), present)] or read
        stacked = len(param.shape) > _MATRIX
        candidates = {
            None if stacked and getattr(rule, "transpose", False) else _source_scheme(config, source, modules)
            for rule, source in read
        }
        if len(candidates) == 1 and (scheme := candidates.pop()) is not None:
            of_parameter = scheme.with_inputs(param.shape[-1])
            if of_parameter is not None:
                schemes[name] = of_parameter
    return schemes


def _quantised_modules(config: QuantizationConfig, stored: Collection[str]) -> frozenset[str] | None:
    """Return the modules of which a part other than `weight` is stored; None if the names are not known."""
    if not stored:
        return None
    parts = config.parts
    split = (config.split(name, parts) for name in stored)
    return frozenset(module for module, part in split if part in parts and part != WEIGHT)


def _source_scheme(config: QuantizationConfig, source: str, modules: frozenset[str] | None) -> ScaledScheme | None:
    module = _module(config, source)
    return None if modules is not None and not _is_among(module, modules) else config.scheme(module)


def _module(config: QuantizationConfig, source: str) -> str:
    """Return the module of a joined weight's name."""
    return source.removesuffix(config.suffix)


def _is_among(module: str, stored: Set[str]) -> bool:
    """Whether stored names have a module, with `model.` as the rules spell it, or without."""
    return module in stored or module.partition(".")[2] in stored
