"""Build the output of POST /v1/responses: the response object and its stream events, from parsed deltas.

A non-streamed response is the `response` of the last event, so that both come from the same code.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pagoda.server.api.openai.responses.input import encode_reasoning
from pagoda.server.api.openai.responses.tools import CustomInputDecoder, OfferedTool
from pagoda.server.http.errors import UnavailableError, response_error
from pagoda.server.http.fields import TokenNames, chat_logprobs
from pagoda.server.http.generation import num_prompt_tokens
from pagoda.server.outputs import LogprobsOnePosition, RequestOutput
from pagoda.server.parsers.output_parser import DeltaParser, ParsedDelta
from pagoda.server.parsers.parser import BlockBuilder, BlockDelta, BlockEvent, BlockStart, BlockStop, OutputBlock

Event = dict[str, Any]
ItemEvent = tuple[str, Event]
"""Type and payload of an event, without sequence number and output index."""


class OutputItem(ABC):
    """An output item under construction. Its methods return the events of its changes."""

    def __init__(self, prefix: str, block: OutputBlock) -> None:
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.status = "in_progress"
        self._block = block

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the item in its current state."""

    @abstractmethod
    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        """Yield the events for text appended to the block."""

    def _content_done(self) -> ItemEvent | None:
        """Return the event for complete content; None if the API has none."""
        return None

    def start(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {"item": self.as_dict()}

    def stop(self, status: str) -> Iterator[ItemEvent]:
        """Yield the last events. `status`: "completed" or "incomplete"."""
        content_done = self._content_done()
        if content_done is not None:
            yield content_done
        self.status = status
        yield "response.output_item.done", {"item": self.as_dict()}


class _ItemWithPart(OutputItem):
    """An item with one content part."""

    _has_part = False

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [self._part()] if self._has_part else []

    @property
    def _part_index(self) -> dict[str, Any]:
        return {"item_id": self.id, "content_index": 0}

    def start(self) -> Iterator[ItemEvent]:
        yield from super().start()
        self._has_part = True
        yield "response.content_part.added", self._part_index | {"part": self._part()}

    def stop(self, status: str) -> Iterator[ItemEvent]:
        *content_done, item_done = super().stop(status)
        yield from content_done
        yield "response.content_part.done", self._part_index | {"part": self._part()}
        yield item_done


class _MessageOutput(_ItemWithPart):
    def __init__(self, block: OutputBlock) -> None:
        super().__init__("msg", block)
        self._logprobs: list[dict[str, Any]] = []

    def as_dict(self) -> dict[str, Any]:
        status = self.status
        content = self._content
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
            "phase": None,
        }

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        self._logprobs += logprobs
        yield "response.output_text.delta", self._part_index | {"delta": text, "logprobs": logprobs}

    def _part(self) -> dict[str, Any]:
        text = self._block.text
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _content_done(self) -> ItemEvent:
        payload = {"text": self._block.text, "logprobs": list(self._logprobs)}
        return "response.output_text.done", self._part_index | payload


class _ReasoningOutput(_ItemWithPart):
    def __init__(self, block: OutputBlock, *, encrypted_content: bool) -> None:
        super().__init__("rs", block)
        self._encrypted_content = encrypted_content

    def as_dict(self) -> dict[str, Any]:
        encrypts = self._encrypted_content and self.status != "in_progress"
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self._content,
            "encrypted_content": encode_reasoning(self._block.text) if encrypts else None,
            "status": self.status,
        }

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        yield "response.reasoning_text.delta", self._part_index | {"delta": text}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._block.text}

    def _content_done(self) -> ItemEvent:
        return "response.reasoning_text.done", self._part_index | {"text": self._block.text}


class _CallOutput(OutputItem):
    """A call of a tool; `tool` is None for a function that was not offered."""

    def __init__(self, prefix: str, block: OutputBlock, tool: OfferedTool | None) -> None:
        super().__init__(prefix, block)
        self._call_id = block.call_id or f"call_{uuid.uuid4().hex}"
        self._name = block.name if tool is None else tool.name
        self._namespace = None if tool is None else tool.namespace

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        """Yield nothing: the API has no events for the parts of most calls."""
        yield from ()


class _FunctionCallOutput(_CallOutput):
    def __init__(self, block: OutputBlock, tool: OfferedTool | None) -> None:
        super().__init__("fc", block, tool)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "namespace": self._namespace,
            "caller": None,
            "arguments": self._block.text,
            "status": self.status,
        }

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        yield "response.function_call_arguments.delta", {"item_id": self.id, "delta": text}

    def _content_done(self) -> ItemEvent:
        payload = {"item_id": self.id, "name": self._name, "arguments": self._block.text}
        return "response.function_call_arguments.done", payload


