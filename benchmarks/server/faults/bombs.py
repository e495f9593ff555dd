"""Requests that are out of proportion, each with well-behaved streams beside it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from faults.report import Options, Report
from faults.server import CACHE, HealthProbe, MemoryProbe, Server, serving
from faults.streams import Neighbours, neighbours

MIB: Final = 1 << 20
MAX_GAP: Final = 0.5  # seconds
ANSWER_SECONDS: Final = 45.0  # that an attacker waits
MAX_GROWTH: Final = 300.0  # MB
KEYS: Final = ("key-of-the-attacker", "key-of-a-neighbour")
VOCAB: Final = 49_152  # of SmolLM2

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


@dataclass(frozen=True)
class Bomb:
    """A request, sent `copies` times at once. `item`: the weakness that it uses, by its number in the list of those."""

    item: int
    name: str
    path: str
    body: Callable[[], bytes]
    copies: int = 1


def _list(head: str, item: str, tail: str, count: int) -> Callable[[], bytes]:
    return lambda: (head + ",".join([item] * count) + tail).encode()


def _numbered(head: str, item: str, tail: str, count: int) -> Callable[[], bytes]:
    """Return `count` items in which % is replaced by their number."""
    return lambda: (head + ",".join(item.replace("%", str(i)) for i in range(count)) + tail).encode()


def _template(expression: str, **other: object) -> Callable[[], bytes]:
    """Return a chat request that renders an expression of a list: 60 levels, each with the one below it twice."""
    build = "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template": build + expression}
    return lambda: json.dumps(body | other).encode()


_MESSAGE = '{"role":"user","content":"a"}'
_LONG = "word and word "

BOMBS: Final = (
    Bomb(1, "wrong elements, 6 MB", COMPLETIONS, _list('{"prompt":"a","stop_token_ids":[', '""', "]}", 2_000_000)),
    Bomb(1, "wrong messages, 6 MB", CHAT, _list('{"messages":[', "{}", "]}", 2_000_000)),
    Bomb(1, "unknown fields, 6 MB", COMPLETIONS, _numbered('{"prompt":"a",', '"f%":0', "}", 500_000)),
    Bomb(2, "a prompt of 30 M characters", COMPLETIONS, lambda: _text('{"max_tokens":1,"prompt":"', '"}')),
    Bomb(2, "one word of 30 M characters", COMPLETIONS, lambda: _text('{"max_tokens":1,"prompt":"', '"}', "a")),
    Bomb(2, "30 M characters, chat", CHAT, lambda: _text('{"messages":[{"role":"user","content":"', '"}]}')),
    Bomb(2, "30 M characters, tokenize", "/tokenize", lambda: _text('{"prompt":"', '"}')),
    Bomb(4, "logit_bias of 49k ids, n = 256", COMPLETIONS, lambda: _edits("logit_bias")),
    Bomb(4, "allowed_token_ids of 49k, n = 256", COMPLETIONS, lambda: _edits("allowed_token_ids")),
    Bomb(4, "bad_words, 20k, n = 256", COMPLETIONS, lambda: _edits("bad_words")),
    Bomb(4, "n = 16384", COMPLETIONS, lambda: b'{"prompt":"a","n":16384,"max_tokens":64,"ignore_eos":true}'),
    Bomb(
        6,
        "a batch of 1,000 chats",
        "/v1/chat/completions/batch",
        _list('{"max_tokens":1,"messages":[', '[{"role":"user","content":"' + _LONG * 100 + '"}]', "]}", 1000),
    ),
    Bomb(6, "5 M token ids", COMPLETIONS, _list('{"max_tokens":1,"prompt":[', "5", "]}", 5_000_000)),
    Bomb(6, "5 M token ids, detokenize", "/detokenize", _list('{"tokens":[', "5", "]}", 5_000_000)),
    Bomb(
        6, "200k messages", CHAT, _list('{"max_tokens":1,"messages":[', '{"role":"user","content":"a"}', "]}", 200_000)
    ),
    Bomb(6, "100k items", RESPONSES, _list('{"input":[', _MESSAGE, "]}", 100_000)),
    *(
        Bomb(8, f"template: {name}", CHAT, _template(expression))
        for name, expression in {
            "tojson": "{{ ns.x | tojson }}",
            "string": "{{ ns.x | string }}",
            "pprint": "{{ ns.x | pprint }}",
            "==": "{% set other = namespace(x=[0]) %}{% for i in range(60) %}{% set other.x = [other.x, other.x] %}"
            "{% endfor %}{{ ns.x == other.x }}",
            "sort": "{{ [ns.x, ns.x] | sort }}",
            "in": "{{ [1] in ns.x or ns.x in [ns.x ~ ''] }}",
        }.items()
    ),
    Bomb(
        8,
        "template: nested chat_template_kwargs",
        CHAT,
        _template("{{ a | tojson | string | pprint }}", chat_template_kwargs={"a": [[["x"] * 1000] * 100] * 10}),
    ),
)


def _text(head: str, tail: str, words: str = _LONG) -> bytes:
    return (head + words * (30_000_000 // len(words)) + tail).encode()


def _edits(field: str) -> bytes:
    ids = range(VOCAB)
    values: dict[str, object] = {
        "logit_bias": {str(i): -1 for i in ids},
        "allowed_token_ids": list(ids),
        "bad_words": [f"w{i} x{i}" for i in range(20_000)],
    }
    fields = {"prompt": "a", "n": 256, "max_tokens": 32, "ignore_eos": True, "temperature": 1.0}
    return json.dumps(fields | {field: values[field]}).encode()


def bombs(options: Options) -> Iterator[Report]:
    """Each bomb beside ten streams: gaps of at most 0.5 s, memory of at most 300 MB more."""
    flags = [*CACHE, *(word for key in KEYS for word in ("--api-key", key))]
    log = Path(options.log_folder) / "bombs.log"
    server: Server | None = None
    try:
        for bomb in BOMBS:
            row = f"item {bomb.item}: {bomb.name}"
            if options.match not in row:
                continue
            if server is None or server.process.poll() is not None or server.health(5) != 200:
                if server is not None:
                    server.stop()
                server = Server(options.model, *flags, "--trust-request-chat-template", log=log)
            yield beside_streams(row, server, _sender(bomb, server))
            _wait_until_idle(server)
    finally:
        if server is not None:
            server.stop()
    for row, carry_out in OTHERS.items():
        if options.match in row:
            with serving(options.model, *flags, log=log) as server:
                yield carry_out(row, server)


def _wait_until_idle(server: Server, seconds: float = 60) -> None:
    """Wait until the bomb's requests have ended. A server that does not become idle, or hangs, is ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.health(10) != 200:
            break
        with suppress(OSError, ValueError):
            if not server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):
                return
        time.sleep(0.5)
    server.stop()


