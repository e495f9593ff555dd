"""The words of a command line, spelled out: underscores, -O3, and JSON written in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagoda.common.config.numbers import json_or_text
from pagoda.common.errors import ConfigError

_PIECE: Final = re.compile(r"(--?[A-Za-z][\w-]*)\.([^=\s]+?)(\+?)(?:=(.*))?", re.DOTALL)
"""--flag.key.key+=value"""

_LEVEL: Final = re.compile(r"-O=?(\d+)")
_COMPILATION: Final = "--compilation-config"
_COMPILATION_SPELLINGS: Final = (_COMPILATION, "-cc", "-O")


def spelled_out(words: Sequence[str], jsons: Mapping[str, str]) -> list[str]:
    """Words as the parser knows them. `jsons`: every spelling of a JSON flag -> its full one. Raises ConfigError."""
    return _whole(_levels([_dashed(word) for word in words]), jsons)


def _dashed(word: str) -> str:
    """The flag's own name with dashes; keys after a dot stay as they are."""
    if not word.startswith("--") or len(word) == 2:
        return word
    name = re.match(r"[^=.]*", word)
    assert name is not None
    return name[0].replace("_", "-") + word[name.end() :]


def _levels(words: Sequence[str]) -> list[str]:
    """-O3, -O=3 and -O 3 are the optimisation level; -O.key and -O JSON are the compilation settings."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        level = _LEVEL.fullmatch(word)
        if level is not None:
            found += ["--optimization-level", level[1]]
        elif word in _COMPILATION_SPELLINGS:
            found += _level_or_settings(word, next(rest, None))
        elif word == "-O=":
            found += _level_or_settings("-O", None)
        elif word.startswith(("-O.", "-O=")):
            found.append(_COMPILATION + word[2:])
        else:
            found.append(word)
    return found


def _level_or_settings(flag: str, value: str | None) -> list[str]:
    if value is None:
        raise ConfigError(flag, "a level from 0 to 3, or a JSON object, is missing")
    return ["--optimization-level" if value.isdecimal() else _COMPILATION, value]


def _whole(words: Sequence[str], jsons: Mapping[str, str]) -> list[str]:
    """Every JSON flag whole: --flag.a.b 1 --flag.c+ x,y is --flag={"a": {"b": 1}, "c": ["x", "y"]}.

    A value is JSON where it reads as JSON and text where it does not. What is said in pieces stands over what is said
    whole, wherever it stands.
    """
    kept: list[str] = []
    pieces: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        match = _PIECE.fullmatch(word)
        if match is None or match[1] not in jsons:
            kept.append(word)
            continue
        value = match[4] if match[4] is not None else _value(word, rest)
        _set(pieces.setdefault(jsons[match[1]], {}), match, value)
    return kept + [f"{flag}={json.dumps(piece)}" for flag, piece in pieces.items()]


def _value(flag: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None or value.startswith("--"):
        raise ConfigError(flag, "a value is missing behind it")
    return value


def _set(whole: dict[str, Any], match: re.Match[str], value: str) -> None:
    flag = f"{match[1]}.{match[2]}{match[3]}"
    *outer, key = match[2].split(".")
    if not all((*outer, key)):
        raise ConfigError(flag, "a key between the dots is empty")
    for part in outer:
        whole = whole.setdefault(part, {})
        if not isinstance(whole, dict):
            raise ConfigError(flag, f"{part} has a value already that is no object; drop one of the two")
    if not match[3]:
        whole[key] = json_or_text(value)
        return
    items = whole.setdefault(key, [])
    if not isinstance(items, list):
        raise ConfigError(flag, f"{key} has a value already that is no list; drop one of the two")
    found = json_or_text(value)
    items.extend(found if isinstance(found, list) else map(json_or_text, value.split(",")))
