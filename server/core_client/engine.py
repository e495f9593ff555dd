"""Runs an engine: the loop of commands and steps, in a thread of this process or in a process of its own.

    python -m pagoda.server.core_client.engine ADDRESS [CLIENTS]      (started by process_client, never by hand)

The process reads its configuration as msgpack from stdin, which stays open: EOF means that the parent ended. Commands
arrive on ADDRESS.in, messages are sent to ADDRESS.out, with several CLIENTS also to ADDRESS.out0 and so on (`shared`).
A failure is sent before the process ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
import zmq

from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.engine.core import EngineCore, Sleeper
from pagoda.common.engine.incident.files import snapshot_of, write_snapshot
from pagoda.common.engine.messages import EngineRequest, StepOutputs
from pagoda.common.engine.steps.profiling import StepProfiler
from pagoda.common.errors import EngineDeadError, PagodaError, RequestError, SleepError
from pagoda.common.observe.logs import configure
from pagoda.common.observe.redact import without_secrets
from pagoda.server.core_client.client import Listener, Supervisor
from pagoda.server.core_client.ipc_messages import (
    NO_OTHERS,
    Abort,
    AdapterState,
    AddRequest,
    EngineInfo,
    Failed,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    OtherUse,
    ProfileState,
    Ready,
    Refused,
    RemoveAdapter,
    ResetDone,
    ResetPrefixCache,
    Resume,
    Shutdown,
    Sleep,
    SleepState,
    SnapshotTaken,
    StartProfile,
    StepReply,
    StopProfile,
    Suspend,
    SuspendDone,
    TakeSnapshot,
    ToEngine,
    WakeUp,
    decode_to_engine,
    encode,
    failure,
)
from pagoda.server.core_client.memory import MemoryTrimmer
from pagoda.server.core_client.process_client import SNAPSHOT_SIGNAL, STACK_SIGNAL, bind_private
from pagoda.server.core_client.shared import ClientRouter, SharedInbox, output_address
from pagoda.server.startup.engine import BuiltEngine, build_engine

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 1.0

Build = Callable[[EngineConfig, Usage], BuiltEngine]
Send = Callable[[FromEngine], None]

# The loop, independent of sockets and processes.


class Inbox(Protocol):
    """A queue of commands."""

    def receive(self, wait: bool) -> list[ToEngine]:
        """Return all queued commands; with `wait`, block until there is one."""
        ...


class Progress:
    """The loop's progress, read by the heartbeat."""

    def __init__(self) -> None:
        self.steps = 0
        self.busy = False


def run_engine(
    core: EngineCore,
    inbox: Inbox,
    send: Send,
    progress: Progress,
    sleeper: Sleeper | None = None,
    incidents: IncidentWriter | None = None,
) -> None:
    """Serve until Shutdown: handle all commands, run one step, send its outputs; block while there is no work.

    `sleeper`: with --enable-sleep-mode; without it no Sleep or WakeUp may arrive. `incidents`: writes snapshots;
    without it no TakeSnapshot may arrive. StartProfile and StopProfile may arrive with --profiler-config only.
    """
    while True:
        progress.busy = core.has_work
        for command in inbox.receive(wait=not progress.busy):
            match command:
                case AddRequest():
                    for request in command.sequences() if command.others else (command.request,):
                        _add(core, request, send)
                case Abort(request_ids):
                    core.abort(request_ids)
                case ResetPrefixCache(ticket):
                    core.reset_prefix_cache()
                    send(ResetDone(ticket))
                case LoadAdapter(ticket, adapter):
                    core.load_adapter(adapter, partial(_report_adapter, send, ticket))
                case RemoveAdapter(number):
                    core.remove_adapter(number)
                case Sleep() | WakeUp() if sleeper is not None:
                    while core.has_work:
                        _step(core, send, progress)
                    progress.busy = False
                    send(_change_sleep(sleeper, command))
                case Suspend(ticket):
                    core.suspend()
                    while core.has_work:
                        _step(core, send, progress)
                    progress.busy = False
                    send(SuspendDone(ticket))
                case Resume():
                    core.resume()
                case TakeSnapshot(ticket) if incidents is not None:
                    send(_take_snapshot(incidents, ticket))
                case StartProfile() | StopProfile() if (profiler := core.profiler) is not None:
                    progress.busy = False  # Writing a trace may take longer than a step.
                    send(_change_profile(profiler, command))
                case Shutdown():
                    return
                case _:
                    raise RuntimeError(f"{type(command).__name__} arrived, for which this engine was not set up")
        if core.has_work:
            progress.busy = True
            _step(core, send, progress)
        else:
            send(StepReply(StepOutputs(stats=core.stats)))


def _step(core: EngineCore, send: Send, progress: Progress) -> None:
    send(StepReply(core.step()))
    progress.steps += 1


