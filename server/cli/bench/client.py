"""One measured request: a streamed POST whose events are timed when their bytes arrive, not when they are parsed."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from pagoda.server.cli.http_client import ApiError, message_of

REQUEST_SECONDS: Final = 6 * 3600.0


@dataclass(slots=True)
class Outcome:
    """The timing of a request, in seconds."""

    start: float = 0.0  # by time.perf_counter
    end: float = 0.0  # by time.perf_counter
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between successive pieces of the answer
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""  # why it failed; the other fields are then meaningless

    @property
    def latency(self) -> float:
        """The time from the request to the last piece."""
        return self.end - self.start

    @property
    def per_token(self) -> float | None:
        """The mean time per token after the first; None if there was only one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint under load."""

    url: str  # with path
    headers: Mapping[str, str]

    async def measure(self, body: Mapping[str, Any], prompt_tokens: int) -> Outcome:
        """Send one request and time its answer.

        `prompt_tokens` is used if the answer has no usage. Errors are in the outcome.
        """
        outcome = Outcome(start=time.perf_counter(), prompt_tokens=prompt_tokens)
        try:
            async with asyncio.timeout(REQUEST_SECONDS), aclosing(self._pieces(body)) as pieces:
                async for at, piece in pieces:
                    _record(outcome, at, piece)
            if not outcome.end:
                raise ApiError("the answer is empty")
        except (ApiError, OSError, ValueError, TimeoutError, httptools.HttpParserError) as error:
            outcome.error = str(getattr(error, "strerror", None) or error) or type(error).__name__
        return outcome

    async def _pieces(self, body: Mapping[str, Any]) -> AsyncGenerator[tuple[float, dict[str, Any]], None]:
        """Yield (arrival time, event) until [DONE]. Raises ApiError, also for an error event."""
        tail = b""
        async with aclosing(self._chunks(json.dumps(body).encode())) as chunks:
            async for at, chunk in chunks:
                *events, tail = (tail + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
                for data in events:
                    text = data.removeprefix(b"data:").strip()
                    if text == b"[DONE]":
                        return
                    if not data.startswith(b"data:"):
                        continue
                    event = json.loads(text)
                    if "error" in event:
                        raise ApiError(message_of(text))
                    yield at, event
        raise ApiError("the answer ended early")

    async def _chunks(self, body: bytes) -> AsyncGenerator[tuple[float, bytes], None]:
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        transport, exchange = await asyncio.get_running_loop().create_connection(
            _Exchange, parts.hostname or "", port, ssl=secure
        )
        head = [f"POST {parts.path or '/'} HTTP/1.1", f"host: {parts.netloc.rpartition('@')[2]}"]
        head += [f"{name}: {value}" for name, value in self.headers.items()]
        head += ["content-type: application/json", f"content-length: {len(body)}", "connection: close", "", ""]
        try:
            transport.write("\r\n".join(head).encode("latin-1") + body)
            while (arrived := await exchange.arrivals.get()) is not None:
                yield arrived
            exchange.check()
        finally:
            transport.close()


class _Exchange(asyncio.Protocol):
    """The response to one request: `arrivals` has the body's pieces with their times, then None."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._error_body = b""
        self._now = 0.0

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.arrivals.put_nowait(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.arrivals.put_nowait(None)

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status == 200:
            self.arrivals.put_nowait((self._now, body))
        else:
            self._error_body += body

    def on_message_complete(self) -> None:
        self.arrivals.put_nowait(None)

    def check(self) -> None:
        """Raise ApiError if the response is an error or missing."""
        if not self._status:
            raise ApiError("the server did not answer")
        if self._status != 200:
            raise ApiError(f"{self._status}: {message_of(self._error_body)}", self._status)


def _record(outcome: Outcome, at: float, event: Mapping[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens", outcome.prompt_tokens)
        outcome.output_tokens = usage.get("completion_tokens", outcome.output_tokens)
    if not any(_has_content(choice) for choice in event.get("choices", ())):
        return
    if outcome.end:
        outcome.gaps.append(at - outcome.end)
    else:
        outcome.ttft = at - outcome.start
    outcome.end = at
    if not usage:
        outcome.output_tokens += 1


def _has_content(choice: Mapping[str, Any]) -> bool:
    """Return False for the first chat piece, which has only a role."""
    delta = choice.get("delta")
    return delta is None or "role" not in delta or bool(delta.get("content"))