def _sender(bomb: Bomb, server: Server) -> Callable[[Report], None]:
    body = bomb.body()

    def send(report: Report) -> None:
        begin = time.monotonic()
        try:
            status, text = server.request("POST", bomb.path, body, key=KEYS[0], timeout=ANSWER_SECONDS)
            answer = f"{status} {text[:120].decode(errors='replace')}"
        except OSError as error:
            answer = type(error).__name__
        report.notes |= {"answer": answer, "seconds": round(time.monotonic() - begin, 2)}
        report.require("no 5xx", not answer.startswith("5"), answer[:80])

    return send


def beside_streams(row: str, server: Server, attack: Callable[[Report], None], *, max_gap: float = MAX_GAP) -> Report:
    """Carry out an attack beside ten streams of another key, and measure their gaps, memory and health."""
    report = Report(row)
    try:
        with neighbours(server.port, key=KEYS[1]) as streams, MemoryProbe(server) as memory:
            quiet = _quiet_gap(streams)
            with HealthProbe(server) as probe:
                attack(report)
                time.sleep(1.0)
            gaps = streams.gaps()
        report.at_most("worst token gap", gaps.worst, max_gap)
        report.at_most("memory growth", memory.growth, MAX_GROWTH, "MB")
        report.at_most("longest wait for /health", probe.longest, 1.0)
        report.require("no stream fails", gaps.streams_failed == 0, f"{gaps.streams_failed} failed")
        report.notes |= {"worst gap before": round(quiet, 3), "p99 gap": round(gaps.p99, 3), "tokens": gaps.tokens}
    except (OSError, EOFError, RuntimeError) as error:
        report.fail(error)
    return report


def _quiet_gap(streams: Neighbours) -> float:
    time.sleep(1.0)
    streams.gaps()
    time.sleep(3.0)
    return streams.gaps().worst


def _headers(row: str, server: Server) -> Report:
    """250 connections with headers of 4 MB, none of which has a key."""

    def attack(report: Report) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * (4 * MIB)
        opened, cut = [], 0
        for _ in range(250):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            opened.append(connection)
            try:
                connection.sendall(head)
            except OSError:
                cut += 1
        time.sleep(1.0)
        report.notes["cut while sending"] = cut
        for connection in opened:
            connection.close()

    return beside_streams(row, server, attack)


def _stored_responses(row: str, server: Server) -> Report:
    """A stored response is read, continued, cancelled and deleted by its own key only."""
    report = Report(row)
    body = {"input": "a", "max_output_tokens": 2, "store": True}
    status, text = server.request("POST", RESPONSES, body, key=KEYS[0])
    if status != 200:
        report.require("a response is stored", False, f"{status} {text[:100]!r}")
        return report
    name = json.loads(text)["id"]
    path = f"{RESPONSES}/{name}"
    theirs = {
        "read": server.request("GET", path, key=KEYS[1])[0],
        "continue": server.request("POST", RESPONSES, body | {"previous_response_id": name}, key=KEYS[1])[0],
        "cancel": server.request("POST", f"{path}/cancel", key=KEYS[1])[0],
        "delete": server.request("DELETE", path, key=KEYS[1])[0],
    }
    report.require("another key gets 404", set(theirs.values()) == {404}, theirs)
    report.require("its own key reads it", server.request("GET", path, key=KEYS[0])[0] == 200)
    return report


OTHERS: Final[Mapping[str, Callable[[str, Server], Report]]] = {
    "item 3: 250 headers of 4 MB": _headers,
    "item 5: stored responses belong to a key": _stored_responses,
}
"""Rows that are not one request, each on a server of its own."""