class _CustomToolCallOutput(_CallOutput):
    def __init__(self, block: OutputBlock, tool: OfferedTool) -> None:
        super().__init__("ctc", block, tool)
        self._input = CustomInputDecoder()

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "custom_tool_call",
            "call_id": self._call_id,
            "name": self._name,
            "namespace": self._namespace,
            "caller": None,
            "input": self._input.text,
            "status": self.status,
        }

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        yield from self._added(self._input.feed(text))

    def stop(self, status: str) -> Iterator[ItemEvent]:
        yield from self._added(self._input.finish())
        yield from super().stop(status)

    def _added(self, text: str) -> Iterator[ItemEvent]:
        if text:
            yield "response.custom_tool_call_input.delta", {"item_id": self.id, "delta": text}

    def _content_done(self) -> ItemEvent:
        return "response.custom_tool_call_input.done", {"item_id": self.id, "input": self._input.text}


class _LocalShellCallOutput(_CallOutput):
    """A command to run. The API has no events for its parts."""

    def __init__(self, block: OutputBlock, tool: OfferedTool) -> None:
        super().__init__("lsh", block, tool)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "local_shell_call",
            "call_id": self._call_id,
            "action": _shell_action(self._block.text if self.status != "in_progress" else ""),
            "status": self.status,
        }


class _ToolSearchCallOutput(_CallOutput):
    """A search that the client runs. The API has no events for its parts."""

    def __init__(self, block: OutputBlock, tool: OfferedTool) -> None:
        super().__init__("tsc", block, tool)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "tool_search_call",
            "call_id": self._call_id,
            "execution": "client",
            "arguments": _object_of(self._block.text),
            "status": self.status,
        }


