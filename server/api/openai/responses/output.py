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

from pagoda.server.api.openai.responses.input import McpApprovalRequestItem, encode_reasoning
from pagoda.server.api.openai.responses.tool_servers import ToolResult
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


class McpListToolsOutput(OutputItem):
    """The tools that a server lists."""

    def __init__(self, server_label: str, tools: list[dict[str, Any]]) -> None:
        super().__init__("mcpl", OutputBlock("call"))
        self._server_label = server_label
        self._tools = tools

    def as_dict(self) -> dict[str, Any]:
        tools = self._tools if self.status != "in_progress" else []
        return {
            "id": self.id,
            "type": "mcp_list_tools",
            "server_label": self._server_label,
            "tools": tools,
            "error": None,
        }

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        """Yield nothing: the list arrives as a whole."""
        yield from ()

    def start(self) -> Iterator[ItemEvent]:
        yield from super().start()
        yield "response.mcp_list_tools.in_progress", {"item_id": self.id}

    def stop(self, status: str) -> Iterator[ItemEvent]:
        yield "response.mcp_list_tools.completed", {"item_id": self.id}
        yield from super().stop(status)


class McpCallOutput(OutputItem):
    """A call that this server makes. It has no result when its block stops; `finish` adds it."""

    def __init__(self, block: OutputBlock, server_label: str, approval_request_id: str | None = None) -> None:
        super().__init__("mcp", block)
        self.server_label = server_label
        self.result: ToolResult | None = None
        self._approval_request_id = approval_request_id

    @property
    def name(self) -> str:
        return self._block.name

    @property
    def arguments(self) -> str:
        return self._block.text

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "mcp_call",
            "server_label": self.server_label,
            "name": self.name,
            "arguments": self.arguments,
            "output": None if self.result is None else self.result.output,
            "error": None if self.result is None else self.result.error,
            "approval_request_id": self._approval_request_id,
            "status": self.status,
        }

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        yield "response.mcp_call_arguments.delta", {"item_id": self.id, "delta": text}

    def start(self) -> Iterator[ItemEvent]:
        yield from super().start()
        yield "response.mcp_call.in_progress", {"item_id": self.id}

    def stop(self, status: str) -> Iterator[ItemEvent]:
        yield "response.mcp_call_arguments.done", {"item_id": self.id, "arguments": self.arguments}
        if status != "completed":
            yield from self.finish(NOT_MADE, status)

    def finish(self, result: ToolResult, status: str = "completed") -> Iterator[ItemEvent]:
        """Yield the last events of a call."""
        self.result = result
        failed = result.output is None
        self.status = "failed" if failed and status == "completed" else status
        yield f"response.mcp_call.{'failed' if failed else 'completed'}", {"item_id": self.id}
        yield "response.output_item.done", {"item": self.as_dict()}


NOT_MADE: Final = ToolResult(None, "the response ended before the call was made")


