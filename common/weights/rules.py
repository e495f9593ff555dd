"""Apply a family's weight-name rules: checkpoint tensors in, model parameters out.

Strict both ways: every tensor must be used or ignored, every parameter filled exactly once, every shape must match.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from os.path import commonprefix
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.models.family import (
    MergedAdapter,
    Normalise,
    Rename,
    Reshape,
    Rule,
    Shift,
    Split,
    Stack,
    TensorRule,
    TokenRows,
    Transpose,
    Zeros,
)
from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import BFLOAT16, dtype_name, to_bfloat16, to_float32
from pagoda.common.weights.quantization.schemes import ScaledScheme, Scheme
from pagoda.common.weights.quantization.tensors import (
    QuantizedTensor,
    Value,
    concatenate,
    scaled,
    stack,
    take_rows,
)

Array = npt.NDArray[Any]

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_SLOT: Final = re.compile(r"\{(\w+)\}|(?<=\.)(\d+)(?=\.)")
"""A number in a rule's source: a placeholder, or the number itself."""
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
            scale = params[target].scale
            yield target, value if scale == 1 else scaled(value, scale)
    for target, unfinished in stacks.items():
        if target not in filled:
            raise WeightError(f"parameter {target}: the checkpoint lacks {unfinished.missing()}")
    for target in _zeros(rules, params, filled):
        filled.add(target)
        yield target, np.zeros(params[target].shape, np.float32)
    _check_filled(rules, params, filled)


def with_equal_head(
    rules: Sequence[Rule], tensors: Iterable[tuple[str, Value]], names: Collection[str]
) -> Iterator[tuple[str, Value]]:
    """Return the tensors of a model whose head is its embedding table, as its config.json states. `names`: of all
    tensors, as far as they are known.

    Raises WeightError, after the later of the two was read, if a head is stored whose values differ from the table's.
    """
    heads = _index([rule for rule in _reading(rules) if "head" in _targets(rule)])
    return iter(tensors) if names and heads.keys().isdisjoint(names) else _checked_head(rules, tensors)