def _object_of(arguments: str) -> dict[str, Any]:
    """Return the JSON object; an empty one for other text."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _shell_action(arguments: str) -> dict[str, Any]:
    """Return the action of a local_shell_call. A command that is one text is run by a shell."""
    command_arguments = _object_of(arguments)
    command, directory, timeout, env = (
        command_arguments.get(key) for key in ("command", "working_directory", "timeout_ms", "env")
    )
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    return {
        "type": "exec",
        "command": [str(word) for word in command] if isinstance(command, list) else [],
        "timeout_ms": timeout if isinstance(timeout, int | float) else None,
        "working_directory": directory if isinstance(directory, str) else None,
        "env": {str(key): str(value) for key, value in env.items()} if isinstance(env, dict) else {},
        "user": None,
    }


_CALLS: Final[Mapping[str, Callable[[OutputBlock, OfferedTool], OutputItem]]] = {
    "custom": _CustomToolCallOutput,
    "local_shell": _LocalShellCallOutput,
    "tool_search": _ToolSearchCallOutput,
}


def _item_of(block: OutputBlock, view: ResponseView) -> OutputItem:
    match block.kind:
        case "call":
            tool = view.tools.get(block.name or "")
            if tool is None or tool.kind == "function":
                return _FunctionCallOutput(block, tool)
            return _CALLS[tool.kind](block, tool)
        case "reasoning":
            return _ReasoningOutput(block, encrypted_content=view.encrypted_content)
        case "text":
            return _MessageOutput(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseView:
    """Which optional parts a response includes."""

    reasoning: bool = True
    encrypted_content: bool = False  # Whether reasoning items have encrypted content.
    logprobs: int | None = None  # Number of alternatives per token; None: no logprobs.
    names: TokenNames
    tools: Mapping[str, OfferedTool] = field(default_factory=dict)  # Name of the offered function -> tool.


class ResponsesBuilder:
    """Builds one response. Implements ResponseBuilder."""

    def __init__(
        self,
        fixed: dict[str, Any],  # Fields that do not change while the response is generated.
        parser: DeltaParser,
        view: ResponseView,
    ) -> None:
        self._fixed = fixed
        self._parser = parser
        self._view = view
        self.on_end: Callable[[], None] = lambda: None  # It is called once, however the response ends.
        self._blocks = BlockBuilder()
        self._items: list[OutputItem] = []
        self._logprobs: list[dict[str, Any]] = []  # Log-probabilities of text that no event has reported yet.
        self._num_events = 0
        self._usage: dict[str, Any] | None = None
        self._output_tokens = 0
        self._error: dict[str, Any] | None = None
        self._incomplete: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self.status = "queued" if fixed["background"] else "in_progress"

    @property
    def response(self) -> dict[str, Any]:
        """The response in its current state."""
        return self._fixed | {
            "status": self.status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "completed_at": self._completed_at,
            "output": [item.as_dict() for item in self._items],
            "usage": self._usage,
        }

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "in_progress")

    def queued(self) -> Iterator[Event]:
        """Yield the first events of a background response."""
        yield self._response_event("response.created")
        yield self._response_event("response.queued")

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        if self._usage is None:
            yield from self._start()
        self._count(output)
        for completion in output.outputs:
            for delta in self._parser.feed(completion):
                yield from self._apply(delta)
            if completion.finish_reason is not None:
                yield from self._end(completion.finish_reason)

    def usage_chunk(self) -> Event | None:
        """Return None: the last event includes the usage."""
        return None

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        for _ in self.chunks(prompt_index, output):
            pass

    def whole(self) -> dict[str, Any]:
        return self.response

    def fail(self, error: BaseException) -> Iterator[Event]:
        """Mark the response failed and yield the final events; none if it has ended already."""
        if self.ended:
            return
        if self._usage is None:
            yield from self._start()
        yield from self._close("failed", error=response_error(error))

    def cancel(self) -> None:
        """Mark the response cancelled; the API has no event for it."""
        if not self.ended:
            for _ in self._item_events(self._blocks.finish(), "incomplete"):
                pass
            self._finish("cancelled")

    def _start(self) -> Iterator[Event]:
        self.status = "in_progress"
        if not self._num_events:
            yield self._response_event("response.created")
        yield self._response_event("response.in_progress")

    def _count(self, output: RequestOutput) -> None:
        prompt = num_prompt_tokens(output)
        cached = output.num_cached_tokens or 0
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + self._output_tokens,
        }

    def _apply(self, delta: ParsedDelta) -> Iterator[Event]:
        self._logprobs += self._logprob_entries(delta.logprobs)
        yield from self._item_events(self._blocks.feed(delta.events))

    def _logprob_entries(self, positions: list[LogprobsOnePosition]) -> list[dict[str, Any]]:
        count = self._view.logprobs
        return [] if count is None else chat_logprobs(positions, count, self._view.names)

    def _item_events(self, events: Iterable[BlockEvent], status: str = "completed") -> Iterator[Event]:
        """Yield the stream events of block events. `status`: of items that end."""
        for event in events:
            block = event.block
            if isinstance(event, BlockStart) and block.kind != "text":
                self._logprobs = []
            if block.kind == "reasoning" and not self._view.reasoning:
                continue
            match event:
                case BlockStart():
                    self._items.append(_item_of(block, self._view))
                    item_events: Iterable[ItemEvent] = self._items[-1].start()
                case BlockDelta(_, text):
                    item_events = self._items[-1].delta(text, self._take_logprobs() if block.kind == "text" else [])
                case BlockStop():
                    item_events = self._items[-1].stop(status)
            for kind, payload in item_events:
                yield self._event(kind, {"output_index": len(self._items) - 1} | payload)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        logprobs = self._logprobs
        self._logprobs = []
        return logprobs

    def _end(self, finish_reason: str) -> Iterator[Event]:
        match finish_reason:
            case "stop":
                self._completed_at = int(time.time())
                yield from self._close("completed")
            case "length":
                yield from self._close("incomplete", incomplete={"reason": "max_output_tokens"})
            case _:
                error = UnavailableError("the server ended the response before it was complete")
                yield from self._close("failed", error=response_error(error))

    def _close(
        self, status: str, *, error: dict[str, Any] | None = None, incomplete: dict[str, Any] | None = None
    ) -> Iterator[Event]:
        item_status = "completed" if status == "completed" else "incomplete"
        if self._usage is not None:  # Without any output there is no item.
            yield from self._item_events(self._blocks.finish(), item_status)
        self._error = error
        self._incomplete = incomplete
        self._finish(status)
        yield self._response_event(f"response.{status}")

    def _finish(self, status: str) -> None:
        self.status = status
        if self._usage is not None:
            self._usage["output_tokens_details"] = {"reasoning_tokens": self._parser.reasoning_tokens}
        self.on_end()

    def _response_event(self, kind: str) -> Event:
        return self._event(kind, {"response": self.response})

    def _event(self, kind: str, payload: dict[str, Any]) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number} | payload
