"""The real HTTP server over a fake engine, or that of a folder, in a thread, on a real port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from support.checkpoints.byte_text import byte_tokenizer, framed_tokenizer
from support.engines.fake_engine import build
from support.suite.watching import PATIENCE, eventually, until

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.observe.metrics import Metrics
from pagoda.server.api.app import create_app
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli.serving.serve import bind
from pagoda.server.core_client.engine import ThreadClient
from pagoda.server.http.server import http_server
from pagoda.server.http.state import ServerState
from pagoda.server.settings.flags import AsyncEngineArgs

TEXT = byte_tokenizer()
FRAMED = framed_tokenizer()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test can put forward."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class LiveServer:
    """A server that listens. `state` belongs to the server's own event loop; read it, do not change it.

    Timeouts that a test waits for are many minutes, which it lets pass by `advance`; else none would be certain to come
    after what it should come after. `clock`: of overloads.
    """

    def __init__(
        self, model: str, config: ServerConfig, ready: bool, clock: Callable[[], float], **engine: Any
    ) -> None:
        engine.setdefault("served_model_name", ["fake"])
        engine_config = AsyncEngineArgs(model, **engine).create_engine_config()
        metrics = Metrics("fake", engine_config.parallel.data_parallel_size, engine_config.lora.slots)
        text = FRAMED if ":pool-" in model else TEXT
        if model.startswith("fake"):
            self.llm = AsyncLLM(
                engine_config,
                client=ThreadClient(engine_config, build),
                open_text=lambda config: None if config.model.skip_tokenizer_init else text,
                wait=False,
                metrics=metrics,
                clock=clock,
            )
        else:
            self.llm = AsyncLLM(engine_config, in_process=True, wait=False, metrics=metrics)
        self._config, self._metrics, self._ready = config, metrics, ready
        self._listener = bind(config)
        self.port = 0 if config.uds else self._listener.getsockname()[1]
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        eventually(lambda: self._started.is_set() or not self._thread.is_alive())
        assert self._started.is_set(), "the server has not started; its thread's exception is shown"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._listener.close()

    def call(self, work: Any, seconds: float = 60) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def settle(self) -> None:
        """Let the server read and handle what was sent to it before."""
        for _ in range(3):  # a connection is accepted, then read
            self.call(asyncio.sleep(0))

    def advance(self, seconds: float) -> None:
        """Put the clock of the server's event loop forward after it has handled what was sent, and run what is due."""
        self.settle()

        async def put_forward() -> None:
            self._loop.ahead += seconds

        self.call(put_forward())
        self.settle()

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and parsed body; `body` is sent as it is when it is bytes."""
        answer = self.response(method, path, body, headers)
        kind = answer.headers.get("content-type", "")
        text = answer.body
        return answer.status, json.loads(text) if kind.startswith("application/json") and text else text

    def response(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """All of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, raw, {"content-type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        found = Answer(
            response.status, {name.lower(): value for name, value in response.headers.items()}, response.read()
        )
        connection.close()
        return found

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        return self.request("POST", path, body, headers)

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self.request("GET", path, None, headers)

    def sent(self, path: str, body: Any, headers: Mapping[str, str]) -> socket.socket:
        """A connection on which a body was posted and nothing was read."""
        text = json.dumps(body).encode()
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(text)}\r\n\r\n".encode() + text
        )
        return connection

    def raw(self, method: str, path: str, body: Any) -> socket.socket:
        """A connection on which a request was sent and nothing was read."""
        text = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
        connection.sendall(head.encode() + text)
        return connection

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _Loop)
        self._loop = loop
        self.state = ServerState(self.llm, self._config, self._metrics)
        if self._ready:
            await self.state.wait_until_ready()
        self.app = create_app(self.state)
        self._server = http_server(self.app, self._config)
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        await until(lambda: self._server.started or serving.done())
        self._started.set()
        await serving
        self.llm.shutdown()


@contextmanager
def live_server(
    model: str = "fake",
    *,
    ready: bool = True,
    engine: Any = None,
    clock: Callable[[], float] = time.monotonic,
    **config: Any,
) -> Iterator[LiveServer]:
    """A running server; `config` are fields of ServerConfig, `engine` of AsyncEngineArgs."""
    settings = {"port": 0, "uvicorn_log_level": "warning"} | config
    server = LiveServer(model, ServerConfig(**settings), ready, clock, **(engine or {}))
    server.start()
    try:
        yield server
    finally:
        server.stop()
