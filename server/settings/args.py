"""EngineArgs: every engine setting as a keyword and as a flag, derived from the configuration dataclasses.

A default, help text, choice or parser is stated once, in common/config. Knows no backend and no model.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar

from pagoda.common.config import env
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.fields import did_you_mean
from pagoda.common.config.groups.commands import COMMAND_SETTINGS
from pagoda.common.config.settings import (
    ENGINE_GROUPS,
    ENGINE_SETTINGS,
    Setting,
    Settled,
    Sourced,
    build,
    from_environment,
    from_file,
    from_keywords,
    settle,
)
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import Once, add_settings, given

_WITH_VARIABLE: Final = frozenset(name for settings in COMMAND_SETTINGS.values() for name in settings)

logger = logging.getLogger(__name__)

ArgsT = TypeVar("ArgsT")


def _with_fields(args: type[ArgsT]) -> type[ArgsT]:
    """A dataclass with one field per setting, for scripts that take arguments apart with `dataclasses.asdict`."""
    args.__annotations__ = {name: setting.hint for name, setting in ENGINE_SETTINGS.items()}
    return dataclasses.dataclass(init=False, repr=False, eq=False)(args)


@_with_fields
class EngineArgs:
    """Every engine setting under vLLM's name: `EngineArgs(model="...", max_model_len=4096)`.

    One attribute per entry of ENGINE_SETTINGS; what is not given comes from the environment, then from the defaults.
    Raises ConfigError for a value that cannot be used and TypeError, naming the nearest match, for a keyword that does
    not exist.
    """

    model: str
    _told: Mapping[str, None] = {}

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        for name in settings:
            if name not in ENGINE_SETTINGS:
                raise TypeError(f"{type(self).__name__} has no setting {name!r}{did_you_mean(name, ENGINE_SETTINGS)}")
        keywords = from_keywords(ENGINE_SETTINGS, {**settings, "model": model})
        self._take(settle(ENGINE_SETTINGS, keywords, from_environment([ENGINE_SETTINGS])))

    def _take(self, settled: Settled) -> None:
        self._config = EngineConfig(
            **{name: build(each, settled.values, ENGINE_SETTINGS.values()) for name, each in ENGINE_GROUPS.items()}
        )
        notes = dict.fromkeys((*env.notes(settings=_WITH_VARIABLE), *settled.notes))
        for note in (note for note in notes if note not in self._told):
            logger.warning("%s", note)
        self._told = notes
        self._settled = {name: settled.values[name] for name in ENGINE_SETTINGS}
        self._sources = {name: source for name, source in settled.sources.items() if name in ENGINE_SETTINGS}
        vars(self).update(self._settled)

    @property
    def sources(self) -> Mapping[str, str]:
        """Setting -> who set it, for those that are not at their default."""
        return self._sources

    def create_engine_config(self) -> EngineConfig:
        """The frozen configuration. Raises ConfigError naming the flag."""
        self._hear_assignments()
        return self._config

    def _hear_assignments(self) -> None:
        """Attributes may have been assigned since: they are keywords like the others, checked like the others."""
        assigned = {name: value for name, value in self._values().items() if value != self._settled[name]}
        if not assigned:
            return
        before = {name: Sourced(self._settled[name], source) for name, source in self._sources.items()}
        for name, value in assigned.items():
            before[name] = Sourced(ENGINE_SETTINGS[name].convert(value), "keyword")
        self._take(settle(ENGINE_SETTINGS, before))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add every engine flag to a parser, in one help section per group, and --config."""
        add_settings(parser, ENGINE_SETTINGS.values())
        add_config_file(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take the engine's part out of parsed arguments. Raises ConfigError."""
        return cls.from_settled(settle_all(args, ENGINE_SETTINGS))

    @classmethod
    def from_settled(cls, settled: Settled) -> Self:
        """The arguments that flags, file and environment came to."""
        self = cls.__new__(cls)
        self._take(settled)
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
    """`--config FILE.yaml`, which every command with engine settings takes, and `--explain-config`."""
    parser.add_argument(
        "--config",
        action=Once,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file of settings, keyed by flag without the dashes in front. Flags are stronger than the file, the "
        "file than the environment.",
    )
    if not explains:
        return
    parser.add_argument(
        "--explain-config",
        action="store_true",
        help="Print what every setting comes to, where that came from and why; start nothing.",
    )


def settle_all(args: argparse.Namespace, *tables: Mapping[str, Setting]) -> Settled:
    """What flags, `--config` and the environment come to. Raises ConfigError."""
    known = {name: setting for table in tables for name, setting in table.items()}
    flags = {name: Sourced(value, "flag") for name, value in given(name_model(args), known.values()).items()}
    path = getattr(args, "config", None)
    file = from_file(path, known) if path is not None else {}
    return settle(known, flags, file, from_environment(tables))


def name_model(args: argparse.Namespace) -> argparse.Namespace:
    """Arguments with the positional MODEL as --model. Raises ConfigError when both are there and differ."""
    tag = getattr(args, "model_tag", None)
    if tag is None:
        return args
    stated = getattr(args, "model", tag)
    if stated != tag:
        raise ConfigError("--model", f"{stated} differs from the model {tag} named first; name one")
    return argparse.Namespace(**{**vars(args), "model": tag})


# Settings of commands that talk to a running server: their flags alone.
#
# The environment speaks about a server on this machine. Its key above all is not for the server that a flag names.


def settle_flags(args: argparse.Namespace, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Every setting's value. Raises ConfigError."""
    flags = {name: Sourced(value, "flag") for name, value in given(args, settings.values()).items()}
    settled = settle(settings, flags)
    for note in settled.notes:
        logger.warning("%s", note)
    return settled.values
