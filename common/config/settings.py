"""From what was said to what holds: flags over the file, the file over the environment, all over the defaults."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pagoda.common.config import env
from pagoda.common.config.deprecated import DeprecatedConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.fields import Option, did_you_mean
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError

# The one table of settings: a row per configuration field, which is a keyword, a flag, a YAML key and a variable.
#
# Everything that lists settings reads it: the parsers, the help, `--explain-config`, the documentation, the tests.

_SWITCH_WORDS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_NOTHING: Final = ("", "None")
_KINDS: Final[dict[Any, str]] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SECRETS: Final = frozenset({"api_key", "hf_token"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration field. `config`: the class that holds it; `name`: its keyword and YAML key."""

    config: type[Any]
    field: str
    name: str
    hint: Any
    default: Any
    option: Option

    @property
    def group(self) -> str:
        """The name of the class that holds it."""
        return self.config.__name__

    @property
    def flag(self) -> str:
        """`--its-flag`."""
        return "--" + self.key

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling, the full one first."""
        return (self.flag, *self.option.aliases)

    @property
    def key(self) -> str:
        """The key in the file of `--config`."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "PAGODA_" + self.name.upper()

    @property
    def plain(self) -> Any:
        """The type without None."""
        if get_origin(self.hint) not in (Union, UnionType):
            return self.hint
        rest = [each for each in get_args(self.hint) if each is not NoneType]
        return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007 (built at run time)

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The values there are, when they can be listed."""
        return self.option.choices or (get_args(self.plain) if get_origin(self.plain) is Literal else None)

    @property
    def is_switch(self) -> bool:
        """True when the flag takes no word: `--x` and `--no-x`."""
        return self.plain is bool

    @property
    def is_list(self) -> bool:
        """True when the flag takes several words."""
        return get_origin(self.plain) is tuple

    @property
    def is_json(self) -> bool:
        """True when the value is a JSON object, which dotted flags may write piecewise."""
        return get_origin(self.plain) is Mapping

    @property
    def is_secret(self) -> bool:
        """True when the value is shown to nobody."""
        return self.name in _SECRETS

    @property
    def kind(self) -> str:
        """What its value is, in words: `a whole number`, `one of auto, float32`."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.is_json:
            return "a JSON object"
        if self.is_list:
            return "a list of " + {int: "whole numbers", float: "numbers"}.get(get_args(self.plain)[0], "texts")
        return _KINDS.get(self.plain, "text")

    def convert(self, value: Any) -> Any:
        """A keyword's value as the configuration wants it; None means the default. Raises ConfigError."""
        if value is None:
            return self.default
        value = _named(value)
        if self.is_list and isinstance(value, str) and self.option.parse is None:
            value = (value,)
        if get_origin(self.plain) is Literal and not isinstance(value, str):
            value = str(value).removeprefix("torch.")  # a torch.dtype, without importing torch
        return self._checked(value, value, strict=True)

    def convert_text(self, text: str | list[str]) -> Any:
        """What a flag or a YAML scalar says, in words. Raises ConfigError."""
        if self.hint is not self.plain and (text in _NOTHING or text == ["None"]):
            return None
        if self.is_json and text in _NOTHING:
            return self.default
        value: Any = text
        if self.is_list and isinstance(text, str):
            value = [text]
        if self.is_switch and isinstance(text, str):
            value = _SWITCH_WORDS.get(text.lower(), text)
        if self.is_list and self.option.parse is not None:
            value = [each for word in value for each in self._parsed(word)]
        return self._checked(value, text, strict=False)

    def convert_variable(self, text: str) -> Any:
        """What a variable says; a list is words with spaces between, or a JSON array. Raises ConfigError."""
        if not self.is_list:
            return self.convert_text(text)
        if not text.lstrip().startswith("["):
            return self.convert_text(text.split())
        try:
            return self.convert(tuple(json.loads(text)))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(self.flag, f"{_said(text)} is no JSON array: {error}") from None

    def _checked(self, value: Any, said: Any, *, strict: bool) -> Any:
        if self.option.parse is not None and isinstance(value, str | int | float) and not isinstance(value, bool):
            value = self._parsed(value)
        try:
            value = msgspec.convert(value, self.hint, strict=strict)
        except (ValueError, msgspec.ValidationError):
            raise self._no(said) from None
        if isinstance(value, float) and value != value:
            raise self._no(said)
        if self.option.choices and value is not None and value not in self.option.choices:
            raise self._no(said)
        try:
            msgspec.msgpack.encode(value)  # as on the way to the engine's process
        except (ValueError, OverflowError, RecursionError, TypeError):
            message = f"{_said(said)} holds what cannot be passed on; use UTF-8 text and numbers of 64 bits"
            raise ConfigError(self.flag, message) from None
        return value

    def _no(self, said: Any) -> ConfigError:
        near = did_you_mean(said, map(str, self.choices)) if self.choices and isinstance(said, str) else ""
        return ConfigError(self.flag, f"{_said(said)} is not {self.kind}{near}")

    def _parsed(self, value: Any) -> Any:
        assert self.option.parse is not None
        try:
            return self.option.parse(str(value))
        except ValueError as error:
            raise ConfigError(self.flag, f"{_said(value)}: {error}") from None

    def note(self, value: Any) -> str | None:
        """What the user should hear about a converted value, or None. Raises ConfigError when it is refused."""
        option = self.option
        if option.deprecated is not None:
            return f"{self.flag} is deprecated; use {option.deprecated}"
        if option.status == "implemented" or value == self.default:
            return None
        if option.status == "no effect":
            return f"{self.flag} has no effect: {option.why}"
        if any(value == each and type(value) is type(each) for each in option.accepts):
            return None
        raise ConfigError(self.flag, f"{_said(value)} is not supported: {option.why}")

    def shown(self, value: Any) -> str:
        """A value as one would write it in the file of `--config`; a secret as `***`."""
        if value is None or value in ((), {}, ""):
            return "nothing"
        if self.is_secret:
            return "***"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return " ".join(map(str, value))
        return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _named(value: Any) -> Any:
    """Python values as text: a path, and a class as its qualified name; also inside a list."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return tuple(map(_named, value)) if isinstance(value, list | tuple) else value


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " ".join(value) if all(isinstance(each, str) for each in value) else list(value)
    return repr(value) if isinstance(value, str) else str(value)


def settings_of(config: type[Any]) -> Iterator[Setting]:
    """A configuration class's settings."""
    hints = get_type_hints(config)
    for each in dataclasses.fields(config):
        option: Option = each.metadata["option"]
        yield Setting(
            config=config,
            field=each.name,
            name=(option.flag or each.name).replace("-", "_"),
            hint=hints[each.name],
            default=each.default if each.default_factory is dataclasses.MISSING else each.default_factory(),
            option=option,
        )


