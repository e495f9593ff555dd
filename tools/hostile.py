"""Send hostile requests to a running server during a stream, and measure how long the stream and /health stall.

    python tools/hostile.py http://127.0.0.1:8000 [--pid PID] [--only NAME] [--json FILE]

Each row: status, seconds to the response, its size, the longest gap between two events of a concurrent stream, the
longest wait for /health, and with --pid the peak growth of the process's memory.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, TOKENIZE = "/v1/messages", "/tokenize"

MIB = 1 << 20


@dataclass(frozen=True)
class Hostile:
    """A request body and its path."""

    path: str
    body: Callable[[], bytes]


def _filled(head: str, item: str, tail: str, size: int) -> Callable[[], bytes]:
    """Repeat `item`, separated by commas, up to `size` bytes."""
    return lambda: (head + ",".join([item] * (size // (len(item) + 1))) + tail).encode()


def _keys(head: str, value: str, tail: str, count: int) -> Callable[[], bytes]:
    return lambda: (head + ",".join(f'"{key}":{value}' for key in range(count)) + tail).encode()


_MESSAGES = '"messages":[{"role":"user","content":"a"}],"max_tokens":1'
_MESSAGE = '{"role":"user","content":"a"}'
_TOOL = '{"type":"function","function":{"name":"f","parameters":{}}}'

BODIES: dict[str, Hostile] = {
    "a plain request": Hostile(COMPLETIONS, lambda: b'{"prompt":"a","max_tokens":1}'),
    "wrong stop_token_ids": Hostile(COMPLETIONS, _filled('{"prompt":"a","stop_token_ids":[', '""', "]}", 6 * MIB)),
    "wrong stop_token_ids, chat": Hostile(CHAT, _filled("{" + _MESSAGES + ',"stop_token_ids":[', '""', "]}", 6 * MIB)),
    "wrong logit_bias": Hostile(COMPLETIONS, _keys('{"prompt":"a","logit_bias":{', '""', "}}", 500_000)),
    "unknown fields": Hostile(COMPLETIONS, _keys('{"prompt":"a",', "0", "}", 500_000)),
    "wrong messages": Hostile(CHAT, _filled('{"messages":[', "0", "]}", 6 * MIB)),
    "messages without role": Hostile(CHAT, _filled('{"messages":[', "{}", "]}", 6 * MIB)),
    "wrong parts": Hostile(CHAT, _filled('{"messages":[{"role":"user","content":[', "0", "]}]}", 6 * MIB)),
    "wrong tools": Hostile(CHAT, _filled("{" + _MESSAGES + ',"tools":[', "0", "]}", 6 * MIB)),
    "wrong input items": Hostile(RESPONSES, _filled('{"input":[', "0", "]}", 6 * MIB)),
    "empty input items": Hostile(RESPONSES, _filled('{"input":[', "{}", "]}", 6 * MIB)),
    "wrong messages, messages": Hostile(MESSAGES, _filled('{"max_tokens":1,"messages":[', "0", "]}", 6 * MIB)),
    "wrong prompts": Hostile(COMPLETIONS, _filled('{"prompt":[', "null", "]}", 30 * MIB)),
    "text of 30 M": Hostile(COMPLETIONS, _filled('{"max_tokens":1,"prompt":"', "word and word", '"}', 30_000_000)),
    "one word of 30 M": Hostile(COMPLETIONS, lambda: b'{"max_tokens":1,"prompt":"' + b"a" * 30_000_000 + b'"}'),
    "text of 30 M, cut": Hostile(
        COMPLETIONS, _filled('{"max_tokens":1,"truncate_prompt_tokens":8,"prompt":"', "word and", '"}', 30_000_000)
    ),
    "text of 30 M, no special": Hostile(
        COMPLETIONS, _filled('{"max_tokens":1,"add_special_tokens":false,"prompt":"', "word and", '"}', 30_000_000)
    ),
    "text of 30 M, chat": Hostile(
        CHAT, _filled('{"max_tokens":1,"messages":[{"role":"user","content":"', "word and", '"}]}', 30_000_000)
    ),
    "text of 30 M, tokenize": Hostile(TOKENIZE, _filled('{"prompt":"', "word and word", '"}', 30_000_000)),
    "4096 texts, the last too long": Hostile(
        COMPLETIONS,
        lambda: json.dumps({"prompt": ["word and " * 800] * 4095 + ["a b" * 9000], "max_tokens": 1}).encode(),
    ),
    "ids, 15 M": Hostile(COMPLETIONS, _filled('{"max_tokens":1,"prompt":[', "5", "]}", 30 * MIB)),
    "stop_token_ids, 15 M": Hostile(COMPLETIONS, _filled('{"prompt":"a","stop_token_ids":[', "5", "]}", 30 * MIB)),
    "allowed_token_ids, 15 M": Hostile(
        COMPLETIONS, _filled('{"prompt":"a","allowed_token_ids":[', "5", "]}", 30 * MIB)
    ),
    "bad_words, 7 M": Hostile(COMPLETIONS, _filled('{"prompt":"a","bad_words":[', '"b"', "]}", 30 * MIB)),
    "stop, 7 M": Hostile(COMPLETIONS, _filled('{"prompt":"a","stop":[', '"b"', "]}", 30 * MIB)),
    "logit_bias, 2 M": Hostile(COMPLETIONS, _keys('{"prompt":"a","logit_bias":{', "1", "}}", 2_000_000)),
    "messages, 1 M": Hostile(CHAT, _filled('{"max_tokens":1,"messages":[', _MESSAGE, "]}", 30 * MIB)),
    "parts, 1 M": Hostile(
        CHAT,
        _filled(
            '{"max_tokens":1,"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", 30 * MIB
        ),
    ),
    "tools, 500 k": Hostile(CHAT, _filled("{" + _MESSAGES + ',"tools":[', _TOOL, "]}", 30 * MIB)),
    "input items, 1 M": Hostile(RESPONSES, _filled('{"input":[', _MESSAGE, "]}", 30 * MIB)),
    "messages, 1 M, messages": Hostile(MESSAGES, _filled('{"max_tokens":1,"messages":[', _MESSAGE, "]}", 30 * MIB)),
    "template keywords": Hostile(
        CHAT, _filled("{" + _MESSAGES + ',"chat_template_kwargs":{"a":[', "[]", "]}}", 30 * MIB)
    ),
    "any: a tree": Hostile(COMPLETIONS, _filled('{"prompt":"a","session_id":[', "[[]]", "]}", 30 * MIB)),
    "wrong stop_token_ids, 2 M": Hostile(
        COMPLETIONS, _filled('{"prompt":"a","stop_token_ids":[', '""', "]}", 6_000_000)
    ),
    "ids, 2 M": Hostile(COMPLETIONS, _filled('{"max_tokens":1,"prompt":[', "5", "]}", 4_000_000)),
    "allowed_token_ids, 1 M": Hostile(
        COMPLETIONS, _filled('{"prompt":"a","allowed_token_ids":[', "5", "]}", 2_000_000)
    ),
    "unknown fields, 130 k": Hostile(COMPLETIONS, _keys('{"prompt":"a",', "0", "}", 130_000)),
    "logit_bias, 130 k": Hostile(COMPLETIONS, _keys('{"prompt":"a","logit_bias":{', "1", "}}", 130_000)),
    "messages without role, 130 k": Hostile(CHAT, _filled('{"messages":[', "{}", "]}", 390_000)),
    "messages, 16 k": Hostile(CHAT, _filled('{"max_tokens":1,"messages":[', _MESSAGE, "]}", 490_000)),
    "input items, 16 k": Hostile(RESPONSES, _filled('{"input":[', _MESSAGE, "]}", 490_000)),
    "empty input items, 130 k": Hostile(RESPONSES, _filled('{"input":[', "{}", "]}", 390_000)),
    "messages, 16 k, messages": Hostile(
        MESSAGES, _filled('{"model":"m","max_tokens":1,"messages":[', _MESSAGE, "]}", 490_000)
    ),
    "parts, 60 k": Hostile(
        CHAT,
        _filled(
            '{"max_tokens":1,"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", 1_600_000
        ),
    ),
    "tools, 40 k": Hostile(CHAT, _filled("{" + _MESSAGES + ',"tools":[', _TOOL, "]}", 2_300_000)),
    "template keywords, 130 k": Hostile(
        CHAT, _filled("{" + _MESSAGES + ',"chat_template_kwargs":{"a":[', "[]", "]}}", 390_000)
    ),
    "deep": Hostile(COMPLETIONS, lambda: b'{"prompt":' + b"[" * (10 * MIB) + b"]" * (10 * MIB) + b"}"),
    "schema": Hostile(
        CHAT, _keys("{" + _MESSAGES + ',"structured_outputs":{"json":{"properties":{', "{}", "}}}}", 1_000_000)
    ),
    "choices": Hostile(CHAT, _filled("{" + _MESSAGES + ',"structured_outputs":{"choice":[', '"b"', "]}}", 30 * MIB)),
}


@dataclass
class Row:
    """Measurements of one request."""

    name: str
    status: int | str = 0
    seconds: float = 0.0
    size: int = 0
    stream_gap: float = 0.0
    health_wait: float = 0.0
    memory_growth_mib: float = 0.0
    message: str = field(default="", repr=False)


class BackgroundLoad:
    """Context manager that runs a stream, a /health probe and a memory probe in threads."""

    def __init__(self, address: tuple[str, int], key: str | None, pid: int | None) -> None:
        self._address, self._headers, self._pid = address, _headers(key), pid
        self._stop = threading.Event()
        self.stream_gap = self.health_wait = 0.0
        self.memory = self._memory()
        self._first_memory = self.memory

    @property
    def memory_growth(self) -> float:
        """Peak growth of the process's memory, in MiB."""
        return (self.memory - self._first_memory) / MIB

    def __enter__(self) -> BackgroundLoad:
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._stream, self._probe, self._measure_memory)
        ]
        for thread in self._threads:
            thread.start()
        time.sleep(1.0)
        self.stream_gap = self.health_wait = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.5)
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _stream(self) -> None:
        body = json.dumps({"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True})
        while not self._stop.is_set():
            with closing(HTTPConnection(*self._address, timeout=600)) as connection:
                connection.request("POST", COMPLETIONS, body, self._headers)
                answer = connection.getresponse()
                before = time.monotonic()
                while not self._stop.is_set() and answer.readline():
                    now = time.monotonic()
                    self.stream_gap, before = max(self.stream_gap, now - before), now

    def _probe(self) -> None:
        with closing(HTTPConnection(*self._address, timeout=600)) as connection:
            while not self._stop.is_set():
                began = time.monotonic()
                connection.request("GET", "/health")
                connection.getresponse().read()
                self.health_wait = max(self.health_wait, time.monotonic() - began)
                time.sleep(0.01)

    def _measure_memory(self) -> None:
        while not self._stop.wait(0.02):
            self.memory = max(self.memory, self._memory())

    def _memory(self) -> int:
        if self._pid is None:
            return 0
        return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1]) * 4096


