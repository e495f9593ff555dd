"""A conversation to answer, whichever API it came through.

Knows the shape of chat completions' messages and tools, into which the other APIs' are turned.
"""

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
    """What is said so far, in the shape of chat completions' messages, and what may be done about it.

    `tools`: {"type": "function", "function": {"name", "description", "parameters"}} each. `keywords`: variables for the
    template. `template`: in place of the model's, only when the server trusts requests' templates.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "none"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)


# What reasoning_effort means to a chat template: which of its variables say how much to think, and whether at all.

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables with which templates switch thinking on and off."""


def effort_variables(effort: str | None, known: frozenset[str]) -> dict[str, Any]:
    """Return the variables that express an effort to a template that reads `known`; none if it has no switch."""
    if effort is None:
        return {}
    variables: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in known else {}
    return variables | {name: effort != "none" for name in _SWITCHES if name in known}


def is_effort_ignored(effort: str | None, known: frozenset[str], *, thinks: bool) -> bool:
    """Return whether an effort changes nothing. `thinks`: whether the server's model thinks, so that "none" asks for
    something."""
    return effort is not None and (thinks or effort != "none") and not effort_variables(effort, known)


# The tools of a conversation: checked, and as parsers take them.
#
# Knows the shape of chat completions' tools. Does not know how a model writes its calls.

MAX_TOOLS: Final = 1_024
MAX_TOOLS_CHARS: Final = 1 << 20
"""Of all tools together, as JSON or nearly."""

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
TOOL_KEYS: Final = frozenset({"type", "function"})
FUNCTION_KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str,),
    "description": (str, type(None)),
    "parameters": (dict, type(None)),
    "strict": (bool, type(None)),
}


def is_function(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool is not of another type, which only a provider's service offers."""
    return not isinstance(tool.get("type"), str) or tool["type"] == "function"


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The tools. Raises RequestError naming the first that is none."""
    if len(tools) > MAX_TOOLS:
        raise RequestError("tools", f"there are {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        known = _checked(place, tool)
        if known.name in found:
            raise RequestError(f"{place}.function.name", f"two tools have the name {known.name!r}")
        found[known.name] = known
    if sum(len(str(tool)) for tool in tools) > MAX_TOOLS_CHARS:
        raise RequestError("tools", f"the tools have more than {MAX_TOOLS_CHARS} characters; shorten them")
    return list(found.values())


def _checked(place: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f"{place}.type", f'{place} must be an object of type "function"; there are no other tools')
    _only_known(place, tool, TOOL_KEYS)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{place}.function", f"{place}.function must be an object with a name")
    _only_known(f"{place}.function", function, FUNCTION_KEYS)
    for key, types in FUNCTION_KEYS.items():
        if not isinstance(function.get(key, None if key != "name" else 0), types):
            kind = {"parameters": "an object (a JSON schema)", "strict": "true or false"}.get(key, "a string")
            raise RequestError(f"{place}.function.{key}", f"{place}.function.{key} must be {kind}")
    if not _NAME.fullmatch(function["name"]):
        raise RequestError(
            f"{place}.function.name",
            f"{place}.function.name must have 1 to 128 letters, digits, underscores, dots or dashes",
        )
    return Tool(function["name"], function.get("parameters") or {}, bool(function.get("strict")))


def _only_known(place: str, value: Mapping[str, Any], known: Mapping[str, Any] | frozenset[str]) -> None:
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise RequestError(f"{place}.{str(unknown)[:80]}", f"{place} has no field {str(unknown)[:80]!r}")
