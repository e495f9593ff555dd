"""Command-line flags from the table of settings, and a parser that names the nearest flag when one is unknown.

The parser only collects words; common/config/settings.py turns them into values, so that a flag, a YAML key and a
variable mean the same and fail the same.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from pagoda.common.config.fields import did_you_mean, json_or_text
from pagoda.common.config.settings import Setting, merged
from pagoda.common.errors import ConfigError
from pagoda.server.settings.help import Flag, Group, Page, answer, default_text, describe, metavar, overview

# The words of a command line, spelled out: underscores, -O3, and JSON written in pieces.

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
        value = match[4] if match[4] is not None else _value_spelling(word, rest)
        _set(pieces.setdefault(jsons[match[1]], {}), match, value)
    return kept + [f"{flag}={json.dumps(piece)}" for flag, piece in pieces.items()]


def _value_spelling(flag: str, rest: Iterator[str]) -> str:
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


__all__ = ["FlagParser", "Once", "add_settings", "default_text", "describe", "given"]

_ONCE: Final = frozenset({"model"})
"""Settings that mean two things when they are said twice, where the last of two ports is the port."""


class FlagParser(argparse.ArgumentParser):
    """Takes --max_model_len for --max-model-len, JSON in pieces, `--help=WHAT`, and no abbreviations.

    It answers an unknown flag with the nearest one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs, "add_help": False})
        self.settings: dict[str, Setting] = {}
        self.add_argument(
            *("-h", "--help"),
            action=_Help,
            nargs="?",
            const="",
            default=argparse.SUPPRESS,
            metavar="WHAT",
            help="This page; --help=WHAT: a group, a flag, a word to look for, listgroup, or all.",
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does it, after spelling out the words. Raises ConfigError for a value that cannot be used."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(spelled_out(words, self._jsons()), namespace)

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
        outer = flag.partition(".")[0]
        if outer in self._jsons():
            self.error(f"argument {flag}: a key is missing behind the dot")
        if outer != flag and outer in self._option_string_actions:
            self.error(f"{outer} is no JSON setting and has no key {flag[len(outer) + 1 :]}; write {outer} VALUE")
        kind = "flag" if flag.startswith("-") else "argument"
        self.error(f"unknown {kind} {flag}{did_you_mean(flag, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def format_help(self) -> str:
        """What --help prints."""
        return overview(self.page()) + "\n"

    def page(self) -> Page:
        """Everything there is to help with."""
        groups = [
            Group(
                name=str(each.title),
                about=(each.description or "").partition("\n")[0],
                flags=tuple(map(self._flag, each._group_actions)),
            )
            for each in self._action_groups
        ]
        return Page(self.prog, self.description or "", tuple(group for group in groups if group.flags))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """argparse's guesses at what a word abbreviates, less those that allow_abbrev does not keep it from."""
        guesses: list[Any] = super()._get_option_tuples(option_string)
        return [guess for guess in guesses if option_string.startswith(guess[1])]  # -n4 is -n 4

    def _flag(self, action: argparse.Action) -> Flag:
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        return Flag(
            spellings=tuple(action.option_strings),
            metavar="" if action.nargs == 0 else metavar,
            optional=action.nargs == "?",
            text=action.help or "",
            setting=self.settings.get(action.dest),
        )

    def _jsons(self) -> dict[str, str]:
        """Every spelling of a JSON flag -> its full one."""
        return {flag: setting.flag for setting in self.settings.values() if setting.is_json for flag in setting.flags}


class _Help(argparse.Action):
    """Prints the page, or the part of it that was asked for."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        print(answer(parser.page(), values))
        parser.exit()


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


class Once(argparse.Action):
    """A word that may be repeated, but not differently."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Raise ConfigError when another word was there before."""
        before = getattr(namespace, self.dest, values)
        if before != values:
            raise ConfigError(self.option_strings[0], f"is there twice, as {before} and as {values}; name one")
        setattr(namespace, self.dest, values)


def add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting], skip: Iterable[str] = ()) -> None:
    """Add one flag per setting, in one section per group, except the names in `skip`."""
    left_out = set(skip)
    sections: dict[str, Any] = {}
    for setting in settings:
        if setting.name in left_out:
            continue
        if setting.group not in sections:
            sections[setting.group] = parser.add_argument_group(setting.group, setting.config.__doc__)
        _add(sections[setting.group], setting)
        if isinstance(parser, FlagParser):
            parser.settings[setting.name] = setting


def _add(parser: argparse._ActionsContainer, setting: Setting) -> None:
    keywords: dict[str, Any] = {
        "dest": setting.name,
        "default": argparse.SUPPRESS,
        "help": describe(setting).replace("%", "%%"),
    }
    if setting.is_switch:
        keywords["action"] = argparse.BooleanOptionalAction
    else:
        keywords["metavar"] = metavar(setting)
        if setting.is_json:
            keywords.update(action=_Json, const=setting)
        elif setting.is_list:
            keywords.update(nargs="+", action=_Extend)
        elif setting.option.optional_value is not None:
            keywords.update(nargs="?", const=setting.option.optional_value)
        elif setting.name in _ONCE:
            keywords.update(action=Once)
    parser.add_argument(*setting.flags, **keywords)


def given(args: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, Any]:
    """The converted values of the flags that were on the command line. Raises ConfigError."""
    said = vars(args)
    return {setting.name: _value(setting, said[setting.name]) for setting in settings if setting.name in said}


def _value(setting: Setting, said: Any) -> Any:
    return setting.convert_text(said) if isinstance(said, str | list) else said
