"""Tools of the Responses API. The model is offered each as a function; its calls become items of the tool's type."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PrivateAttr, Tag

from pagoda.common.errors import RequestError
from pagoda.server.api.chat_prompt import NamedTool
from pagoda.server.api.chat_prompt import ToolChoice as Choice
from pagoda.server.http.body import Ignored, RequestBody, hint
from pagoda.server.http.fields import LIST, OTHER, TEXT, OtherTool, Unsupported, by_type, text_or_list

LOCAL_SHELL: Final = "local_shell"
"""Name of the function offered for the tool of this type."""

TOOL_SEARCH: Final = "tool_search"
"""Name of the function offered for the tool of this type."""

CUSTOM_INPUT: Final = "input"
"""Argument of the function offered for a custom tool."""


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which a function of a namespace is offered."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """Return the input of a custom tool as arguments of its function."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool as the model sees it: a function."""

    kind: Literal["function", "custom", "local_shell", "tool_search", "mcp", "mcp_approval"] = "function"
    path: str  # Path in the request, such as `tools[1].tools[0]`.
    name: str  # Name in the response.
    namespace: str | None = None
    server_label: str | None = None  # The server that this server calls for it.
    definition: Mapping[str, Any]  # An object {"description", "parameters", "strict"}.

    @property
    def function_name(self) -> str:
        return flat_name(self.namespace, self.name)

    def as_chat(self) -> dict[str, Any]:
        """Return the function in the format of chat completions."""
        return {"type": "function", "function": {"name": self.function_name, **self.definition}}


class _ToolFields(RequestBody, ABC):
    defer_loading: Any = hint(why="all tools are always shown to the model")
    allowed_callers: Any = hint(harmless=(["direct"],), why="only the model calls tools")

    @abstractmethod
    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        """Yield the functions that are offered for this tool."""

    def shown(self) -> dict[str, Any]:
        """Return the fields that the response repeats."""
        return self.model_dump(exclude_unset=True, exclude={"defer_loading", "allowed_callers"})


class FunctionTool(_ToolFields):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = hint()

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        definition = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        set_keys = {key: value for key, value in definition.items() if value is not None}
        yield OfferedTool(path=path, name=self.name, namespace=namespace, definition=set_keys)

    def shown(self) -> dict[str, Any]:
        return self.model_dump(include={"type", "name", "description", "parameters", "strict"})


class CustomToolFormat(RequestBody):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: str | None = None  # Syntax "lark" or "regex".


class ResponsesCustomTool(_ToolFields):
    """A tool whose input is any text. A grammar is described to the model, but not enforced."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomToolFormat | None = None

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the parts without effect, a grammar among them."""
        yield from super().ignored(path)
        if self.format is not None and self.format.type == "grammar":
            where = f"{path}.format"
            yield Ignored(where, "hint", f"{where}: the grammar is not enforced; leave it out")

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        texts = [self.description or ""]
        if self.format is not None and self.format.definition:
            texts.append(f"The input conforms to this {self.format.syntax or ''} grammar:\n{self.format.definition}")
        schema = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string", "description": "The input of the tool, as plain text."}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        definition = {"description": "\n\n".join(filter(None, texts)), "parameters": schema}
        yield OfferedTool(kind="custom", path=path, name=self.name, namespace=namespace, definition=definition)


_SHELL_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string", "description": "The directory to run it in."},
        "timeout_ms": {"type": "integer", "description": "Timeout in milliseconds."},
        "env": {"type": "object", "additionalProperties": {"type": "string"}, "description": "Environment variables."},
    },
    "required": ["command"],
}


class LocalShellTool(_ToolFields):
    """Commands that the client runs."""

    type: Literal["local_shell"]

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        definition = {"description": "Run a command in a shell and return its output.", "parameters": _SHELL_SCHEMA}
        yield OfferedTool(kind="local_shell", path=path, name=LOCAL_SHELL, definition=definition)


class ToolSearchTool(_ToolFields):
    """A search for further tools. Offered if the client runs it; it returns the tools with an item."""

    type: Literal["tool_search"]
    execution: str | None = None  # Place of execution, "client" or "server".
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield this tool if the server would have to run it, else its parts without effect."""
        if self.execution != "client":
            yield Ignored(path, "tool", f'{path}: tool_search needs execution "client"', self.type)
        else:
            yield from super().ignored(path)

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        if self.execution != "client":
            return
        schema = self.parameters or {"type": "object", "properties": {"query": {"type": "string"}}}
        definition = {"description": self.description or "Search for further tools.", "parameters": schema}
        yield OfferedTool(kind="tool_search", path=path, name=TOOL_SEARCH, definition=definition)


class NamespaceTool(_ToolFields):
    """Functions and custom tools with a common namespace; offered as `namespace__name`."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[_InNamespace]

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        for index, tool in enumerate(self.tools):
            if isinstance(tool, _ToolFields):
                yield from tool.offered(f"{path}.tools[{index}]", self.name)


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as its server lists it."""

    name: str
    description: str | None
    schema: Mapping[str, Any]
    read_only: bool = False


class ToolFilter(RequestBody):
    """Tools of a server: those that are named, or those that change nothing, as the server says."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    def selects(self, tool: ListedTool) -> bool:
        """True if the tool is among them; without a field, all are."""
        return (self.tool_names is None or tool.name in self.tool_names) and (not self.read_only or tool.read_only)


