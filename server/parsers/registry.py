"""Registry of tool-call and reasoning formats by name. Format modules are imported on first use.

To add a format: declare it in the module of its parser (or write a new module) and add a line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.parsers.parser import ReasoningFormat, ToolFormat

if TYPE_CHECKING:  # The help of `serve` lists the formats, and tokenizers take time to import.
    from pagoda.common.text.tokenizer import Tokenizer

AUTO: Final = "auto"
"""Value of --tool-call-parser and --reasoning-parser, and their default in `serve`: as the chat template shows."""

NONE: Final = "none"
"""Value of these flags: calls and reasoning stay in the text."""

TOOL_FORMATS: Final[dict[str, tuple[str, str]]] = {
    "apertus": ("json_calls", "APERTUS"),
    "cohere_command3": ("tagged_json", "COMMAND"),
    "cohere_command4": ("tagged_json", "COMMAND"),
    "deepseek_v3": ("json_calls", "DEEPSEEK_V3"),
    "deepseek_v31": ("json_calls", "DEEPSEEK_V31"),
    "deepseek_v32": ("xml_calls", "DEEPSEEK_V32"),
    "deepseek_v4": ("xml_calls", "DEEPSEEK_V4"),
    "deepseek_v41": ("xml_calls", "DEEPSEEK_V41"),
    "dots": ("xml_calls", "DOTS"),
    "ernie45": ("tagged_json", "HERMES"),
    "functiongemma": ("escaped", "FUNCTION_GEMMA"),
    "gemma4": ("escaped", "GEMMA4"),
    "gigachat3": ("tagged_json", "GIGACHAT3"),
    "glm45": ("xml_calls", "GLM"),
    "glm47": ("xml_calls", "GLM"),
    "granite": ("tagged_json", "GRANITE"),
    "granite-20b-fc": ("tagged_json", "GRANITE_20B_FC"),
    "granite4": ("tagged_json", "HERMES"),
    "hermes": ("tagged_json", "HERMES"),
    "hunyuan_a13b": ("tagged_json", "JAMBA"),
    "hy_v3": ("xml_calls", "HUNYUAN"),
    "internlm": ("tagged_json", "INTERNLM"),
    "jamba": ("tagged_json", "JAMBA"),
    "kimi_k2": ("json_calls", "KIMI_K2"),
    "kimi_k3": ("xml_calls", "KIMI_K3"),
    "lfm2": ("pythonic", "LFM2"),
    "ling3": ("xml_calls", "GLM"),
    "llama3_json": ("tagged_json", "LLAMA_JSON"),
    "llama4_json": ("tagged_json", "LLAMA_JSON"),
    "llama4_pythonic": ("pythonic", "LLAMA4_PYTHONIC"),
    "longcat": ("tagged_json", "LONGCAT"),
    "mimo": ("xml_calls", "MIMO"),
    "minicpm5": ("xml_calls", "MINICPM5"),
    "minimax": ("tagged_json", "JAMBA"),
    "minimax_m2": ("xml_calls", "MINIMAX_M2"),
    "minimax_m3": ("xml_calls", "MINIMAX_M3"),
    "mistral": ("json_calls", "MISTRAL"),
    "olmo3": ("pythonic", "OLMO3"),
    "openai": ("harmony", "HARMONY"),
    "phi4_mini_json": ("tagged_json", "PHI4_MINI"),
    "plamo3": ("json_calls", "PLAMO3"),
    "poolside_v1": ("xml_calls", "POOLSIDE"),
    "pythonic": ("pythonic", "PYTHONIC"),
    "qwen3_coder": ("xml_calls", "QWEN3_CODER"),
    "qwen3_json": ("tagged_json", "HERMES"),
    "qwen3_xml": ("xml_calls", "QWEN3_CODER"),
    "seed_oss": ("xml_calls", "SEED_OSS"),
    "step3": ("xml_calls", "STEP3"),
    "step3p5": ("xml_calls", "QWEN3_CODER"),
    "xlam": ("tagged_json", "XLAM"),
}
"""--tool-call-parser -> (module in `parsers.tool.formats`, its attribute)."""

_CLOSEST: Final = {"hy_v4": "hy_v3", "inkling": "hermes", "k2_horizon": "glm45", "muse_glimmer": "minimax_m2"}
"""vLLM's formats without a pagoda equivalent -> the most similar format, as a starting point for a plugin."""

REASONING_FORMATS: Final[dict[str, tuple[str, str]]] = {
    "cohere_command3": ("formats", "COMMAND3"),
    "cohere_command4": ("formats", "COMMAND4"),
    "deepseek_r1": ("formats", "R1"),
    "deepseek_v3": ("formats", "V3"),
    "deepseek_v4": ("formats", "V3"),
    "deepseek_v41": ("formats", "V3"),
    "ernie45": ("formats", "ERNIE45"),
    "gemma4": ("formats", "GEMMA4"),
    "glm45": ("formats", "GLM45"),
    "glm47": ("formats", "GLM45"),
    "granite": ("formats", "GRANITE"),
    "granite_thinking_parser": ("formats", "GRANITE_THINKING"),
    "holo2": ("formats", "HOLO2"),
    "hunyuan_a13b": ("formats", "HUNYUAN_A13B"),
    "hy_v3": ("formats", "HY_V3"),
    "identity": ("formats", "IDENTITY"),
    "k2_horizon": ("formats", "K2_HORIZON"),
    "kimi_k2": ("formats", "KIMI_K2"),
    "kimi_k3": ("formats", "KIMI_K3"),
    "ling3": ("formats", "GLM45"),
    "mimo": ("formats", "QWEN3"),
    "minimax_m2": ("formats", "MINIMAX_M2"),
    "minimax_m2_append_think": ("formats", "APPEND_THINK"),
    "minimax_m3": ("formats", "MINIMAX_M3"),
    "mistral": ("formats", "MISTRAL"),
    "nemotron_v3": ("formats", "QWEN3"),
    "olmo3": ("formats", "OLMO3"),
    "openai_gptoss": ("harmony", "HARMONY"),
    "poolside_v1": ("formats", "POOLSIDE_V1"),
    "qwen3": ("formats", "QWEN3"),
    "seed_oss": ("formats", "SEED_OSS"),
    "step3": ("formats", "STEP3"),
    "step3p5": ("formats", "STEP3P5"),
}
"""--reasoning-parser -> (module in `parsers.reasoning`, its attribute)."""


