"""All settings: their declaration, their sources and how they are merged (flags > file > environment > defaults)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from pagoda.common.config import env
from pagoda.common.config.deprecated import DeprecatedConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.fields import Option, did_you_mean
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.config.without_setting import why_no_setting
from pagoda.common.errors import ConfigError

ConfigT = TypeVar("ConfigT")

_SWITCH_WORDS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_NULL_TEXTS: Final = ("", "None")
_KINDS: Final[dict[Any, str]] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_SECRETS: Final = frozenset({"api_key", "hf_token"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration field, which is a keyword, a flag, a YAML key and an environment variable."""

    config: type[Any]  # The dataclass of the field.
    field: str
    name: str  # The keyword; with dashes, the flag and the YAML key.
    hint: Any
    default: Any
    option: Option

    @property
    def group(self) -> str:
        """The name of the field's dataclass."""
        return self.config.__name__

    @property
    def flag(self) -> str:
        """The flag, such as `--max-num-seqs`."""
        return "--" + self.key

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag and its aliases."""
        return (self.flag, *self.option.aliases)

    @property
    def key(self) -> str:
        """The key in the file of `--config`."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "PAGODA_" + self.name.upper()

    @property
    def value_type(self) -> Any:
        """The type without None."""
        if get_origin(self.hint) not in (Union, UnionType):
            return self.hint
        types = [member for member in get_args(self.hint) if member is not NoneType]
        return types[0] if len(types) == 1 else Union[tuple(types)]  # noqa: UP007 (built at run time)

    @property
    def choices(self) -> tuple[str, ...] | None:
        """All allowed values, if they can be listed."""
        return self.option.choices or (get_args(self.value_type) if get_origin(self.value_type) is Literal else None)

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value: `--x` and `--no-x`."""
        return self.value_type is bool

    @property
    def is_list(self) -> bool:
        """True if the flag takes several values."""
        return get_origin(self.value_type) is tuple

    @property
    def is_json(self) -> bool:
        """True if the value is a JSON object, whose keys dotted flags can set."""
        return get_origin(self.value_type) is Mapping

    @property
    def is_secret(self) -> bool:
        """True if the value must not be printed or logged."""
        return self.name in _SECRETS

    @property
    def kind(self) -> str:
        """The type of the value for messages: `an integer`, `one of auto, float32`."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.is_json:
            return "a JSON object"
        if self.is_list:
            return "a list of " + {int: "integers", float: "numbers"}.get(get_args(self.value_type)[0], "strings")
        return _KINDS.get(self.value_type, "a string")

    def convert(self, value: Any) -> Any:
        """Convert the value of a Python keyword; None means the default. Raise ConfigError."""
        if value is None:
            return self.default
        value = _path_or_class_name(value)
        if self.is_list and isinstance(value, str) and self.option.parse is None:
            value = (value,)
        if get_origin(self.value_type) is Literal and not isinstance(value, str):
            value = str(value).removeprefix("torch.")  # This converts a torch.dtype without importing torch.
        return self._checked(value, value, strict=True)

    def convert_text(self, text: str | list[str]) -> Any:
        """Convert the text of a flag or of a YAML scalar. Raise ConfigError."""
        if self.hint is not self.value_type and (text in _NULL_TEXTS or text == ["None"]):
            return None
        if self.is_json and text in _NULL_TEXTS:
            return self.default
        value: Any = text
        if self.is_list and isinstance(text, str):
            value = [text]
        if self.is_switch and isinstance(text, str):
            value = _SWITCH_WORDS.get(text.lower(), text)
        if self.is_list and (parse := self.option.parse) is not None:
            value = [item for word in value for item in self._parsed(parse, word)]
        return self._checked(value, text, strict=False)

    def convert_variable(self, text: str) -> Any:
        """Convert the text of an environment variable; a list is separated by spaces or a JSON array.

        Raise ConfigError.
        """
        if not self.is_list:
            return self.convert_text(text)
        if not text.lstrip().startswith("["):
            return self.convert_text(text.split())
        try:
            return self.convert(tuple(json.loads(text)))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(self.flag, f"{_quoted(text)} is not a JSON array: {error}") from None

    def _checked(self, value: Any, original: Any, *, strict: bool) -> Any:
        if isinstance(value, str):
            if (reason := self.option.refused_values.get(value)) is not None:
                raise ConfigError(self.flag, f"{_quoted(value)} is not supported: {reason}")
            value = self.option.same_values.get(value, value)
        parse = self.option.parse
        if parse is not None and isinstance(value, str | int | float) and not isinstance(value, bool):
            value = self._parsed(parse, value)
        try:
            value = msgspec.convert(value, self.hint, strict=strict)
        except (ValueError, msgspec.ValidationError):
            raise self._type_error(original) from None
        if isinstance(value, float) and value != value:
            raise self._type_error(original)
        if self.option.choices and value is not None and value not in self.option.choices:
            raise self._type_error(original)
        try:
            msgspec.msgpack.encode(value)  # Messages to the engine process have this encoding.
        except (ValueError, OverflowError, RecursionError, TypeError):
            message = f"{_quoted(original)} cannot be encoded; use UTF-8 text and numbers of at most 64 bits"
            raise ConfigError(self.flag, message) from None
        return value

    def _type_error(self, value: Any) -> ConfigError:
        near = did_you_mean(value, map(str, self.choices)) if self.choices and isinstance(value, str) else ""
        return ConfigError(self.flag, f"{_quoted(value)} is not {self.kind}{near}")

    def _parsed(self, parse: Callable[[str], Any], value: Any) -> Any:
        try:
            return parse(str(value))
        except ValueError as error:
            raise ConfigError(self.flag, f"{_quoted(value)}: {error}") from None

    def note(self, value: Any) -> str | None:
        """Return the warning to log for a converted value, or None. Raise ConfigError if the value is refused."""
        option = self.option
        if option.deprecated is not None:
            effect = f"; it has no effect: {option.reason}" if option.reason and not option.stands_for else ""
            return f"{self.flag} is deprecated; use {option.deprecated}{effect}"
        if option.status == "implemented" or value == self.default:
            return None
        if option.status == "no effect":
            return f"{self.flag} has no effect: {option.reason}"
        if any(value == accepted and type(value) is type(accepted) for accepted in option.accepts):
            return None
        raise ConfigError(self.flag, f"{_quoted(value)} is not supported: {option.reason}")

    def shown(self, value: Any) -> str:
        """Return the value as written in the file of `--config`; `unset` if empty, `***` if secret."""
        if value is None or value in ((), {}, ""):
            return "unset"
        if self.is_secret:
            return "***"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return " ".join(map(str, value))
        return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _path_or_class_name(value: Any) -> Any:
    """Replace a path by its text and a class by its qualified name, also inside a list."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return tuple(map(_path_or_class_name, value)) if isinstance(value, list | tuple) else value


def _quoted(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " ".join(value) if all(isinstance(item, str) for item in value) else list(value)
    return repr(value) if isinstance(value, str) else str(value)


def settings_of(config: type[Any]) -> Iterator[Setting]:
    """Yield the settings of a configuration dataclass."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        option = _with_status(field.metadata["option"])
        yield Setting(
            config=config,
            field=field.name,
            name=_name(field),
            hint=hints[field.name],
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            option=option,
        )


