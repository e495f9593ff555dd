"""One measured request: a streamed POST whose events are timed when their bytes arrive, not when somebody reads them.

Knows HTTP and OpenAI's events. Does not know why the request is made.
"""

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
    """What a request came to. Times in seconds: `began` and `ended` of time.perf_counter, the others durations.

    `gaps`: between successive pieces of the answer. `error`: why it failed; its other figures then say nothing.
    """

    began: float = 0.0
    ended: float = 0.0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def latency(self) -> float:
        """Request sent to last piece received."""
        return self.ended - self.began

    @property
    def per_token(self) -> float | None:
        """Mean time per token after the first; None when there was only one."""
        return (self.latency - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `url`: with its path."""

    url: str
    headers: Mapping[str, str]

    async def measure(self, body: Mapping[str, Any], prompt_tokens: int) -> Outcome:
        """Send one request and time its answer; a failure is an outcome too. `prompt_tokens`: if it is not told."""
        outcome = Outcome(began=time.perf_counter(), prompt_tokens=prompt_tokens)
        try:
            async with asyncio.timeout(REQUEST_SECONDS), aclosing(self._pieces(body)) as pieces:
                async for at, piece in pieces:
                    _take(outcome, at, piece)
            if not outcome.ended:
                raise ApiError("the answer is empty")
        except (ApiError, OSError, ValueError, TimeoutError, httptools.HttpParserError) as error:
            outcome.error = str(getattr(error, "strerror", None) or error) or type(error).__name__
        return outcome

    async def _pieces(self, body: Mapping[str, Any]) -> AsyncGenerator[tuple[float, dict[str, Any]], None]:
        """(arrival, event) until [DONE]. Raises ApiError, also for an error inside the stream."""
        rest = b""
        async with aclosing(self._chunks(json.dumps(body).encode())) as chunks:
            async for at, chunk in chunks:
                *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
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
        raise ApiError("the answer broke off")

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
    """The answer to one request: `arrivals` of its body with their times, then None."""

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
        """Raise ApiError when the answer is an error, or none."""
        if not self._status:
            raise ApiError("the server gave no answer")
        if self._status != 200:
            raise ApiError(f"{self._status}: {message_of(self._error_body)}", self._status)


def _take(outcome: Outcome, at: float, event: Mapping[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens", outcome.prompt_tokens)
        outcome.output_tokens = usage.get("completion_tokens", outcome.output_tokens)
    if not any(_says_something(choice) for choice in event.get("choices", ())):
        return
    if outcome.ended:
        outcome.gaps.append(at - outcome.ended)
    else:
        outcome.first = at - outcome.began
    outcome.ended = at
    if not usage:
        outcome.output_tokens += 1


def _says_something(choice: Mapping[str, Any]) -> bool:
    """False for the piece of a chat that only names the role of the answer."""
    delta = choice.get("delta")
    return delta is None or "role" not in delta or bool(delta.get("content"))