def tool_format(name: str, plugin: str = "", tokenizer: Tokenizer | None = None) -> ToolFormat:
    """Return a tool format by name: from the plugin, the registry, or an entry point, in this order.

    `plugin`: file or module with a dict TOOL_FORMATS, or that registers a parser of vLLM's interface. `tokenizer`: of
    the model, for the latter to run. Raise ConfigError with the known names if there is none.
    """
    return cast(ToolFormat, _bound(_resolve(_TOOL, name, plugin), tokenizer))


def reasoning_format(name: str, plugin: str = "", tokenizer: Tokenizer | None = None) -> ReasoningFormat:
    """Return a reasoning format by name, like `tool_format`; the plugin's dict is REASONING_FORMATS."""
    return cast(ReasoningFormat, _bound(_resolve(_REASONING, name, plugin), tokenizer))


def check_formats(engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError if a configured tool or reasoning format is unknown."""
    if server.tool_call_parser not in (None, "", AUTO, NONE):
        tool_format(str(server.tool_call_parser), server.tool_parser_plugin)
    reasoning = engine.structured_outputs
    if reasoning.reasoning_parser not in ("", AUTO, NONE):
        reasoning_format(reasoning.reasoning_parser, reasoning.reasoning_parser_plugin)


def check_format_is_named(engine: EngineConfig) -> None:
    """Raise ConfigError if the format of reasoning is to be found from the template, which only the server does."""
    if engine.structured_outputs.reasoning_parser == AUTO:
        raise ConfigError("--reasoning-parser", "auto is for `pagoda serve`; name the format, or drop it")


@dataclass(frozen=True, slots=True)
class _FormatKind:
    flag: str
    plugin_flag: str
    package: str  # Package of the built-in formats.
    builtin: dict[str, tuple[str, str]]
    table: str  # Name of a plugin's dict.
    group: str  # Name of the entry point group.
    attributes: tuple[str, ...]  # Attributes that plugin formats must have.


_TOOL: Final = _FormatKind(
    "--tool-call-parser",
    "--tool-parser-plugin",
    "tool.formats",
    TOOL_FORMATS,
    "TOOL_FORMATS",
    "pagoda.tool_parsers",
    ("parser",),
)
_REASONING: Final = _FormatKind(
    "--reasoning-parser",
    "--reasoning-parser-plugin",
    "reasoning",
    REASONING_FORMATS,
    "REASONING_FORMATS",
    "pagoda.reasoning_parsers",
    ("starts", "ends", "thinks", "parser"),
)


@runtime_checkable
class _NeedsTokenizer(Protocol):
    def bound(self, tokenizer: Tokenizer) -> object: ...


def _bound(format: object, tokenizer: Tokenizer | None) -> object:
    return format.bound(tokenizer) if tokenizer is not None and isinstance(format, _NeedsTokenizer) else format


def _resolve(kind: _FormatKind, name: str, plugin: str) -> Any:
    if not plugin and name in kind.builtin:
        return _builtin(kind, name)
    from pagoda.server.settings import plugins
    from pagoda.server.vllm.parser_plugins import reasoning_plugin, tool_plugin

    added = plugins.table(kind.plugin_flag, plugin, kind.table) if plugin else {}
    if added and name in added:
        return _checked(kind.plugin_flag, name, added[name], kind.attributes)
    try:
        registered = tool_plugin(name) if kind is _TOOL else reasoning_plugin(name)
    except Exception as error:
        raise ConfigError(kind.flag, f"the parser {name!r} cannot be imported: {error}") from error
    if registered is not None:
        return registered
    if name in kind.builtin:
        return _builtin(kind, name)
    installed = plugins.installed(kind.group)
    if name in installed:
        return _checked(kind.flag, name, plugins.load(kind.flag, name, kind.group), kind.attributes)
    if added is None:
        problem = f"defines no dictionary {kind.table}, nor registers a parser {name!r} as vLLM's plugins do"
        raise ConfigError(kind.plugin_flag, f"{plugin} {problem}")
    names = sorted({*added, *kind.builtin, *installed})
    closest = [_CLOSEST[name]] if name in _CLOSEST else get_close_matches(name, names, 1)
    hint = f"; the closest is {closest[0]}" if closest and closest[0] in names else ""
    raise ConfigError(kind.flag, f"unknown format {name!r}; use one of {', '.join(names)}{hint}")


def _builtin(kind: _FormatKind, name: str) -> Any:
    module, attribute = kind.builtin[name]
    return getattr(import_module(f"{__package__}.{kind.package}.{module}"), attribute)


def _checked(flag: str, name: str, format: Any, attributes: tuple[str, ...]) -> Any:
    missing = [attribute for attribute in attributes if not hasattr(format, attribute)]
    if missing:
        raise ConfigError(flag, f"format {name!r} has no {', '.join(missing)}; see server/parsers/parser.py")
    return format