class ApprovalFilter(RequestBody):
    """Which calls need an approval. Tools in neither list do."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpTool(_ToolFields):
    """The tools of a server of the Model Context Protocol, which this server calls (--tool-server)."""

    type: Literal["mcp"]
    server_label: str = ""
    server_url: str | None = None
    server_description: str | None = None
    authorization: str | None = Field(None, exclude=True)  # Secrets are neither stored nor shown.
    headers: dict[str, str] | None = Field(None, exclude=True)
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = "always"
    connector_id: Any = None

    _listed: list[ListedTool] = PrivateAttr(default_factory=list)

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield this tool if it is not one of the request's own list: servers are asked for those only."""
        if path.startswith("tools["):
            yield from super().ignored(path)
        else:
            yield Ignored(path, "tool", f"{path}: tools of type 'mcp' are called if they stand in tools", self.type)

    def check(self, path: str) -> None:
        """Raise RequestError for a server that cannot be asked."""
        if self.connector_id is not None:
            raise RequestError(f"{path}.connector_id", f"{path}.connector_id: connectors are OpenAI's; give server_url")
        if not _LABEL.fullmatch(self.server_label):
            field = f"{path}.server_label"
            raise RequestError(field, f"{field} must begin with a letter and have at most 64 letters, digits, - and _")

    def http_headers(self, path: str) -> dict[str, str]:
        """Return the headers of requests to the server. Raise RequestError for a header that cannot be sent."""
        headers = dict(self.headers or {})
        if self.authorization is not None:
            headers["Authorization"] = f"Bearer {self.authorization}"
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise RequestError(f"{path}.headers", f"{path}.headers: {name[:80]!r} is not a valid header")
            if name.lower() in _OUR_HEADERS or name.lower().startswith("mcp-"):
                raise RequestError(f"{path}.headers", f"{path}.headers: the server sets {name[:80]!r}; leave it out")
        return headers

    def take_listing(self, listed: Sequence[ListedTool], path: str) -> list[dict[str, Any]]:
        """Take over the server's tools, and return those that are offered, as an mcp_list_tools item shows them.

        Raise RequestError for an allowed tool that the server does not have.
        """
        allowed = self.allowed_tools
        names = allowed.tool_names if isinstance(allowed, ToolFilter) else allowed
        known = {tool.name for tool in listed}
        for name in names or ():
            if name not in known:
                raise RequestError(f"{path}.allowed_tools", f"{path}.allowed_tools: there is no tool {name[:128]!r}")
        chosen = allowed if isinstance(allowed, ToolFilter) else ToolFilter(tool_names=allowed)
        self._listed = [tool for tool in listed if chosen.selects(tool)]
        return [
            {
                "name": tool.name,
                "description": tool.description,
                "input_schema": tool.schema,
                "annotations": {"read_only": tool.read_only},
            }
            for tool in self._listed
        ]

    def needs_approval(self, tool: ListedTool) -> bool:
        """True if a call of the tool waits for the client's approval."""
        rule = self.require_approval
        if not isinstance(rule, ApprovalFilter):
            return rule != "never"
        if rule.always is not None and rule.always.selects(tool):
            return True
        return rule.never is None or not rule.never.selects(tool)

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        for tool in self._listed:
            yield OfferedTool(
                kind="mcp_approval" if self.needs_approval(tool) else "mcp",
                path=path,
                name=tool.name,
                server_label=self.server_label,
                definition={"description": tool.description or "", "parameters": tool.schema},
            )

    def shown(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


_LABEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_OUR_HEADERS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "content-type", "accept"}
)
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]{0,8192}")