def _checked_head(rules: Sequence[Rule], tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    index = _index([rule for rule in _reading(rules) if not {"embed", "head"}.isdisjoint(_targets(rule))])
    values: dict[str, tuple[str, Value]] = {}
    for name, tensor in tensors:
        yield name, tensor
        for target in {target for rule in index.get(name, ()) for target in _targets(rule)} & {"embed", "head"}:
            values[target] = (name, tensor)
            if len(values) == 2:
                _check_equal(embed=values["embed"], head=values["head"])
                values.clear()


_ROWS_COMPARED: Final = 1024  # Rows compared at a time, so that no table of gigabytes is copied.


def _check_equal(*, embed: tuple[str, Value], head: tuple[str, Value]) -> None:
    """Raise WeightError unless two tensors, each with its name, have the same values. Rows of zeros may follow."""
    embed_name, table = embed
    head_name, values = head
    problem = "is quantised apart"
    if not isinstance(table, QuantizedTensor) and not isinstance(values, QuantizedTensor):
        if _equal(table, values):
            return
        problem = "differs"
    raise WeightError(
        f"tensor {head_name} {problem} from {embed_name}, but config.json says with tie_word_embeddings that the head "
        "is the embedding table; to use the stored head, pass --hf-overrides '{\"tie_word_embeddings\": false}'"
    )


def _equal(one: Array, other: Array) -> bool:
    """Whether two tables have the same rows, compared in pieces; what only the longer one has is zero."""
    if one.shape[1:] != other.shape[1:]:
        return False
    common = min(len(one), len(other))
    pieces = [slice(row, min(row + _ROWS_COMPARED, common)) for row in range(0, common, _ROWS_COMPARED)]
    return all(
        np.array_equal(to_float32(one[piece]), to_float32(other[piece]), equal_nan=True) for piece in pieces
    ) and not any(to_float32(table[common:]).any() for table in (one, other))


def check_names(
    rules: Sequence[Rule], params: Mapping[str, Param], names: Iterable[str], ignored: Sequence[str] = ()
) -> None:
    """Raise WeightError for tensor names that `apply_rules` refuses; shapes are not looked at."""
    index = _index(rules)
    filled = set[str]()
    parts: dict[str, set[int]] = {}
    for name in sorted(names):
        match = _match(index, name, params)
        if match is None:
            if any(fnmatchcase(name, pattern) for pattern in ignored):
                continue
            raise WeightError(f"tensor {name} belongs to no parameter of this model")
        if isinstance(match.rule, Stack):
            target = match.targets[0]
            if not match.rule.surplus or match.numbers["e"] < params[target].shape[0]:
                parts.setdefault(target, set()).add(match.numbers["e"])
        else:
            filled.update(match.targets)
    filled |= {target for target, numbers in parts.items() if len(numbers) >= params[target].shape[0]}
    filled.update(_zeros(rules, params, filled))
    _check_filled(rules, params, filled)


def _zeros(rules: Sequence[Rule], params: Mapping[str, Param], filled: Collection[str]) -> list[str]:
    """Return the parameters that no tensor filled and that are zero then."""
    zeros = [_pattern(rule.target) for rule in rules if isinstance(rule, Zeros)]
    return [target for target in params if target not in filled and any(zero.fullmatch(target) for zero in zeros)]


def _check_filled(rules: Sequence[Rule], params: Mapping[str, Param], filled: Collection[str]) -> None:
    """Raise WeightError if a parameter is not filled."""
    unfilled = [target for target in params if target not in filled]
    if unfilled:
        more = f" and {len(unfilled) - 1} more parameters" if len(unfilled) > 1 else ""
        first = params[unfilled[0]]
        names = [source for _, source in sources(rules, {first.name: first})[first.name]]
        lacks = " or ".join(names) or "any tensor for it"
        raise WeightError(f"parameter {first.name} {list(first.shape)}{more}: the checkpoint lacks {lacks}")


_PARAMETRIZED: Final = ".parametrizations.weight."
_ADAPTED: Final = ("original", "0.lora_A", "0.lora_B")


def merge_adapter(tensors: Iterable[tuple[str, Value]], adapter: MergedAdapter) -> Iterator[tuple[str, Value]]:
    """Yield the tensors, each matrix merged with its adapter (as torch's parametrizations name them).

    Adapters are stacked: A [adapters, r, I] and B [adapters, O, r]; of embeddings A [adapters, V, r] comes first.
    Raises WeightError for a matrix without both.
    """
    waiting: dict[str, dict[str, Float32]] = {}
    for name, tensor in tensors:
        module, separator, part = name.partition(_PARAMETRIZED)
        if not separator:
            yield name, tensor
            continue
        tensor = _values_of_blocks(tensor)
        if isinstance(tensor, QuantizedTensor) or part not in _ADAPTED:
            raise WeightError(f"tensor {name} is not a matrix or one of its low-rank factors")
        parts = waiting.setdefault(module, {})
        parts[part] = to_float32(tensor) if part == "original" else to_float32(tensor[adapter.index])
        if len(parts) == len(_ADAPTED):
            original, first, second = (waiting[module][part] for part in _ADAPTED)
            del waiting[module]
            product = second @ first if second.shape[0] == original.shape[0] else first @ second
            yield f"{module}.weight", original + np.float32(adapter.scale) * product
    for module, parts in waiting.items():
        lacks = next(part for part in _ADAPTED if part not in parts)
        raise WeightError(f"tensor {module}: the checkpoint lacks its {lacks}; download it again")


_Index = Mapping[str, Sequence[TensorRule]]


def _reading(rules: Sequence[Rule]) -> list[TensorRule]:
    """The rules that read a tensor."""
    return [rule for rule in rules if not isinstance(rule, Zeros)]


def _index(rules: Sequence[Rule]) -> _Index:
    """Rules by source pattern, with anonymous numbers."""
    index: dict[str, list[TensorRule]] = {}
    for rule in _reading(rules):
        template = _SLOT.sub("{}", rule.source)
        for spelling in {_OPTIONAL.sub(r"\1", template), _OPTIONAL.sub("", template)}:
            index.setdefault(spelling, []).append(rule)
    return index


def _match(index: _Index, name: str, params: Mapping[str, Param]) -> TensorMatch | None:
    """The first rule that matches a tensor name and whose target parameters all exist in this model."""
    numbers = [int(number) for number in _NUMBER.findall(name)]
    for rule in index.get(_NUMBER.sub("{}", name), ()):
        slots = _SLOT.findall(rule.source)
        if any(literal and int(literal) != number for (_, literal), number in zip(slots, numbers)):
            continue
        match = TensorMatch(rule, {name: number for (name, _), number in zip(slots, numbers) if name})
        if all(target in params for target in match.targets):
            return match
    return None


@dataclass(frozen=True, slots=True)
class TensorMatch:
    """A rule with the numbers its placeholders matched."""

    rule: TensorRule
    numbers: dict[str, int]

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self._fill(name) for name in _targets(self.rule))

    @property
    def source(self) -> str:
        """Name of the tensor, with its optional part; of a stack with `{e}`."""
        return self._fill(self.rule.source, keep="e")

    def values(
        self, name: str, tensor: Value, params: Mapping[str, Param], stacks: dict[str, _PartialStack]
    ) -> Iterator[tuple[str, Value]]:
        """Yield the parameters that this tensor completes."""
        targets = self.targets
        match self.rule:
            case Rename(transpose=transpose):
                yield targets[0], _checked(name, tensor, transpose, targets[0], params[targets[0]].shape)
            case Reshape(transpose=transpose):
                yield targets[0], _reshaped(name, tensor, transpose, params[targets[0]])
            case Normalise(axis=axis):
                yield targets[0], _changed(name, tensor, params[targets[0]], lambda values: _unit(values, axis))
            case Shift(offset=offset):
                yield targets[0], _changed(name, tensor, params[targets[0]], lambda values: values + np.float32(offset))
            case TokenRows(tokens=tokens, difference=difference, table=table):
                if table is not None:
                    yield table, _checked(name, tensor, False, table, params[table].shape)
                yield targets[0], _token_rows(name, tensor, tokens, difference, params[targets[0]])
            case Split():
                yield from _split(name, tensor, self.rule, [params[target] for target in targets])
            case Stack(surplus=surplus):
                param = params[targets[0]]
                if surplus and self.numbers["e"] >= param.shape[0]:
                    return
                part = _checked(name, tensor, False, param.name, param.shape[1:])
                if param.name not in stacks:
                    stacks[param.name] = _PartialStack(param, self.source)
                if stacks[param.name].put(self.numbers["e"], name, part):
                    yield param.name, stacks[param.name].values()

    def _fill(self, pattern: str, keep: str = "") -> str:
        return _PLACEHOLDER.sub(
            lambda hit: hit[0] if hit[1] == keep else str(self.numbers[hit[1]]), _OPTIONAL.sub(r"\1", pattern)
        )


