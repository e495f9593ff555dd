"""Input items of the Responses API, and their conversion to chat messages."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from pagoda.common.errors import RequestError
from pagoda.server.api.openai.responses.tools import (
    LOCAL_SHELL,
    TOOL_SEARCH,
    OfferedTool,
    ResponsesTool,
    custom_arguments,
    flat_name,
    offered_tools,
)
from pagoda.server.http.body import Ignored, RequestBody, hint
from pagoda.server.http.fields import LIST, OTHER, TEXT, Unsupported, by_type, text_or_list


class TextPart(RequestBody):
    """Text. `annotations` and `logprobs`, which clients send back with earlier outputs, are not used."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = hint(why="prompt prefixes are cached automatically")


class RefusalPart(RequestBody):
    """A refusal, handled as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[Unsupported, Tag(OTHER)],
    by_type("input_text", "output_text", "text", "refusal"),
]
Content = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[Part], Tag(LIST)], text_or_list()]


class MessageItem(RequestBody):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: Any = hint(why="chat templates do not use it")


class ReasoningItem(RequestBody):
    """Reasoning of an earlier output: `content`, else `encrypted_content`, else the summary is used."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[TextPart] = Field(default_factory=list)
    content: list[TextPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None

    @property
    def text(self) -> str:
        if self.content:
            return "".join(part.text for part in self.content)
        decoded = decode_reasoning(self.encrypted_content or "")
        return "\n".join(part.text for part in self.summary) if decoded is None else decoded

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the parts that have no effect, encrypted content of another server among them."""
        yield from super().ignored(path)
        if self.encrypted_content and not self.content and decode_reasoning(self.encrypted_content) is None:
            where = f"{path}.encrypted_content"
            yield Ignored(where, "hint", f"{where} cannot be read: it was not created by this server")


class FunctionCallItem(RequestBody):
    """A function call of the model. `arguments`: a JSON object as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None
    caller: Any = hint(harmless=({"type": "direct"},), why="only the model calls tools")


class CustomToolCallItem(RequestBody):
    """A call of a custom tool. `input`: any text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None
    caller: Any = hint(harmless=({"type": "direct"},), why="only the model calls tools")


class ShellAction(RequestBody):
    """A command to run."""

    type: Literal["exec"] = "exec"
    command: list[str]
    timeout_ms: float | None = None
    working_directory: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None


class LocalShellCallItem(RequestBody):
    """A call of the local_shell tool."""

    type: Literal["local_shell_call"]
    action: ShellAction
    call_id: str | None = None
    id: str | None = None
    status: str | None = None

    @property
    def arguments(self) -> str:
        """The arguments of the function that the model called, as JSON."""
        return json.dumps(self.action.model_dump(exclude={"type"}, exclude_none=True), ensure_ascii=False)


def _as_text(output: Any) -> Any:
    """Return an object, which older versions of Codex send, as its text `content`, or as JSON."""
    if not isinstance(output, dict):
        return output
    content = output.get("content")
    return content if isinstance(content, str) else json.dumps(output, ensure_ascii=False)


CallOutput = Annotated[Content, BeforeValidator(_as_text)]


class CallOutputItem(RequestBody):
    """The result of a call of a function or custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: CallOutput
    id: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = hint(harmless=({"type": "direct"},), why="only the model calls tools")


class LocalShellCallOutputItem(RequestBody):
    """The result of a call of the local_shell tool, found by `call_id`, else by the call's `id`."""

    type: Literal["local_shell_call_output"]
    id: str | None = None
    call_id: str | None = None
    output: CallOutput
    status: str | None = None


class AdditionalToolsItem(RequestBody):
    """Tools that are offered besides the request's."""

    type: Literal["additional_tools"]
    tools: list[ResponsesTool]
    role: str | None = None
    id: str | None = None


class ToolSearchCallItem(RequestBody):
    """A call of the tool_search tool, run by the client, or by a provider (without a call id)."""

    type: Literal["tool_search_call"]
    arguments: Any = None
    call_id: str | None = None
    execution: str | None = None
    id: str | None = None
    status: str | None = None


class ToolSearchOutputItem(RequestBody):
    """The tools that a search found. They are offered from then on."""

    type: Literal["tool_search_output"]
    tools: list[ResponsesTool]
    call_id: str | None = None
    execution: str | None = None
    id: str | None = None
    status: str | None = None


class McpListToolsItem(RequestBody):
    """The tools that a server listed. The servers are asked again for each response, so it has no effect."""

    type: Literal["mcp_list_tools"]
    server_label: str
    tools: list[Any] = Field(default_factory=list)
    error: Any = None
    id: str | None = None
    status: str | None = None


class McpCallItem(RequestBody):
    """A call of a tool that a server ran."""

    type: Literal["mcp_call"]
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None
    approval_request_id: str | None = None
    id: str | None = None
    status: str | None = None

    @property
    def result(self) -> str:
        """What the model sees of the call."""
        return self.output if self.output is not None else f"Error: {self.error or 'the call has no result'}"


class McpApprovalRequestItem(RequestBody):
    """A call that waits for the client's approval."""

    type: Literal["mcp_approval_request"]
    server_label: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class McpApprovalResponseItem(RequestBody):
    """The client's answer to an approval request. A call that is approved is made when the response begins."""

    type: Literal["mcp_approval_response"]
    approval_request_id: str
    approve: bool
    reason: str | None = None
    id: str | None = None
    status: str | None = None


class ItemReference(RequestBody):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: str


class OtherItem(RequestBody):
    """An item of another type, such as a call of a tool that a provider ran. It is dropped."""

    type: str
    id: str | None = None

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield this item, but not its fields."""
        reason = f"{path}: type {self.type[:60]!r} is not supported by this version of pagoda"
        yield Ignored(path, "item", reason, self.type)


_KNOWN: Final = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("local_shell_call", "local_shell_call_output", "item_reference"),
    *("additional_tools", "tool_search_call", "tool_search_output"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
)


def _tag_of(item: Any) -> str:
    """Return the tag of an item. Without a type, one with only an id is a reference, all others are messages."""
    if not isinstance(item, dict):
        return f"<{getattr(item, 'type', None)}>"
    kind = item.get("type")
    if kind is None:
        kind = "item_reference" if "id" in item and not {"role", "content"} & item.keys() else "message"
    return f"<{kind}>" if kind in _KNOWN else OTHER


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomToolCallItem, Tag("<custom_tool_call>")]
    | Annotated[CallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[LocalShellCallItem, Tag("<local_shell_call>")]
    | Annotated[LocalShellCallOutputItem, Tag("<local_shell_call_output>")]
    | Annotated[AdditionalToolsItem, Tag("<additional_tools>")]
    | Annotated[ToolSearchCallItem, Tag("<tool_search_call>")]
    | Annotated[ToolSearchOutputItem, Tag("<tool_search_output>")]
    | Annotated[McpListToolsItem, Tag("<mcp_list_tools>")]
    | Annotated[McpCallItem, Tag("<mcp_call>")]
    | Annotated[McpApprovalRequestItem, Tag("<mcp_approval_request>")]
    | Annotated[McpApprovalResponseItem, Tag("<mcp_approval_response>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[OtherItem, Tag(OTHER)],
    Discriminator(_tag_of),
]
Input = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[Item], Tag(LIST)], text_or_list()]

ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])
"""Reads and writes stored items."""

_ENCODED_PREFIX: Final = "pagoda:"


def encode_reasoning(text: str) -> str:
    """Return the `encrypted_content` of a reasoning item: encoded only, since `content` has the text anyway."""
    return _ENCODED_PREFIX + base64.b64encode(text.encode("utf-8", "replace")).decode()


def decode_reasoning(text: str) -> str | None:
    """Reverse `encode_reasoning`. None for anything else."""
    if not text.startswith(_ENCODED_PREFIX):
        return None
    try:
        return base64.b64decode(text.removeprefix(_ENCODED_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


_ID_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "additional_tools": "at",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
"""Prefix of a new id, by type of the item."""


def new_item_id(kind: str) -> str:
    """Return a random id for an item of type `kind`."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def items_of(input: str | Sequence[Item] | None) -> list[Item]:
    """Return the items of an input, without those of types that are dropped."""
    if isinstance(input, str):
        return [MessageItem(role="user", content=input)]
    return [item for item in input or () if not isinstance(item, OtherItem)]


def with_ids(items: Sequence[Item]) -> list[Item]:
    """Return the items, each with an id: copies of those that have none."""
    return [
        item
        if item.id or isinstance(item, OtherItem)
        else item.model_copy(update={"id": new_item_id(item.type or "message")})
        for item in items
    ]


def dumped_item(item: Item) -> bytes:
    """Return the item as JSON."""
    return item.model_dump_json(exclude_unset=True).encode()


def output_items(output: Sequence[dict[str, Any]]) -> list[Item]:
    """Return the output of a response as input items, without logprobs."""
    items = ITEMS.validate_python(output)
    for item in items:
        if isinstance(item, MessageItem) and isinstance(item.content, list):
            for part in item.content:
                if isinstance(part, TextPart):
                    part.logprobs = None
    return items


def shown_item(item: Item) -> dict[str, Any]:
    """Return a stored item in the format of lists of items: texts as parts, with a status."""
    shown: dict[str, Any] = item.model_dump(exclude_unset=True) | {"type": item.type or "item_reference"}
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = {"type": "output_text", "annotations": []} if item.role == "assistant" else {"type": "input_text"}
        shown["content"] = [part | {"text": item.content}]
    return shown if isinstance(item, ReasoningItem) else {"status": "completed"} | shown


def approved_calls(items: Sequence[Item], num_earlier: int) -> list[McpApprovalRequestItem]:
    """Return the calls that items of the current request approve, and that no item reports as made.

    Raise RequestError for several answers to one request.
    """
    answers: set[str] = set()
    for number, item in enumerate(items[num_earlier:]):
        if isinstance(item, McpApprovalResponseItem):
            if item.approval_request_id in answers:
                field = f"input[{number}].approval_request_id"
                raise RequestError(field, f"{field} is answered twice; answer each request for approval once")
            answers.add(item.approval_request_id)
    requests = {item.id: item for item in items if isinstance(item, McpApprovalRequestItem)}
    made = {item.approval_request_id for item in items if isinstance(item, McpCallItem)}
    return [
        requests[item.approval_request_id]
        for item in items[num_earlier:]
        if isinstance(item, McpApprovalResponseItem)
        and item.approve
        and item.approval_request_id in requests
        and item.approval_request_id not in made
    ]


def tools_in(items: Sequence[Item], num_earlier: int) -> list[OfferedTool]:
    """Return the functions that are offered for tools in items, those of the current request first."""
    numbered = list(enumerate(items, -num_earlier))
    return [
        tool
        for number, item in (*numbered[num_earlier:], *numbered[:num_earlier])
        if isinstance(item, AdditionalToolsItem | ToolSearchOutputItem)
        for tool in offered_tools(item.tools, f"input[{number}].tools" if number >= 0 else "previous_response_id")
    ]


def messages_of(instructions: str | None, items: Sequence[Item], num_earlier: int = 0) -> list[dict[str, Any]]:
    """Convert items to chat messages. Consecutive items of the model become one message.

    `num_earlier`: number of leading items that belong to earlier requests, for error messages. Raise RequestError.
    """
    builder = _MessagesFromItems()
    requests = {item.id: item for item in items if isinstance(item, McpApprovalRequestItem)}
    for number, item in enumerate(items, -num_earlier):
        where = f"input[{number}]" if number >= 0 else "previous_response_id"
        match item:
            case MessageItem(role="assistant"):
                builder.assistant(_text(item.content))
            case MessageItem():
                builder.user_or_system("user" if item.role == "user" else "system", _text(item.content))
            case ReasoningItem():
                if item.text:
                    builder.reasoning(item.text)
            case FunctionCallItem():
                builder.call(item.call_id, flat_name(item.namespace, item.name), item.arguments)
            case CustomToolCallItem():
                builder.call(item.call_id, flat_name(item.namespace, item.name), custom_arguments(item.input))
            case LocalShellCallItem():
                call_id = item.call_id or item.id or ""
                builder.call(call_id, LOCAL_SHELL, item.arguments)
                builder.alias(item.id, call_id)
            case CallOutputItem():
                builder.call_output(where, item.call_id, _text(item.output))
            case LocalShellCallOutputItem():
                builder.call_output(where, item.call_id or item.id or "", _text(item.output))
            case McpCallItem():
                call_id = item.id or f"mcp_{number}"
                builder.call(call_id, item.name, item.arguments)
                builder.call_output(where, call_id, item.result)
            case McpApprovalResponseItem(approval_request_id=asked_id):
                if (asked := requests.get(asked_id)) is None:
                    raise RequestError(
                        where, f"{where}.approval_request_id {asked_id[:80]!r} matches no mcp_approval_request"
                    )
                if not item.approve:
                    builder.call(asked_id, asked.name, asked.arguments)
                    builder.call_output(where, asked_id, f"The user refused this call. {item.reason or ''}".strip())
            case ToolSearchCallItem(call_id=str() as call_id):
                builder.call(call_id, TOOL_SEARCH, json.dumps(item.arguments or {}, ensure_ascii=False))
            case ToolSearchOutputItem(call_id=str() as call_id):
                names = [tool.function_name for tool in offered_tools(item.tools)]
                builder.call_output(where, call_id, json.dumps({"tools": names}, ensure_ascii=False))
    return _with_instructions(instructions, builder.messages)


class _MessagesFromItems:
    """Converts items to chat messages, merging consecutive items of the model into one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._function_names: dict[str, str] = {}  # Call id -> name of the function.
        self._call_ids: dict[str, str] = {}  # Item id -> call id, of calls whose output may name either.
        self._current: dict[str, Any] | None = None  # The assistant message that further items are added to.

    def user_or_system(self, role: str, text: str) -> None:
        self._current = None
        self.messages.append({"role": role, "content": text})

    def reasoning(self, text: str) -> None:
        """Start an assistant message with reasoning."""
        self._start()["reasoning_content"] = text

    def assistant(self, text: str) -> None:
        """Add content to a message that has only reasoning, else start a message."""
        current = self._current
        if current is None or {"content", "tool_calls"} & current.keys():
            current = self._start()
        current["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        self._function_names[call_id] = name
        message = self._start() if self._current is None else self._current
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def alias(self, item_id: str | None, call_id: str) -> None:
        """Let an output name a call by the id of its item."""
        if item_id is not None:
            self._call_ids[item_id] = call_id

    def call_output(self, where: str, call_id: str, text: str) -> None:
        """Add a tool message. Raise RequestError for an unknown call id."""
        call_id = self._call_ids.get(call_id, call_id)
        name = self._function_names.get(call_id)
        if name is None:
            field = f"{where}.call_id"
            raise RequestError(field, f"{field} {call_id[:80]!r} matches no earlier function_call")
        self._current = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def _start(self) -> dict[str, Any]:
        self._current = {"role": "assistant"}
        self.messages.append(self._current)
        return self._current


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge instructions and leading system messages: many templates accept only one system message, at the start."""
    system = [] if instructions is None else [instructions]
    num_leading = 0
    while num_leading < len(messages) and messages[num_leading]["role"] == "system":
        system.append(messages[num_leading]["content"])
        num_leading += 1
    first = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return [*first, *({"content": "", **message} for message in messages[num_leading:])]


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
