"""Structured output and reasoning settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import did_you_mean, json_object, option
from pagoda.common.errors import ConfigError

_FLAG: Final = "--structured-outputs-config"
_BACKENDS: Final = ("auto", "guidance", "xgrammar")
_UNSUPPORTED: Final = ("outlines", "lm-format-enforcer")
_SWITCHES: Final = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "enable_in_reasoning",
    "disable_fallback",
)
_REASONING_FLAG: Final = "--reasoning-config"
_REASONING: Final = ("reasoning_parser", "reasoning_start_str", "reasoning_end_str")
_TEXTS: Final = ("reasoning_parser", "reasoning_parser_plugin")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Structured output and reasoning parsers."""

    reasoning_parser: str = option(
        "",
        "Reasoning parser: the model's reasoning (chain-of-thought) output format. auto, the default of `serve`: found "
        "from the chat template. none: reasoning stays in the text.",
    )
    reasoning_parser_plugin: str = option(
        "", "File or module that defines reasoning parsers in a dictionary REASONING_FORMATS."
    )
    reasoning_config: Mapping[str, Any] = option(
        {},
        "Reasoning settings as JSON. reasoning_parser: as --reasoning-parser. reasoning_start_str: text that starts "
        "the reasoning. reasoning_end_str: text that is inserted when thinking_token_budget is spent, such as a "
        "sentence that leads to the answer. The strings default to the parser's.",
        parse=json_object,
    )
    structured_outputs_config: Mapping[str, Any] = option(
        {},
        "Structured output settings as JSON. backend: auto or guidance (llguidance), or xgrammar. "
        "disable_any_whitespace: generate JSON without white space. disable_additional_properties: generate only "
        "properties that the schema lists; by default this is so unless the schema can add properties elsewhere. "
        "enable_in_reasoning: apply the grammar to the reasoning too. disable_fallback has no effect: there is no "
        "fallback backend.",
        parse=json_object,
    )

    def __post_init__(self) -> None:
        self._check_reasoning()
        if self.reasoning_parser_plugin and self.reasoning_parser in ("", "auto", "none"):
            raise ConfigError("--reasoning-parser-plugin", "needs --reasoning-parser; name one of the plugin's formats")
        settings = self.structured_outputs_config
        keys = ("backend", *_SWITCHES, *_TEXTS)
        for key, value in settings.items():
            if key not in keys:
                raise ConfigError(_FLAG, f"{key} is unknown{did_you_mean(key, keys)}; drop it")
            if key in _SWITCHES and not isinstance(value, bool):
                raise ConfigError(_FLAG, f"{key} must be true or false, not {value!r}")
            if key in _TEXTS and value:
                raise ConfigError(_FLAG, f"{key} is a separate flag; use --{key.replace('_', '-')}")
        backend = settings.get("backend") or "auto"
        if backend in _UNSUPPORTED:
            raise ConfigError(_FLAG, f"backend {backend} is not supported; use guidance")
        if backend not in _BACKENDS:
            raise ConfigError(_FLAG, f"backend {backend!r} is unknown; use {', '.join(_BACKENDS)}")

    def _check_reasoning(self) -> None:
        for key, value in self.reasoning_config.items():
            if key not in _REASONING:
                raise ConfigError(_REASONING_FLAG, f"{key} is unknown{did_you_mean(key, _REASONING)}; drop it")
            if not isinstance(value, str):
                raise ConfigError(_REASONING_FLAG, f"{key} must be a string, not {value!r}")
        parser = self.reasoning_config.get("reasoning_parser")
        if parser and self.reasoning_parser and parser != self.reasoning_parser:
            raise ConfigError(
                _REASONING_FLAG, f"reasoning_parser {parser} differs from --reasoning-parser {self.reasoning_parser}"
            )
        if parser:
            object.__setattr__(self, "reasoning_parser", parser)

    @property
    def reasoning_start(self) -> tuple[str, ...]:
        """The configured text that starts the reasoning, if any."""
        return tuple(filter(None, [self.reasoning_config.get("reasoning_start_str")]))

    @property
    def reasoning_end(self) -> tuple[str, ...]:
        """The configured text that ends the reasoning when its budget is spent, if any."""
        return tuple(filter(None, [self.reasoning_config.get("reasoning_end_str")]))

    @property
    def engine(self) -> Literal["guidance", "xgrammar"]:
        """The grammar library."""
        return "xgrammar" if self.structured_outputs_config.get("backend") == "xgrammar" else "guidance"

    @property
    def is_engine_explicit(self) -> bool:
        """True if the configuration names the grammar library, which must then be installed."""
        return (self.structured_outputs_config.get("backend") or "auto") != "auto"

    def is_on(self, switch: str) -> bool:
        """Return the value of a switch in the JSON; default: False."""
        return bool(self.structured_outputs_config.get(switch, False))
