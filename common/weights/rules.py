"""Checkpoint names as data: which tensor fills which parameter, through a closed set of operations.

Knows: rename, split, stack, transpose, and that both sides must come out even. Does not know file formats or families.

A pattern is a dotted name in which `{l}` and `{e}` stand for a layer's and an expert's number, and a leading
`[part.]` may be absent. Several rules may fill the same parameter under different names: whichever the checkpoint has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.shapes import Param
from pagoda.common.weights.dtypes import dtype_name

Array = npt.NDArray[Any]

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_OPTIONAL: Final = re.compile(r"^\[(.*?)\]")


@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor is one parameter; `transpose` swaps its two axes first."""

    source: str
    target: str
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor is several parameters, one after the other along axis 0 (after `transpose`). Sizes: the shapes'."""

    source: str
    targets: tuple[str, ...]
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors numbered `{e}` are one parameter, along a new axis 0."""

    source: str
    target: str


Rule = Rename | Split | Stack


def linear(source: str, target: str) -> tuple[Rule, ...]:
    """The rules of a linear layer: its weight and, where the model has one, its bias."""
    return Rename(f"{source}.weight", target), Rename(f"{source}.bias", f"{target}_bias")


def fused_linear(source: str, *targets: str) -> tuple[Rule, ...]:
    """The rules of several linear layers kept as one."""
    biases = tuple(f"{target}_bias" for target in targets)
    return Split(f"{source}.weight", targets), Split(f"{source}.bias", biases)


def apply(
    rules: Sequence[Rule],
    params: Mapping[str, Param],
    tensors: Iterable[tuple[str, Array]],
    ignored: Sequence[str] = (),
) -> Iterator[Weight]:
    """Turn named checkpoint tensors into named parameters, one at a time, in the checkpoint's order.

    `ignored`: shell-style patterns of tensors that no parameter needs; a rule whose parameter exists comes first.
    A stack is kept until its last part arrives; all else passes through as a view.

    Raises WeightError for a tensor nobody wants, a shape that does not fit, a parameter filled twice or never.
    """
    index = _index(rules)
    filled: set[str] = set()
    stacks: dict[str, _PartialStack] = {}
    for name, tensor in tensors:
        match = _match(index, name, params)
        if match is None:
            if any(fnmatchcase(name, pattern) for pattern in ignored):
                continue
            raise WeightError(f"tensor {name} {list(tensor.shape)} belongs to no parameter of this model")
        for target, value in match.values(name, tensor, params, stacks):
            if target in filled:
                raise WeightError(f"tensor {name}: parameter {target} is already filled")
            filled.add(target)
            yield target, value
    for target, stack in stacks.items():
        if target not in filled:
            raise WeightError(f"parameter {target}: the checkpoint lacks {stack.missing()}")
    left = [target for target in params if target not in filled]
    if left:
        more = f" and {len(left) - 1} more parameters" if len(left) > 1 else ""
        source = _sources(rules, left[0])
        raise WeightError(f"parameter {left[0]} {list(params[left[0]].shape)}{more}: the checkpoint lacks {source}")


class _PartialStack:
    """A stacked parameter on its way: which of its parts have come."""

    def __init__(self, param: Param, dtype: np.dtype[Any], source: str) -> None:
        self.values = np.empty(param.shape, dtype)
        self._source = source
        self._waiting = set(range(param.shape[0]))

    def put(self, number: int, name: str, tensor: Array) -> bool:
        """Keep one part; True when it was the last."""
        if number not in self._waiting:
            reason = "came twice" if number < len(self.values) else f"but there are {len(self.values)}"
            raise WeightError(f"tensor {name}: part {number} {reason}")
        if tensor.dtype != self.values.dtype:
            got, kept = dtype_name(tensor.dtype), dtype_name(self.values.dtype)
            raise WeightError(f"tensor {name}: dtype {got}, but parts before it have {kept}")
        self.values[number] = tensor
        self._waiting.remove(number)
        return not self._waiting

    def missing(self) -> str:
        """The first tensor that never came."""
        return self._source.replace("{e}", str(min(self._waiting)))


@dataclass(frozen=True, slots=True)
class _Match:
    """A rule and the numbers its placeholders stand for."""

    rule: Rule
    numbers: dict[str, int]

    @property
    def targets(self) -> tuple[str, ...]:
        rule = self.rule
        names = rule.targets if isinstance(rule, Split) else (rule.target,)
        return tuple(self._fill(name) for name in names)

    def values(
        self, name: str, tensor: Array, params: Mapping[str, Param], stacks: dict[str, _PartialStack]
    ) -> Iterator[tuple[str, Array]]:
        """The parameters that this tensor completes."""
        targets = self.targets
        match self.rule:
            case Rename(transpose=transpose):
                yield targets[0], _checked(name, tensor, transpose, targets[0], params[targets[0]].shape)
            case Split(transpose=transpose):
                yield from _split(name, tensor, transpose, [params[target] for target in targets])
            case Stack(source=source):
                param = params[targets[0]]
                part = _checked(name, tensor, False, param.name, param.shape[1:])
                if param.name not in stacks:
                    stacks[param.name] = _PartialStack(param, part.dtype, self._fill(source, keep="e"))
                if stacks[param.name].put(self.numbers["e"], name, part):
                    yield param.name, stacks[param.name].values

    def _fill(self, pattern: str, keep: str = "") -> str:
        return _PLACEHOLDER.sub(
            lambda hit: hit[0] if hit[1] == keep else str(self.numbers[hit[1]]), _OPTIONAL.sub(r"\1", pattern)
        )


def _checked(name: str, tensor: Array, transpose: bool, target: str, shape: tuple[int, ...]) -> Array:
    turned = tensor.T if transpose else tensor
    if turned.shape != shape:
        expected = shape[::-1] if transpose else shape
        raise WeightError(f"tensor {name} has shape {list(tensor.shape)}, parameter {target} needs {list(expected)}")
    return turned


def _split(name: str, tensor: Array, transpose: bool, parts: Sequence[Param]) -> Iterator[tuple[str, Array]]:
    sizes = [part.shape[0] for part in parts]
    whole = (sum(sizes), *parts[0].shape[1:])
    rows = _checked(name, tensor, transpose, " + ".join(part.name for part in parts), whole)
    for part, end in zip(parts, np.cumsum(sizes).tolist()):
        yield part.name, rows[end - part.shape[0] : end]


_Index = Mapping[str, Sequence[Rule]]


def _index(rules: Sequence[Rule]) -> _Index:
    """Rules by source pattern, with anonymous placeholders."""
    index: dict[str, list[Rule]] = {}
    for rule in rules:
        template = _PLACEHOLDER.sub("{}", rule.source)
        for spelling in {_OPTIONAL.sub(r"\1", template), _OPTIONAL.sub("", template)}:
            index.setdefault(spelling, []).append(rule)
    return index


def _match(index: _Index, name: str, params: Mapping[str, Param]) -> _Match | None:
    """The first rule for a tensor all of whose parameters the model has."""
    numbers = [int(number) for number in _NUMBER.findall(name)]
    for rule in index.get(_NUMBER.sub("{}", name), ()):
        match = _Match(rule, dict(zip(_PLACEHOLDER.findall(rule.source), numbers)))
        if all(target in params for target in match.targets):
            return match
    return None


def _sources(rules: Sequence[Rule], target: str) -> str:
    """The tensor names that could have filled a parameter."""
    numbers = _NUMBER.findall(target)
    pattern = _NUMBER.sub("{l}", target)
    spellings = [
        _OPTIONAL.sub(r"\1", rule.source).replace("{l}", numbers[0] if numbers else "")
        for rule in rules
        if pattern in (rule.targets if isinstance(rule, Split) else (rule.target,))
    ]
    return " or ".join(spellings) or "any tensor for it"