def table(*configs: type[Any]) -> dict[str, Setting]:
    """Settings by name."""
    return {setting.name: setting for config in configs for setting in settings_of(config)}


ENGINE_GROUPS: Final[dict[str, type[Any]]] = get_type_hints(EngineConfig)
"""EngineConfig's attribute -> its class."""

ENGINE_SETTINGS: Final = table(*ENGINE_GROUPS.values(), DeprecatedConfig)
SERVER_SETTINGS: Final = table(ServerConfig)

DOCUMENTED_GROUPS: Final = (*ENGINE_GROUPS.values(), DeprecatedConfig, ServerConfig)
"""Every class with flags of its own, in the order that help and documentation show."""


def build(config: type[Any], values: Mapping[str, Any], settings: Iterable[Setting]) -> Any:
    """A configuration class from values by setting name."""
    return config(**{s.field: values[s.name] for s in settings if s.config is config and s.name in values})


# JSON objects laid over each other.


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper` over `lower`, objects within objects merged too."""
    found = dict(lower)
    for key, value in upper.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and who said it: `flag`, `keyword`, `file x.yaml`, `environment NAME`.

    `said_as`: the older flag or variable that stood for this setting; empty when the setting was named itself.
    """

    value: Any
    source: str
    said_as: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """Every setting's value, the source of those that were said, and one line for each that the user should hear."""

    values: dict[str, Any]
    sources: dict[str, str]
    notes: tuple[str, ...]


def settle(table: Mapping[str, Setting], *layers: Mapping[str, Sourced]) -> Settled:
    """Merge layers, the strongest first. JSON settings are merged key by key. Raises ConfigError.

    A setting that stands for others becomes those, in its own layer; to say both, differently, is an error.
    """
    said: dict[str, Sourced] = {}
    for layer in reversed(layers):
        for name, sourced in _translated(table, layer).items():
            said[name] = _over(sourced, said.get(name))
    values = {name: said[name].value if name in said else setting.default for name, setting in table.items()}
    return Settled(values, {name: sourced.source for name, sourced in said.items()}, _notes(table, said))


def _translated(table: Mapping[str, Setting], layer: Mapping[str, Sourced]) -> dict[str, Sourced]:
    found = dict(layer)
    for name, old in layer.items():
        becomes, flag = table[name].option.becomes, table[name].flag
        if becomes is None or old.value == table[name].default:
            continue
        for replaced, value in becomes(old.value).items():
            new = found.get(replaced)
            if new is not None and not _agree(new.value, value):
                raise ConfigError(flag, f"contradicts {table[replaced].flag}; drop {flag}")
            found[replaced] = _over(new, Sourced(value, f"{old.source} {flag}", flag))
    return found


def _agree(one: Any, other: Any) -> bool:
    """Whether two values can both hold; JSON objects, when the keys that both have can."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_agree(one[key], other[key]) for key in one.keys() & other.keys())
    return bool(one == other)


def _notes(table: Mapping[str, Setting], said: Mapping[str, Sourced]) -> tuple[str, ...]:
    """One line for each flag that was said and calls for one. Raises ConfigError for a refused value."""
    notes: dict[str, list[str]] = {}
    for name, sourced in said.items():
        try:
            note = table[name].note(sourced.value)
        except ConfigError as error:
            raise ConfigError(sourced.said_as, f"stands for {error}") if sourced.said_as else error from None
        if note is not None:
            notes.setdefault(sourced.said_as or table[name].flag, []).append(note)
    return tuple("; ".join(lines) for lines in notes.values())


def _over(upper: Sourced | None, lower: Sourced | None) -> Sourced:
    """What holds of two layers; JSON objects are merged."""
    if upper is None or lower is None:
        found = upper or lower
        assert found is not None
        return found
    if not (isinstance(upper.value, Mapping) and isinstance(lower.value, Mapping)):
        return upper
    source = upper.source if upper.source == lower.source else f"{upper.source}, {lower.source}"
    return Sourced(merged(lower.value, upper.value), source, upper.said_as)


def from_keywords(table: Mapping[str, Setting], keywords: Mapping[str, Any]) -> dict[str, Sourced]:
    """Python keywords; None says nothing, nor does a deprecated one at its default. Raises ConfigError."""
    found = {name: table[name].convert(value) for name, value in keywords.items() if value is not None}
    return {
        name: Sourced(value, "keyword")
        for name, value in found.items()
        if table[name].option.deprecated is None or value != table[name].default
    }


def from_environment(
    tables: Iterable[Mapping[str, Setting]], environ: Mapping[str, str] | None = None
) -> dict[str, Sourced]:
    """What variables say about settings: PAGODA_<SETTING>, and older names where they mean one. Raises ConfigError."""
    source = os.environ if environ is None else environ
    found: dict[str, Sourced] = {}
    known = {name: setting for table in tables for name, setting in table.items()}
    for variable in env.VARIABLES:
        for name, value in variable.settings(source).items():
            if name in known:
                found[name] = _from_variable(known[name], variable.spelling(source), value)
    for name, setting in known.items():
        text = source.get(setting.variable)
        if text and not env.is_service_link(setting.variable, text):
            found[name] = _from_variable(setting, setting.variable, text)
    return found


def _from_variable(setting: Setting, variable: str, said: Any) -> Sourced:
    try:
        value = setting.convert_variable(said) if isinstance(said, str) else setting.convert(said)
    except ConfigError as error:
        raise ConfigError(variable, str(error)) from None
    return Sourced(value, f"environment {variable}", "" if variable == setting.variable else variable)


def from_file(path: str, table: Mapping[str, Setting]) -> dict[str, Sourced]:
    """What a YAML file says; keys are flags without dashes in front, and null says nothing. Raises ConfigError."""
    found: dict[str, Sourced] = {}
    for key, said in _read_yaml(path).items():
        name, value = _entry(path, str(key), said, table)
        if value is None:
            continue
        sourced = Sourced(_from_yaml(path, table[name], value), f"file {path}")
        if name in found and not table[name].is_json:
            raise ConfigError("--config", f"{path}: {table[name].key} is there twice; drop one")
        found[name] = _over(sourced, found.get(name))
    return found


def _read_yaml(path: str) -> dict[Any, Any]:
    import yaml

    if not path:
        raise ConfigError("--config", "names no file; write --config FILE.yaml")
    try:
        text = Path(path).read_text(encoding="utf-8")
        root, found = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError("--config", f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not isinstance(root, yaml.MappingNode):
        message = f"{path}: a mapping is needed, such as `max-model-len: 4096`, not a {type(found).__name__}"
        raise ConfigError("--config", message)
    keys = [key.value for key, _ in root.value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError("--config", f"{path}: {twice} is there twice; drop one")
    return found


def _entry(path: str, key: str, value: Any, table: Mapping[str, Setting]) -> tuple[str, Any]:
    """A key and its value as a setting's name and value: `no-x: true` is `x: false`, `x.y: 1` is `x: {y: 1}`."""
    outer, *inner = key.split(".")
    name = outer.replace("-", "_")
    if name == "model_tag":
        name = "model"
    positive = table.get(name.removeprefix("no_"))
    if name not in table and positive is not None and positive.is_switch and isinstance(value, bool):
        return positive.name, not value
    if name not in table:
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
        if setting.is_list and isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            return setting.convert_text(value)
        return setting.convert(value)
    except ConfigError as error:
        quotes = "; put it in quotes" if setting.kind in ("text", "a list of texts") else ""
        raise ConfigError("--config", f"{path}: {error}{quotes}") from None
