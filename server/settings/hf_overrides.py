"""A function as --hf-overrides: it gets the model's configuration and returns a changed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError
from pagoda.server.settings.resolve import read_hf_config


class EditableHfConfig(MutableMapping[str, Any]):
    """config.json with its keys as attributes, which can be set; nested objects are dictionaries."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all keys."""
        return dict(self._values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"the model's config.json has no key {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def overrides_of(change: Callable[[Any], Any], config: EngineConfig) -> dict[str, Any]:
    """Return the keys that a function changes in the model's configuration. Raise ConfigError if it fails."""
    before = read_hf_config(config)
    try:
        after = change(EditableHfConfig(before))
    except Exception as error:
        raise ConfigError("--hf-overrides", f"the function failed: {type(error).__name__}: {error}") from error
    if not isinstance(after, Mapping):
        raise ConfigError("--hf-overrides", f"the function returned {type(after).__name__}, not the configuration")
    return {name: value for name, value in after.items() if name not in before or before[name] != value}
