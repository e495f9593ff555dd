"""Grids of parameters: JSON files of combinations of flags, and the command lines that they make."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagoda.common.errors import ConfigError

NAME_KEY: Final = "_benchmark_name"
"""Key of a combination's name in a list of combinations."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Values of flags. `name`: of its folder; empty for no flags."""

    name: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Combination:
        """Return a combination that is named after its values unless it has a name."""
        flags = {key: value for key, value in values.items() if key != NAME_KEY}
        name = values.get(NAME_KEY)
        return cls(str(name) if name else "-".join(f"{key}={value}" for key, value in flags.items()), flags)

    def with_value(self, key: str, value: Any) -> Combination:
        """Return a combination of the same name in which a flag is replaced."""
        others = {name: other for name, other in self.values.items() if _same(name, key) is False}
        return Combination(self.name, {**others, key: value})

    def get(self, key: str) -> Any:
        """Return the value of a flag however it is spelled; None without it."""
        return next((value for name, value in self.values.items() if _same(name, key)), None)

    def applied(self, command: Sequence[str]) -> list[str]:
        """Return the command with these flags, which replace its own."""
        words = list(command)
        for key, value in self.values.items():
            words = [*_without(words, key), *_words(key, value)]
        return words

    def as_text(self) -> str:
        """Return the flags for a line of output."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "defaults"


def read_params(path: str | None, flag: str) -> list[Combination]:
    """Return the combinations of a JSON file; one without flags if there is no file. Raises ConfigError.

    The file has a list of objects, or an object of objects by name.
    """
    if path is None:
        return [Combination("", {})]
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(flag, f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(flag, f"{path}: invalid JSON: {error}") from None
    rows = (
        [{NAME_KEY: name, **_object(row, path, flag)} for name, row in data.items()] if isinstance(data, dict) else data
    )
    if not isinstance(rows, list) or not rows:
        raise ConfigError(flag, f"{path}: is neither a list of objects nor an object of objects")
    combinations = [Combination.of(_object(row, path, flag)) for row in rows]
    names = [combination.name for combination in combinations]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(flag, f"{path}: two combinations are named {name or 'defaults'}; rename one")
    return combinations


def linked(serve: Combination, bench: Combination, pairs: Sequence[str]) -> bool:
    """True if the parameters of each SERVE=BENCH pair are set and equal."""
    for pair in pairs:
        left, _, right = pair.partition("=")
        value = serve.get(left)
        if value is None or value != bench.get(right):
            return False
    return True


def file_name(text: str) -> str:
    """Return a text as the name of a file."""
    return re.sub(r"[^\w.,=+-]+", "_", text)[:200]


def _object(row: Any, path: str, flag: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(flag, f"{path}: {json.dumps(row)[:60]} is not an object of flags")
    return row


def _same(one: str, other: str) -> bool:
    return one.replace("-", "_") == other.replace("-", "_")


def _flag(key: str) -> str:
    outer, dot, inner = key.partition(".")
    return "--" + outer.replace("_", "-") + dot + inner


def _words(key: str, value: Any) -> list[str]:
    """Return a flag and its value as words: true is the flag alone, false its negation, null nothing."""
    if value is None:
        return []
    if isinstance(value, bool) and "." not in key:
        return [_flag(key) if value else _flag("no_" + key)]
    if isinstance(value, list):
        return [_flag(key), *map(str, value)]
    if isinstance(value, bool | dict):
        return [_flag(key), json.dumps(value)]
    return [_flag(key), str(value)]


def _without(words: Sequence[str], key: str) -> list[str]:
    """Return a command line without a flag and its values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = _same(word[2:].partition("=")[0].removeprefix("no-"), key.removeprefix("no_"))
        elif word.startswith("-") and not _is_number(word):
            dropping = False
        if not dropping:
            kept.append(word)
    return kept


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
