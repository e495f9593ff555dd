"""From what was said to what holds: flags over the file, the file over the environment, all over the defaults."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.common.config import env
from pagoda.common.config.merge import merged as merged
from pagoda.common.config.nearest import did_you_mean
from pagoda.common.config.table import Setting
from pagoda.common.errors import ConfigError


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
