"""Answers of POST /v1/responses: a response that grows, and the events that tell of it.

The whole answer is the `response` of the last event, so that both come from the same code.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pagoda.server.http.fields.errors import http_error
from pagoda.server.http.fields.logprobs import TokenNames, chat_logprobs
from pagoda.server.openai.responses.input import sealed
from pagoda.server.outputs import LogprobsOnePosition, RequestOutput
from pagoda.server.parsers.blocks import BlockDelta, BlockStart, BlockStop, Change, Section, Sections
from pagoda.server.parsers.reader import AnswerText, ParsedDelta

# Output items of a response that grow: messages, reasoning and function calls, and the events that tell of each.

Told = tuple[str, dict[str, Any]]
"""Type of an event, and what it says beside its number and the place of the item."""


def item_of(section: Section, *, seals: bool) -> OutputItem:
    """The item for a section. `seals`: reasoning gets an `encrypted_content`."""
    match section.kind:
        case "call":
            return _Call(section)
        case "reasoning":
            return _Reasoning(section, seals=seals)
        case "text":
            return _Message(section)


class OutputItem(ABC):
    """An item of a response's output."""

    def __init__(self, prefix: str, section: Section) -> None:
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.status = "in_progress"
        self._section = section

    @abstractmethod
    def shown(self) -> dict[str, Any]:
        """The item as it stands."""

    @abstractmethod
    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Told]:
        """It goes on."""

    @abstractmethod
    def _done(self) -> Told:
        """What it says is complete."""

    def opened(self) -> Iterator[Told]:
        """It begins."""
        yield "response.output_item.added", {"item": self.shown()}

    def closed(self, status: str) -> Iterator[Told]:
        """It is whole, or cut."""
        yield self._done()
        self.status = status
        yield "response.output_item.done", {"item": self.shown()}


class _WithPart(OutputItem):
    """An item with one content part."""

    _has_part = False

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [self._part()] if self._has_part else []

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "content_index": 0}

    def opened(self) -> Iterator[Told]:
        """It begins, and so does its part."""
        yield from super().opened()
        self._has_part = True
        yield "response.content_part.added", self._place | {"part": self._part()}

    def closed(self, status: str) -> Iterator[Told]:
        """It is whole, or cut, and so is its part."""
        done, last = super().closed(status)
        yield done
        yield "response.content_part.done", self._place | {"part": self._part()}
        yield last


class _Message(_WithPart):
    """Text for the user."""

    def __init__(self, section: Section) -> None:
        super().__init__("msg", section)
        self._logprobs: list[dict[str, Any]] = []

    def shown(self) -> dict[str, Any]:
        status, content = self.status, self._content
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Told]:
        self._logprobs += logprobs
        yield "response.output_text.delta", self._place | {"delta": text, "logprobs": logprobs}

    def _part(self) -> dict[str, Any]:
        text, logprobs = self._section.text, list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _done(self) -> Told:
        told = {"text": self._section.text, "logprobs": list(self._logprobs)}
        return "response.output_text.done", self._place | told


class _Reasoning(_WithPart):
    """Thinking."""

    def __init__(self, section: Section, *, seals: bool) -> None:
        super().__init__("rs", section)
        self._seals = seals

    def shown(self) -> dict[str, Any]:
        seals = self._seals and self.status != "in_progress"
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self._content,
            "encrypted_content": sealed(self._section.text) if seals else None,
            "status": self.status,
        }

    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Told]:
        yield "response.reasoning_text.delta", self._place | {"delta": text}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._section.text}

    def _done(self) -> Told:
        return "response.reasoning_text.done", self._place | {"text": self._section.text}


class _Call(OutputItem):
    """A call of a function."""

    def __init__(self, section: Section) -> None:
        super().__init__("fc", section)
        self._call_id = section.call_id or f"call_{uuid.uuid4().hex}"

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._section.name,
            "arguments": self._section.text,
            "status": self.status,
        }

    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Told]:
        yield "response.function_call_arguments.delta", {"item_id": self.id, "delta": text}

    def _done(self) -> Told:
        told = {"item_id": self.id, "name": self._section.name, "arguments": self._section.text}
        return "response.function_call_arguments.done", told


Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseView:
    """What of an answer is shown. `logprobs`: how many candidates beside each token; None: no log-probabilities."""

    reasoning: bool = True
    sealed: bool = False
    logprobs: int | None = None
    names: TokenNames


