"""Which keys of a config.json transformers' classes know, and which keys that no reader consumed are harmless.

`known_keys.json` has, for each `model_type`, the names that its configuration and modelling files read and the classes'
defaults; `tools/known_keys.py` writes it. An absent key has the default. A key that the family left unread

1. and that has the default of its class is accepted: the family computes what the class does by default,
2. and that has another value is refused if the class knows it, or if it switches on what other types have,
3. and that no class knows is accepted if transformers' class is all that computes the checkpoint: no code of its own,
   an architecture of this type, and a file that is not newer than the table, or a value of false or 0,
4. or, if the checkpoint has code of its own, where that only stores it; it is searched as text and never run.
"""

from __future__ import annotations

import io
import json
import logging
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

Code = Callable[[], Mapping[str, str]]
"""Returns the Python files of a checkpoint: name -> text."""

CONVERTED: Final = ("kimi_linear", "mimo_v2_flash", "minimax_m2", "step3p7")
"""Model types whose classes fix values that the released files state in keys of other names."""

OLD_BASE: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("add_cross_attention", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder"), False),
    **dict.fromkeys(("torchscript", "use_bfloat16", "cross_attention_hidden_size"), False),
    "pruned_heads": {},
}
"""Defaults of the base class of transformers 4, which wrote them into every file. Later versions do not have them."""

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class KnownType:
    """What transformers' classes know of the keys of a `model_type`."""

    name: str
    architectures: frozenset[str]
    aliases: Mapping[str, str]  # Name of an attribute -> the key that holds its value.
    defaults: Mapping[str, Any]
    keys: frozenset[str]  # Keys without a default.

    def partners(self, key: str) -> Iterator[str]:
        """Yield the other names of a key."""
        if key in self.aliases:
            yield self.aliases[key]
        yield from (name for name, stored in self.aliases.items() if stored == key)


NO_TYPE: Final = KnownType("", frozenset(), {}, {}, frozenset())


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(Path(__file__).with_name("known_keys.json").read_text(encoding="utf-8"))
    return table


@cache
def known_type(name: str) -> KnownType:
    """Return what is known of a `model_type`: `NO_TYPE` for one that transformers does not have."""
    entry = _table()["types"].get(name)
    if entry is None:
        return NO_TYPE
    keys = frozenset((*entry["keys"], *_table()["shared"]))
    known = KnownType(name, frozenset(entry["architectures"]), entry["aliases"], entry["defaults"], keys)
    others = {other: value for key, value in known.defaults.items() for other in known.partners(key)}
    return replace(known, defaults={**others, **known.defaults})


@cache
def _switches() -> Mapping[str, Any]:
    """Return the keys of mechanisms that types without them do without: False, or the factor that changes nothing."""
    defaults: dict[str, list[Any]] = {}
    for entry in _table()["types"].values():
        for key, value in entry["defaults"].items():
            defaults.setdefault(key, []).append(value)
    flags = {key: False for key, values in defaults.items() if any(isinstance(value, bool) for value in values)}
    factors = {key: values[0] for key, values in defaults.items() if all(_is_neutral(value) for value in values)}
    return flags | factors


def _is_neutral(value: object) -> bool:
    return type(value) in (int, float) and value in (0, 1)


