"""Items of the Responses API, and how they become the messages of a conversation."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Tag, TypeAdapter

from pagoda.common.errors import RequestError
from pagoda.server.http.body import RequestBody, hint
from pagoda.server.http.fields.tagged import LIST, OTHER, TEXT, Null, Unsupported, by_type, text_or_list

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(RequestBody):
    """Text. `annotations` and `logprobs` come back with the parts of an answer and say nothing to the model."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = hint(why="equal beginnings of prompts share their cache")


class RefusalPart(RequestBody):
    """A refusal, which is text too."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What it says."""
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
    """Something said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: Any = hint(why="templates do not show it")


class ReasoningItem(RequestBody):
    """What the model thought before it answered. Its content counts, else `encrypted_content`, else the summary."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[TextPart] = Field(default_factory=list)
    content: list[TextPart] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """What was thought. Raises ValueError for encrypted content that is not from here."""
        if self.content:
            return "".join(part.text for part in self.content)
        if self.encrypted_content:
            return opened(self.encrypted_content)
        return "\n".join(part.text for part in self.summary)


class FunctionCallItem(RequestBody):
    """A call that the model made. `arguments`: a JSON object as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Null = None
    namespace: Null = None


class FunctionCallOutputItem(RequestBody):
    """What a call gave."""

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
"""Reads and writes items that were stored."""

_SEALED: Final = "pagoda:"


def sealed(text: str) -> str:
    """`encrypted_content` of a reasoning item: encoded only, since the text itself stands beside it."""
    return _SEALED + base64.b64encode(text.encode("utf-8", "replace")).decode()


def opened(text: str) -> str:
    """The reverse of `sealed`. Raises ValueError for anything else."""
    if not text.startswith(_SEALED):
        raise ValueError("it is not from this server")
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError("it is not from this server") from None


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """The input as items."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else list(given)


def output_items(output: Sequence[dict[str, Any]]) -> list[Item]:
    """The output of a response as items to go on from, without its log-probabilities."""
    items = ITEMS.validate_python(output)
    for item in items:
        if isinstance(item, MessageItem) and isinstance(item.content, list):
            for part in item.content:
                if isinstance(part, TextPart):
                    part.logprobs = None
    return items


def messages_of(instructions: str | None, items: Sequence[Item], first: int = 0) -> list[dict[str, Any]]:
    """The messages that items stand for. What the model said in one go is one message.

    `first`: number of the first item of this request, before which there are those of earlier ones. Raises
    RequestError.
    """
    talk = _Talk()
    for number, item in enumerate(items, -first):
        where = f"input[{number}]" if number >= 0 else "previous_response_id"
        match item:
            case MessageItem(role="assistant"):
                talk.say(_text(item.content))
            case MessageItem():
                talk.hear("user" if item.role == "user" else "system", _text(item.content))
            case ReasoningItem():
                try:
                    talk.think(item.text)
                except ValueError as fault:
                    raise RequestError(where, f"{where}.encrypted_content cannot be read: {fault}") from None
            case FunctionCallItem():
                talk.call(item.call_id, item.name, item.arguments)
            case FunctionCallOutputItem():
                talk.result(where, item.call_id, _text(item.output))
    return _led_by(instructions, talk.messages)


class _Talk:
    """Messages under construction."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        self._own: dict[str, Any] | None = None  # the model's message that still grows

    def hear(self, role: str, text: str) -> None:
        """The other side speaks."""
        self._own = None
        self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """The model thinks, which begins a message."""
        self._turn()["reasoning_content"] = text

    def say(self, text: str) -> None:
        """The model speaks: after thinking in the same message."""
        own = self._own if self._own is not None and not ({"content", "tool_calls"} & self._own.keys()) else None
        (self._turn() if own is None else own)["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """The model calls a tool: in the message that it has begun."""
        self._names[call_id] = name
        own = self._turn() if self._own is None else self._own
        function = {"name": name, "arguments": arguments}
        own.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def result(self, where: str, call_id: str, text: str) -> None:
        """A tool answers. Raises RequestError when nobody called it."""
        if call_id not in self._names:
            raise RequestError(where, f"{where}.call_id {call_id[:80]!r} is of no function_call before it")
        self._own = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": self._names[call_id], "content": text})

    def _turn(self) -> dict[str, Any]:
        self._own = {"role": "assistant"}
        self.messages.append(self._own)
        return self._own


def _led_by(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and the system messages that follow them as one: many templates know only one, and only first."""
    leading = [] if instructions is None else [instructions]
    rest = 0
    while rest < len(messages) and messages[rest]["role"] == "system":
        leading.append(messages[rest]["content"])
        rest += 1
    opening = [{"role": "system", "content": "\n\n".join(leading)}] if leading else []
    return [*opening, *({"content": "", **message} for message in messages[rest:])]


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
