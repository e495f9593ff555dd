"""Several API server processes over one engine: the process of `pagoda serve`, which starts both.

It binds the port, handles signals and reports failures. Each API server process (`api_process`) inherits the listening
socket and a control socket. On the latter it sends READY, KEEP and RELEASE, and receives STOP and HURRY.

One that ends after it has served is replaced, and so is a replacement: its streams end with an event that this process
sends, its other connections are cut and its requests dropped. Those of the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import resource
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import zmq

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.server.cli.serving.signals import deferring_signals, ignore_signals
from pagoda.server.core_client import start_shared_engine
from pagoda.server.core_client.ipc_messages import EngineInfo, Failed, FromEngine, Ready, Rejoin, encode, raised
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.core_client.replica_client import ReplicaClient
from pagoda.server.core_client.shared import output_address
from pagoda.server.processing.workers.child import child_env, describe_exit

PROGRAM: Final = (sys.executable, "-P", "-m", "pagoda.server.cli.serving.api_process")

READY = b"r"
STOP = b"s"
HURRY = b"h"

KEEP = b"k"
RELEASE = b"d"
"""Followed by the number of a stream; KEEP also by what to send on it if its process is killed, with the descriptor of
its connection. RELEASE comes when the stream has ended."""

NUMBER_BYTES: Final = 8

_OTHER_DESCRIPTORS: Final = 128
"""Descriptors that connections of streams leave to new processes and engines."""

_MAX_MESSAGE: Final = 65_536
_MAX_UNSENT: Final = 8_192
"""With as many unsent bytes of a stream in the system's buffers, the process that was killed may have had a part of an
event in its own memory. The stream is then cut, since an event after a part of another could not be read."""

FIRST = "first"
AGAIN = "again"

_CAUSE_SECONDS: Final = 5.0
"""How long API server processes have to fail their requests with the cause of the engine's death before they are told
to stop: that message comes by another socket, and may overtake the cause."""

_END_SECONDS: Final = 10.0
"""How long API server processes have to end after the engine has died or another of them has."""

MAX_RESTARTS: Final = 5
RESTART_SECONDS: Final = 600.0
"""So many processes are replaced within this time; the end of a further one ends the server."""

logger = logging.getLogger(__name__)

WatchSignals = Callable[[asyncio.Event, asyncio.Event], contextlib.AbstractContextManager[None]]
"""Sets the first event on a signal and the second on a further one, in its context."""


# The process of `pagoda serve`.


def run_api_servers(
    config: EngineConfig,
    server: ServerConfig,
    listener: socket.socket,
    watch_signals: WatchSignals,
    start_time: float,
    start_engine: Callable[..., ProcessClient | ReplicaClient] = start_shared_engine,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Serve with --api-server-count processes until a signal (returns 0, or 1 if requests were cut) or a failure.

    Raises the engine's error; one that keeps a process from starting is printed by process 0.
    """
    from pagoda.server.http.connections import raise_descriptor_limit  # The import costs start-up time.

    # The limit allows for what KeptStreams holds.
    raise_descriptor_limit(server.max_connections * server.api_server_count)
    with contextlib.ExitStack() as owned:
        with deferring_signals():
            engine = start_engine(config, clients=server.api_server_count)
            owned.callback(engine.close)
            owned.callback(ignore_signals)
        supervisor = _Supervisor(config, server, engine, start_time)
        return asyncio.run(supervisor.run(listener, watch_signals, program))


