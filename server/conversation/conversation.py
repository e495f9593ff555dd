"""A conversation to answer, whichever API it came through.

Knows the shape of chat completions' messages and tools, into which the other APIs' are turned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


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
