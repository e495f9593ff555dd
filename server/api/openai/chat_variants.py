"""Forms in which clients of other servers and of former versions give the fields of chat completions.

Tool choices, options of reasoning, and OpenAI's former `functions` and `function_call`, converted to and from tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from pagoda.common.errors import RequestError
from pagoda.server.api.chat_prompt import EFFORTS
from pagoda.server.http.body import Int64, RequestBody, hint

# Tool choices.


class NamedFunction(RequestBody):
    """The name of a tool."""

    name: str


class NamedToolChoice(RequestBody):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(RequestBody):
    """Names of the tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]

    def of(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return those of `tools` that are allowed. Raise RequestError for one that is not among them."""
        by_name = {_name_of(tool): tool for tool in tools}
        names = {
            index: _name_of(tool) for index, tool in enumerate(self.tools) if tool.get("type", "function") == "function"
        }
        for index, name in names.items():
            if name not in by_name:
                field = f"tool_choice.allowed_tools.tools[{index}]"
                raise RequestError(field, f"{field} is {name[:128]!r}, which is not among the tools")
        return [by_name[name] for name in dict.fromkeys(names.values())]


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name") if isinstance(function, Mapping) else tool.get("name"))


class AllowedToolsChoice(RequestBody):
    """Restricts the calls to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _without_any(value: Any) -> Any:
    return "required" if value == "any" else value  # Another API's name is "any".


GivenToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice, BeforeValidator(_without_any)
]

# Reasoning.


class RoutedReasoning(RequestBody):
    """OpenRouter's `reasoning`."""

    effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    max_tokens: Int64 | None = None
    exclude: bool | None = None
    enabled: bool | None = None
    summary: Any = hint(why="reasoning is returned unabridged")


class ThinkingOptions(RequestBody):
    """Anthropic's `thinking`, which LiteLLM and several providers have in chat completions."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Int64 | None = None


def effort_of_switch(value: bool | str | None) -> str | None:
    """Return the reasoning effort of a switch: "medium" if on, "none" if off; an effort and None as they are."""
    if isinstance(value, bool):
        return "medium" if value else "none"
    return value


# OpenAI's former functions.

_TOOL_PATH: Final = re.compile(r"^tools(\[\d+\])(\.function)?")


def own_name_of_functions(field: str) -> str:
    """Return the name of a field of tools in a request with functions."""
    if field.startswith("tool_choice"):
        return field.replace("tool_choice.function", "function_call").replace("tool_choice", "function_call")
    return "functions" if field == "tools" else _TOOL_PATH.sub(r"functions\1", field)


def with_tool_calls(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the messages with each function_call as a tool call, and each function's result as a tool's."""
    converted: list[Mapping[str, Any]] = []
    last = ""
    for index, message in enumerate(messages):
        call = message.get("function_call")
        rest = {key: value for key, value in message.items() if key != "function_call"}
        if message.get("role") == "function":
            converted.append({**rest, "role": "tool", "tool_call_id": last or f"call_{index}"})
        elif isinstance(call, Mapping):
            last = f"call_{index}"
            converted.append({**rest, "tool_calls": [{"id": last, "type": "function", "function": call}]})
        else:
            converted.append(rest)
    return converted


def message_with_function_call(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its first tool call as function_call."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"function_call": calls[0]["function"]}


def delta_with_function_call(delta: dict[str, Any]) -> dict[str, Any]:
    """Return the stream delta with a part of a tool call as a part of function_call."""
    calls = delta.get("tool_calls")
    return {"function_call": calls[0]["function"]} if calls else delta