def _headers(key: str | None) -> dict[str, str]:
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})


def send(address: tuple[str, int], name: str, key: str | None, pid: int | None) -> Row:
    """Send one body during a stream."""
    row, hostile = Row(name), BODIES[name]
    body = hostile.body()
    with BackgroundLoad(address, key, pid) as load, closing(HTTPConnection(*address, timeout=600)) as connection:
        began = time.monotonic()
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before the body was complete
                connection.request("POST", hostile.path, body, _headers(key))
            answer = connection.getresponse()
            text = answer.read()
            row.status, row.size, row.message = answer.status, len(text), text[:200].decode(errors="replace")
        except (OSError, HTTPException) as error:
            row.status, row.message = type(error).__name__, str(error)
        row.seconds = time.monotonic() - began
    row.stream_gap, row.health_wait = load.stream_gap, load.health_wait
    row.memory_growth_mib = load.memory_growth
    return row


@contextmanager
def _sockets(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    opened = [socket.create_connection(address, timeout=30) for _ in range(count)]
    try:
        yield opened
    finally:
        for each in opened:
            each.close()


def headers(address: tuple[str, int], pid: int | None, count: int = 250, size: int = 4 * MIB) -> Row:
    """Open `count` connections, each with an unfinished header of `size` bytes."""
    row = Row(f"{count} headers of {size} bytes")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * size
    with BackgroundLoad(address, None, pid) as load, _sockets(address, count) as opened:
        began = time.monotonic()
        cut = 0
        for each in opened:
            try:
                each.sendall(head)
            except OSError:
                cut += 1
        row.seconds, row.status = time.monotonic() - began, f"{cut} cut"
        time.sleep(0.5)
    row.stream_gap, row.health_wait = load.stream_gap, load.health_wait
    row.memory_growth_mib = load.memory_growth
    return row


def main() -> int:
    """Send all requests and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--key")
    parser.add_argument("--only", action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    url = urlsplit(args.url)
    address = (url.hostname or "127.0.0.1", url.port or 8000)
    rows: list[Row] = []
    tasks: dict[str, Callable[[], Row]] = {
        name: (lambda name=name: send(address, name, args.key, args.pid)) for name in BODIES
    }
    tasks["headers"] = lambda: headers(address, args.pid)
    print(f"{'request':34} {'status':>9} {'seconds':>8} {'bytes':>7} {'gap':>6} {'health':>7} {'MiB':>6}")
    for name in args.only or tasks:
        row = tasks[name]()
        rows.append(row)
        print(
            f"{row.name:34} {row.status!s:>9} {row.seconds:8.2f} {row.size:7} {row.stream_gap:6.2f} "
            f"{row.health_wait:7.2f} {row.memory_growth_mib:6.0f}  {row.message[:110]}",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