def _is_off(value: object) -> bool:
    """Return whether a value means that a mechanism is off, or a factor that changes nothing."""
    return value is False or _is_neutral(value)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the keys of a text model come from.

    `file`: the whole config.json. `section`: whether the keys are from a section of it, whose `model_type` alone says
    which class reads them. `code`: the checkpoint's Python files, None where there can be none.
    """

    file: Mapping[str, Any]
    text: Mapping[str, Any]
    section: bool = False
    code: Code | None = None

    @property
    def known(self) -> KnownType:
        """What is known of the keys: nothing if the architecture is not one of the `model_type`."""
        known = known_type(str(self.text.get("model_type")))
        names = self.text.get("architectures")
        matches = isinstance(names, list) and not known.architectures.isdisjoint(map(str, names))
        return known if self.section or matches else NO_TYPE

    def problem(self, key: str, value: object) -> str | None:
        """Return why a key that the family left unread is refused; None if it is harmless."""
        known = self.known
        if _is_off(value) and _equal(value, known_type(str(self.text.get("model_type"))).defaults.get(key)):
            return None  # The class of the type wrote it, for an architecture that is not transformers'.
        defaults = {**OLD_BASE, **known.defaults}
        if key in defaults:
            return None if _equal(value, defaults[key]) else f"is {value!r}; only {defaults[key]!r} is supported"
        if key in known.keys:
            return UNKNOWN
        if known is not NO_TYPE and key in _switches() and isinstance(value, bool | int | float):
            off = _switches()[key]
            return None if _equal(value, off) else f"is {value!r}; only {off!r} is supported"
        if self._own_code:
            return None if self.code is not None and only_stored(key, self._own_code, self.code()) else UNKNOWN
        if self._is_ignored(known, value):
            logger.info("config.json: %s is ignored, as transformers' %s does", key, known.name)
            return None
        return UNKNOWN

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Values of absent keys: those of the class, if transformers wrote the file. A GGUF file states none."""
        return self.known.defaults if "transformers_version" in {**self.text, **self.file} else {}

    @property
    def _own_code(self) -> Sequence[str]:
        """Names of the files with the checkpoint's own classes, the configuration's first; empty if it has none."""
        entries = [config["auto_map"] for config in (self.file, self.text) if isinstance(config.get("auto_map"), dict)]
        names = {name: str(target) for entry in entries for name, target in entry.items() if "Tokenizer" not in name}
        config = names.pop("AutoConfig", "")
        return [f"{target.rpartition('.')[0]}.py" for target in (config, *names.values())] if entries else []

    def _is_ignored(self, known: KnownType, value: object) -> bool:
        """Return whether transformers' own class computes the checkpoint, without reading an unknown scalar."""
        if known is NO_TYPE or known.name in CONVERTED or not isinstance(value, bool | int | float | str):
            return False
        version = self.file.get("transformers_version", self.text.get("transformers_version"))
        is_old = isinstance(version, str) and _release(version) <= _release(_table()["transformers"])
        return is_old or value == 0  # False is 0, too. Whoever wrote the file: what it names is off, or there is none.


def _equal(value: object, default: object) -> bool:
    """Return whether two values are the same in JSON, where 1 and 1.0 are, but not 1 and true."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


UNKNOWN: Final = "unknown"
"""The problem of a key of which nothing is known."""


def _release(version: str) -> tuple[int, int]:
    """Return major and minor version; a version that cannot be read counts as newer than any."""
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else (1 << 30, 0)


def only_stored(key: str, own: Sequence[str], files: Mapping[str, str]) -> bool:
    """Return whether Python files mention a key only where the configuration class stores it.

    `own`: names of the files that have to be there, the configuration's first. Comments and docstrings do not count.
    The files are split into tokens, never run; one that cannot be read counts as one that mentions the key.
    """
    if any(name not in files for name in own):
        return False
    try:
        return all(
            _mentions(key, line) == 0 or (name == own[0] and _stores(key, line))
            for name, text in files.items()
            for line in _lines(text)
        )
    except (tokenize.TokenError, SyntaxError):
        return False


def _lines(text: str) -> Iterator[list[str]]:
    """Yield the tokens of each logical line, without comments and line breaks."""
    line: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            yield line
            line = []
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            line.append(token.string)


def _mentions(key: str, line: Sequence[str]) -> int:
    """Return how many tokens are the key, as a name or as a text."""
    return sum(token == key or token.strip("rbfuRBFU\"'") == key for token in line)


def _stores(key: str, line: Sequence[str]) -> bool:
    """Return whether a logical line declares the key as a parameter or a field, stores it or passes it on."""
    if list(line) == ["self", ".", key, "=", key]:
        return True
    if line[0] == "def":
        return _mentions(key, line) == line.count(key) == 1
    if line[0] == "super":
        passed = any(line[index : index + 3] == [key, "=", key] for index in range(len(line)))
        return passed and _mentions(key, line) == 2
    return line[0] == key and line[1:2] in ([":"], ["="]) and _mentions(key, line) == 1