def _name(field: dataclasses.Field[Any]) -> str:
    return (field.metadata["option"].flag or field.name).replace("-", "_")


def _with_status(option: Option) -> Option:
    """Return the option, with the status of the setting that it stands for."""
    if not option.stands_for:
        return option
    fields = (field for group in ENGINE_GROUPS.values() for field in dataclasses.fields(group))
    target: Option = next(field for field in fields if field.name == option.stands_for).metadata["option"]
    return dataclasses.replace(option, status=target.status, reason=target.reason)


def table(*configs: type[Any]) -> dict[str, Setting]:
    """Return the settings of several dataclasses by name."""
    return {setting.name: setting for config in configs for setting in settings_of(config)}


ENGINE_GROUPS: Final[dict[str, type[Any]]] = get_type_hints(EngineConfig)
"""Attribute of EngineConfig -> its dataclass."""

ENGINE_SETTINGS: Final = table(*ENGINE_GROUPS.values(), DeprecatedConfig)
SERVER_SETTINGS: Final = table(ServerConfig)

DOCUMENTED_GROUPS: Final = (*ENGINE_GROUPS.values(), DeprecatedConfig, ServerConfig)
"""Every dataclass of settings, in the order of the help and the documentation."""


def build(config: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Construct a configuration dataclass from values by setting name; a field without a value has its default."""
    fields = {field.name: values[_name(field)] for field in dataclasses.fields(config) if _name(field) in values}  # type: ignore[arg-type]
    return config(**fields)


def merge_json(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two JSON objects recursively; `upper` takes precedence."""
    result = dict(lower)
    for key, value in upper.items():
        below = result.get(key)
        result[key] = merge_json(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and its source: `flag`, `keyword`, `file x.yaml` or `environment NAME`."""

    value: Any
    source: str
    alias: str = ""  # The deprecated flag or variable that mapped to this setting; empty if set by its own name.


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Merged settings."""

    values: dict[str, Any]  # Values of all settings, defaults included.
    sources: dict[str, str]  # Sources of the settings that are set.
    notes: tuple[str, ...]  # Warnings to log.


def merge_layers(table: Mapping[str, Setting], *layers: Mapping[str, Sourced]) -> ResolvedSettings:
    """Merge layers of settings, in order of precedence; JSON settings are merged key by key.

    A deprecated setting is replaced by those that it maps to, within its layer. Raise ConfigError if a value is refused
    or if a layer sets both differently.
    """
    merged: dict[str, Sourced] = {}
    for layer in reversed(layers):
        for name, sourced in _map_deprecated(table, layer).items():
            merged[name] = _merge(sourced, merged.get(name))
    values = {name: merged[name].value if name in merged else setting.default for name, setting in table.items()}
    return ResolvedSettings(values, {name: sourced.source for name, sourced in merged.items()}, _notes(table, merged))


def _map_deprecated(table: Mapping[str, Setting], layer: Mapping[str, Sourced]) -> dict[str, Sourced]:
    mapped = dict(layer)
    for name, old in layer.items():
        maps_to = table[name].option.maps_to
        flag = table[name].flag
        if maps_to is None or old.value == table[name].default:
            continue
        for replacement, value in maps_to(old.value).items():
            new = mapped.get(replacement)
            if new is not None and not _agree(new.value, value):
                raise ConfigError(flag, f"contradicts {table[replacement].flag}; drop {flag}")
            mapped_value = Sourced(value, f"{old.source} {flag}", flag)
            mapped[replacement] = mapped_value if new is None else _merge(new, mapped_value)
    return mapped


def _agree(one: Any, other: Any) -> bool:
    """True if two values are equal; JSON objects are compared in their common keys only."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_agree(one[key], other[key]) for key in one.keys() & other.keys())
    return bool(one == other)


def _notes(table: Mapping[str, Setting], layer: Mapping[str, Sourced]) -> tuple[str, ...]:
    """Return at most one warning per flag given. Raise ConfigError for a refused value."""
    notes: dict[str, list[str]] = {}
    for name, sourced in layer.items():
        try:
            note = table[name].note(sourced.value)
        except ConfigError as error:
            raise ConfigError(sourced.alias, f"sets {error}") if sourced.alias else error from None
        if note is not None:
            notes.setdefault(sourced.alias or table[name].flag, []).append(note)
    return tuple("; ".join(lines) for lines in notes.values())


def _merge(upper: Sourced, lower: Sourced | None) -> Sourced:
    """Return the value of the upper layer; JSON objects are merged with those of the lower one, if it has any."""
    if lower is None:
        return upper
    if not (isinstance(upper.value, Mapping) and isinstance(lower.value, Mapping)):
        return upper
    source = upper.source if upper.source == lower.source else f"{upper.source}, {lower.source}"
    return Sourced(merge_json(lower.value, upper.value), source, upper.alias)


def from_keywords(table: Mapping[str, Setting], keywords: Mapping[str, Any]) -> dict[str, Sourced]:
    """Return the layer of Python keywords, without None and without deprecated settings at their default.

    Raise ConfigError.
    """
    values = {name: table[name].convert(value) for name, value in keywords.items() if value is not None}
    return {
        name: Sourced(value, "keyword")
        for name, value in values.items()
        if table[name].option.deprecated is None or value != table[name].default
    }


def from_environment(
    tables: Iterable[Mapping[str, Setting]], environ: Mapping[str, str] | None = None
) -> dict[str, Sourced]:
    """Return the layer of environment variables: PAGODA_<SETTING>, and variables of env.VARIABLES that map to settings.

    Raise ConfigError.
    """
    source = os.environ if environ is None else environ
    layer: dict[str, Sourced] = {}
    settings_by_name = {name: setting for table in tables for name, setting in table.items()}
    for variable in env.VARIABLES:
        for name, value in variable.settings(source).items():
            if name in settings_by_name:
                layer[name] = _from_variable(settings_by_name[name], variable.spelling(source), value)
    for name, setting in settings_by_name.items():
        text = source.get(setting.variable)
        if text and not env.is_service_link(setting.variable, text):
            layer[name] = _from_variable(setting, setting.variable, text)
    return layer


def _from_variable(setting: Setting, variable: str, value: Any) -> Sourced:
    try:
        converted = setting.convert_variable(value) if isinstance(value, str) else setting.convert(value)
    except ConfigError as error:
        raise ConfigError(variable, str(error)) from None
    return Sourced(converted, f"environment {variable}", "" if variable == setting.variable else variable)


def from_file(path: str, table: Mapping[str, Setting]) -> dict[str, Sourced]:
    """Return the layer of a YAML file; keys are flags without leading dashes, null is ignored. Raise ConfigError."""
    layer: dict[str, Sourced] = {}
    for key, entry in _read_yaml(path).items():
        name, value = _entry(path, str(key), entry, table)
        if value is None:
            continue
        sourced = Sourced(_from_yaml(path, table[name], value), f"file {path}")
        if name in layer and not table[name].is_json:
            raise ConfigError("--config", f"{path}: duplicate key {table[name].key}; drop one")
        layer[name] = _merge(sourced, layer.get(name))
    return layer


def _read_yaml(path: str) -> dict[Any, Any]:
    import yaml

    if not path:
        raise ConfigError("--config", "the file name is empty; use --config FILE.yaml")
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError("--config", f"{path}: invalid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(root, yaml.MappingNode):
        message = f"{path}: must be a mapping, such as `max-model-len: 4096`, not a {type(content).__name__}"
        raise ConfigError("--config", message)
    keys = [key.value for key, _ in root.value]
    duplicate = next((key for key in keys if keys.count(key) > 1), None)
    if duplicate is not None:
        raise ConfigError("--config", f"{path}: duplicate key {duplicate}; drop one")
    return content


def _entry(path: str, key: str, value: Any, table: Mapping[str, Setting]) -> tuple[str, Any]:
    """Return the setting's name and value of a YAML entry: `no-x: true` is `x: false`, `x.y: 1` is `x: {y: 1}`."""
    outer, *inner = key.split(".")
    name = outer.replace("-", "_")
    if name == "model_tag":
        name = "model"
    positive = table.get(name.removeprefix("no_"))
    if name not in table and positive is not None and positive.is_switch and isinstance(value, bool):
        return positive.name, not value
    if name not in table:
        if why := why_no_setting(name):
            raise ConfigError("--config", f"{path}: {key} is not supported: {why}")
        near = did_you_mean(outer.replace("_", "-"), (setting.key for setting in table.values()))
        raise ConfigError("--config", f"{path}: unknown key {key}{near}")
    if inner and not table[name].is_json:
        raise ConfigError("--config", f"{path}: {key}: {table[name].flag} is {table[name].kind} and has no keys")
    for part in reversed(inner):
        value = {part: value}
    return name, value


def _from_yaml(path: str, setting: Setting, value: Any) -> Any:
    try:
        if isinstance(value, str):
            return setting.convert_text(value)
        if setting.is_list and isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return setting.convert_text(value)
        return setting.convert(value)
    except ConfigError as error:
        quotes = "; put it in quotes" if setting.kind in ("a string", "a list of strings") else ""
        raise ConfigError("--config", f"{path}: {error}{quotes}") from None
