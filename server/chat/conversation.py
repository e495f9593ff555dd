"""A conversation in the format of chat completions' messages and tools, to which the other APIs' are converted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pagoda.common.errors import RequestError
from pagoda.server.parsers.parser import Tool


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to render and continue."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    tool_choice: ToolChoice = "none"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None  # overrides the model's, with --trust-request-chat-template
    keywords: Mapping[str, Any] = field(default_factory=dict)  # variables of the template
    cache_salt: str | None = None


# Reasoning effort: chat templates control thinking with different variables.

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_SWITCHES: Final = ("enable_thinking", "thinking")
"""Template variables that enable and disable thinking."""


def effort_variables(effort: str | None, known: frozenset[str]) -> dict[str, Any]:
    """Return the variables that set the effort in a template that reads the variables `known`."""
    if effort is None:
        return {}
    variables: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in known else {}
    return variables | {name: effort != "none" for name in _SWITCHES if name in known}


def is_effort_ignored(effort: str | None, known: frozenset[str], *, thinks: bool) -> bool:
    """Return whether an effort has no effect. `thinks`: the model reasons, so that "none" should disable it."""
    return effort is not None and (thinks or effort != "none") and not effort_variables(effort, known)


# Tools.

MAX_TOOLS: Final = 1_024
MAX_TOOLS_CHARS: Final = 1 << 20
"""Maximum length of all tools together, in characters."""

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
TOOL_KEYS: Final = frozenset({"type", "function"})
FUNCTION_KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str,),
    "description": (str, type(None)),
    "parameters": (dict, type(None)),
    "strict": (bool, type(None)),
}


def is_function(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool is a function, not a hosted tool of a provider."""
    return not isinstance(tool.get("type"), str) or tool["type"] == "function"


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the tools. Raise RequestError naming the first invalid one."""
    if len(tools) > MAX_TOOLS:
        raise RequestError("tools", f"there are {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    by_name: dict[str, Tool] = {}
    for index, given in enumerate(tools):
        path = f"tools[{index}]"
        tool = _checked(path, given)
        if tool.name in by_name:
            raise RequestError(f"{path}.function.name", f"two tools have the name {tool.name!r}")
        by_name[tool.name] = tool
    if sum(len(str(tool)) for tool in tools) > MAX_TOOLS_CHARS:
        raise RequestError("tools", f"the tools have more than {MAX_TOOLS_CHARS} characters; shorten them")
    return list(by_name.values())


def _checked(path: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f"{path}.type", f'{path} must be an object of type "function"')
    _only_known(path, tool, TOOL_KEYS)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function", f"{path}.function must be an object with a name")
    _only_known(f"{path}.function", function, FUNCTION_KEYS)
    for key, types in FUNCTION_KEYS.items():
        if not isinstance(function.get(key, None if key != "name" else 0), types):
            kind = {"parameters": "an object (a JSON schema)", "strict": "true or false"}.get(key, "a string")
            raise RequestError(f"{path}.function.{key}", f"{path}.function.{key} must be {kind}")
    if not _NAME.fullmatch(function["name"]):
        raise RequestError(
            f"{path}.function.name",
            f"{path}.function.name must have 1 to 128 letters, digits, underscores, dots or dashes",
        )
    return Tool(function["name"], function.get("parameters") or {}, bool(function.get("strict")))


def _only_known(path: str, value: Mapping[str, Any], known: Mapping[str, Any] | frozenset[str]) -> None:
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise RequestError(f"{path}.{str(unknown)[:80]}", f"{path} has no field {str(unknown)[:80]!r}")
