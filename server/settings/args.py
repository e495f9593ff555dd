"""EngineArgs: every engine setting as a keyword and as a flag, derived from the dataclasses in common/config."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar

from pagoda.common.config import env
from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.fields import did_you_mean
from pagoda.common.config.settings import (
    ENGINE_GROUPS,
    ENGINE_SETTINGS,
    ResolvedSettings,
    Setting,
    Sourced,
    build,
    from_environment,
    from_file,
    from_keywords,
    merge_layers,
)
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import Once, add_settings, given

_ALL_NAMES: Final = frozenset(name for settings in COMMAND_SETTINGS.values() for name in settings)

logger = logging.getLogger(__name__)

ArgsT = TypeVar("ArgsT")


def _with_fields(args: type[ArgsT]) -> type[ArgsT]:
    """Make a dataclass with one field per setting, for scripts that use `dataclasses.asdict`."""
    args.__annotations__ = {name: setting.hint for name, setting in ENGINE_SETTINGS.items()}
    return dataclasses.dataclass(init=False, repr=False, eq=False)(args)


@_with_fields
class EngineArgs:
    """Every engine setting under vLLM's name: `EngineArgs(model="...", max_model_len=4096)`.

    One attribute per entry of ENGINE_SETTINGS; settings that are not given come from the environment, then from the
    defaults. Raise ConfigError for an invalid value, TypeError naming the nearest match for an unknown keyword.
    """

    model: str
    _logged: Mapping[str, None] = {}

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        for name in settings:
            if name not in ENGINE_SETTINGS:
                raise TypeError(f"{type(self).__name__} has no setting {name!r}{did_you_mean(name, ENGINE_SETTINGS)}")
        keywords = from_keywords(ENGINE_SETTINGS, {**settings, "model": model})
        self._apply(merge_layers(ENGINE_SETTINGS, keywords, from_environment([ENGINE_SETTINGS])))

    def _apply(self, resolved: ResolvedSettings) -> None:
        self._config = EngineConfig(
            **{name: build(each, resolved.values, ENGINE_SETTINGS.values()) for name, each in ENGINE_GROUPS.items()}
        )
        notes = dict.fromkeys((*env.notes(settings=_ALL_NAMES), *resolved.notes))
        for note in (note for note in notes if note not in self._logged):
            logger.warning("%s", note)
        self._logged = notes
        self._resolved = {name: resolved.values[name] for name in ENGINE_SETTINGS}
        self._sources = {name: source for name, source in resolved.sources.items() if name in ENGINE_SETTINGS}
        vars(self).update(self._resolved)

    @property
    def sources(self) -> Mapping[str, str]:
        """Setting -> its source, for settings that are set."""
        return self._sources

    def create_engine_config(self) -> EngineConfig:
        """Return the frozen configuration. Raise ConfigError naming the flag."""
        self._apply_assignments()
        return self._config

    def _apply_assignments(self) -> None:
        """Validate attributes assigned after construction like keywords."""
        assigned = {name: value for name, value in self._values().items() if value != self._resolved[name]}
        if not assigned:
            return
        layer = {name: Sourced(self._resolved[name], source) for name, source in self._sources.items()}
        for name, value in assigned.items():
            layer[name] = Sourced(ENGINE_SETTINGS[name].convert(value), "keyword")
        self._apply(merge_layers(ENGINE_SETTINGS, layer))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add every engine flag to a parser, in one help section per group, and --config."""
        add_settings(parser, ENGINE_SETTINGS.values())
        add_config_file(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take the engine settings from parsed arguments. Raise ConfigError."""
        return cls.from_resolved(resolve_settings(args, ENGINE_SETTINGS))

    @classmethod
    def from_resolved(cls, resolved: ResolvedSettings) -> Self:
        """Take the engine settings from merged flags, file and environment. Raise ConfigError."""
        self = cls.__new__(cls)
        self._apply(resolved)
        return self

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = {n: v for n, v in self._values().items() if v != ENGINE_SETTINGS[n].default or n == "model"}
        changed |= {n: "***" for n, v in changed.items() if v and ENGINE_SETTINGS[n].is_secret}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ENGINE_SETTINGS}


class AsyncEngineArgs(EngineArgs):
    """The settings of AsyncLLM; the same as EngineArgs."""


def add_config_file(parser: argparse.ArgumentParser, *, explains: bool = True) -> None:
    """Add `--config FILE.yaml` and, with `explains`, `--explain-config`."""
    parser.add_argument(
        "--config",
        action=Once,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file of settings; keys are flags without the leading dashes. Precedence: flags, file, environment, "
        "defaults.",
    )
    if not explains:
        return
    parser.add_argument(
        "--explain-config",
        action="store_true",
        help="Print the resolved value, source and reason of every setting, without starting the engine.",
    )


def resolve_settings(args: argparse.Namespace, *tables: Mapping[str, Setting]) -> ResolvedSettings:
    """Merge flags, the file of `--config` and the environment. Raise ConfigError."""
    known = {name: setting for table in tables for name, setting in table.items()}
    flags = {name: Sourced(value, "flag") for name, value in given(name_model(args), known.values()).items()}
    path = getattr(args, "config", None)
    file = from_file(path, known) if path is not None else {}
    return merge_layers(known, flags, file, from_environment(tables))


def name_model(args: argparse.Namespace) -> argparse.Namespace:
    """Return arguments with the positional MODEL as --model. Raise ConfigError if both are given and differ."""
    tag = getattr(args, "model_tag", None)
    if tag is None:
        return args
    model = getattr(args, "model", tag)
    if model != tag:
        raise ConfigError("--model", f"{model} differs from the positional MODEL {tag}; give one of them")
    return argparse.Namespace(**{**vars(args), "model": tag})


def resolve_flags(args: argparse.Namespace, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the value of every setting of a client command, from flags only. Raise ConfigError.

    The environment is not read: its settings, above all the API key, are for a server on this machine.
    """
    flags = {name: Sourced(value, "flag") for name, value in given(args, settings.values()).items()}
    resolved = merge_layers(settings, flags)
    for note in resolved.notes:
        logger.warning("%s", note)
    return resolved.values
