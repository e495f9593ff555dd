"""The process that an engine runs in.

    python -m pagoda.server.core_client.engine_process ADDRESS        (started by engine_client, never by hand)

The configuration comes as msgpack on stdin, which stays open: its end means that the parent is gone. Requests come
from ADDRESS.in, outputs go to ADDRESS.out. A failure is told to the parent in one message before the process ends.
Where several hosts run the engine, all but the first take their work from that one, and no requests.
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
    """Build the engine that stdin describes and run it. Returns the exit status."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole terminal, a service manager's all of a
        signal.signal(number, signal.SIG_IGN)  # service; the parent decides what it means
    stdin = sys.stdin.buffer
    config = msgspec.msgpack.decode(stdin.read(int.from_bytes(stdin.read(4), "big")), type=EngineConfig)
    configure(config.logging)
    threading.Thread(target=_end_with_parent, name="pagoda-parent", daemon=True).start()
    context = zmq.Context()
    progress = Progress()
    threading.Thread(target=_beat, args=(context, address, progress), name="pagoda-heartbeat", daemon=True).start()
    output_context = zmq.Context()  # its own, so that ending it waits for the last message and for nothing else
    outputs = _outputs(output_context, address)

    def send(message: FromEngine) -> None:
        outputs.send(encode(message))

    try:
        commands = context.socket(zmq.PULL)
        commands.set_hwm(0)
        commands.bind(f"{address}.in")
        built = build(config, "server")
        try:
            if built.hosts is not None:
                built.hosts.watch(lambda death: _tell(context, address, death))
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
    """Say that the engine is warm, and run it until it is told to end."""
    gc.collect()
    gc.freeze()  # what is here now stays: collections between steps look at requests only
    send(Ready(built.info))
    if isinstance(built.hosts, FollowingBackend):
        built.hosts.follow(built.sleeper)
    else:
        run_engine(built.core, inbox, send, progress, built.sleeper)


def _tell(context: zmq.Context[zmq.Socket[bytes]], address: str, death: EngineDeadError) -> None:
    """From any thread: the engine is dead, whatever its own thread is waiting for."""
    outputs = _outputs(context, address)
    outputs.send(encode(failure(death)))
    outputs.close(linger=1000)


def _outputs(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(f"{address}.out")
    return socket


def _end_with_parent() -> None:
    """Wait for the end of stdin, then end at once, whatever the engine is doing."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _beat(context: zmq.Context[zmq.Socket[bytes]], address: str, progress: Progress) -> None:
    socket = _outputs(context, address)
    while True:
        socket.send(encode(Heartbeat(progress.steps, progress.busy)))
        time.sleep(HEARTBEAT_SECONDS)


if __name__ == "__main__":
    status = serve(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # daemon threads hold sockets; an orderly interpreter exit would wait for them