class _McpApprovalOutput(OutputItem):
    """A call that waits for the client's approval. The API has no events for its parts."""

    def __init__(self, block: OutputBlock, tool: OfferedTool) -> None:
        super().__init__("mcpr", block)
        self._server_label = tool.server_label

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "mcp_approval_request",
            "server_label": self._server_label,
            "name": self._block.name,
            "arguments": self._block.text,
        }

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        """Yield nothing."""
        yield from ()


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
    "mcp": lambda block, tool: McpCallOutput(block, tool.server_label or ""),
    "mcp_approval": _McpApprovalOutput,
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
        self._earlier_usage = (0, 0, 0)  # Prompt, cached and reasoning tokens of the rounds before this one.
        self._has_begun = False
        self._ending: str | None = None  # The status with which the response ends after calls; None: it goes on.
        self._unsent: list[tuple[OutputItem, ItemEvent]] = []  # Events of items that no output of the model has.
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
        if not self._has_begun:
            self._has_begun = True
            yield from self._start()
        for item, (kind, payload) in self._unsent:
            if item not in self._items:
                self._items.append(item)
            yield self._event(kind, {"output_index": self._items.index(item)} | payload)
        self._unsent.clear()
        if not output.outputs:
            if self._ending is not None:
                self._completed_at = int(time.time()) if self._ending == "completed" else None
                yield from self._close(self._ending, error=self._error, incomplete=self._incomplete)
            return
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

    @property
    def output_tokens(self) -> int:
        """Tokens that the model has generated in all rounds."""
        return self._output_tokens

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

    # Tools of servers: what is added here becomes a part of the response with the next output, which may be one without
    # completions.

    @property
    def calls_to_make(self) -> list[McpCallOutput]:
        """Calls of servers' tools that have no result."""
        return [item for item in self._items if isinstance(item, McpCallOutput) and item.result is None]

    @property
    def awaits_client(self) -> bool:
        """True if a call of this response is the client's: to make, or to approve."""
        return any(isinstance(item, _CallOutput | _McpApprovalOutput) for item in self._items)

    def add_listing(self, server_label: str, tools: list[dict[str, Any]]) -> None:
        """Add what a server listed."""
        item = McpListToolsOutput(server_label, tools)
        self._unsent += [(item, event) for event in (*item.start(), *item.stop("completed"))]

    def add_approved_call(self, request: McpApprovalRequestItem) -> McpCallOutput:
        """Add a call that the client approved."""
        block = OutputBlock("call", request.name, parts=[request.arguments])
        item = McpCallOutput(block, request.server_label, request.id)
        self._unsent += [(item, event) for event in (*item.start(), *item.stop("completed"))]
        return item

    def add_result(self, call: McpCallOutput, result: ToolResult) -> None:
        """Add the result of a call."""
        self._unsent += [(call, event) for event in call.finish(result)]

    def begin_round(self, parser: DeltaParser) -> None:
        """Read further outputs, of a generation that has the results of the calls in its prompt."""
        if self._usage is not None:
            cached = self._usage["input_tokens_details"]["cached_tokens"]
            reasoning = self._earlier_usage[2] + self._parser.reasoning_tokens
            self._earlier_usage = (self._usage["input_tokens"], cached, reasoning)
        self._parser = parser
        self._blocks = BlockBuilder(may_be_empty=True)
        self._logprobs = []

    @property
    def has_results(self) -> bool:
        """Whether a call was made."""
        return any(isinstance(item, McpCallOutput) and item.result is not None for item in self._items)

    def fail_after_calls(self, error: BaseException) -> None:
        """End a response with an error, and with the calls that were made."""
        self._ending = "failed"
        self._error = response_error(error)

    def end_after_calls(self, reason: str | None) -> None:
        """End a response whose last output was calls. `reason`: why it is incomplete; None: it is complete."""
        self._ending = "completed" if reason is None else "incomplete"
        self._incomplete = None if reason is None else {"reason": reason}

    def _start(self) -> Iterator[Event]:
        self.status = "in_progress"
        if not self._num_events:
            yield self._response_event("response.created")
        yield self._response_event("response.in_progress")

    def _count(self, output: RequestOutput) -> None:
        earlier_prompt, earlier_cached, _ = self._earlier_usage
        prompt = num_prompt_tokens(output) + earlier_prompt
        cached = (output.num_cached_tokens or 0) + earlier_cached
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
            case "stop" if self.calls_to_make:
                yield from self._item_events(self._blocks.finish())  # The response goes on with their results.
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
        for call in self.calls_to_make:
            for kind, payload in call.finish(NOT_MADE, item_status):
                yield self._event(kind, {"output_index": self._items.index(call)} | payload)
        self._error = error
        self._incomplete = incomplete
        self._finish(status)
        yield self._response_event(f"response.{status}")

    def _finish(self, status: str) -> None:
        self.status = status
        if self._usage is not None:
            reasoning = self._earlier_usage[2] + self._parser.reasoning_tokens
            self._usage["output_tokens_details"] = {"reasoning_tokens": reasoning}
        self.on_end()

    def _response_event(self, kind: str) -> Event:
        return self._event(kind, {"response": self.response})

    def _event(self, kind: str, payload: dict[str, Any]) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number} | payload
