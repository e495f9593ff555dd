"""Command-line flags: EngineArgs, the argument parser, and the rewriting of vLLM's spellings for argparse.

The parser only collects words; common/config/settings.py converts them, so that flags, YAML keys and environment
variables have the same values and errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Final, NoReturn, Self, TypeVar

from pagoda.common.config import env
from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.fields import did_you_mean, json_or_text
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
    merge_json,
    merge_layers,
)
from pagoda.common.config.without_setting import why_no_setting
from pagoda.common.errors import ConfigError
from pagoda.server.settings.help import Flag, Group, Page, describe, help_text, metavar, overview

logger = logging.getLogger(__name__)

_ALL_NAMES: Final = frozenset(name for settings in COMMAND_SETTINGS.values() for name in settings)

ArgsT = TypeVar("ArgsT")

_ONCE: Final = frozenset({"model"})
"""Settings that may not be given twice with different values; of other settings the last value counts."""

_DOTTED: Final = re.compile(r"(--?[A-Za-z][\w-]*)\.([^=\s]+?)(\+?)(?:=(.*))?", re.DOTALL)
"""--flag.key.key+=value"""

_LEVEL: Final = re.compile(r"-O=?(\d+)")
_COMPILATION: Final = "--compilation-config"
_COMPILATION_SPELLINGS: Final = (_COMPILATION, "-cc", "-O")


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
                if why := why_no_setting(name):
                    raise ConfigError(name, f"is not supported: {why}")
                raise TypeError(f"{type(self).__name__} has no setting {name!r}{did_you_mean(name, ENGINE_SETTINGS)}")
        keywords = from_keywords(ENGINE_SETTINGS, _as_mappings({**settings, "model": model}))
        self._apply(merge_layers(ENGINE_SETTINGS, keywords, from_environment([ENGINE_SETTINGS])))

    def _apply(self, resolved: ResolvedSettings) -> None:
        resolved = _with_overridden_length(resolved)
        groups = {name: build(group, resolved.values) for name, group in ENGINE_GROUPS.items()}
        self._config = EngineConfig(**groups)
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

    def create_engine_config(self, usage_context: object = None, headless: bool = False) -> EngineConfig:
        """Return the frozen configuration. Raise ConfigError naming the flag. Parameters of vLLM's without effect."""
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
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """Add every engine flag to a parser, in one help section per group, and --config.

        `async_args_only`: add none, because AsyncLLM has no flags of its own.
        """
        if async_args_only:
            return parser
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


