"""Streamed completions from a process of its own, so that what else the benchmark computes delays no measurement."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

COMPLETIONS = "/v1/completions"


@dataclass
class Answer:
    """What a client saw of one request. Times are monotonic seconds."""

    status: int = 0  # HTTP status; 0: no response
    begin: float = 0.0
    first: float = 0.0  # the first event with a token
    end: float = 0.0
    tokens: int = 0  # events with a choice
    finished: str = ""  # finish_reason
    done: bool = False  # [DONE], or the whole body of an answer that is not streamed
    error: str = ""  # the error of an event or of a body
    cut: str = ""  # how the connection ended, if it was cut
    retry_after: bool = False
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (when it ended, seconds)
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether the client knows how its request ended."""
        return self.done or bool(self.error) or self.status >= 400


async def ask(
    port: int,
    body: dict[str, Any],
    *,
    path: str = COMPLETIONS,
    key: str = "",
    timeout: float = 600.0,
    cut_after: int = 0,
    measure_gaps: bool = False,
) -> Answer:
    """Send one request. `cut_after`: number of tokens after which the client disconnects. Never raises."""
    answer = Answer(begin=time.monotonic())
    writer = None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
            head += f"authorization: Bearer {key}\r\n" if key else ""
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            with suppress(ConnectionError):
                await writer.drain()
            await _read_head(reader, answer)
            if body.get("stream") and answer.status == 200:
                await _read_events(reader, answer, cut_after, measure_gaps)
            else:
                _read_body(await reader.read(), answer)
    except TimeoutError:
        answer.cut = "timeout"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.cut = f"{type(error).__name__}: {error}"[:200]
    finally:
        if writer is not None:
            writer.close()
    answer.end = time.monotonic()
    return answer


async def _read_head(reader: asyncio.StreamReader, answer: Answer) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    answer.status = int(head.split(" ", 2)[1])
    answer.retry_after = "\r\nretry-after:" in head


async def _read_events(reader: asyncio.StreamReader, answer: Answer, cut_after: int, measure_gaps: bool) -> None:
    before = 0.0
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            answer.done = True
            return
        now = time.monotonic()
        event = json.loads(line[6:])
        if "error" in event:
            answer.error = json.dumps(event["error"])[:300]
            continue
        answer.usage = event.get("usage") or answer.usage
        if not event.get("choices"):
            continue
        answer.tokens += 1
        answer.first = answer.first or now
        answer.finished = event["choices"][0].get("finish_reason") or answer.finished
        if measure_gaps and before:
            answer.gaps.append((now, now - before))
        before = now
        if cut_after and answer.tokens >= cut_after:
            return
    if not answer.error:
        answer.cut = "the connection ended before [DONE]"


def _read_body(raw: bytes, answer: Answer) -> None:
    try:
        content = json.loads(raw) if raw.startswith(b"{") else json.loads(_unchunked(raw))
    except ValueError:
        answer.error = raw[:200].decode(errors="replace") if answer.status >= 400 else ""
        answer.cut = "" if answer.status >= 400 else "the body is not complete"
        return
    if answer.status >= 400:
        answer.error = json.dumps(content.get("error", content))[:300]
        return
    answer.done = True
    answer.usage = content.get("usage") or {}
    choices = content.get("choices") or [{}]
    answer.finished = choices[0].get("finish_reason") or ""


def _unchunked(raw: bytes) -> bytes:
    """Return the body of a response with transfer-encoding: chunked."""
    parts = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size or b"0", 16)
        parts.append(raw[:length])
        raw = raw[length + 2 :]
    return b"".join(parts)


def stream_body(prompt: str = "Once upon a time", tokens: int = 1500, **fields: Any) -> dict[str, Any]:
    """Return the body of a streamed completion of exactly `tokens` tokens."""
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0} | fields


@dataclass(frozen=True)
class Gaps:
    """Gaps between the tokens of well-behaved streams."""

    worst: float  # seconds
    p99: float
    streams_failed: int
    tokens: int


class Neighbours:
    """`count` streams that run until the end, each replaced when it ends. Their process is `multiprocessing`'s."""

    def __init__(self, pipe: Connection, process: Any) -> None:
        self._pipe, self._process = pipe, process

    def gaps(self) -> Gaps:
        """Return the gaps since the last call, those that are still open included."""
        self._pipe.send("gaps")
        found = self._pipe.recv()
        assert isinstance(found, Gaps)
        return found

    def close(self) -> None:
        """End the streams and their process."""
        with suppress(OSError):
            self._pipe.send("close")
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


@contextmanager
def neighbours(port: int, count: int = 10, key: str = "") -> Iterator[Neighbours]:
    """Run well-behaved streams beside what the benchmark does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_neighbours, args=(theirs, port, count, key), daemon=True)
    process.start()
    streams = Neighbours(ours, process)
    try:
        ours.recv()  # every stream has its first token
        yield streams
    finally:
        streams.close()


def run_neighbours(
    pipe: Connection, port: int, count: int, key: str, clock: Callable[[], float] = time.monotonic
) -> None:
    """Run the streams until the other end of the pipe says `close`."""
    asyncio.run(_Neighbours(port, count, key, clock).run(pipe))


class _Neighbours:
    """The streams' side of the pipe."""

    def __init__(self, port: int, count: int, key: str, clock: Callable[[], float]) -> None:
        self._port, self._count, self._key, self._clock = port, count, key, clock
        self._last = [0.0] * count  # when each stream had its latest token
        self._gaps: list[float] = []
        self._failed = 0

    async def run(self, pipe: Connection) -> None:
        tasks = [asyncio.create_task(self._stream(i)) for i in range(self._count)]
        while not all(self._last):
            await asyncio.sleep(0.01)
        self._gaps.clear()
        pipe.send("ready")
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv) == "gaps":
            pipe.send(self._take())
        for task in tasks:
            task.cancel()

    def _take(self) -> Gaps:
        now = self._clock()
        gaps = sorted([*self._gaps, *(now - last for last in self._last)])
        result = Gaps(gaps[-1], gaps[int(len(gaps) * 0.99)], self._failed, len(self._gaps))
        self._gaps, self._failed = [], 0
        return result

    async def _stream(self, index: int) -> None:
        while True:
            try:
                await self._read_one(index)
            except (OSError, ValueError, asyncio.IncompleteReadError):
                self._failed += 1
                await asyncio.sleep(0.1)

    async def _read_one(self, index: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            data = json.dumps(stream_body(f"{index} is a number. Once upon a time")).encode()
            key = f"authorization: Bearer {self._key}\r\n" if self._key else ""
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{key}"
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(status)
            first = True
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    if b'"error"' in line[:20]:
                        raise ValueError(line)
                    now = self._clock()
                    if not first:  # the wait for a first token is a queue's, not a gap
                        self._gaps.append(now - self._last[index])
                    self._last[index], first = now, False
            raise ValueError("the connection ended")
        finally:
            writer.close()
