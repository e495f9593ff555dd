"""Many streamed answers at once from one server, on one thread that does as little as it can with what comes.

usage: python http_load.py PORT PATH STREAMS TOKENS MODEL

Prints one JSON object: seconds from the first request to the end of the last answer, the same seconds of this
process's own CPU time, events per token, the longest and the median wait for a first event, and a digest of the texts,
which are read only after the clock has stopped.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import statistics
import sys
import time

PROMPT = "The quick brown fox jumps over the lazy dog. " * 11
"""About 110 tokens."""


class Stream:
    """One connection and all that came over it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.parts: list[bytes] = []
        self.first = 0.0

    def texts(self) -> list[str]:
        """What each event that says anything says."""
        raw = b"".join(self.parts)
        head, _, body = raw.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(raw[:500].decode())
        texts = []
        for line in _unchunked(body).split(b"\n\n"):
            event = line.removeprefix(b"data: ")
            if not event or event == b"[DONE]":
                continue
            for choice in json.loads(event)["choices"]:
                text = choice.get("text") or choice.get("delta", {}).get("content")
                if text:
                    texts.append(text)
        return texts


def _unchunked(body: bytes) -> bytes:
    """The body of a response with transfer-encoding: chunked."""
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + size + 4


def body(path: str, number: int, tokens: int, model: str) -> dict:
    """A request; no two prompts are alike."""
    prompt = f"{number}: {PROMPT}"
    asked = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    return {"model": model, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True} | asked


def run(port: int, path: str, streams: int, tokens: int, model: str) -> dict:
    """Ask, and read until every answer has ended."""
    poll = select.epoll()
    opened = [Stream(port) for _ in range(streams)]
    asked = []
    for number, stream in enumerate(opened):
        text = json.dumps(body(path, number, tokens, model)).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        )
        asked.append(head.encode() + text)
        poll.register(stream.socket, select.EPOLLIN)
    by_number = {stream.socket.fileno(): stream for stream in opened}
    begin, cpu = time.perf_counter(), time.process_time()
    for stream, request in zip(opened, asked):
        stream.socket.sendall(request)
    left = streams
    while left:
        for number, _ in poll.poll():
            stream = by_number[number]
            part = stream.socket.recv(1 << 16)
            if not stream.first:
                stream.first = time.perf_counter() - begin
            stream.parts.append(part)
            if not part or part.endswith(b"0\r\n\r\n"):
                poll.unregister(number)
                left -= 1
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    answers = [stream.texts() for stream in opened]
    texts = sorted("".join(answer) for answer in answers)
    waits = [stream.first for stream in opened]
    return {
        "seconds": seconds,
        "own_cpu_seconds": cpu,
        "tokens_per_s": streams * tokens / seconds,
        "events_per_token": sum(map(len, answers)) / (streams * tokens),
        "words": sum(len(text.split()) for text in texts),
        "first_event_median_s": statistics.median(waits),
        "digest": hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16],
    }


if __name__ == "__main__":
    port, path, streams, tokens, model = sys.argv[1:]
    print(json.dumps(run(int(port), path, int(streams), int(tokens), model)))