def _report_adapter(send: Send, ticket: int, error: RequestError | None) -> None:
    send(AdapterState(ticket, None if error is None else (error.field, str(error))))


def _take_snapshot(incidents: IncidentWriter, ticket: int) -> SnapshotTaken:
    try:
        return SnapshotTaken(ticket, str(incidents.write("on demand")))
    except OSError as error:
        return SnapshotTaken(ticket, "", f"{error.filename}: {error.strerror}")


def _change_profile(profiler: StepProfiler, command: StartProfile | StopProfile) -> ProfileState:
    try:
        if isinstance(command, StopProfile):
            return ProfileState(command.ticket, profiler.stop())
        profiler.start(command.request)
    except RequestError as error:
        return ProfileState(command.ticket, error=(error.field, str(error)))
    return ProfileState(command.ticket)


def _change_sleep(sleeper: Sleeper, command: Sleep | WakeUp) -> SleepState:
    error = ""
    try:
        if isinstance(command, Sleep):
            sleeper.sleep(command.level)
        else:
            sleeper.wake_up(command.tags)
    except SleepError as failure:
        error = str(failure)
    return SleepState(command.ticket, sleeper.asleep, error)


def _add(core: EngineCore, request: EngineRequest, send: Send) -> None:
    try:
        core.add_request(request)
    except RequestError as error:
        send(Refused(request.request_id, error.field, str(error)))


# Incident snapshots: when the engine fails, on a signal, and on demand.


