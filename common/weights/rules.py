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
from pagoda.common.weights.quantization import QuantizedTensor, Value, concatenate, stack

Array = npt.NDArray[Any]

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_OPTIONAL: Final = re.compile(r"^\[(.*?)\]")


def apply_rules(
    rules: Sequence[Rule],
    params: Mapping[str, Param],
    tensors: Iterable[tuple[str, Value]],
    ignored: Sequence[str] = (),
) -> Iterator[tuple[str, Value]]:
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
    for target, partial in stacks.items():
        if target not in filled:
            raise WeightError(f"parameter {target}: the checkpoint lacks {partial.missing()}")
    unfilled = [target for target in params if target not in filled]
    if unfilled:
        more = f" and {len(unfilled) - 1} more parameters" if len(unfilled) > 1 else ""
        first = params[unfilled[0]]
        names = [source for _, source in sources(rules, {first.name: first})[first.name]]
        lacks = " or ".join(names) or "any tensor for it"
        raise WeightError(f"parameter {first.name} {list(first.shape)}{more}: the checkpoint lacks {lacks}")


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
        return tuple(self._fill(name) for name in _targets(self.rule))

    def values(
        self, name: str, tensor: Value, params: Mapping[str, Param], stacks: dict[str, _PartialStack]
    ) -> Iterator[tuple[str, Value]]:
        """Yield the parameters that this tensor completes."""
        targets = self.targets
        match self.rule:
            case Rename(transpose=transpose):
                yield targets[0], _checked(name, tensor, transpose, targets[0], params[targets[0]].shape)
            case Split(transpose=transpose, interleaved=interleaved):
                yield from _split(name, tensor, transpose, [params[target] for target in targets], interleaved)
            case Stack(source=source):
                param = params[targets[0]]
                part = _checked(name, tensor, False, param.name, param.shape[1:])
                if param.name not in stacks:
                    stacks[param.name] = _PartialStack(param, self._fill(source, keep="e"))
                if stacks[param.name].put(self.numbers["e"], name, part):
                    yield param.name, stacks[param.name].values()

    def _fill(self, pattern: str, keep: str = "") -> str:
        return _PLACEHOLDER.sub(
            lambda hit: hit[0] if hit[1] == keep else str(self.numbers[hit[1]]), _OPTIONAL.sub(r"\1", pattern)
        )


class _PartialStack:
    """A stacked parameter that is still missing parts."""

    def __init__(self, param: Param, source: str) -> None:
        self._shape, self._source = param.shape, source
        self._missing = set(range(param.shape[0]))
        self._kind: tuple[str, tuple[int, ...]] | None = None  # of the parts, see `_kind`
        self._values: Array | None = None  # of dense parts
        self._quantised: dict[int, QuantizedTensor] = {}

    def put(self, number: int, name: str, part: Value) -> bool:
        """Store one part. Return True if it was the last."""
        if number not in self._missing:
            reason = "occurs twice" if number < self._shape[0] else f"but there are {self._shape[0]}"
            raise WeightError(f"tensor {name}: part {number} {reason}")
        kind = _kind(part)
        if self._kind not in (None, kind):
            assert self._kind is not None
            raise WeightError(
                f"tensor {name}: dtype {_kind_text(kind)}, but parts before it have {_kind_text(self._kind)}"
            )
        self._kind = kind
        if isinstance(part, QuantizedTensor):
            self._quantised[number] = part
        else:
            if self._values is None:
                self._values = np.empty(self._shape, part.dtype)
            self._values[number] = part
        self._missing.remove(number)
        return not self._missing

    def values(self) -> Value:
        """Return the complete stack, once."""
        if self._values is not None:
            return self._values
        return stack([self._quantised.pop(number) for number in range(self._shape[0])])

    def missing(self) -> str:
        """Name of the first missing tensor."""
        return self._source.replace("{e}", str(min(self._missing)))


def _kind(part: Value) -> tuple[str, tuple[int, ...]]:
    """Return what all parts of a stack have in common: dtype, and the groups of quantised ones."""
    if isinstance(part, QuantizedTensor):
        return dtype_name(part.data.dtype), part.group_shape
    return dtype_name(part.dtype), ()


def _kind_text(kind: tuple[str, tuple[int, ...]]) -> str:
    return kind[0] + (f" in groups of {list(kind[1])}" if kind[1] else "")


def _checked(name: str, tensor: Value, transpose: bool, target: str, shape: tuple[int, ...]) -> Value:
    oriented = tensor.T if transpose else tensor
    if oriented.shape != shape:
        expected = shape[::-1] if transpose else shape
        raise WeightError(f"tensor {name} has shape {list(tensor.shape)}, parameter {target} needs {list(expected)}")
    return oriented


def _split(
    name: str, tensor: Value, transpose: bool, parts: Sequence[Param], interleaved: bool
) -> Iterator[tuple[str, Value]]:
    groups = parts[0].groups if interleaved else 1
    whole = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    rows = _checked(name, tensor, transpose, " + ".join(part.name for part in parts), whole)
    period, begin = whole[0] // groups, 0
    for part in parts:
        end = begin + part.shape[0] // groups
        pieces = [rows[(slice(first + begin, first + end),)] for first in range(0, whole[0], period)]
        yield part.name, concatenate(pieces) if interleaved else pieces[0]
        begin = end


def sources(rules: Sequence[Rule], params: Mapping[str, Param]) -> dict[str, list[tuple[Rule, str]]]:
    """Return for each parameter the rules that fill it, each with the name of the tensor that it reads.

    Of a stack the first tensor; optional parts of names are present.
    """
    patterns = [(_pattern(target), rule) for rule in rules for target in _targets(rule)]
    result: dict[str, list[tuple[Rule, str]]] = {}
    for name in params:
        result[name] = []
        for pattern, rule in patterns:
            if (match := pattern.fullmatch(name)) is not None:
                result[name].append((rule, _filled(rule.source, {"e": "0"} | match.groupdict())))
    return result


def _filled(source: str, numbers: Mapping[str, str]) -> str:
    """Return a rule's source with its optional part and these numbers."""
    return _PLACEHOLDER.sub(lambda hit: numbers[hit[1]], _OPTIONAL.sub(r"\1", source))


def _pattern(target: str) -> re.Pattern[str]:
    """Return a regular expression for the parameters of a rule's target, with a group per placeholder."""
    pieces = _PLACEHOLDER.split(target)  # text and names of placeholders in turns
    return re.compile("".join(rf"(?P<{piece}>\d+)" if at % 2 else re.escape(piece) for at, piece in enumerate(pieces)))


def _targets(rule: Rule) -> tuple[str, ...]:
    return rule.targets if isinstance(rule, Split) else (rule.target,)
