"""EngineArgs: every engine setting as a keyword and as a flag, derived from the configuration dataclasses.

A default, help text, choice or parser is stated once, in common/config. Knows no backend and no model.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import msgspec

from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.model import ModelConfig
from pagoda.common.config.scheduler import SchedulerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.compat_flags import COMPAT, Compat
from pagoda.server.flags import add_options

_GROUPS: dict[str, type[Any]] = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration field as a keyword argument and a flag."""

    group: str
    field: str
    name: str
    hint: Any
    default: Any
    choices: tuple[str, ...] | None
    parse: Callable[[str], Any] | None

    @property
    def option(self) -> str:
        """`--its-flag`."""
        return "--" + self.name.replace("_", "-")

    @property
    def plain(self) -> Any:
        """The type without None."""
        if get_origin(self.hint) not in (Union, UnionType):
            return self.hint
        rest = [each for each in get_args(self.hint) if each is not NoneType]
        return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007 (built at run time)

    def convert(self, value: Any) -> Any:
        """A keyword's value as the configuration wants it; None means the default. Raises ConfigError."""
        if value is None:
            return self.default
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if get_origin(self.plain) is tuple and isinstance(value, str):
            value = (value,)
        if get_origin(self.plain) is Literal and not isinstance(value, str):
            value = str(value).removeprefix("torch.")  # a torch.dtype, without importing torch
        try:
            if self.parse is not None and not isinstance(value, bool):
                value = self.parse(str(value))
            return msgspec.convert(value, self.hint)
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(self.option, f"{value!r}: {error}{self._hint_of_choices()}") from None

    def _hint_of_choices(self) -> str:
        return f"; choose from {', '.join(self.choices)}" if self.choices else ""


def _settings() -> Iterator[Setting]:
    for group, config in _GROUPS.items():
        hints = get_type_hints(config)
        for each in dataclasses.fields(config):
            meta, hint = each.metadata, hints[each.name]
            yield Setting(
                group=group,
                field=each.name,
                name=(meta["flag"] or each.name).replace("-", "_"),
                hint=hint,
                default=each.default if each.default_factory is dataclasses.MISSING else each.default_factory(),
                choices=tuple(meta["choices"]) if meta["choices"] else _literal_choices(hint),
                parse=meta["parse"],
            )


def _literal_choices(hint: Any) -> tuple[str, ...] | None:
    return get_args(hint) if get_origin(hint) is Literal else None


SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _settings()}


class EngineArgs:
    """Every engine setting under vLLM's name: `EngineArgs(model="...", max_model_len=4096)`.

    One attribute per entry of SETTINGS. Raises ConfigError for a value that cannot be used and TypeError, naming the
    nearest match, for a keyword that does not exist.
    """

    model: str

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        for name, value in settings.items():
            if name not in SETTINGS:
                _check_compat(type(self).__name__, name, value)
        settings["model"] = model
        for name, setting in SETTINGS.items():
            setattr(self, name, setting.convert(settings.get(name)))

    def create_engine_config(self) -> EngineConfig:
        """The frozen configuration. Raises ConfigError naming the flag."""
        groups = {
            group: config(**{s.field: getattr(self, s.name) for s in SETTINGS.values() if s.group == group})
            for group, config in _GROUPS.items()
        }
        return EngineConfig(**groups)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add every engine flag to a parser, in one help section per group."""
        for group, config in _GROUPS.items():
            add_options(parser.add_argument_group(group), config)
        section = parser.add_argument_group("accepted at these values only")
        for compat in COMPAT.values():
            if compat.flag:
                _add_compat(section, compat)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take the engine's part out of parsed arguments. Raises ConfigError."""
        given = vars(args)
        dests = {setting.name: setting.field for setting in SETTINGS.values()} | {name: name for name in COMPAT}
        return cls(**{name: given[dest] for name, dest in dests.items() if dest in given})

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = {n: getattr(self, n) for n, s in SETTINGS.items() if getattr(self, n) != s.default or n == "model"}
        if changed.get("hf_token"):
            changed["hf_token"] = "***"
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


class AsyncEngineArgs(EngineArgs):
    """The settings of AsyncLLM; the same as EngineArgs."""


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean x?`, or nothing when no name is close."""
    match = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _check_compat(owner: str, name: str, value: Any) -> None:
    if name not in COMPAT:
        raise TypeError(f"{owner} has no setting {name!r}{nearest(name, (*SETTINGS, *COMPAT))}")
    COMPAT[name].check(value)


def _add_compat(parser: argparse._ArgumentGroup, compat: Compat) -> None:
    kind = type(compat.accepted[0])
    values = ", ".join(str(value) for value in compat.accepted)
    common: dict[str, Any] = {"dest": compat.name, "default": None, "help": f"{values}: {compat.reason}."}
    if kind is bool:
        parser.add_argument(compat.option, *compat.aliases, action=argparse.BooleanOptionalAction, **common)
    else:
        parser.add_argument(compat.option, *compat.aliases, type=kind, **common)
