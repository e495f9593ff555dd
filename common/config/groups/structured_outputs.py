"""Answers held to a grammar, and the parts of an answer that are thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import did_you_mean, json_object, option
from pagoda.common.errors import ConfigError

_FLAG: Final = "--structured-outputs-config"
_BACKENDS: Final = ("auto", "guidance", "xgrammar")
_GONE: Final = ("outlines", "lm-format-enforcer")
_SWITCHES: Final = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "enable_in_reasoning",
    "disable_fallback",
)
_TEXTS: Final = ("reasoning_parser", "reasoning_parser_plugin")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Structured output and reasoning."""

    reasoning_parser: str = option("", "Name of the format in which the model thinks aloud.")
    reasoning_parser_plugin: str = option(
        "", "File or module with formats of thinking, as a dictionary REASONING_FORMATS."
    )
    structured_outputs_config: Mapping[str, Any] = option(
        {},
        "Settings of structured output as JSON: backend (auto and guidance: llguidance; xgrammar), "
        "disable_any_whitespace (JSON without white space), disable_additional_properties (only the schema's own "
        "properties), enable_in_reasoning (a grammar holds the thinking too). disable_fallback changes nothing: no "
        "second backend is ever tried.",
        parse=json_object,
    )

    def __post_init__(self) -> None:
        if self.reasoning_parser_plugin and not self.reasoning_parser:
            raise ConfigError("--reasoning-parser-plugin", "name the one of its formats to use with --reasoning-parser")
        stated, known = self.structured_outputs_config, ("backend", *_SWITCHES, *_TEXTS)
        for key, value in stated.items():
            if key not in known:
                raise ConfigError(_FLAG, f"{key} is unknown{did_you_mean(key, known)}; drop it")
            if key in _SWITCHES and not isinstance(value, bool):
                raise ConfigError(_FLAG, f"{key} must be true or false, not {value!r}")
            if key in _TEXTS and value:
                raise ConfigError(_FLAG, f"{key} is a flag of its own: use --{key.replace('_', '-')}")
        backend = stated.get("backend") or "auto"
        if backend in _GONE:
            raise ConfigError(_FLAG, f"backend {backend} is not supported; use guidance")
        if backend not in _BACKENDS:
            raise ConfigError(_FLAG, f"backend {backend!r} is unknown; use {', '.join(_BACKENDS)}")

    @property
    def engine(self) -> Literal["guidance", "xgrammar"]:
        """The library that compiles grammars."""
        return "xgrammar" if self.structured_outputs_config.get("backend") == "xgrammar" else "guidance"

    @property
    def is_engine_stated(self) -> bool:
        """Whether the configuration names the library, which must then be installed."""
        return (self.structured_outputs_config.get("backend") or "auto") != "auto"

    def is_on(self, switch: str) -> bool:
        """A switch of the JSON."""
        return bool(self.structured_outputs_config.get(switch, False))