class _PartialStack:
    """A stacked parameter that is still missing parts."""

    def __init__(self, param: Param, source: str) -> None:
        self._shape = param.shape
        self._source = source
        self._missing = set(range(param.shape[0]))
        self._kind: tuple[str, tuple[int, ...]] | None = None  # Kind of all parts, see `_kind`.
        self._values: Array | None = None  # The stack, if its parts are dense.
        self._quantised: dict[int, QuantizedTensor] = {}

    def put(self, number: int, name: str, part: Value) -> bool:
        """Store one part. Return True if it was the last."""
        if number not in self._missing:
            reason = "occurs twice" if number < self._shape[0] else f"but there are {self._shape[0]}"
            raise WeightError(f"tensor {name}: part {number} {reason}")
        kind = _kind(part)
        if self._kind is not None and self._kind != kind:
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
        if isinstance(part.scheme, ScaledScheme):
            return dtype_name(part.data.dtype), part.group_shape
        return part.scheme.words, part.group_shape
    return dtype_name(part.dtype), ()


def _kind_text(kind: tuple[str, tuple[int, ...]]) -> str:
    return kind[0] + (f" in groups of {list(kind[1])}" if kind[1] else "")


def _checked(name: str, tensor: Value, transpose: Transpose, target: str, shape: tuple[int, ...]) -> Value:
    if isinstance(tensor, QuantizedTensor):
        transpose = False  # Quantised tensors are [..., O, I], whichever way dense ones are stored.
    if transpose == "unless_it_fits":
        transpose = tensor.shape != shape
    oriented = tensor.swapaxes(-1, -2) if transpose and not isinstance(tensor, QuantizedTensor) else tensor
    if oriented.shape != shape:
        expected = (*shape[:-2], *shape[:-3:-1]) if transpose else shape
        raise WeightError(f"tensor {name} has shape {list(tensor.shape)}, parameter {target} needs {list(expected)}")
    return oriented