_InNamespace = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[ResponsesCustomTool, Tag("<custom>")]
    | Annotated[OtherTool, Tag(OTHER)],
    by_type("function", "custom"),
]
NamespaceTool.model_rebuild()

ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[ResponsesCustomTool, Tag("<custom>")]
    | Annotated[LocalShellTool, Tag("<local_shell>")]
    | Annotated[ToolSearchTool, Tag("<tool_search>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[McpTool, Tag("<mcp>")]
    | Annotated[OtherTool, Tag(OTHER)],
    by_type("function", "custom", "local_shell", "tool_search", "namespace", "mcp"),
]


def offered_tools(tools: Iterable[Any], path: str = "tools") -> list[OfferedTool]:
    """Return the functions that are offered for a list of tools, located at `path`."""
    return [
        offered
        for index, tool in enumerate(tools)
        if isinstance(tool, _ToolFields)
        for offered in tool.offered(f"{path}[{index}]")
    ]


def check_tool_names(tools: Sequence[OfferedTool]) -> None:
    """Raise RequestError if a tool of a server has the name of another tool: a call would be of either."""
    paths: dict[str, OfferedTool] = {}
    for tool in tools:
        first = paths.setdefault(tool.function_name, tool)
        if first is not tool and (first.server_label or tool.server_label):
            raise RequestError(
                tool.path,
                f"{tool.path}: there is a tool {tool.name[:128]!r} in {first.path}, too; leave one out with "
                "allowed_tools",
            )


def shown_tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the tools that the response repeats: those that are offered."""
    return [tool.shown() for tool in tools if isinstance(tool, _ToolFields)]


# Tool choice.


class ToolByName(RequestBody):
    """The tool that must be called. `name` may be the one in its namespace, if that is unique."""

    type: Literal["function", "custom", "local_shell"]
    name: str | None = None
    namespace: str | None = None

    @property
    def function_name(self) -> str:
        return flat_name(self.namespace, self.name or (LOCAL_SHELL if self.type == "local_shell" else ""))


class AllowedTool(RequestBody):
    """One of the allowed tools. Types that are not offered are dropped."""

    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None  # With type "mcp": all tools of this server, or the one of `name`.

    def is_of_server(self, tool: OfferedTool) -> bool:
        """Whether a tool is one of the server that is named."""
        if self.server_label is None or tool.server_label != self.server_label:
            return False
        return self.name is None or tool.name == self.name


class AllowedChoice(RequestBody):
    """The tools that the model may call (mode "auto") or must call one of ("required")."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[
        Annotated[ToolByName, Tag("<function>")]
        | Annotated[ToolByName, Tag("<custom>")]
        | Annotated[ToolByName, Tag("<local_shell>")]
        | Annotated[AllowedChoice, Tag("<allowed_tools>")]
        | Annotated[Unsupported, Tag(OTHER)],
        by_type("function", "custom", "local_shell", "allowed_tools"),
        Tag(LIST),
    ],
    text_or_list(),
]


def chosen_tools(tools: Sequence[OfferedTool], choice: Any) -> tuple[list[OfferedTool], Choice]:
    """Return the tools to offer and the tool choice. Raise RequestError."""
    if isinstance(choice, ToolByName):
        return list(tools), NamedTool(_resolved(tools, choice.function_name))
    if isinstance(choice, AllowedChoice):
        names = {
            index: _resolved(tools, flat_name(tool.namespace, tool.name or LOCAL_SHELL))
            for index, tool in enumerate(choice.tools)
            if tool.type in ("function", "custom", "local_shell")
        }
        of_servers = [tool for tool in choice.tools if tool.type == "mcp"]
        offered = {tool.function_name for tool in tools}
        for index, name in names.items():
            if name not in offered:
                field = f"tool_choice.tools[{index}]"
                raise RequestError(field, f"{field} is {name[:128]!r}, which is not among the tools")
        allowed = [
            tool
            for tool in tools
            if tool.function_name in names.values() or any(each.is_of_server(tool) for each in of_servers)
        ]
        return allowed, choice.mode if allowed or choice.mode == "required" else "none"
    if choice == "required":
        return list(tools), "required"
    return list(tools), "auto" if choice != "none" and tools else "none"


def _resolved(tools: Sequence[OfferedTool], name: str) -> str:
    """Return the function's name. `name` may be the one in a namespace, if only one tool has it."""
    if any(tool.function_name == name for tool in tools):
        return name
    same = [tool.function_name for tool in tools if tool.name == name]
    return same[0] if len(same) == 1 else name


# Inputs of custom tools, decoded while they are generated.

_START: Final = re.compile(r'\s*\{\s*"' + CUSTOM_INPUT + r'"\s*:\s*"')
_UNITS: Final = re.compile(r'(?:[^"\\]|\\u(?!d[89ab])[0-9a-f]{4}|\\ud[89ab][0-9a-f]{2}\\u[0-9a-f]{4}|\\[^u])*', re.I)
"""Whole characters of a JSON string."""


class CustomInputDecoder:
    """Decodes the arguments of a custom tool's function to the input text, piece by piece."""

    def __init__(self) -> None:
        self.text = ""  # Text decoded so far.
        self._arguments = ""
        self._rest: str | None = None  # Undecoded end of the string; None: the string has not started.

    def feed(self, arguments: str) -> str:
        """Return the text that a piece of the arguments adds."""
        self._arguments += arguments
        if self._rest is not None:
            self._rest += arguments
        elif start := _START.match(self._arguments):
            self._rest = self._arguments[start.end() :]
        else:
            return ""
        units = _UNITS.match(self._rest)
        assert units is not None
        self._rest = self._rest[units.end() :]
        try:
            added = str(json.loads(f'"{units.group()}"', strict=False))
        except ValueError:  # An escape that JSON does not have.
            added = units.group()
        self.text += added
        return added

    def finish(self) -> str:
        """Return the text that remains; arguments of another form are the text as they are."""
        try:
            text = json.loads(self._arguments)[CUSTOM_INPUT]
        except (ValueError, TypeError, KeyError, IndexError):
            text = None
        if self._rest is None and not isinstance(text, str):
            text = self._arguments
        if not isinstance(text, str) or not text.startswith(self.text):
            return ""
        added = text[len(self.text) :]
        self.text = text
        return added
