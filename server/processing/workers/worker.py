"""A child process that works on untrusted input, one request at a time, with limits of time and memory.

It gets none of the server's environment but the paths of programs and packages, and can gain no privileges.

Requests and replies are length-prefixed frames on the child's stdin and stdout. The first frame has what the child
prepares itself with; it answers READY. A child that exceeds a limit or crashes is replaced by a new one at the next
request. EOF on stdin ends the child, so that it does not outlive its parent.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from pagoda.server.processing.workers.child import untrusted_env

START_SECONDS: Final = 60.0
READY: Final = b"ready"
_SIZE_BYTES: Final = 8  # before each frame
LOOK_SECONDS: Final = 0.02  # between looks at the processor time of a child that is near its limit

Handler = Callable[[bytes], bytes]
"""Returns the reply to a request."""


class WorkerTimeoutError(Exception):
    """The child did not reply in time, on however busy a machine."""


class WorkerEndedError(Exception):
    """The child ended at a request: it crashed, or it was ended.

    `out_of_time`: because it used up its processor time; `stopped`: because a signal had stopped it (SIGSTOP).
    """

    def __init__(self, message: str, *, out_of_time: bool = False, stopped: bool = False) -> None:
        super().__init__(message)
        self.out_of_time = out_of_time
        self.stopped = stopped


# The parent's side.


class ChildWorker:
    """Starts the child at the first request, and again after it has ended. Thread-safe; requests wait in turn."""

    def __init__(
        self,
        program: Sequence[str],
        seconds: float,
        elapsed: float,
        setup: Callable[[], bytes] = bytes,
        *,
        name: str = "worker",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`program`: its command line; `setup`: makes the first frame, once.

        `seconds`: processor time of a request; `elapsed`: seconds by `clock` until its reply, however busy the machine.
        """
        self._program = tuple(program)
        self._seconds = seconds
        self._elapsed = elapsed
        self._make_setup = setup
        self._name = name
        self._clock = clock
        self._lock = threading.RLock()
        self._setup: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., ChildWorker] | None = None
        self._num_served = 0  # requests that the running child has answered
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None before the first request and after the last child has ended."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the child if it is not running. Raises RuntimeError if it does not start or the worker is closed."""
        with self._lock:
            self._started()

    def call(self, data: bytes) -> bytearray:
        """Return the reply to a request, in memory of the caller's own.

        Raises WorkerTimeoutError, WorkerEndedError, and as `start` does.

        A new child tries again where the request may not be the reason: after the crash of a child that has served
        others, which may be for what they left in memory, and after somebody has stopped the child.
        """
        with self._lock:
            is_used = self._num_served > 0
            try:
                return self._call(data)
            except WorkerEndedError as error:
                if error.out_of_time or not (is_used or error.stopped):
                    raise
            return self._call(data)

    def _call(self, data: bytes) -> bytearray:
        process = self._started()
        try:
            reply = _exchange(process, data, _Limits(process.pid, self._seconds, self._elapsed, self._clock))
        except (WorkerTimeoutError, WorkerEndedError):
            self._end()
            raise
        if reply is None:
            self._end(forced=False)
            raise WorkerEndedError(f"ended with status {process.returncode}")
        self._num_served += 1
        return reply

    def close(self) -> None:
        """End the child at once; a request in flight fails. Idempotent."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # what waits for its reply holds the lock and sees its end
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        self._check_open()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        if self._setup is None:
            self._setup = self._make_setup()
        process = subprocess.Popen(
            self._program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=untrusted_env(),
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _kill, process)
        try:
            self._check_open()  # it may have been closed since this call began
        except RuntimeError:
            self._end()
            raise
        try:
            limits = _Limits(process.pid, START_SECONDS, START_SECONDS, self._clock)
            ready = _exchange(process, self._setup, limits)
        except (WorkerTimeoutError, WorkerEndedError):
            ready = None
        if ready is None or bytes(ready) != READY:
            self._end()
            raise RuntimeError(f"the process of the {self._name} did not start")
        return process

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the {self._name} is closed")

    def _end(self, *, forced: bool = True) -> None:
        process = self._process
        self._process = None
        self._num_served = 0
        if process is None:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        if forced:
            process.kill()
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a child that closed its stdout or must end; its own exit status is kept if it ends within a second."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Limits:
    """What a request may still use. The parent measures it: a child may inherit blocked or ignored signals."""

    def __init__(self, pid: int, seconds: float, elapsed: float, clock: Callable[[], float]) -> None:
        self._pid = pid
        self._clock = clock
        self._used_at_end = _Usage.of(pid).seconds + seconds
        self._stopped_until = clock() + seconds
        self._until = clock() + elapsed

    def left(self) -> float:
        """Return after how many seconds to look again.

        Raises WorkerTimeoutError when no time is left, WorkerEndedError when no processor time is, or when the child
        is stopped and would by now have used its processor time if it ran.
        """
        now = self._clock()
        usage = _Usage.of(self._pid)
        if now >= self._until:
            raise WorkerTimeoutError
        if now >= self._stopped_until and usage.is_stopped:
            raise WorkerEndedError("is stopped", stopped=True)
        processor = self._used_at_end - usage.seconds
        if processor <= 0:
            raise WorkerEndedError("used up its processor time", out_of_time=True)
        return min(self._until - now, max(processor, LOOK_SECONDS))


@dataclass(frozen=True, slots=True)
class _Usage:
    """What the system says of a process."""

    seconds: float = 0.0
    """Processor time that it has used; 0 where there is no /proc."""
    is_stopped: bool = False

    @staticmethod
    def of(pid: int) -> _Usage:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return _Usage()
        fields = stat[stat.rindex(b")") + 2 :].split()  # from field 3 on; the second is a name with spaces
        user, system = fields[11:13]
        return _Usage((int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), fields[0] in (b"T", b"t"))


def _exchange(process: subprocess.Popen[bytes], data: bytes, limits: _Limits) -> bytearray | None:
    """Send a frame and return the reply; None if the child ended. Raises as `_Limits.left` does."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin.fileno(), len(data).to_bytes(_SIZE_BYTES, "big") + data, limits)
    except BrokenPipeError:
        return None
    size = _receive(process.stdout.fileno(), _SIZE_BYTES, limits)
    return None if size is None else _receive(process.stdout.fileno(), int.from_bytes(size, "big"), limits)