Float32 = npt.NDArray[np.float32]


def _changed(name: str, tensor: Value, param: Param, change: Callable[[Float32], Float32]) -> Array:
    """Return the tensor's values after `change` in float32, in its own dtype; of blocks in float32.

    Raises WeightError if it is quantised otherwise.
    """
    tensor = _values_of_blocks(tensor)
    if isinstance(tensor, QuantizedTensor):
        raise WeightError(f"tensor {name} is quantised, which is not supported for {param.name}; serve it unquantised")
    _checked(name, tensor, False, param.name, param.shape)
    values = change(to_float32(tensor))
    return to_bfloat16(values) if tensor.dtype == BFLOAT16 else values.astype(tensor.dtype)


def _unit(values: Float32, axis: int) -> Float32:
    """Divide the vectors along `axis` by their L2 norms."""
    norms = np.sqrt(np.square(values).sum(axis, keepdims=True))
    unit: Float32 = values / np.maximum(norms, np.float32(1e-7))
    return unit


def _reshaped(name: str, tensor: Value, transpose: bool, param: Param) -> Value:
    if isinstance(tensor, QuantizedTensor) and _is_blocks(tensor):
        if prod(tensor.shape) != param.size or tensor.shape[-1] != param.shape[-1]:
            needs = f"parameter {param.name} needs {list(param.shape)}"
            raise WeightError(f"tensor {name} has blocks of shape {list(tensor.shape)}, {needs}")
        return replace(tensor, data=tensor.data.reshape(*param.shape[:-1], -1))
    if isinstance(tensor, QuantizedTensor):
        raise WeightError(f"tensor {name} is quantised, which is not supported for {param.name}; serve it unquantised")
    *stacked, rows, columns = (1, *param.shape)
    shape = (*stacked, columns, rows) if transpose else (*stacked, rows, columns)
    if tensor.size != param.size:
        needs = f"parameter {param.name} needs {param.size} numbers"
        raise WeightError(f"tensor {name} has shape {list(tensor.shape)}, {needs}")
    reshaped: Array = tensor.reshape(shape)
    return (reshaped.swapaxes(-1, -2) if transpose else reshaped).reshape(param.shape)


def _token_rows(name: str, tensor: Value, tokens: Sequence[int], difference: bool, param: Param) -> Float32:
    if isinstance(tensor, QuantizedTensor) and _is_blocks(tensor) and max(tokens) < len(tensor.data):
        rows = take_rows(tensor, np.array(tokens)).dequantize()
        return _token_rows(name, rows, range(len(tokens)), difference, param)
    if isinstance(tensor, QuantizedTensor):
        raise WeightError(f"tensor {name} is quantised, which is not supported for {param.name}; serve it unquantised")
    if max(tokens) >= len(tensor):
        raise WeightError(f"tensor {name} has {len(tensor)} rows, so none for token {max(tokens)}")
    rows = to_float32(np.ascontiguousarray(tensor[list(tokens)]))
    _checked(name, rows, False, param.name, (len(tokens), *param.shape[1:]))
    return rows[1:] - rows[:1] if difference else rows