class _Supervisor:
    """Starts the API server processes and waits for the end of one, of the engine, or for a signal."""

    def __init__(
        self, config: EngineConfig, server: ServerConfig, engine: ProcessClient | ReplicaClient, start_time: float
    ) -> None:
        self._config = config
        self._server = server
        self._engine = engine
        self._start_time = start_time
        self._info: EngineInfo | None = None
        self._is_announced = False
        self._processes: list[_ApiServer] = []
        self._restarts: deque[float] = deque()
        self._replaced: set[int] = set()  # Indices of processes that are replacements.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports: list[zmq.Socket[bytes]] = []

    async def run(self, listener: socket.socket, watch_signals: WatchSignals, program: Sequence[str]) -> int:
        """See run_api_servers."""
        loop = asyncio.get_running_loop()
        dead: asyncio.Future[Failed] = loop.create_future()
        self._engine.listen(loop, lambda message: self._on_message(message, dead))
        stop = asyncio.Event()
        hurry = asyncio.Event()
        with watch_signals(stop, hurry):
            try:
                for index in range(self._server.api_server_count):
                    self._processes.append(await self._start(index, listener, program))
                return await self._watch(
                    dead, stop, hurry, partial(self._start, listener=listener, program=program, again=True)
                )
            finally:
                for process in self._processes:
                    await process.end()
                self._context.destroy(linger=0)

    async def _start(
        self, index: int, listener: socket.socket, program: Sequence[str], *, again: bool = False
    ) -> _ApiServer:
        """Start a process. `again`: it replaces another, and takes no connections before the engine has answered."""
        when = AGAIN if again else FIRST
        words = [*program, str(index), str(self._server.api_server_count), ",".join(self._engine.addresses), when]
        return await _ApiServer.start(words, self._config, self._server, listener, self._log_ready)

    async def _watch(
        self,
        dead: asyncio.Future[Failed],
        stop: asyncio.Event,
        hurry: asyncio.Event,
        start: Callable[[int], Awaitable[_ApiServer]],
    ) -> int:
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
        stopping = asyncio.ensure_future(stop.wait())
        hurrying = asyncio.ensure_future(hurry.wait())
        try:
            while True:
                first: set[asyncio.Future[Any]] = {dead, stopping, *ends}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if dead.done() or stopping.done() or not await self._replace(ends, dead, start):
                    break
            if dead.done() and self._server.keep_alive_on_engine_death:
                await asyncio.wait({stopping, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                self._tell(STOP)
                hurrying.add_done_callback(lambda task: None if task.cancelled() else self._tell(HURRY))
                return int(any(await asyncio.gather(*ends)))
            ended = next((end.result() for end in ends if end.done()), 1)
            if dead.done() and not self._server.keep_alive_on_engine_death:
                await asyncio.wait(ends, timeout=_CAUSE_SECONDS)
            self._tell(HURRY)
            await asyncio.wait(ends, timeout=_END_SECONDS)
            if dead.done():
                raise raised(dead.result())
            if ended < 0:
                logger.error("an API server process %s", describe_exit(ended))
            return max(1, ended)
        finally:
            for task in (stopping, hurrying, *ends):
                task.cancel()

    async def _replace(
        self,
        ends: list[asyncio.Task[int]],
        dead: asyncio.Future[Failed],
        start: Callable[[int], Awaitable[_ApiServer]],
    ) -> bool:
        """Replace a process that ended, if it has served and few were replaced. `ends`: the status of each process."""
        index = next(index for index, end in enumerate(ends) if end.done())
        await asyncio.wait({dead}, timeout=0.5)  # A process may end first when the engine dies.
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_SECONDS:
            self._restarts.popleft()
        has_served = self._processes[index].has_served or index in self._replaced
        if dead.done() or not has_served or len(self._restarts) >= MAX_RESTARTS:
            return False
        self._restarts.append(now)
        self._replaced.add(index)
        logger.error("API server process %d %s; it is replaced", index, describe_exit(ends[index].result()))
        await self._processes[index].end()
        try:
            self._processes[index] = await start(index)
        except OSError as error:
            logger.error("no process could be started in its place: %s", error.strerror)
            return False
        self._engine.send(Rejoin(index))
        ends[index] = asyncio.ensure_future(self._processes[index].wait())
        return True

    def _on_message(self, message: FromEngine, dead: asyncio.Future[Failed]) -> None:
        if isinstance(message, Ready):
            self._info = message.info
            self._log_ready()
        elif isinstance(message, Failed) and not dead.done():
            dead.set_result(message)
            self._report(message)

    def _report(self, failed: Failed) -> None:
        """Tell the API server processes that the engine has died: it may not have been able to.

        Does not wait for busy processes: they read it while `_context` lives. The sockets are kept until it ends: one
        that is collected before waits for ever for a process that never listens.
        """
        data = encode(failed)
        for index in range(self._server.api_server_count):
            for address in self._engine.addresses:
                outputs = self._context.socket(zmq.PUSH)
                outputs.connect(output_address(address, index))
                outputs.send(data)
                self._reports.append(outputs)

    def _log_ready(self) -> None:
        served = [process for process in self._processes if process.has_served]
        if self._info is None or self._is_announced or len(served) < self._server.api_server_count:
            return
        info = self._info
        self._is_announced = True
        logger.info("%s on %s (%s): %s", info.backend, info.device, info.dtype, info.memory)
        seconds = time.monotonic() - self._start_time
        logger.info("ready after %.1f s with %d API server processes", seconds, len(served))

    def _tell(self, word: bytes) -> None:
        for process in self._processes:
            process.tell(word)


class KeptStreams:
    """Copies of the connections on which an API server process sends streams, and how each ends if it is killed."""

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[socket.socket, bytes]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, *, number: bytes, descriptor: int, ending: bytes) -> None:
        """Keep the connection of a stream. Without it, as where descriptors get scarce, the stream would be cut."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            if soft != resource.RLIM_INFINITY and descriptor >= soft - _OTHER_DESCRIPTORS:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._kept[number] = socket.socket(fileno=descriptor), ending
        except OSError as error:
            os.close(descriptor)
            logger.debug("a stream is not kept: %s", error)

    def release(self, number: bytes) -> None:
        """Close the copy of a stream that has ended."""
        if (kept := self._kept.pop(number, None)) is not None:
            kept[0].close()

    def end(self) -> None:
        """Send on each connection how its stream ends, and close it. Their process has ended."""
        for connection, ending in self._kept.values():
            with connection:
                with contextlib.suppress(OSError):
                    if _unsent_bytes(connection) < _MAX_UNSENT:
                        connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(ending), ending), socket.MSG_DONTWAIT)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                    # Unread data at the end would reset a connection.
                    connection.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT)
        self._kept.clear()


def _unsent_bytes(connection: socket.socket) -> int:
    """Return how many bytes of a connection the system has not sent, or its peer has not acknowledged."""
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


class _ApiServer:
    """One API server process."""

    def __init__(
        self, process: asyncio.subprocess.Process, control: socket.socket, on_ready: Callable[[], None]
    ) -> None:
        self._process = process
        self._control = control
        self._on_ready = on_ready
        self._streams = KeptStreams()
        self.has_served = False

    @classmethod
    async def start(
        cls,
        words: Sequence[str],
        config: EngineConfig,
        server: ServerConfig,
        listener: socket.socket,
        on_ready: Callable[[], None],
    ) -> _ApiServer:
        """Start a process. `on_ready` is called once it serves requests, and `has_served` is true from then on."""
        parent_end, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with other, contextlib.ExitStack() as failed:
            failed.enter_context(parent_end)
            descriptors = (listener.fileno(), other.fileno())
            process = await asyncio.create_subprocess_exec(
                *(*words, *map(str, descriptors)), stdin=asyncio.subprocess.PIPE, pass_fds=descriptors, env=child_env()
            )
            failed.pop_all()
        parent_end.setblocking(False)
        started = cls(process, parent_end, on_ready)
        asyncio.get_running_loop().add_reader(parent_end.fileno(), started._read)
        assert process.stdin is not None
        data = msgspec.msgpack.encode((config, server))
        process.stdin.write(data)
        process.stdin.close()
        return started

    def _read(self) -> bool:
        """Read a message of the process; return whether there was one."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # It ended without having read everything; what it sent comes next.
            return True
        except OSError:
            message = b""
            descriptors = []
        word = message[:1]
        number = message[1 : 1 + NUMBER_BYTES]
        if word == READY:
            self.has_served = True
            self._on_ready()
        elif word == KEEP and descriptors:
            self._streams.keep(number=number, descriptor=descriptors[0], ending=message[1 + NUMBER_BYTES :])
        elif word == RELEASE:
            self._streams.release(number)
        elif not word:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        return bool(word)

    async def wait(self) -> int:
        """Return the exit status once the process has ended, and its streams with it."""
        status = await self._process.wait()
        while self._control.fileno() >= 0 and self._read():
            pass
        self._streams.end()
        return status

    def tell(self, word: bytes) -> None:
        """Send STOP or HURRY."""
        with contextlib.suppress(OSError):  # The process has ended.
            self._control.send(word)

    async def end(self) -> None:
        """End the process by force if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
        await self.wait()
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
