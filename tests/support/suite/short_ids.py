"""A plugin of pytest: ids of tests have at most `MAX_ID` characters, for which texts in them are cut.

Ids that a test states for itself (`ids=`, `pytest.param(id=...)`) are taken as they are.
"""

from __future__ import annotations

from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import pytest

MAX_ID = 80  # characters of class, function and values, without the path of the file

LARGE = 10**20

_left = 0
"""How many characters a value of the function that is being collected may have."""


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    global _left
    names = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize") if mark.args]
    values = sum(name.count(",") + 1 if isinstance(name, str) else len(name) for name in names)
    _left = room(metafunc.definition.nodeid.partition("::")[2], values)


def room(name: str, values: int) -> int:
    """How many characters each value of a test may have, besides the hyphens between them, brackets and a number."""
    return max(3, (MAX_ID - len(name) - len("[]99")) // max(1, values) - 1)


def pytest_make_parametrize_id(val: Any) -> str | None:
    match val:
        case Enum():
            text = val.name
        case type() | FunctionType() | ModuleType():
            text = val.__name__.rpartition(".")[2]
        case str():
            text = val.encode("unicode_escape").decode("ascii")
        case bytes():
            text = val.decode("latin-1").encode("unicode_escape").decode("ascii")
        case int() if abs(val) > LARGE:
            text = "large"
        case _:
            return None
    return text[:_left]