class ResponseAnswer:
    """One response. Implements ResponseBuilder.

    `head`: the fields that the request decides. `on_end` hears when the response has ended, whichever way.
    """

    def __init__(self, head: dict[str, Any], text: AnswerText, view: ResponseView) -> None:
        self._head = head
        self._text = text
        self._view = view
        self.on_end: Callable[[], None] = lambda: None
        self._sections = Sections()
        self._items: list[OutputItem] = []
        self._logprobs: list[dict[str, Any]] = []  # of text that is not out yet
        self._numbers = 0
        self._usage: dict[str, Any] | None = None
        self._output_tokens = 0
        self._error: dict[str, Any] | None = None
        self._incomplete: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self.status = "queued" if head["background"] else "in_progress"

    @property
    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        return self._head | {
            "status": self.status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "completed_at": self._completed_at,
            "output": [item.shown() for item in self._items],
            "usage": self._usage,
        }

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.status not in ("queued", "in_progress")

    def queued(self) -> Iterator[Event]:
        """The first events of a response in the background."""
        yield self._of_response("response.created")
        yield self._of_response("response.queued")

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        """What an output adds, as events."""
        if self._usage is None:
            yield from self._begin()
        self._count(output)
        for completion in output.outputs:
            for said in self._text.take(completion):
                yield from self._say(said)
            if completion.finish_reason is not None:
                yield from self._end(completion.finish_reason)

    def usage_chunk(self) -> Event | None:
        """None: the last event has the usage."""
        return None

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in, for `whole`."""
        for _ in self.chunks(prompt_index, output):
            pass

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        return self.response

    def fail(self, error: BaseException) -> Iterator[Event]:
        """An error cuts the response off."""
        if self.ended:
            return
        if not self._numbers:
            yield from self._begin()
        told = http_error(error)
        code = "rate_limit_exceeded" if told.status == 429 else "server_error"
        yield from self._close("failed", error={"code": code, "message": told.message})

    def cancel(self) -> None:
        """The client has had enough. There is no event that says so."""
        if not self.ended:
            for _ in self._change(self._sections.finish(), "incomplete"):
                pass
            self._finish("cancelled")

    def _begin(self) -> Iterator[Event]:
        self.status = "in_progress"
        if not self._numbers:
            yield self._of_response("response.created")
        yield self._of_response("response.in_progress")

    def _count(self, output: RequestOutput) -> None:
        prompt, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + self._output_tokens,
        }

    def _say(self, said: ParsedDelta) -> Iterator[Event]:
        self._logprobs += self._entries(said.logprobs)
        yield from self._change(self._sections.take(said.events))

    def _entries(self, positions: list[LogprobsOnePosition]) -> list[dict[str, Any]]:
        count = self._view.logprobs
        return [] if count is None else chat_logprobs(positions, count, self._view.names)

    def _change(self, changes: Iterable[Change], status: str = "completed") -> Iterator[Event]:
        """Events of changes. `status`: of what is closed."""
        for change in changes:
            section = change.section
            if isinstance(change, BlockStart) and section.kind != "text":
                self._logprobs = []
            if section.kind == "reasoning" and not self._view.reasoning:
                continue
            match change:
                case BlockStart():
                    self._items.append(item_of(section, seals=self._view.sealed))
                    told = self._items[-1].opened()
                case BlockDelta(_, text):
                    told = self._items[-1].grown(text, self._taken() if section.kind == "text" else [])
                case BlockStop():
                    told = self._items[-1].closed(status)
            for kind, payload in told:
                yield self._event(kind, {"output_index": len(self._items) - 1} | payload)

    def _taken(self) -> list[dict[str, Any]]:
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _end(self, finish_reason: str) -> Iterator[Event]:
        match finish_reason:
            case "stop":
                self._completed_at = int(time.time())
                yield from self._close("completed")
            case "length":
                yield from self._close("incomplete", incomplete={"reason": "max_output_tokens"})
            case _:
                error = {"code": "server_error", "message": "the server ended the response before it was complete"}
                yield from self._close("failed", error=error)

    def _close(
        self, status: str, *, error: dict[str, Any] | None = None, incomplete: dict[str, Any] | None = None
    ) -> Iterator[Event]:
        whole = "completed" if status == "completed" else "incomplete"
        yield from self._change(self._sections.finish(), whole)
        self._error, self._incomplete = error, incomplete
        self._finish(status)
        yield self._of_response(f"response.{status}")

    def _finish(self, status: str) -> None:
        self.status = status
        if self._usage is not None:
            self._usage["output_tokens_details"] = {"reasoning_tokens": self._text.reasoning_tokens}
        self.on_end()

    def _of_response(self, kind: str) -> Event:
        return self._event(kind, {"response": self.response})

    def _event(self, kind: str, payload: dict[str, Any]) -> Event:
        number = self._numbers
        self._numbers += 1
        return {"type": kind, "sequence_number": number} | payload
