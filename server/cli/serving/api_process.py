"""One of several API server processes over one engine.

    python -m pagoda.server.cli.serving.api_process INDEX COUNT ADDRESSES first|again LISTENER CONTROL

It is started by `api_servers`, never by hand. LISTENER and CONTROL are the descriptors of the listening socket and of
the socket to the process of `pagoda serve`, whose EOF means that that process has ended. The sockets of the engines are
at ADDRESSES, separated by commas; those of the API server processes are at the first. The configurations are read as
msgpack from stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import PagodaError
from pagoda.common.observe.logs import configure
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli.serving.api_servers import AGAIN, HURRY, KEEP, NUMBER_BYTES, READY, RELEASE
from pagoda.server.cli.serving.serve import application, bind_unix, until_stopped
from pagoda.server.core_client.replica_client import ReplicaClient
from pagoda.server.core_client.shared import SharedClient
from pagoda.server.http.connections import TRANSPORT, raise_descriptor_limit
from pagoda.server.http.forward import Forwarder
from pagoda.server.http.peers import ApiPeers
from pagoda.server.http.response import KEEP_STREAM

_AT_ONCE: Final = 1
"""Connections accepted before other events, so that all processes get some."""


class ParentControl:
    """The socket to the process of `pagoda serve`. EOF ends this process at once."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._kept = itertools.count()
        self._unsent: deque[bytes] = deque()
        self._loop: asyncio.AbstractEventLoop
        control.setblocking(False)

    def ready(self) -> None:
        """Report that requests are served."""
        self._control.send(READY)

    @contextlib.contextmanager
    def keeping(self, transport: asyncio.Transport, ending: bytes) -> Iterator[None]:
        """While this context is open, the other process has a copy of the connection, on which it sends `ending` if
        this process is killed. Without a copy, as when it has no descriptors left, the connection is cut in that case.
        """
        number = next(self._kept).to_bytes(NUMBER_BYTES)
        is_kept = self._keep(transport, KEEP + number + ending)
        try:
            yield
        finally:
            if is_kept:
                self._release(number)

    def _keep(self, transport: asyncio.Transport, message: bytes) -> bool:
        """Send a copy of the connection, whose descriptor is looked up now: that of a closed one has another owner."""
        connection = transport.get_extra_info("socket")
        if self._unsent or connection is None or transport.is_closing():
            return False
        try:
            socket.send_fds(self._control, [message], [connection.fileno()])
        except OSError:
            return False
        return True

    def _release(self, number: bytes) -> None:
        """Send that a stream has ended, at once or, if the other process is late, as soon as there is room."""
        self._unsent.append(RELEASE + number)
        if len(self._unsent) == 1 and not self._flush():
            self._loop.add_writer(self._control.fileno(), self._flush_later)

    def _flush(self) -> bool:
        """Send what has not been sent; return whether that was all."""
        try:
            while self._unsent:
                self._control.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:  # The other process has ended, and this one will.
            self._unsent.clear()
        return True

    def _flush_later(self) -> None:
        if self._flush():
            self._loop.remove_writer(self._control.fileno())

    @contextlib.contextmanager
    def watch(self, stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
        """Set the events when the other process says so."""

        def readable() -> None:
            try:
                word = self._control.recv(1)
            except BlockingIOError:
                return
            except OSError:  # The other process ended without having read everything.
                word = b""
            if not word:
                os._exit(1)
            stop.set()
            if word == HURRY:
                hurry.set()

        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control.fileno(), readable)
        yield


class StreamKeeping:
    """ASGI middleware: lets streams end with an event if this process is killed. Streams over TLS are cut, since no
    other process has the keys of their connections.
    """

    def __init__(self, app: ASGIApp, control: ParentControl) -> None:
        self._app = app
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "HEAD":
            transport = scope.get(TRANSPORT)
            if transport is not None and transport.get_extra_info("sslcontext") is None:
                scope[KEEP_STREAM] = partial(self._control.keeping, transport)
        await self._app(scope, receive, send)


def serve(
    llm: AsyncLLM,
    config: ServerConfig,
    listener: socket.socket,
    control: ParentControl,
    address: str,
    index: int,
    count: int,
) -> int:
    """Serve until told to stop. Returns 0 if no request was cut, else 1. Raises the engine's error."""
    raise_descriptor_limit(config.max_connections)
    path = f"{address}.http".removeprefix("ipc://")

    def wrap(app: ASGIApp) -> ASGIApp:
        return StreamKeeping(Forwarder(app, path, config.prefix) if index else app, control)

    server, state = application(llm, config, wrap=wrap, at_once=_AT_ONCE)
    listeners = [listener]
    if index == 0:
        server.private = bind_unix(path)
        listeners.append(server.private)

    async def run() -> int:
        state.peers = ApiPeers(address, index, count, state.report)
        await state.peers.start()
        try:
            return await until_stopped(server, state, listeners, control.watch, control.ready)
        finally:
            state.peers.close()

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(run())


def main(words: Sequence[str], **parts: Any) -> int:
    """Run an API server process and return its exit status. `parts`: arguments of AsyncLLM, for tests."""
    # They are sent to the whole process group; the other process decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    index = int(words[0])
    count = int(words[1])
    addresses = words[2].split(",")
    listener, control = (socket.socket(fileno=int(word)) for word in words[4:6])
    engine, config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[EngineConfig, ServerConfig])
    configure(engine.logging, also=("uvicorn",))
    if index:
        config = replace(config, files_dir=None)  # Process 0 has the files.
    clients = [SharedClient(engine, address, index) for address in addresses]
    client = clients[0] if len(clients) == 1 else ReplicaClient(clients)
    try:
        llm = AsyncLLM(engine, wait=words[3] == AGAIN, client=client, **parts)
        return serve(llm, config, listener, ParentControl(control), addresses[0], index, count)
    except PagodaError as error:
        if index == 0 and client.failed is None:  # The other process reports the engine's own failure.
            print(f"pagoda: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        client.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
