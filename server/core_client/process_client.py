"""An engine in its own process, and its supervision.

The processes share two Unix sockets in a folder that only this user may enter. The engine ends when its stdin closes,
which happens when this process ends; a thread here waits for the engine's exit.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.engine.messages import EngineOutput, StepOutputs
from pagoda.common.errors import ConfigError, EngineDeadError
from pagoda.server.core_client.client import Listener, Supervisor
from pagoda.server.core_client.ipc_messages import (
    NO_OTHERS,
    EngineInfo,
    Failed,
    FromEngine,
    OtherUse,
    Ready,
    Shutdown,
    StepReply,
    ToEngine,
    decode_from_engine,
    encode,
    raised,
)
from pagoda.server.core_client.private_folder import PrivateFolder
from pagoda.server.processing.workers.child import describe_exit, engine_env

ENGINE_PROGRAM: Final = (sys.executable, "-P", "-m", "pagoda.server.core_client.engine")

_MAX_MESSAGES: Final = 32
"""Maximum messages delivered before the event loop handles other events."""

_MAX_SOCKET_PATH: Final = 107
"""Bytes, on Linux."""

_FOLDER_KIND: Final = "ipc"
STACK_SIGNAL: Final = signal.SIGUSR2
"""An engine process that gets it writes the stacks of its threads to stderr, even within native code."""

SNAPSHOT_SIGNAL: Final = signal.SIGUSR1
"""An engine process that gets it writes an incident snapshot, even while it is stuck in a step."""

_LAST_SECONDS: Final = 1.0
"""Time for a stuck engine to write its stacks and a snapshot before it is killed."""


class ProcessClient:
    """Implements EngineClient over two Unix sockets.

    `clients`: number of SharedClients that send the requests instead of this one, from other processes; this one gets
    Ready, Failed and heartbeats.
    """

    _process: subprocess.Popen[bytes] | None = None  # None: another process started the engine.

    def __init__(
        self,
        config: EngineConfig,
        program: Sequence[str] = ENGINE_PROGRAM,
        clients: int = 0,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the engine. `env`: environment variables beside this process's. `clock`: see Supervisor."""
        self._private = _private_folder(config.runtime.rpc_base_path)
        self._folder = self._private.path
        self.address = f"ipc://{self._folder}/engine"
        self._connect(Supervisor(config.runtime, clock), f"{self.address}.out", f"{self.address}.in")
        try:
            process = subprocess.Popen(
                [*program, self.address, *([str(clients)] if clients else ())],
                stdin=subprocess.PIPE,
                env=engine_env() | dict(env or {}),
            )
        except OSError:  # There is no memory, or there are too many processes.
            self._context.destroy(linger=0)  # A context with open sockets would block when it is collected.
            self._private.remove()
            raise
        self._process = process
        self._send_config(process, config)
        # Not __del__: a collected cycle may finalize the context before its sockets, and that blocks for ever.
        self._release = weakref.finalize(
            self, _end, process, self._supervisor, self._in, self._out, self._context, self._private
        )
        # The reference is weak: the client may be deleted before the engine ends.
        watched = (process, weakref.ref(self))
        threading.Thread(target=_watch, args=watched, name="pagoda-watch", daemon=True).start()

    def _connect(self, supervisor: Supervisor, outputs: str, commands: str) -> None:
        """Bind the socket of the engine's messages and connect to that of its commands."""
        self._supervisor = supervisor
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PULL)
        self._out.set_hwm(0)
        bind_private(self._out, outputs)
        # The connecting side queues while the engine is not connected: it never blocks.
        self._in = self._context.socket(zmq.PUSH)
        self._in.set_hwm(0)
        self._in.connect(commands)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._closed = False
        self._resuming = False
        self._kill_cause = ""
        self._others = NO_OTHERS

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where SharedClients find the engine's sockets."""
        return (self.address,)

    @property
    def failed(self) -> Failed | None:
        """Why the engine died, as far as it is known."""
        return self._supervisor.failed

    @property
    def others(self) -> OtherUse:
        """What unfinished requests of the engine's other clients use, as of its last message."""
        return self._others

    @property
    def pid(self) -> int:
        """The engine's process id."""
        assert self._process is not None, "another process started the engine"
        return self._process.pid

    def wait_ready(self) -> EngineInfo:
        while (info := self.poll_ready(50)) is None:
            pass
        return info

    def poll_ready(self, timeout_ms: int) -> EngineInfo | None:
        if self._closed:
            raise EngineDeadError("the engine was shut down while it was starting")
        ended = self._status() is not None
        while (message := self._receive(0 if ended else timeout_ms)) is not None:
            self._supervisor.note(message)
            if isinstance(message, Ready):
                return message.info
        if self._supervisor.failed is not None:
            raise raised(self._supervisor.failed)
        if ended:
            raise raised(self._exit_failure())
        return None

    def wait_end(self) -> None:
        """Block until the engine exits by itself. Raises the cause of its death."""
        while True:
            status = self._status()
            while (message := self._receive(200 if status is None else 0)) is not None:
                self._supervisor.note(message)
            if self._supervisor.failed is not None:
                raise raised(self._supervisor.failed)
            if status:
                raise raised(self._exit_failure())
            if status is not None:
                return

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._out.FD)
        self._loop = loop
        self._listener = listener
        loop.add_reader(self._out.FD, self._deliver)
        loop.call_soon(self._deliver)  # The socket's descriptor signals changes only.
        if self._status() is not None:
            loop.call_soon(self._deliver_end)

    def send(self, command: ToEngine) -> None:
        if self._closed or self._supervisor.failed is not None or self._status() is not None:
            raise EngineDeadError((self._supervisor.failed or self._exit_failure()).message)
        self._in.send(encode(command))

    def check(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        self._deliver()
        if self._status() is not None:
            self._deliver_end()
        self._supervisor.check()

    def kill(self, cause: str) -> None:
        """End a stuck engine. The process that started it does so; in others nothing happens."""
        if self._process is None:
            return
        self._kill_cause = cause
        for number in (STACK_SIGNAL, SNAPSHOT_SIGNAL):
            self._process.send_signal(number)
        timer = threading.Timer(_LAST_SECONDS, self._process.kill)
        timer.daemon = True
        timer.start()

    def close(self, timeout: float = 2.0) -> None:
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._out.FD)
        if self._process is not None and self._release.detach():
            _end(self._process, self._supervisor, self._in, self._out, self._context, self._private, timeout)

    def _status(self) -> int | None:
        """Return the exit status of the engine's process; None while it runs, or if another process started it."""
        return None if self._process is None else self._process.poll()

    def _send_config(self, process: subprocess.Popen[bytes], config: EngineConfig) -> None:
        """Write the configuration to the engine's stdin and keep it open: EOF tells the engine that we ended."""
        assert process.stdin is not None
        text = msgspec.msgpack.encode(config)
        try:
            process.stdin.write(len(text).to_bytes(4, "big") + text)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # The process has ended already; wait_ready raises the cause.

    def _receive(self, timeout_ms: int) -> FromEngine | None:
        if timeout_ms and not self._out.poll(timeout_ms):
            return None
        try:
            message = decode_from_engine(self._out.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        if isinstance(message, StepReply) and message.others is not None:
            self._others = message.others
        return message

    def _deliver(self) -> None:
        """Deliver up to `_MAX_MESSAGES` messages; schedule the delivery of more."""
        messages: list[FromEngine] = []
        while len(messages) < _MAX_MESSAGES and not self._closed and (message := self._receive(0)) is not None:
            self._supervisor.note(message)
            messages.append(message)
        for message in coalesce(messages):
            if self._listener is not None and not self._closed:
                self._listener(message)
        if len(messages) < _MAX_MESSAGES or self._closed:
            return
        if self._loop is not None and not self._resuming:
            self._resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._deliver()

    def _deliver_end(self) -> None:
        """Deliver the last messages of a process that ended, and its exit status unless one of them was Failed."""
        while not self._closed and self._out.poll(0):
            self._deliver()
        if self._closed or self._supervisor.failed is not None:
            return
        failed = self._exit_failure()
        self._supervisor.note(failed)
        if self._listener is not None:
            self._listener(failed)

    def notify_exit(self) -> None:
        """Schedule the delivery of the process's end. Thread-safe."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver_end)

    def _exit_failure(self) -> Failed:
        status = self._status()
        why = "the engine was shut down" if status is None else f"the engine process {describe_exit(status)}"
        return Failed("EngineDeadError", self._kill_cause or why)


def bind_private(socket: zmq.Socket[bytes], address: str) -> None:
    """Bind a unix socket that only this user may connect to."""
    socket.bind(address)
    Path(address.removeprefix("ipc://")).chmod(0o600)


def _end(
    process: subprocess.Popen[bytes],
    supervisor: Supervisor,
    commands: zmq.Socket[bytes],
    replies: zmq.Socket[bytes],
    context: zmq.Context[zmq.Socket[bytes]],
    folder: PrivateFolder,
    timeout: float = 2.0,
) -> None:
    """End the engine, by a signal where it is not ready or takes over `timeout` seconds; free sockets and folder."""
    if process.poll() is None:
        commands.send(encode(Shutdown()))
        if not supervisor.ready or not _ends_within(process, timeout):
            process.kill()  # The process ignores other signals.
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    for socket in (commands, replies):  # A context with open sockets would block.
        socket.close(linger=0)
    context.term()
    folder.remove()


def _ends_within(process: subprocess.Popen[bytes], timeout: float) -> bool:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


def _watch(process: subprocess.Popen[bytes], watcher: weakref.ref[ProcessClient]) -> None:
    """Wait for the process to end, then notify the client if it still exists. Runs in a thread."""
    process.wait()
    client = watcher()
    if client is not None:
        client.notify_exit()


def check_folder(config: RuntimeConfig) -> None:
    """Raise ConfigError if the engine's sockets cannot be created."""
    _private_folder(config.rpc_base_path).remove()


def _private_folder(base: str | None) -> PrivateFolder:
    """Create a folder in `base`, with a path short enough for a socket. Raises ConfigError."""
    flag = "--rpc-base-path"
    try:
        folder = PrivateFolder(_FOLDER_KIND, base)
    except OSError as error:
        raise ConfigError(flag, f"{base or tempfile.gettempdir()}: {error.strerror}; use a writable folder") from None
    if len(bytes(folder.path / "engine.out")) <= _MAX_SOCKET_PATH:
        return folder
    folder.remove()
    if base is not None:
        raise ConfigError(flag, f"{base}: too long for a socket; use a folder with a shorter path")
    return PrivateFolder(_FOLDER_KIND, "/tmp")


# Coalescing: queued steps are merged into one, with one output per sequence.
#
# If the engine is faster than this process, one event per token takes longer than a step and latency would grow without
# bound. Merging a backlog costs hardly more than a single step, so the backlog does not grow. A slower engine never has
# two steps queued, and nothing is merged.


def coalesce(messages: Sequence[FromEngine]) -> list[FromEngine]:
    """Return the messages in order, with consecutive steps merged into one."""
    merged: list[FromEngine] = []
    steps: list[StepOutputs] = []
    for message in messages:
        if isinstance(message, StepReply) and not any(output.error for output in message.outputs.outputs):
            steps.append(message.outputs)
            continue
        # An error is not merged: it ends a request at once, after the outputs before it.
        merged += [*_merge_steps(steps), message]
        steps = []
    return merged + _merge_steps(steps)


def _merge_steps(steps: list[StepOutputs]) -> list[FromEngine]:
    """Return at most one message with the outputs of all steps."""
    if len(steps) < 2:
        return [StepReply(step) for step in steps]
    by_request: defaultdict[str, list[EngineOutput]] = defaultdict(list)
    for step in steps:
        for output in step.outputs:
            by_request[output.request_id].append(output)
    outputs = [outputs[0] if len(outputs) == 1 else _merge_outputs(outputs) for outputs in by_request.values()]
    earlier = tuple(stats for step in steps[:-1] for stats in (*step.earlier, step.stats))
    return [StepReply(StepOutputs(outputs=outputs, stats=steps[-1].stats, earlier=earlier))]


def _merge_outputs(outputs: list[EngineOutput]) -> EngineOutput:
    """Merge outputs of one sequence: first-only fields, last-only fields, and all tokens."""
    first = outputs[0]
    last = outputs[-1]
    logprobs = None
    if first.logprobs is not None:
        logprobs = [position for output in outputs for position in output.logprobs or ()]
    return EngineOutput(
        request_id=first.request_id,
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        scheduled=first.scheduled,
        num_preemptions=max(output.num_preemptions for output in outputs),
        replica=first.replica,
    )
