"""Tools of the Messages API: custom ones, and those that Anthropic defines and the client runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Tag

from pagoda.server.http.body import RequestBody, hint
from pagoda.server.http.fields import OTHER, OtherTool


class CacheControl(RequestBody):
    """Cache hint: the request's prefixes are kept longer. Type and time have no effect."""

    type: str | None = None
    ttl: str | int | None = None


class _ToolHints(RequestBody):
    cache_control: CacheControl | None = None
    input_examples: Any = hint(why="chat templates do not use them")
    defer_loading: Any = hint(why="all tools are always shown to the model")
    eager_input_streaming: Any = hint(harmless=(True,), why="arguments are always streamed as they are generated")
    allowed_callers: Any = hint(harmless=(["direct"],), why="only the model calls tools")


class CustomTool(_ToolHints):
    """A tool executed by the client."""

    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool in the format of chat completions."""
        function: dict[str, Any] = {"name": self.name, "parameters": {"type": "object"} | self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


# Tools that Anthropic's models know by their type. Other models are offered a function with the same arguments.

_TEXT: Final = {"type": "string"}
_LINES: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def _schema(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_BASH: Final = _schema((), command=_TEXT, restart={"type": "boolean"})
_EDITOR_ARGUMENTS: Final = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
    "view_range": _LINES,
}
_EDITOR: Final = _schema(
    ("command", "path"),
    command={"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
    **_EDITOR_ARGUMENTS,
    insert_text=_TEXT,
)
_MEMORY: Final = _schema(
    ("command",),
    command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
    **_EDITOR_ARGUMENTS,
    insert_text=_TEXT,
    old_path=_TEXT,
    new_path=_TEXT,
)

_CLIENT_TOOLS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "bash": ("Run a command in a persistent bash session, or restart the session.", _BASH),
    "text_editor": ("View, create and edit text files.", _EDITOR),
    "memory": ("View and change the files below /memories, which are kept between conversations.", _MEMORY),
}
"""Kind of a tool that the client runs -> description and schema of its function."""

_VERSIONED: Final = re.compile(r"([a-z_]+)_20\d{6}")


def _client_kind(tool_type: object) -> str | None:
    """Return the kind of a tool's type, `bash` of `bash_20250124`, if its schema is known."""
    versioned = _VERSIONED.fullmatch(tool_type) if isinstance(tool_type, str) else None
    return versioned[1] if versioned and versioned[1] in _CLIENT_TOOLS else None


class ClientTool(_ToolHints):
    """A tool with a schema of Anthropic's, run by the client: bash, text_editor, memory."""

    type: str
    name: str
    strict: bool | None = None
    max_characters: Any = hint(why="the client limits what it returns")

    def as_chat(self) -> dict[str, Any]:
        """Return the tool in the format of chat completions."""
        description, schema = _CLIENT_TOOLS[_client_kind(self.type) or ""]
        function: dict[str, Any] = {"name": self.name, "description": description, "parameters": schema}
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


def _tag_of(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None or kind == "custom":
        return "<custom>"
    return "<client>" if _client_kind(kind) else OTHER


AnthropicTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[ClientTool, Tag("<client>")] | Annotated[OtherTool, Tag(OTHER)],
    Discriminator(_tag_of),
]