def _send(descriptor: int, data: bytes, limits: _Limits) -> None:
    left = memoryview(data)
    os.set_blocking(descriptor, False)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            _wait(descriptor, select.POLLOUT, limits)


def _receive(descriptor: int, size: int, limits: _Limits) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        _wait(descriptor, select.POLLIN, limits)
        piece = os.read(descriptor, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return data


def _wait(descriptor: int, event: int, limits: _Limits) -> None:
    poll = select.poll()  # unlike select, for any number of open files
    poll.register(descriptor, event)
    while not poll.poll(limits.left() * 1000):
        pass


# The child's side.


def serve(prepare: Callable[[bytes], Handler], memory: int) -> None:
    """Answer requests until EOF. `prepare` gets the first frame.

    `memory`: bytes that a request may allocate beyond what the process has after `prepare`; further allocations fail.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _renounce_privileges()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # libraries may print
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    handle = prepare(first)
    _limit_memory(memory)
    write_frame(replies, READY)
    while (data := read_frame(sys.stdin.buffer)) is not None:
        write_frame(replies, handle(data))


_PR_SET_NO_NEW_PRIVS: Final = 38


def _renounce_privileges() -> None:
    """Keep this process and its children from gaining privileges through programs that they start."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Write a frame and flush."""
    stream.write(len(data).to_bytes(_SIZE_BYTES, "big"))
    stream.write(data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next frame; None at EOF."""
    size = stream.read(_SIZE_BYTES)
    return stream.read(int.from_bytes(size, "big")) if len(size) == _SIZE_BYTES else None


def _limit_memory(extra: int) -> None:
    """Limit the address space to `extra` bytes beyond what is mapped now. Has no effect without /proc."""
    if not Path("/proc/self/statm").exists():
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + extra if hard == resource.RLIM_INFINITY else min(mapped + extra, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
