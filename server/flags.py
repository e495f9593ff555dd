"""Command-line flags from configuration dataclasses, and a parser that names the nearest flag when one is unknown."""

from __future__ import annotations

import argparse
import difflib
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

ConfigT = TypeVar("ConfigT")


class FlagParser(argparse.ArgumentParser):
    """Takes --max_model_len for --max-model-len, no abbreviations, and answers an unknown flag with the nearest one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does it, after writing underscores in flag names as dashes."""
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_dashed(word) for word in words], namespace)

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


def _dashed(word: str) -> str:
    if not word.startswith("--") or len(word) == 2:
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def add_options(parser: argparse._ActionsContainer, config: type, skip: Iterable[str] = ()) -> None:
    """Add one flag per field of a configuration dataclass (see common/config/option.py), except those in `skip`."""
    hints = typing.get_type_hints(config)
    for field in fields(config):
        if field.name not in set(skip):
            _add_option(parser, field, hints[field.name])


def _add_option(parser: argparse._ActionsContainer, field: Field[Any], hint: Any) -> None:
    meta = field.metadata
    names = ["--" + (meta.get("flag") or field.name).replace("_", "-"), *meta.get("aliases", ())]
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    keywords: dict[str, Any] = {"dest": field.name, "default": default, "help": meta["help"].replace("%", "%%")}
    kind = _without_none(hint)
    choices = meta.get("choices") or (get_args(kind) if get_origin(kind) is Literal else None)
    if kind is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif meta.get("parse"):
        keywords["type"] = meta["parse"]
    elif get_origin(kind) in (tuple, list):
        keywords.update(nargs="+", action=_Extend, type=str)
    elif choices:
        keywords["choices"] = list(choices)
    else:
        keywords["type"] = kind
    parser.add_argument(*names, **keywords)


class _Extend(argparse.Action):
    """Words of repeated flags gathered in one tuple; the first use replaces the default."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        so_far = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (() if so_far is self.default else so_far) + tuple(values))


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [arg for arg in get_args(hint) if arg is not type(None)]
        return kinds[0] if len(kinds) == 1 else str
    return hint


def from_namespace(config: type[ConfigT], namespace: argparse.Namespace) -> ConfigT:
    """The configuration that parsed flags describe. Raises ConfigError naming a flag."""
    names = [field.name for field in fields(config)]  # type: ignore[arg-type]
    return config(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})
