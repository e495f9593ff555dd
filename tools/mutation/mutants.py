"""Small bugs in Python files: each changes one operator, constant, condition or statement."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Target:
    """Files of one subject, as glob patterns."""

    name: str
    files: tuple[str, ...]
    functions: tuple[str, ...] = ()  # mutate these alone; (): everything
    tests: tuple[str, ...] = ()  # files of tests that run first, since they reach the files through a registry

    def paths(self, root: Path) -> list[str]:
        """The files that the patterns match, in the order of the patterns."""
        found = {
            path.relative_to(root).as_posix(): None
            for pattern in self.files
            for path in sorted(root.glob(pattern))
            if path.suffix == ".py" and path.is_file()
        }
        return list(found)


@dataclass(frozen=True, slots=True)
class Name:
    """What identifies a mutant in any revision that has its line: the `nth` place in `function` where `before` is."""

    path: str
    function: str  # "" outside of functions
    before: str  # the line
    after: str
    nth: int

    def describe(self) -> str:
        """`path function: old line -> new line`."""
        return f"{f'{self.path} {self.function}'.strip()}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: the bytes from `start` to `end` of a file become `new`."""

    name: Name
    line: int
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        """The file's content with the bug."""
        return source[: self.start] + self.new.encode() + source[self.end :]


_COMPARISONS: Final = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC: Final = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"}


@dataclass(frozen=True)
class Source:
    """One file and its mutants."""

    path: str
    content: bytes

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.content)

    @cached_property
    def lines(self) -> list[bytes]:
        """Its lines with their ends."""
        return self.content.splitlines(keepends=True)

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Its functions, methods and functions inside of functions."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def mutants(self) -> list[Mutant]:
        """All its mutants."""
        seen: Counter[tuple[str, str, str]] = Counter()
        made = []
        for line, start, end, new in sorted({*self._changes()}):
            function = self._function_at(line)
            begin, before = self._line_starts[line - 1], self.lines[line - 1].decode().strip()
            changed = self.content[begin:start] + new.encode() + self.content[end : self._line_end(end)]
            after = changed.decode().splitlines()[0].strip()
            what = function, before, after
            made.append(Mutant(Name(self.path, *what, seen[what]), line, start, end, new))
            seen[what] += 1
        return made

    def mutants_in(self, functions: Sequence[str]) -> list[Mutant]:
        """Those in the named functions, or all."""
        if not functions:
            return self.mutants
        spans = [(node.lineno, node.end_lineno or 0) for node in self.functions if node.name in functions]
        return [mutant for mutant in self.mutants if any(first <= mutant.line <= last for first, last in spans)]

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return starts

    def _line_end(self, place: int) -> int:
        return (self.content.find(b"\n", place) + 1) or len(self.content)

    def _function_at(self, line: int) -> str:
        around = [node for node in self.functions if node.lineno <= line <= (node.end_lineno or 0)]
        return max(around, key=lambda node: node.lineno).name if around else ""

    def _changes(self) -> Iterator[tuple[int, int, int, str]]:
        """Line, first and last byte of what is replaced, and what by."""
        for node in _behaviour(self.tree):
            match node:
                case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                    yield from self._between(left, right, _COMPARISONS[type(op)])
                case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                    yield from self._between(left, right, _ARITHMETIC[type(op)])
                case ast.BoolOp(op=op, values=[left, right]):
                    yield from self._between(left, right, "or" if isinstance(op, ast.And) else "and")
                case ast.UnaryOp(op=ast.Not(), operand=operand):
                    yield self._instead(node, self._text(operand))
                case ast.Constant(value=bool(value)):
                    yield self._instead(node, str(not value))
                case ast.Constant(value=int(value)):
                    yield self._instead(node, str(value + 1))
                case ast.Call(func=ast.Name(id="min" | "max" as name)):
                    yield self._instead(node.func, "max" if name == "min" else "min")
                case ast.If(test=test) | ast.IfExp(test=test):
                    yield self._instead(test, f"(not ({self._text(test)}))")
                case ast.Expr(value=ast.Call()) | ast.AugAssign():
                    yield self._instead(node, "pass")
                case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                    yield self._instead(node, "pass")

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return start, self._line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self.content[start:end].decode()

    def _instead(self, node: ast.expr | ast.stmt, new: str) -> tuple[int, int, int, str]:
        return node.lineno, *self._span(node), new

    def _between(self, left: ast.expr, right: ast.expr, new: str) -> Iterator[tuple[int, int, int, str]]:
        """Another operator, where nothing besides it is between the operands: no parenthesis, no end of a line."""
        start, end = self._span(left)[1], self._span(right)[0]
        if not {b"(", b")", b"\n"} & {self.content[place : place + 1] for place in range(start, end)}:
            yield left.end_lineno or 0, start, end, f" {new} "


def _behaviour(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes below `tree` that decide what the program does: no annotations, docstrings, errors, assertions, imports."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "exc", "msg", "type_comment", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(node, ast.AST):
                yield node
                yield from _behaviour(node)


class Sources:
    """The files below `root`, each read and parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, Source] = {}

    def file(self, path: str) -> Source:
        """One of them."""
        if path not in self._files:
            self._files[path] = Source(path, (self.root / path).read_bytes())
        return self._files[path]

    def mutants(self, target: Target) -> list[Mutant]:
        """Every mutant of a target."""
        return [m for path in target.paths(self.root) for m in self.file(path).mutants_in(target.functions)]

    def find(self, name: Name) -> Mutant | None:
        """The mutant of that name; None if the file or the line is gone."""
        if not (self.root / name.path).is_file():
            return None
        return next((mutant for mutant in self.file(name.path).mutants if mutant.name == name), None)


def choose(
    sources: Sources, targets: Sequence[Target], count: int, seed: int, without: frozenset[str] = frozenset()
) -> list[tuple[Target, Mutant]]:
    """`count` mutants, as many of each target as of the others, at most one per line, mixed.

    Lines and mutants are ranked by a digest of the seed and their names: a change of a file, or another mutant that is
    left out, changes no other choice. `without`: descriptions of those never chosen.
    """
    chosen: list[tuple[Target, Mutant]] = []
    taken: set[tuple[str, int]] = set()
    for index, target in enumerate(targets):
        lines: dict[tuple[str, int], list[Mutant]] = {}
        for mutant in sources.mutants(target):
            place = mutant.name.path, mutant.line
            if place not in taken and mutant.name.describe() not in without:
                lines.setdefault(place, []).append(mutant)
        wanted = count // len(targets) + (index < count % len(targets))
        ranked = sorted(
            lines.items(), key=lambda item: _rank(seed, item[0][0], item[1][0].name.before, item[1][0].line)
        )
        for place, found in ranked[:wanted]:
            taken.add(place)
            chosen.append((target, min(found, key=lambda mutant: _rank(seed, mutant.name))))
    return sorted(chosen, key=lambda each: _rank(seed, each[1].name))


def _rank(seed: int, *what: object) -> str:
    return sha256(repr((seed, *what)).encode()).hexdigest()