def incident_folder(config: EngineConfig) -> Path:
    """Return --incident-dir or its default."""
    if config.runtime.incident_dir is not None:
        return Path(config.runtime.incident_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda" / "incidents"


class IncidentWriter:
    """Writes snapshots of one engine. Thread-safe, as far as the engine's own thread does not need to take part."""

    def __init__(self, config: EngineConfig, built: BuiltEngine) -> None:
        self._config = config
        self._built = built

    def write(self, cause: str, error: BaseException | None = None) -> Path:
        """Write a snapshot and return its path. Raises OSError."""
        info = self._built.info
        snapshot = snapshot_of(
            self._built.core,
            cause,
            error=error,
            config=without_secrets("", self._config),
            engine={"backend": info.backend, "device": info.device, "dtype": info.dtype, "memory": info.memory},
            tokens=self._config.runtime.incident_tokens,
        )
        path = write_snapshot(incident_folder(self._config), snapshot)
        logger.warning("incident snapshot: %s (pagoda replay FILE steps through it)", path)
        return path

    def try_write(self, cause: str, error: BaseException | None = None) -> None:
        """Write a snapshot; log why it cannot be written, if so. For an engine that has failed."""
        try:
            self.write(cause, error)
        except Exception as failure:
            logger.error("no incident snapshot: %r", failure)

    def on_signal(self) -> None:
        """From now on write a snapshot for each SNAPSHOT_SIGNAL, in a thread. Call it in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(SNAPSHOT_SIGNAL, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # C code writes to it: the main thread may be stuck.
        threading.Thread(target=self._wait, args=(reader,), name="pagoda-incidents", daemon=True).start()

    def _wait(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            if SNAPSHOT_SIGNAL in numbers:
                self.try_write("on demand, by signal")


# An engine in a thread.


class ThreadClient:
    """Implements EngineClient and Inbox with an engine in a thread: easy to debug, no isolation."""

    def __init__(
        self, config: EngineConfig, build: Build = build_engine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._build = build
        self._supervisor = Supervisor(config.runtime, clock)
        self._progress = Progress()
        self._commands: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[EngineInfo | BaseException] = queue.SimpleQueue()
        self._listener_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pagoda-engine", daemon=True)
        self._thread.start()

    def wait_ready(self) -> EngineInfo:
        result = self._started.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        with self._listener_lock:
            self._loop = loop
            self._listener = listener
            if self._supervisor.failed is not None:
                loop.call_soon_threadsafe(listener, self._supervisor.failed)

    def send(self, command: ToEngine) -> None:
        if self._supervisor.failed is not None:
            raise EngineDeadError(self._supervisor.failed.message)
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        self._commands.put(command)

    def check(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        if self._supervisor.failed is None:
            self._supervisor.note(Heartbeat(self._progress.steps, self._progress.busy))
        self._supervisor.check()

    @property
    def others(self) -> OtherUse:
        return NO_OTHERS

    def kill(self, cause: str) -> None:
        """Count the engine as dead; its thread ends after its current step."""
        self._deliver(Failed("EngineDeadError", cause))
        self._commands.put(Shutdown())

    def close(self, timeout: float = 2.0) -> None:
        """End the engine after its current step. Idempotent."""
        if not self._closed:
            self._closed = True
            self._commands.put(Shutdown())
            self._thread.join(timeout)

    def receive(self, wait: bool) -> list[ToEngine]:
        commands = [self._commands.get()] if wait else []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands

    def _run(self) -> None:
        try:
            built = self._build(self._config, "server")
        except BaseException as error:
            self._deliver(failure(error))
            self._started.put(error)
            return
        if built.hosts is not None:
            built.hosts.watch(lambda death: self._deliver(failure(death)))
        self._deliver(Ready(built.info))
        self._started.put(built.info)
        incidents = IncidentWriter(self._config, built)
        try:
            run_engine(built.core, self, self._deliver, self._progress, built.sleeper, incidents)
        except BaseException as error:
            traceback.print_exc()
            incidents.try_write(str(error), error)
            self._deliver(failure(error))
        else:
            self._deliver(Failed("EngineDeadError", "the engine was shut down"))
        finally:
            built.backend.close()

    def _deliver(self, message: FromEngine) -> None:
        with self._listener_lock:
            self._supervisor.note(message)
            if self._loop is not None and self._listener is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._listener, message)


# An engine process. On several hosts, all but the first execute the steps of the first and take no requests.


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


def serve(address: str, build: Build = build_engine, clients: int = 0) -> int:
    """Build the engine of the configuration on stdin and run it. Return the exit status.

    `clients`: number of SharedClients; 0: the parent sends the requests.
    """
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # They are sent to the whole process group; the parent decides.
        signal.signal(number, signal.SIG_IGN)
    stdin = sys.stdin.buffer
    config = msgspec.msgpack.decode(stdin.read(int.from_bytes(stdin.read(4), "big")), type=EngineConfig)
    configure(config.logging)
    threading.Thread(target=_end_with_parent, name="pagoda-parent", daemon=True).start()
    context = zmq.Context()
    progress = Progress()
    addresses = [f"{address}.out", *(output_address(address, client) for client in range(clients))]
    threading.Thread(
        target=_send_heartbeats, args=(context, addresses, progress), name="pagoda-heartbeat", daemon=True
    ).start()
    output_context = zmq.Context()  # A separate context, so that term() waits for the last message only.
    outputs = [_connect(output_context, address) for address in addresses]
    router = ClientRouter(
        clients,
        lambda client, message: outputs[client + 1].send(encode(message)),
        lambda message: _send_all(outputs, message),
    )

    def send(message: FromEngine) -> None:
        if clients:
            router.send(message)
        else:
            outputs[0].send(encode(message))

    try:
        commands = context.socket(zmq.PULL)
        commands.set_hwm(0)
        bind_private(commands, f"{address}.in")
        inbox = SharedInbox(commands, router, decode_to_engine) if clients else _SocketInbox(commands)
        built = build(config, "server")
        try:
            if built.hosts is not None:
                built.hosts.watch(lambda death: _send_failure(context, addresses, death))
            _run(config, built, inbox, send, progress)
        finally:
            built.backend.close()
    except BaseException as error:
        if not isinstance(error, PagodaError):
            traceback.print_exc()
        send(failure(error))
        return 1
    finally:
        for output in outputs:
            output.close(linger=1000)
        output_context.term()
    return 0


def _run(config: EngineConfig, built: BuiltEngine, inbox: Inbox, send: Send, progress: Progress) -> None:
    gc.collect()
    gc.freeze()  # Collections between steps then visit requests only.
    incidents = IncidentWriter(config, built)
    incidents.on_signal()
    send(Ready(built.info))
    if isinstance(built.hosts, FollowingBackend):
        built.hosts.follow(built.sleeper)
        return
    try:
        run_engine(built.core, inbox, send, progress, built.sleeper, incidents)
    except BaseException as error:
        incidents.try_write(str(error), error)
        raise


def _send_failure(context: zmq.Context[zmq.Socket[bytes]], addresses: list[str], death: EngineDeadError) -> None:
    """Report the engine's death. Thread-safe: the engine's own thread may be blocked."""
    outputs = [_connect(context, address) for address in addresses]
    _send_all(outputs, failure(death))
    for output in outputs:
        output.close(linger=1000)


def _send_all(sockets: list[zmq.Socket[bytes]], message: FromEngine) -> None:
    data = encode(message)
    for socket in sockets:
        socket.send(data)


def _connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def _end_with_parent() -> None:
    """Wait for EOF on stdin, then exit at once."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _send_heartbeats(context: zmq.Context[zmq.Socket[bytes]], addresses: list[str], progress: Progress) -> None:
    sockets = [_connect(context, address) for address in addresses]
    trimmer = MemoryTrimmer()
    while True:
        _send_all(sockets, Heartbeat(progress.steps, progress.busy))
        trimmer.check()
        time.sleep(HEARTBEAT_SECONDS)


if __name__ == "__main__":
    status = serve(sys.argv[1], clients=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # A normal interpreter exit would wait for the sockets of daemon threads.
