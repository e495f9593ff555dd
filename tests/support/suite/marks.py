"""The marks of all test files, read from their text."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[2]


@cache
def marks() -> dict[str, tuple[object, ...]]:
    """Kind -> the arguments of every `pytest.mark.KIND(...)`, which must be written out."""
    found: dict[str, list[object]] = defaultdict(list)
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            match node:
                case ast.Call(
                    ast.Attribute(
                        ast.Attribute(ast.Name("pytest"), "mark"),
                        ("setting" | "variable" | "command" | "field") as kind,
                    )
                ):
                    for arg in node.args:
                        assert isinstance(arg, ast.Constant), f"{path}: a mark must be written out"
                        found[kind].append(arg.value)
                case _:
                    pass
    return {kind: tuple(values) for kind, values in found.items()}
