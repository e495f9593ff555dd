"""Command-line flags from the table of settings, and a parser that names the nearest flag when one is unknown.

The parser only collects words; common/config/table.py turns them into values, so that a flag, a YAML key and a
variable mean the same and fail the same.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Final, NoReturn

from pagoda.common.config.sources import merged
from pagoda.common.config.table import DOCUMENTED_GROUPS, Setting

_PIECE: Final = re.compile(r"(--?[A-Za-z][\w-]*)\.([^=\s]+?)(\+?)(?:=(.*))?", re.DOTALL)
"""--flag.key.key+=value"""

_LEVEL: Final = re.compile(r"-O=?(\d+)")


class FlagParser(argparse.ArgumentParser):
    """Takes --max_model_len for --max-model-len, JSON in pieces, no abbreviations.

    It answers an unknown flag with the nearest one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does it, after writing flags in their full form."""
        words = [_dashed(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(self._whole_json(_levels(words)), namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """All arguments, or exit 2 with one line that names the unknown one and its nearest match."""
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            self.unknown(rest)
        return known

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """End with one line about the first of `words`."""
        word = next((word for word in words if word.startswith("-")), words[0])
        flag = word.partition("=")[0]
        near = difflib.get_close_matches(flag, list(self._option_string_actions), n=1, cutoff=0.6)
        kind = "flag" if flag.startswith("-") else "argument"
        self.error(f"unknown {kind} {flag}" + (f"; did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _whole_json(self, words: list[str]) -> list[str]:
        """Words with every JSON flag written once and whole: --flag.a.b 1 --flag.c+ x is --flag={"a": {"b": 1}, ...}.

        A value is JSON where it reads as JSON and text where it does not; pieces are stronger than the whole.
        """
        jsons = {spelling: action for spelling, action in self._option_string_actions.items() if _takes_json(action)}
        kept: list[str] = []
        pieces: dict[str, dict[str, Any]] = {}
        rest = iter(words)
        for word in rest:
            match = _PIECE.fullmatch(word)
            if match is None or match[1] not in jsons:
                kept.append(word)
                continue
            value = match[4] if match[4] is not None else next(rest, None)
            if value is None:
                self.error(f"argument {word}: expected one argument")
            whole = pieces.setdefault(jsons[match[1]].option_strings[0], {})
            self._set(whole, match[1], match[2].split("."), value, appends=bool(match[3]))
        for flag, piece in pieces.items():
            kept.append(f"{flag}={json.dumps(piece)}")
        return kept

    def _set(self, whole: dict[str, Any], flag: str, path: list[str], value: str, *, appends: bool) -> None:
        for key in path[:-1]:
            inner = whole.setdefault(key, {})
            if not isinstance(inner, dict):
                self.error(f"argument {flag}.{'.'.join(path)}: {key} already has a value that is no object")
            whole = inner
        if not appends:
            whole[path[-1]] = _json_or_text(value)
            return
        items = whole.setdefault(path[-1], [])
        if not isinstance(items, list):
            self.error(f"argument {flag}.{'.'.join(path)}+: the value so far is no list")
        items.extend(_json_or_text(each) for each in value.split(","))


def _dashed(word: str) -> str:
    """The flag's own name with dashes; keys after a dot stay as they are."""
    if not word.startswith("--") or len(word) == 2:
        return word
    name = re.match(r"[^=.]*", word)
    assert name is not None
    return name[0].replace("_", "-") + word[name.end() :]


def _levels(words: list[str]) -> list[str]:
    """-O3, -O=3 and -O 3 are the optimisation level; -O.key and -O JSON are the compilation settings."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        level = _LEVEL.fullmatch(word)
        if level is not None:
            found += ["--optimization-level", level[1]]
        elif word == "-O":
            value = next(rest, "")
            found += ["--optimization-level" if value.isdecimal() else "--compilation-config", value]
        elif word.startswith(("-O.", "-O=")):
            found.append("--compilation-config" + word[2:])
        else:
            found.append(word)
    return found


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _takes_json(action: argparse.Action) -> bool:
    return isinstance(action, _Json)


class _Json(argparse.Action):
    """A JSON object; several are merged, the later over the earlier."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setting: Setting = self.const
        so_far = getattr(namespace, self.dest, None)
        value = setting.convert_text(values)
        setattr(namespace, self.dest, value if so_far is None or value is None else merged(so_far, value))


class _Extend(argparse.Action):
    """Words of repeated flags gathered in one list."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])


def add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting], skip: Iterable[str] = ()) -> None:
    """Add one flag per setting, in one section per group, except the names in `skip`."""
    left_out = set(skip)
    sections: dict[str, Any] = {}
    about = {config.__name__: config.__doc__ for config in DOCUMENTED_GROUPS}
    for setting in settings:
        if setting.name in left_out:
            continue
        if setting.group not in sections:
            sections[setting.group] = parser.add_argument_group(setting.group, about.get(setting.group))
        _add(sections[setting.group], setting)


def _add(parser: argparse._ActionsContainer, setting: Setting) -> None:
    keywords: dict[str, Any] = {
        "dest": setting.name,
        "default": argparse.SUPPRESS,
        "help": describe(setting).replace("%", "%%"),
    }
    if setting.is_switch:
        keywords["action"] = argparse.BooleanOptionalAction
    else:
        keywords["metavar"] = _metavar(setting)
        if setting.is_json:
            keywords.update(action=_Json, const=setting)
        elif setting.is_list:
            keywords.update(nargs="+", action=_Extend)
        elif setting.option.optional_value is not None:
            keywords.update(nargs="?", const=setting.option.optional_value)
    parser.add_argument(*setting.flags, **keywords)


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(map(str, setting.choices)) + "}"
    return "JSON" if setting.is_json else setting.name.rpartition("_")[2].upper()


def describe(setting: Setting) -> str:
    """A flag's help: what it is, its default, and what becomes of it here."""
    option = setting.option
    text = option.help
    if setting.default not in (None, (), {}, ""):
        text += f" (default: {default_text(setting)})"
    if option.deprecated is not None:
        text += f" [deprecated: use {option.deprecated}]"
    elif option.status == "no effect":
        text += f" [no effect: {option.why}]"
    elif option.status == "refused":
        only = ", ".join(map(str, (default_text(setting), *option.accepts)))
        text += f" [only {only}: {option.why}]"
    return text


def default_text(setting: Setting) -> str:
    """The default as one would write it on a command line."""
    value = setting.default
    if value is MISSING or value is None or value in ((), {}, ""):
        return "nothing"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, Mapping):
        return json.dumps(value)
    return str(value)


def given(args: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, Any]:
    """The converted values of the flags that were on the command line. Raises ConfigError."""
    said = vars(args)
    return {setting.name: _value(setting, said[setting.name]) for setting in settings if setting.name in said}


def _value(setting: Setting, said: Any) -> Any:
    return setting.convert_text(said) if isinstance(said, str | list) else said