def _as_mappings(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of EngineArgs with vLLM's short forms of two settings as mappings.

    `compilation_config`: an integer is the mode. `hf_overrides`: a function gets config.json and returns it changed.
    """
    settings = dict(keywords)
    level = settings.get("compilation_config")
    if isinstance(level, int):
        settings["compilation_config"] = {"mode": int(level)}
    if callable(change := settings.get("hf_overrides")):
        # The module reads the model, and needs this module.
        from pagoda.server.settings.hf_overrides import overrides_of

        del settings["hf_overrides"]
        settings["hf_overrides"] = overrides_of(change, EngineArgs(**settings).create_engine_config())
    return settings


def _with_overridden_length(resolved: ResolvedSettings) -> ResolvedSettings:
    """Return settings in which `max_model_len` of hf_overrides is that of the engine, unless it is set itself."""
    overrides = dict(resolved.values["hf_overrides"])
    if "max_model_len" not in overrides:
        return resolved
    length = overrides.pop("max_model_len")
    values = {**resolved.values, "hf_overrides": overrides}
    sources = dict(resolved.sources)
    if values["max_model_len"] is None:
        values["max_model_len"] = ENGINE_SETTINGS["max_model_len"].convert(length)
        sources["max_model_len"] = sources["hf_overrides"]
    return dataclasses.replace(resolved, values=values, sources=sources)


class AsyncEngineArgs(EngineArgs):
    """The settings of AsyncLLM; the same as EngineArgs."""


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE.yaml`."""
    parser.add_argument(
        "--config",
        action=Once,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file of settings; keys are flags without the leading dashes. Precedence: flags, file, environment, "
        "defaults.",
    )


def add_explain_config(parser: argparse.ArgumentParser) -> None:
    """Add `--explain-config`, which the commands of pagoda answer instead of running."""
    parser.add_argument(
        "--explain-config",
        action="store_true",
        help="Print the resolved value, source and reason of every setting, without starting the engine.",
    )


def resolve_settings(args: argparse.Namespace, *tables: Mapping[str, Setting]) -> ResolvedSettings:
    """Merge flags, the file of `--config` and the environment. Raise ConfigError."""
    settings_by_name = {name: setting for table in tables for name, setting in table.items()}
    flags = {name: Sourced(value, "flag") for name, value in given(name_model(args), settings_by_name.values()).items()}
    path = getattr(args, "config", None)
    file = from_file(path, settings_by_name) if path is not None else {}
    return merge_layers(settings_by_name, flags, file, from_environment(tables))


def name_model(args: argparse.Namespace) -> argparse.Namespace:
    """Return arguments with the positional MODEL as --model. Raise ConfigError if both are given and differ."""
    tag = getattr(args, "model_tag", None)
    if tag is None:
        return args
    model = getattr(args, "model", tag)
    if model != tag:
        raise ConfigError("--model", f"{model} differs from the positional MODEL {tag}; give one of them")
    with_model = copy(args)
    with_model.model = tag
    return with_model


def resolve_flags(args: argparse.Namespace, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the value of every setting of a client command, from flags only. Raise ConfigError.

    The environment is not read: its settings, above all the API key, are for a server on this machine.
    """
    flags = {name: Sourced(value, "flag") for name, value in given(args, settings.values()).items()}
    resolved = merge_layers(settings, flags)
    for note in resolved.notes:
        logger.warning("%s", note)
    return resolved.values


# The argument parser: it suggests the nearest flag for an unknown one.


class FlagParser(argparse.ArgumentParser):
    """Argument parser with underscores in flags, dotted JSON flags, `--help=WHAT`, and without abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs["add_help"] = False
        super().__init__(*args, **kwargs)
        self.settings: dict[str, Setting] = {}
        self.values: Mapping[str, tuple[str, ...]] = {}  # Values of settings without choices, for the help.
        self.add_argument(
            *("-h", "--help"),
            action=_Help,
            nargs="?",
            const="",
            default=argparse.SUPPRESS,
            metavar="WHAT",
            help="Show this help. WHAT: a group, a flag, a word to search for, listgroup (the groups) or all.",
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Normalise the words, then parse them. Raise ConfigError for an invalid value."""
        words = normalize(sys.argv[1:] if args is None else args, self._json_flags())
        return super().parse_known_args([self._as_added(word) for word in words], namespace)

    def _as_added(self, word: str) -> str:
        """Return a flag that a script has added with underscores in that spelling."""
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return word
        added = next((spelling for spelling in self._option_string_actions if _dashed(spelling) == flag), flag)
        return f"{added}{equals}{value}"

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse all arguments; exit with status 2 for an unknown one."""
        namespace_read, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.unknown(unknown)
        return namespace_read

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Exit with status 2 and one line that names the first unknown flag and its nearest match."""
        word = next((word for word in words if word.startswith("-")), words[0])
        flag = word.partition("=")[0]
        outer = flag.partition(".")[0]
        if outer in self._json_flags():
            self.error(f"argument {flag}: needs a key after the dot")
        if outer != flag and outer in self._option_string_actions:
            self.error(f"{outer} is not a JSON setting and has no key {flag[len(outer) + 1 :]}; use {outer} VALUE")
        if why := why_no_setting(outer):
            self.error(f"{outer} is not supported: {why}")
        kind = "flag" if flag.startswith("-") else "argument"
        self.error(f"unknown {kind} {flag}{did_you_mean(flag, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def format_help(self) -> str:
        """Return the text of --help."""
        return overview(self.page()) + "\n"

    def page(self) -> Page:
        """Return all flags by group."""
        groups = [
            Group(
                name=str(group.title),
                description=(group.description or "").partition("\n")[0],
                flags=tuple(map(self._flag, group._group_actions)),
            )
            for group in self._action_groups
        ]
        return Page(self.prog, self.description or "", tuple(group for group in groups if group.flags))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Drop argparse's abbreviation matches that allow_abbrev does not disable."""
        guesses: list[Any] = super()._get_option_tuples(option_string)
        return [guess for guess in guesses if option_string.startswith(guess[1])]  # The word -n4 is -n 4.

    def _flag(self, action: argparse.Action) -> Flag:
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        return Flag(
            spellings=tuple(action.option_strings),
            metavar="" if action.nargs == 0 else metavar,
            optional=action.nargs == "?",
            text=action.help or "",
            setting=self.settings.get(action.dest),
            values=self.values.get(action.dest, ()),
        )

    def _json_flags(self) -> dict[str, str]:
        """Return alias of a JSON flag -> its name."""
        return {flag: setting.flag for setting in self.settings.values() if setting.is_json for flag in setting.flags}


class ScriptParser(FlagParser):
    """The parser of scripts, vLLM's FlexibleArgumentParser.

    Settings have their types, those of --config FILE are among them, and those that were not given are attributes with
    their defaults, though not in `vars(args)`.
    """

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse all arguments. Raise ConfigError for an invalid value."""
        parsed = super().parse_args(args, namespace)
        if namespace is not None or not self.settings:
            return parsed
        path = vars(parsed).pop("config", None)
        file = {} if path is None else {name: sourced.value for name, sourced in from_file(path, self.settings).items()}
        return DefaultsNamespace(self.settings, {**file, **vars(parsed), **given(parsed, self.settings.values())})


class DefaultsNamespace(argparse.Namespace):
    """Arguments of a script: settings that were not given are attributes with their defaults."""

    __slots__ = ("_settings",)

    def __init__(self, settings: Mapping[str, Setting], values: Mapping[str, Any]) -> None:
        super().__init__(**values)
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._settings:
            raise AttributeError(f"there is no argument {name!r}{did_you_mean(name, vars(self))}")
        return self._settings[name].default


class _Help(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        print(help_text(parser.page(), values))
        parser.exit()


class _Json(argparse.Action):
    """A JSON object; repeated flags are merged, later ones take precedence."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setting: Setting = self.const
        previous = getattr(namespace, self.dest, None)
        value = setting.convert_text(values)
        setattr(namespace, self.dest, value if previous is None or value is None else merge_json(previous, value))


class _Extend(argparse.Action):
    """Append the values of repeated flags to one list."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])


class Once(argparse.Action):
    """A value that may be repeated, but not with a different value."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Raise ConfigError if a different value was given before."""
        before = getattr(namespace, self.dest, values)
        if before != values:
            raise ConfigError(self.option_strings[0], f"is given twice, as {before} and {values}; give it once")
        setattr(namespace, self.dest, values)


def add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting], skip: Iterable[str] = ()) -> None:
    """Add one flag per setting, in one section per group, except the names in `skip`."""
    skipped = set(skip)
    sections: dict[str, Any] = {}
    for setting in settings:
        if setting.name in skipped:
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
    if setting.is_switch and setting.name.startswith("no_"):
        keywords["action"] = "store_true"  # BooleanOptionalAction would take --no-x for the negation of --x.
    elif setting.is_switch:
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
    """Return the converted values of the flags on the command line. Raise ConfigError."""
    values = vars(args)
    return {setting.name: _converted(setting, values[setting.name]) for setting in settings if setting.name in values}


def _converted(setting: Setting, value: Any) -> Any:
    return setting.convert_text(value) if isinstance(value, str | list) else value


# Words before argparse reads them: underscores, -O3, dotted JSON flags.


def normalize(words: Sequence[str], json_flags: Mapping[str, str]) -> list[str]:
    """Rewrite the words of a command line for argparse: dashes, -O3 and dotted JSON flags. Raise ConfigError.

    `json_flags`: alias of a JSON flag -> its name.
    """
    return _merge_dotted(_optimization_levels([_dashed(word) for word in words]), json_flags)


def _dashed(word: str) -> str:
    """Replace underscores by dashes in the flag's name, not in keys after a dot."""
    if not word.startswith("--") or len(word) == 2:
        return word
    name = re.split(r"[=.]", word, maxsplit=1)[0]
    return name.replace("_", "-") + word[len(name) :]


def _optimization_levels(words: Sequence[str]) -> list[str]:
    """Rewrite -O3, -O=3 and -O 3 to --optimization-level, -O.key and -O JSON to --compilation-config."""
    result: list[str] = []
    remaining = iter(words)
    for word in remaining:
        level = _LEVEL.fullmatch(word)
        if level is not None:
            result += ["--optimization-level", level[1]]
        elif word in _COMPILATION_SPELLINGS:
            result += _level_or_settings(word, next(remaining, None))
        elif word == "-O=":
            result += _level_or_settings("-O", None)
        elif word.startswith(("-O.", "-O=")):
            result.append(_COMPILATION + word[2:])
        else:
            result.append(word)
    return result


def _level_or_settings(flag: str, value: str | None) -> list[str]:
    if value is None:
        raise ConfigError(flag, "needs a level from 0 to 3, or a JSON object")
    return ["--optimization-level" if value.isdecimal() else _COMPILATION, value]


def _merge_dotted(words: Sequence[str], json_flags: Mapping[str, str]) -> list[str]:
    """Merge dotted flags: --flag.a.b 1 --flag.c+ x,y is --flag={"a": {"b": 1}, "c": ["x", "y"]}.

    A value is parsed as JSON, else taken as text. Dotted flags override --flag JSON, in any order.
    """
    kept: list[str] = []
    merged: dict[str, dict[str, Any]] = {}
    remaining = iter(words)
    for word in remaining:
        match = _DOTTED.fullmatch(word)
        if match is None or match[1] not in json_flags:
            kept.append(word)
            continue
        value = match[4] if match[4] is not None else _next_value(word, remaining)
        _set_key(merged.setdefault(json_flags[match[1]], {}), match, value)
    return kept + [f"{flag}={json.dumps(settings)}" for flag, settings in merged.items()]


def _next_value(flag: str, remaining: Iterator[str]) -> str:
    value = next(remaining, None)
    if value is None or value.startswith("--"):
        raise ConfigError(flag, "needs a value")
    return value


def _set_key(target: dict[str, Any], match: re.Match[str], value: str) -> None:
    flag = f"{match[1]}.{match[2]}{match[3]}"
    *outer, key = match[2].split(".")
    if not all((*outer, key)):
        raise ConfigError(flag, "has an empty key between dots")
    for part in outer:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(flag, f"{part} is already set to a value that is not an object; drop one of them")
    if not match[3]:
        target[key] = json_or_text(value)
        return
    items = target.setdefault(key, [])
    if not isinstance(items, list):
        raise ConfigError(flag, f"{key} is already set to a value that is not a list; drop one of them")
    parsed = json_or_text(value)
    items.extend(parsed if isinstance(parsed, list) else map(json_or_text, value.split(",")))