def _split(name: str, tensor: Value, rule: Split, parts: Sequence[Param]) -> Iterator[tuple[str, Value]]:
    groups = rule.quantised_pieces if isinstance(tensor, QuantizedTensor) else 1
    rows = _checked(name, tensor, rule.transpose, " + ".join(part.name for part in parts), _split_shape(rule, parts))
    before = (slice(None),) * rule.axis
    for part, slices in zip(parts, _split_slices(rule, parts, groups)):
        pieces = [rows[(*before, piece)] for piece in slices]
        yield part.name, concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _split_shape(rule: Split, parts: Sequence[Param]) -> tuple[int, ...]:
    """Return the shape of the tensor that has all parts, after it was transposed."""
    total = sum(part.shape[rule.axis] for part in parts)
    return (*parts[0].shape[: rule.axis], total, *parts[0].shape[rule.axis + 1 :])


def _split_slices(rule: Split, parts: Sequence[Param], groups: int) -> Iterator[list[slice]]:
    """Yield where each part is along the axis of the tensor that has all. `groups`: of rows of all parts."""
    if rule.alternating:
        yield from ([slice(first, None, len(parts))] for first in range(len(parts)))
        return
    groups = min(part.groups for part in parts) if rule.interleaved else groups
    sizes = [part.shape[rule.axis] // groups for part in parts]
    total = sum(part.shape[rule.axis] for part in parts)
    begin = 0
    for size in sizes:
        yield [slice(first + begin, first + begin + size) for first in range(0, total, total // groups)]
        begin += size


def _is_blocks(tensor: Value) -> bool:
    return isinstance(tensor, QuantizedTensor) and not isinstance(tensor.scheme, ScaledScheme)


def _values_of_blocks(tensor: Value) -> Value:
    """Return the values of blocks; others as they are."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) and _is_blocks(tensor) else tensor


@dataclass(frozen=True, slots=True)
class TensorUse:
    """The parameters that a tensor fills, none if it is not used. `by_rows`: its rows are theirs, as they are."""

    params: tuple[Param, ...] = ()
    by_rows: bool = False


def tensor_uses(rules: Sequence[Rule], params: Mapping[str, Param]) -> Callable[[str], TensorUse]:
    """Return a function from a tensor's name to its use."""
    index = _index(rules)

    def use(name: str) -> TensorUse:
        match = _match(index, name, params)
        if match is None:
            return TensorUse()
        rule = match.rule
        straight = isinstance(rule, Rename | Split) and not rule.transpose
        by_rows = isinstance(rule, Stack) or (straight and not (isinstance(rule, Split) and rule.axis))
        return TensorUse(tuple(params[target] for target in match.targets), by_rows)

    return use


def match_tensor(rules: Sequence[Rule], name: str, params: Mapping[str, Param]) -> TensorMatch | None:
    """Return the rule that reads the tensor of that name and its targets; None if the model has no such tensor."""
    return _match(_index(rules), name, params)


def split_rows(name: str, tensor: Array, rule: Split, parts: Sequence[Param]) -> Iterator[tuple[str, Array]]:
    """Yield the rows [F, R] of each parameter of `parts`, of these shapes, in a tensor with all rows."""
    for part, rows in _split(name, tensor, replace(rule, transpose=False), parts):
        assert not isinstance(rows, QuantizedTensor)
        yield part, rows


def quantised_pieces(rules: Sequence[Rule], name: str) -> int:
    """Return the parts, with blocks of scales of their own, that the tensor `name` consists of if it is quantised."""
    matching = _index(rules).get(_NUMBER.sub("{}", name), ())
    return max((rule.quantised_pieces for rule in matching if isinstance(rule, Split)), default=1)


def stored_shapes(rules: Sequence[Rule], params: Mapping[str, Param]) -> Callable[[str], tuple[int, ...] | None]:
    """Return a function from a tensor's name to the shape that a rule needs, after it was transposed; None: any."""
    index = _index(rules)

    def shape(name: str) -> tuple[int, ...] | None:
        match = _match(index, name, params)
        if match is None:
            return None
        targets = [params[target] for target in match.targets]
        match match.rule:
            case Split() as rule:
                return _split_shape(rule, targets)
            case Stack():
                return targets[0].shape[1:]
            case Rename():
                return targets[0].shape
            case _:
                return None

    return shape


def stored_schemes(
    rules: Sequence[Rule], params: Mapping[str, Param], stored: Mapping[str, Scheme]
) -> dict[str, Scheme]:
    """Return the scheme of each parameter that `apply_rules` yields in blocks. `stored`: of the tensors of blocks."""
    index = _index(rules)
    schemes = dict[str, Scheme]()
    for param, filling in sources(rules, params).items():
        for rule, full in filling:
            short = full.removeprefix(optional[1]) if (optional := _OPTIONAL.match(rule.source)) else full
            for name in (full, short):
                match = _match(index, name, params) if name in stored else None
                if match is not None and match.rule is rule and _passes_blocks(match, param):
                    schemes[param] = stored[name]
    return schemes


def _passes_blocks(source: TensorMatch, param: str) -> bool:
    """Whether the rule yields blocks for a parameter if it reads blocks."""
    match source.rule:
        case Normalise() | Shift():
            return False
        case TokenRows():
            return param != source.targets[0]
        case _:
            return True


def stored_tensors(
    rules: Sequence[Rule],
    params: Mapping[str, Param],
    weights: Iterable[tuple[str, Value]],
    preferred: Callable[[str, str], bool] = lambda source, param: False,
) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a checkpoint that `apply_rules` reads as these weights, dense. Scales are not undone.

    Where several tensors could fill a parameter, a `preferred` one is written, else one of the module that most
    parameters beside it could come from. The parts of a fused tensor are buffered until the last one comes.
    """
    matches = _chosen(_writers(rules, params), preferred)
    waiting: dict[str, dict[str, Array]] = {}
    for name, value in weights:
        if name not in matches:
            continue  # The parameter is zero, and needs no tensor.
        match = matches[name]
        array = value.dequantize() if isinstance(value, QuantizedTensor) else value
        match match.rule:
            case Stack():
                yield from ((match.source.replace("{e}", str(number)), part) for number, part in enumerate(array))
            case Split() as rule:
                parts = waiting.setdefault(match.source, {})
                parts[name] = array
                if len(parts) == len(match.targets):
                    del waiting[match.source]
                    yield match.source, _fused(rule, [params[target] for target in match.targets], parts)
            case rule:
                yield match.source, _unapplied(rule, array)
    for source in waiting:
        raise WeightError(f"tensor {source}: the checkpoint lacks a part of it")


def experts_one_by_one(
    rules: Sequence[Rule], params: Mapping[str, Param], tensors: Iterable[tuple[str, Value]]
) -> Iterator[tuple[str, Value]]:
    """Yield dense tensors, those that hold several experts divided into one matrix [O, I] or bias [O] of each.

    Only where a rule reads such parts, under whose names they come. They are views of the tensors.
    """
    index = _index(rules)
    single = {
        name: [match.source for match in matches if isinstance(match.rule, Stack)]
        for name, matches in _writers(rules, params).items()
    }
    for name, value in tensors:
        match = _match(index, name, params)
        if match is None or isinstance(match.rule, Stack) or not all(single[target] for target in match.targets):
            yield name, value
            continue
        for target, stacked in match.values(name, value, params, {}):
            assert not isinstance(stacked, QuantizedTensor)
            source = max(single[target], key=partial(_common, name))
            yield from ((source.replace("{e}", str(number)), part) for number, part in enumerate(stacked))


def _common(one: str, other: str) -> int:
    """Return how many characters two names have in common at their beginning."""
    return len(commonprefix((one, other)))


def _writers(rules: Sequence[Rule], params: Mapping[str, Param]) -> dict[str, list[TensorMatch]]:
    """Return for each parameter the rules that fill it and of whose targets the model has all."""
    patterns = [(_pattern(target), rule) for rule in _reading(rules) for target in _targets(rule)]
    writers: dict[str, list[TensorMatch]] = {}
    for name in params:
        for target, rule in patterns:
            if (numbers := target.fullmatch(name)) is None:
                continue
            match = TensorMatch(rule, {place: int(number) for place, number in numbers.groupdict().items()})
            if all(other in params for other in match.targets):
                writers.setdefault(name, []).append(match)
    return writers


def _chosen(
    writers: Mapping[str, Sequence[TensorMatch]], preferred: Callable[[str, str], bool]
) -> dict[str, TensorMatch]:
    """Return the rule to write each parameter by."""
    modules = Counter(
        (_parent(name), module)
        for name, matches in writers.items()
        for module in {_parent(match.source.removesuffix(".weight").removesuffix(".bias")) for match in matches}
    )

    def rank(name: str, match: TensorMatch) -> tuple[bool, int]:
        module = _parent(match.source.removesuffix(".weight").removesuffix(".bias"))
        return preferred(match.source, name), modules[_parent(name), module]

    return {name: max(matches, key=lambda match: rank(name, match)) for name, matches in writers.items()}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _fused(rule: Split, params: Sequence[Param], parts: Mapping[str, Array]) -> Array:
    """Return the tensor that `_split` divides into these parts."""
    arrays = [parts[param.name] for param in params]
    if len({array.dtype for array in arrays}) > 1:
        arrays = [to_float32(array) for array in arrays]
    fused = np.empty(_split_shape(rule, params), arrays[0].dtype)
    before = (slice(None),) * rule.axis
    for array, slices in zip(arrays, _split_slices(rule, params, 1)):
        for piece, values in zip(slices, np.split(array, len(slices), rule.axis)):
            fused[(*before, piece)] = values
    return fused.swapaxes(-1, -2) if rule.transpose is True else fused


def _unapplied(rule: TensorRule, array: Array) -> Array:
    """Return the tensor from which a rule of one tensor and one parameter makes `array`."""
    match rule:
        case Rename(transpose=True):
            return array.swapaxes(-1, -2)
        case Reshape(transpose=transpose):
            rows = array.swapaxes(-1, -2) if transpose else array
            return rows.reshape(-1, rows.shape[-1])
        case Shift(offset=offset):
            values = to_float32(array) - np.float32(offset)
            return to_bfloat16(values) if array.dtype == BFLOAT16 else values.astype(array.dtype)
        case _:
            return array


def sources(rules: Sequence[Rule], params: Mapping[str, Param]) -> dict[str, list[tuple[TensorRule, str]]]:
    """Return for each parameter the rules that fill it, each with the name of the tensor that it reads.

    Of a stack the first tensor; optional parts of names are present.
    """
    patterns = [(_pattern(target), rule) for rule in _reading(rules) for target in _targets(rule)]
    result: dict[str, list[tuple[TensorRule, str]]] = {}
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
    pieces = _PLACEHOLDER.split(target)  # Text and names of placeholders take turns.
    return re.compile(
        "".join(rf"(?P<{piece}>\d+)" if index % 2 else re.escape(piece) for index, piece in enumerate(pieces))
    )


def _targets(rule: TensorRule) -> tuple[str, ...]:
    match rule:
        case Split(targets=targets):
            return targets
        case TokenRows(target=target, table=str(table)):
            return target, table
        case _:
            return (rule.target,)
