"""An OpenAI server in this process whose answers are made up: tokens "a" at given times."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.suite.watching import eventually


class FakeOpenAI:
    """Answers like an OpenAI server. What it got is in `bodies`, `headers` and `paths`, in order of arrival."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.arrivals: list[float] = []
        self.connections: set[tuple[str, int]] = set()
        self.running = self.most = 0
        self.token_seconds = 0.0
        self.pause: Callable[[float], None] = time.sleep
        self.after_sending: Callable[[], object] = lambda: None
        self.may_answer: Callable[[Mapping[str, Any]], bool] = lambda body: True
        self.loading = 0  # requests that are refused first
        self.fail_prompts: set[str] = set()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.paths.append(self.path)
                if self.path == "/v1/models":
                    return self._whole(200, {"data": [{"id": "served", "root": "root"}]})
                return self._whole(404, {"error": {"message": "no such path"}})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                fake.paths.append(self.path)
                if self.path.endswith("_profile"):
                    return self._whole(200, {"path": "trace"})
                with fake._lock:
                    fake.arrivals.append(time.perf_counter())
                    fake.bodies.append(json.loads(raw))
                    fake.headers.append({name.lower(): value for name, value in self.headers.items()})
                    fake.connections.add(self.client_address)
                    fake.running += 1
                    fake.most = max(fake.most, fake.running)
                    refused = fake.loading > 0
                    fake.loading -= refused
                try:
                    if refused:
                        return self._whole(503, {"error": {"message": "loading"}})
                    if fake.bodies[-1].get("prompt") in tuple(fake.fail_prompts):
                        return self._whole(400, {"error": {"message": "refused"}})
                    body = json.loads(raw)
                    eventually(lambda: fake.may_answer(body))
                    self._answer(self.path, body)
                finally:
                    with fake._lock:
                        fake.running -= 1

            def _answer(self, path: str, body: Mapping[str, Any]) -> None:
                if path.endswith("/chat/completions"):
                    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
                    events = [role, *({"choices": [{"delta": {"content": "a"}}]} for _ in range(tokens_of(body)))]
                    self._stream([*events, {"choices": [{"delta": {}, "finish_reason": "length"}]}, usage(body)])
                elif path.endswith("/completions"):
                    self._stream([*({"choices": [{"text": "a"}]} for _ in range(tokens_of(body))), usage(body)])
                elif path.endswith("/responses"):
                    count = tokens_of(body)
                    deltas = [{"type": "response.output_text.delta", "delta": "a"}] * count
                    end = {"usage": {"input_tokens": 5, "output_tokens": count}}
                    self._stream([*deltas, {"type": "response.completed", "response": end}], done=False)
                else:
                    fake.pause(fake.token_seconds)
                    self._whole(200, {"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}})

            def _stream(self, events: list[Mapping[str, Any]], done: bool = True) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                fake.after_sending()
                lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
                for line in lines:
                    fake.pause(fake.token_seconds)
                    self._chunk(line.encode())
                    fake.after_sending()
                self._chunk(b"")

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()

            def _whole(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @contextmanager
    def running_server(self) -> Iterator[FakeOpenAI]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()


def tokens_of(body: Mapping[str, Any]) -> int:
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    return next(int(body[name]) for name in limits if name in body)


def usage(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last event: usage if it was requested."""
    count = {"prompt_tokens": 5, "completion_tokens": tokens_of(body)}
    return {"choices": [], "usage": count if body.get("stream_options", {}).get("include_usage") else None}
