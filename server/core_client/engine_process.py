"""The entry point of an engine process.

    python -m pagoda.server.core_client.engine_process ADDRESS        (started by process_client, never by hand)

The configuration is read as msgpack from stdin, which stays open: EOF means that the parent ended. Commands arrive on
ADDRESS.in, messages are sent to ADDRESS.out. A failure is sent to the parent before the process ends. On several hosts,
all but the first execute the steps of the first and take no requests.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.errors import EngineDeadError, PagodaError
from pagoda.common.observe.logs import configure
from pagoda.server.core_client.engine_loop import Progress, run_engine
from pagoda.server.ipc_messages import (
    FromEngine,
    Heartbeat,
    Ready,
    ToEngine,
    decode_to_engine,
    encode,
    failure,
)
from pagoda.server.startup.engine import build_engine
from pagoda.server.startup.worker_group import BuiltEngine

HEARTBEAT_SECONDS: Final = 1.0

Build = Callable[[EngineConfig, Usage], BuiltEngine]


class _SocketInbox:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def receive(self, wait: bool) -> list[ToEngine]:
        commands = [decode_to_engine(self._socket.recv())] if wait else []
        while True:
            try:
                commands.append(decode_to_engine(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands


def serve(address: str, build: Build = build_engine) -> int:
    """Build the engine of the configuration on stdin and run it. Return the exit status."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    stdin = sys.stdin.buffer
    config = msgspec.msgpack.decode(stdin.read(int.from_bytes(stdin.read(4), "big")), type=EngineConfig)
    configure(config.logging)
    threading.Thread(target=_end_with_parent, name="pagoda-parent", daemon=True).start()
    context = zmq.Context()
    progress = Progress()
    threading.Thread(
        target=_send_heartbeats, args=(context, address, progress), name="pagoda-heartbeat", daemon=True
    ).start()
    output_context = zmq.Context()  # separate, so that term() waits for the last message only
    outputs = _connect(output_context, address)

    def send(message: FromEngine) -> None:
        outputs.send(encode(message))

    try:
        commands = context.socket(zmq.PULL)
        commands.set_hwm(0)
        commands.bind(f"{address}.in")
        built = build(config, "server")
        try:
            if built.hosts is not None:
                built.hosts.watch(lambda death: _send_failure(context, address, death))
            _run(built, _SocketInbox(commands), send, progress)
        finally:
            built.backend.close()
    except BaseException as error:
        if not isinstance(error, PagodaError):
            traceback.print_exc()
        send(failure(error))
        return 1
    finally:
        outputs.close(linger=1000)
        output_context.term()
    return 0


def _run(built: BuiltEngine, inbox: _SocketInbox, send: Callable[[FromEngine], None], progress: Progress) -> None:
    gc.collect()
    gc.freeze()  # collections between steps then visit requests only
    send(Ready(built.info))
    if isinstance(built.hosts, FollowingBackend):
        built.hosts.follow(built.sleeper)
    else:
        run_engine(built.core, inbox, send, progress, built.sleeper)


def _send_failure(context: zmq.Context[zmq.Socket[bytes]], address: str, death: EngineDeadError) -> None:
    """Report the engine's death. Thread-safe: the engine's own thread may be blocked."""
    outputs = _connect(context, address)
    outputs.send(encode(failure(death)))
    outputs.close(linger=1000)


def _connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(f"{address}.out")
    return socket


def _end_with_parent() -> None:
    """Wait for EOF on stdin, then exit at once."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _send_heartbeats(context: zmq.Context[zmq.Socket[bytes]], address: str, progress: Progress) -> None:
    socket = _connect(context, address)
    while True:
        socket.send(encode(Heartbeat(progress.steps, progress.busy)))
        time.sleep(HEARTBEAT_SECONDS)


if __name__ == "__main__":
    status = serve(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a normal interpreter exit would wait for the sockets of daemon threads
