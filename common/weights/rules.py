"""Apply a family's weight-name rules: checkpoint tensors in, model parameters out.

Strict both ways: every tensor must be used or ignored, every parameter filled exactly once, every shape must match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.models.family import Rename, Rule, Split, Stack
from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import dtype_name
from pagoda.common.weights.files import NamedTensor

Array = npt.NDArray[Any]

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_OPTIONAL: Final = re.compile(r"^\[(.*?)\]")


def apply_rules(
    rules: Sequence[Rule],
    params: Mapping[str, Param],
    tensors: Iterable[tuple[str, Array]],
    ignored: Sequence[str] = (),
) -> Iterator[NamedTensor]:
    """Yield (parameter name, values) for named checkpoint tensors, one at a time, in checkpoint order.

    `ignored`: shell-style patterns of tensors to drop, unless a rule maps them to a parameter of this model.
    A stack is buffered until its last part arrives; everything else passes through as a view.

    Raises WeightError for an unexpected tensor, a shape mismatch, or a parameter filled twice or never.
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
    unfilled = [target for target in params if target not in filled]
    if unfilled:
        more = f" and {len(unfilled) - 1} more parameters" if len(unfilled) > 1 else ""
        first, source = params[unfilled[0]], _sources(rules, unfilled[0])
        raise WeightError(f"parameter {first.name} {list(first.shape)}{more}: the checkpoint lacks {source}")


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
    """The first rule that matches a tensor name and whose target parameters all exist in this model."""
    numbers = [int(number) for number in _NUMBER.findall(name)]
    for rule in index.get(_NUMBER.sub("{}", name), ()):
        match = _Match(rule, dict(zip(_PLACEHOLDER.findall(rule.source), numbers)))
        if all(target in params for target in match.targets):
            return match
    return None


@dataclass(frozen=True, slots=True)
class _Match:
    """A rule with the numbers its placeholders matched."""

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
        """Yield the parameters that this tensor completes."""
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


class _PartialStack:
    """A stacked parameter that is still missing parts."""

    def __init__(self, param: Param, dtype: np.dtype[Any], source: str) -> None:
        self.values = np.empty(param.shape, dtype)
        self._source = source
        self._missing = set(range(param.shape[0]))

    def put(self, number: int, name: str, tensor: Array) -> bool:
        """Store one part. Return True if it was the last."""
        if number not in self._missing:
            reason = "occurs twice" if number < len(self.values) else f"but there are {len(self.values)}"
            raise WeightError(f"tensor {name}: part {number} {reason}")
        if tensor.dtype != self.values.dtype:
            got, expected = dtype_name(tensor.dtype), dtype_name(self.values.dtype)
            raise WeightError(f"tensor {name}: dtype {got}, but parts before it have {expected}")
        self.values[number] = tensor
        self._missing.remove(number)
        return not self._missing

    def missing(self) -> str:
        """Name of the first missing tensor."""
        return self._source.replace("{e}", str(min(self._missing)))


def _checked(name: str, tensor: Array, transpose: bool, target: str, shape: tuple[int, ...]) -> Array:
    oriented = tensor.T if transpose else tensor
    if oriented.shape != shape:
        expected = shape[::-1] if transpose else shape
        raise WeightError(f"tensor {name} has shape {list(tensor.shape)}, parameter {target} needs {list(expected)}")
    return oriented


def _split(name: str, tensor: Array, transpose: bool, parts: Sequence[Param]) -> Iterator[tuple[str, Array]]:
    sizes = [part.shape[0] for part in parts]
    whole = (sum(sizes), *parts[0].shape[1:])
    rows = _checked(name, tensor, transpose, " + ".join(part.name for part in parts), whole)
    for part, end in zip(parts, np.cumsum(sizes).tolist()):
        yield part.name, rows[end - part.shape[0] : end]


def _sources(rules: Sequence[Rule], target: str) -> str:
    """The tensor names that could have filled a parameter."""
    numbers = _NUMBER.findall(target)
    spellings = [
        _OPTIONAL.sub(r"\1", rule.source).replace("{l}", numbers[0] if numbers else "")
        for rule in rules
        if any(_fills(each, target) for each in (rule.targets if isinstance(rule, Split) else (rule.target,)))
    ]
    return " or ".join(spellings) or "any tensor for it"


def _fills(pattern: str, target: str) -> bool:
    """Return whether a rule's target pattern stands for a parameter."""
    return re.fullmatch(re.escape(pattern).replace(r"\{l\}", r"\d+"), target) is not None
