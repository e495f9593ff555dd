"""The tools of a conversation: checked, and as parsers take them.

Knows the shape of chat completions' tools. Does not know how a model writes its calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagoda.common.errors import RequestError
from pagoda.server.parsers.parser import Tool

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
