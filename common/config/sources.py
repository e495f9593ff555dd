"""From what was said to what holds: flags over the file, the file over the environment, all over the defaults."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.common.config import env
from pagoda.common.config.table import Setting
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and who said it: `flag`, `keyword`, `file x.yaml`, `environment NAME`."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settled:
    """Every setting's value, the source of those that were said, and one line for each that the user should hear."""

    values: dict[str, Any]
    sources: dict[str, str]
    notes: tuple[str, ...]


def settle(table: Mapping[str, Setting], *layers: Mapping[str, Sourced]) -> Settled:
    """Merge layers, the strongest first. JSON settings are merged key by key. Raises ConfigError.

    A deprecated setting becomes what replaced it, unless that was said as well.
    """
    said: dict[str, Sourced] = {}
    for layer in reversed(layers):
        for name, sourced in layer.items():
            said[name] = _over(sourced, said.get(name))
    notes: list[str] = []
    for name in [name for name in said if table[name].option.becomes is not None]:
        old = said[name]
        for replaced, value in (table[name].option.becomes or dict)(old.value).items():
            new = said.get(replaced)
            if new is None or isinstance(value, Mapping):
                said[replaced] = _over(new, Sourced(value, f"{old.source} {table[name].flag}"))
    for name, sourced in said.items():
        note = table[name].note(sourced.value)
        if note is not None:
            notes.append(note)
    values = {name: said[name].value if name in said else setting.default for name, setting in table.items()}
    return Settled(values, {name: sourced.source for name, sourced in said.items()}, tuple(notes))


def _over(upper: Sourced | None, lower: Sourced | None) -> Sourced:
    """What holds of two layers; JSON objects are merged."""
    if upper is None or lower is None:
        found = upper or lower
        assert found is not None
        return found
    if isinstance(upper.value, Mapping) and isinstance(lower.value, Mapping):
        return Sourced(merged(lower.value, upper.value), f"{upper.source}, {lower.source}")
    return upper


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper` over `lower`, objects within objects merged too."""
    found = dict(lower)
    for key, value in upper.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found


def from_keywords(table: Mapping[str, Setting], keywords: Mapping[str, Any]) -> dict[str, Sourced]:
    """Python keywords; None says nothing. Raises ConfigError."""
    return {
        name: Sourced(table[name].convert(value), "keyword") for name, value in keywords.items() if value is not None
    }


def from_environment(
    tables: Iterable[Mapping[str, Setting]], environ: Mapping[str, str] | None = None
) -> dict[str, Sourced]:
    """What variables say about settings: PAGODA_<SETTING>, and older names where they mean one. Raises ConfigError."""
    source = os.environ if environ is None else environ
    found: dict[str, Sourced] = {}
    known = {name: setting for table in tables for name, setting in table.items()}
    for variable in env.VARIABLES:
        if variable.becomes is None or (text := variable.read(source)) is None:
            continue
        for name, value in variable.settings(text).items():
            if name in known:
                found[name] = Sourced(known[name].convert(value), f"environment {variable.spelling(source)}")
    for key, setting in known.items():
        if source.get(setting.variable):
            found[key] = Sourced(setting.convert_text(source[setting.variable]), f"environment {setting.variable}")
    return found


def from_file(path: str, table: Mapping[str, Setting]) -> dict[str, Sourced]:
    """What a YAML file says; keys are flags without dashes in front. Raises ConfigError."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError("--config", f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError("--config", f"{path}: a mapping of settings is needed, not a {type(found).__name__}")
    return {
        _key(path, key, table): Sourced(_from_yaml(path, key, value, table), f"file {path}")
        for key, value in found.items()
        if value is not None
    }


def _key(path: str, key: Any, table: Mapping[str, Setting]) -> str:
    name = str(key).replace("-", "_")
    if name == "model_tag":
        name = "model"
    if name not in table:
        near = difflib.get_close_matches(name, list(table), n=1)
        hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
        raise ConfigError("--config", f"{path}: unknown key {key}{hint}")
    return name


def _from_yaml(path: str, key: Any, value: Any, table: Mapping[str, Setting]) -> Any:
    setting = table[_key(path, key, table)]
    try:
        if isinstance(value, list) and setting.is_list:
            return setting.convert_text([str(each) for each in value])
        if isinstance(value, str):
            return setting.convert_text(value)
        return setting.convert(value)
    except ConfigError as error:
        raise ConfigError("--config", f"{path}: {error}") from None
