"""Input items of the Responses API, and their conversion to chat messages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Tag, TypeAdapter

from pagoda.common.errors import RequestError
from pagoda.server.http.body import RequestBody, hint
from pagoda.server.http.fields import LIST, OTHER, TEXT, Null, Unsupported, by_type, text_or_list

Status = Literal["in_progress", "completed", "incomplete"]


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
    status: Status | None = None
    phase: Any = hint(why="chat templates do not use it")


class ReasoningItem(RequestBody):
    """Reasoning of an earlier output: `content`, else `encrypted_content`, else the summary is used."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[TextPart] = Field(default_factory=list)
    content: list[TextPart] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """The reasoning text. Raise ValueError for `encrypted_content` of another server."""
        if self.content:
            return "".join(part.text for part in self.content)
        if self.encrypted_content:
            return decode_reasoning(self.encrypted_content)
        return "\n".join(part.text for part in self.summary)


class FunctionCallItem(RequestBody):
    """A function call of the model. `arguments`: a JSON object as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Null = None
    namespace: Null = None


class FunctionCallOutputItem(RequestBody):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: Null = None
    namespace: Null = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[Unsupported, Tag(OTHER)],
    by_type("message", "reasoning", "function_call", "function_call_output", default="message"),
]
Items = Annotated[list[Item], Field(min_length=1)]
Input = Annotated[Annotated[str, Tag(TEXT)] | Annotated[Items, Tag(LIST)], text_or_list()]

ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])
"""Reads and writes stored items."""

_ENCODED_PREFIX: Final = "pagoda:"


def encode_reasoning(text: str) -> str:
    """Return the `encrypted_content` of a reasoning item: encoded only, since `content` has the text anyway."""
    return _ENCODED_PREFIX + base64.b64encode(text.encode("utf-8", "replace")).decode()


def decode_reasoning(text: str) -> str:
    """Reverse `encode_reasoning`. Raise ValueError for anything else."""
    if not text.startswith(_ENCODED_PREFIX):
        raise ValueError("it was not created by this server")
    try:
        return base64.b64decode(text.removeprefix(_ENCODED_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError("it was not created by this server") from None


def items_of(input: str | Sequence[Item]) -> list[Item]:
    return [MessageItem(role="user", content=input)] if isinstance(input, str) else list(input)


def output_items(output: Sequence[dict[str, Any]]) -> list[Item]:
    """Return the output of a response as input items, without logprobs."""
    items = ITEMS.validate_python(output)
    for item in items:
        if isinstance(item, MessageItem) and isinstance(item.content, list):
            for part in item.content:
                if isinstance(part, TextPart):
                    part.logprobs = None
    return items


def messages_of(instructions: str | None, items: Sequence[Item], num_earlier: int = 0) -> list[dict[str, Any]]:
    """Convert items to chat messages. Consecutive items of the model become one message.

    `num_earlier`: number of leading items that belong to earlier requests, for error messages. Raise RequestError.
    """
    builder = _MessagesFromItems()
    for number, item in enumerate(items, -num_earlier):
        where = f"input[{number}]" if number >= 0 else "previous_response_id"
        match item:
            case MessageItem(role="assistant"):
                builder.assistant(_text(item.content))
            case MessageItem():
                builder.user_or_system("user" if item.role == "user" else "system", _text(item.content))
            case ReasoningItem():
                try:
                    builder.reasoning(item.text)
                except ValueError as fault:
                    raise RequestError(where, f"{where}.encrypted_content cannot be read: {fault}") from None
            case FunctionCallItem():
                builder.call(item.call_id, item.name, item.arguments)
            case FunctionCallOutputItem():
                builder.call_output(where, item.call_id, _text(item.output))
    return _with_instructions(instructions, builder.messages)


class _MessagesFromItems:
    """Converts items to chat messages, merging consecutive items of the model into one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._function_names: dict[str, str] = {}  # by call id
        self._current: dict[str, Any] | None = None  # assistant message that further items are added to

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

    def call_output(self, where: str, call_id: str, text: str) -> None:
        """Add a tool message. Raise RequestError for an unknown call id."""
        name = self._function_names.get(call_id)
        if name is None:
            raise RequestError(where, f"{where}.call_id {call_id[:80]!r} matches no earlier function_call")
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
