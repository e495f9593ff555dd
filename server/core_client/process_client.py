"""An engine in a process of its own, and the watch over it.

Three things hold the two together: two Unix sockets in a folder that only this user may enter, the engine's stdin,
whose end tells it that this process is gone, and a thread here that waits for the engine's end.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.engine.messages import EngineOutput, StepOutputs
from pagoda.common.errors import ConfigError, EngineDeadError
from pagoda.server.child import child_env, describe_exit
from pagoda.server.core_client.client import Listener, Supervisor
from pagoda.server.ipc_messages import (
    EngineInfo,
    Failed,
    FromEngine,
    Ready,
    Shutdown,
    StepReply,
    ToEngine,
    decode_from_engine,
    encode,
    raised,
)

# Steps that waited to be heard are handed on as one: what they brought each sequence, in one output.
#
# Where the engine is faster than this process, an event for each token costs more time than there is, and clients
# would hear later and later. A backlog that is joined before anything is made of it costs hardly more than a single
# step, so it does not grow. An engine that is slower never has two steps waiting, and nothing is joined.


def joined(messages: Sequence[FromEngine]) -> list[FromEngine]:
    """Messages in order, each run of steps in one."""
    told: list[FromEngine] = []
    waiting: list[StepOutputs] = []
    for message in messages:
        if isinstance(message, StepReply) and not any(output.error for output in message.outputs.outputs):
            waiting.append(message.outputs)
            continue
        # An error goes by itself: it ends a request at once, and what was said before it is to be heard before it.
        told += [*_one(waiting), message]
        waiting = []
    return told + _one(waiting)


def _one(steps: list[StepOutputs]) -> list[FromEngine]:
    """At most one message, of all these steps."""
    if len(steps) < 2:
        return [StepReply(step) for step in steps]
    news: defaultdict[str, list[EngineOutput]] = defaultdict(list)
    for step in steps:
        for output in step.outputs:
            news[output.request_id].append(output)
    outputs = [outputs[0] if len(outputs) == 1 else _joined_outputs(outputs) for outputs in news.values()]
    earlier = tuple(stats for step in steps[:-1] for stats in (*step.earlier, step.stats))
    return [StepReply(StepOutputs(outputs=outputs, stats=steps[-1].stats, earlier=earlier))]


def _joined_outputs(outputs: list[EngineOutput]) -> EngineOutput:
    """Of one sequence: what comes with the first output, what comes with the last, and all tokens."""
    first, last = outputs[0], outputs[-1]
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
    )


ENGINE_PROGRAM: Final = (sys.executable, "-P", "-m", "pagoda.server.core_client.engine_process")

_AT_ONCE: Final = 32
"""Messages that are handed over at most before requests that have just come get their turn."""

_LONGEST_SOCKET_PATH: Final = 107
"""Bytes, on Linux."""


class ProcessClient:
    """The engine in a process of its own, over two Unix sockets in a folder that only this user may enter."""

    def __init__(self, config: EngineConfig, program: Sequence[str] = ENGINE_PROGRAM) -> None:
        self._supervisor = Supervisor(config.runtime)
        self._folder = _private_folder(config.runtime.rpc_base_path)
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PULL)
        self._out.set_hwm(0)
        self._out.bind(f"ipc://{self._folder}/engine.out")
        # The connecting side queues, even when nobody listens: it never blocks.
        self._in = self._context.socket(zmq.PUSH)
        self._in.set_hwm(0)
        self._in.connect(f"ipc://{self._folder}/engine.in")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._closed = False
        self._resuming = False
        self._process = subprocess.Popen(
            [*program, f"ipc://{self._folder}/engine"],
            stdin=subprocess.PIPE,
            env=child_env(),
        )
        self._hand_over(config)
        watched = (self._process, weakref.ref(self))  # not this itself, which could not end before the engine then
        threading.Thread(target=_watch, args=watched, name="pagoda-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def wait_ready(self) -> EngineInfo:
        """Block until the engine is warm. Raises what kept it from starting."""
        while True:
            if self._closed:
                raise EngineDeadError("the engine was shut down while it was starting")
            ended = self._process.poll() is not None
            while (message := self._receive(0 if ended else 50)) is not None:
                self._supervisor.hear(message)
                if isinstance(message, Ready):
                    return message.info
            if self._supervisor.failed is not None:
                raise raised(self._supervisor.failed)
            if ended:
                raise raised(self._obituary())

    def wait_end(self) -> None:
        """Block until the engine ends by itself. Raises what it died of."""
        while True:
            ended = self._process.poll() is not None
            while (message := self._receive(0 if ended else 200)) is not None:
                self._supervisor.hear(message)
            if self._supervisor.failed is not None:
                raise raised(self._supervisor.failed)
            if ended:
                if self._process.returncode:
                    raise raised(self._obituary())
                return

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        """Deliver messages to `listener` in `loop` from now on; replaces an earlier listener."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._out.FD)
        self._loop, self._listener = loop, listener
        loop.add_reader(self._out.FD, self._deliver)
        loop.call_soon(self._deliver)  # the socket's descriptor signals changes only
        if self._process.poll() is not None:
            loop.call_soon(self._deliver_end)

    def send(self, command: ToEngine) -> None:
        """Queue a command. Raises EngineDeadError when the engine is gone."""
        if self._closed or self._supervisor.failed is not None or self._process.poll() is not None:
            raise EngineDeadError((self._supervisor.failed or self._obituary()).message)
        self._in.send(encode(command))

    def check(self) -> None:
        """Raise EngineDeadError when the engine is dead, silent or stuck."""
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        self._deliver()
        if self._supervisor.failed is None and self._process.poll() is not None:
            self._supervisor.hear(self._obituary())
        self._supervisor.check()

    def close(self, timeout: float = 2.0) -> None:
        """End the engine, by force after `timeout` seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._out.FD)
        if self._process.poll() is None:
            self._in.send(encode(Shutdown()))
            if not self._supervisor.ready or not self._ends_within(timeout):
                self._process.kill()  # it leaves every other signal to this process
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        # By name: a context that is garbage together with its sockets has forgotten them, and would wait for ever.
        for socket in (self._in, self._out):
            socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    def _hand_over(self, config: EngineConfig) -> None:
        """Write the configuration to the engine's stdin, and leave that open: its end tells that this process ended."""
        assert self._process.stdin is not None
        text = msgspec.msgpack.encode(config)
        try:
            self._process.stdin.write(len(text).to_bytes(4, "big") + text)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended already; wait_ready tells why

    def _receive(self, timeout_ms: int) -> FromEngine | None:
        if timeout_ms and not self._out.poll(timeout_ms):
            return None
        try:
            return decode_from_engine(self._out.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _deliver(self) -> None:
        """Hand over what has come, `_AT_ONCE` messages at most: more wait until these have been read."""
        messages: list[FromEngine] = []
        while len(messages) < _AT_ONCE and not self._closed and (message := self._receive(0)) is not None:
            self._supervisor.hear(message)
            messages.append(message)
        for message in joined(messages):
            if self._listener is not None and not self._closed:
                self._listener(message)
        if len(messages) < _AT_ONCE or self._closed:
            return
        if self._loop is not None and not self._resuming:
            self._resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._deliver()

    def _deliver_end(self) -> None:
        """The process has ended: deliver its last messages, then its obituary unless one of them was it."""
        while not self._closed and self._out.poll(0):
            self._deliver()
        if self._closed or self._supervisor.failed is not None:
            return
        failed = self._obituary()
        self._supervisor.hear(failed)
        if self._listener is not None:
            self._listener(failed)

    def tell_end(self) -> None:
        """Have the end of the process delivered. From any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver_end)

    def _ends_within(self, timeout: float) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _obituary(self) -> Failed:
        status = self._process.poll()
        why = "the engine was shut down" if status is None else f"the engine process {describe_exit(status)}"
        return Failed("EngineDeadError", why)


def _watch(process: subprocess.Popen[bytes], watcher: weakref.ref[ProcessClient]) -> None:
    """In a thread: wait for the end of the process, and tell the client if it is still there."""
    process.wait()
    client = watcher()
    if client is not None:
        client.tell_end()


def check_folder(config: RuntimeConfig) -> None:
    """Raise ConfigError where the sockets of an engine's process could not be made."""
    _private_folder(config.rpc_base_path).rmdir()


def _private_folder(base: str | None) -> Path:
    """A new folder with mode 0700 in `base`, whose path is short enough for a socket in it. Raises ConfigError."""
    flag = "--rpc-base-path"
    try:
        folder = Path(tempfile.mkdtemp(prefix="pagoda-", dir=base))
    except OSError as error:
        raise ConfigError(
            flag, f"{base or tempfile.gettempdir()}: {error.strerror}; name a folder to write in"
        ) from None
    if len(bytes(folder / "engine.out")) <= _LONGEST_SOCKET_PATH:
        return folder
    folder.rmdir()
    if base is not None:
        raise ConfigError(flag, f"{base}: too long for a socket; name a folder with a shorter path")
    return Path(tempfile.mkdtemp(prefix="pagoda-", dir="/tmp"))
