"""Child processes that work on untrusted input, one request at a time, with limits of time and memory.

ChildWorker is the parent's side of one child, TemplateRenderer that of the children that render chat templates
(`template_worker`), `serve` the child's side.

A child gets none of the server's environment but the paths of programs and packages, and can gain no privileges.

Requests and replies are length-prefixed frames on the child's stdin and stdout. The first frame has what the child
prepares itself with; it answers READY. A child that exceeds a limit or crashes is replaced by a new one at the next
request. EOF on stdin ends the child, so that it does not outlive its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar

from pagoda.common.errors import EngineDeadError, QueueFullError, RequestError
from pagoda.server.processing.workers.child import untrusted_env

START_SECONDS: Final = 60.0
READY: Final = b"ready"
_SIZE_BYTES: Final = 8  # Bytes of the size before each frame.
LOOK_SECONDS: Final = 0.02  # Seconds between looks at the processor time of a child that is near its limit.

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
        self._num_served = 0  # Number of requests that the running child has answered.
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
            process.kill()  # The call that waits for its reply holds the lock and sees its end.
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
            self._check_open()  # The pool may have been closed since this call began.
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
        # These are the fields from the third on; the second is a name with spaces.
        fields = stat[stat.rindex(b")") + 2 :].split()
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
    poll = select.poll()  # Unlike select, poll takes any number of open files.
    poll.register(descriptor, event)
    while not poll.poll(limits.left() * 1000):
        pass


# Chat templates are rendered in other processes, because a template or messages may take any time and memory.

TEMPLATE_PROGRAM: Final = (sys.executable, "-P", "-m", "pagoda.server.processing.workers.template_worker")
TEMPLATE_SECONDS: Final = 5.0
"""Maximum time of a rendering, in seconds of processor time: a busy machine refuses none."""
TEMPLATE_ELAPSED_SECONDS: Final = 60.0
"""Maximum time of a rendering on however busy a machine."""


MAX_INSPECTED: Final = 32
MAX_WAITING_TEMPLATES: Final = 64
"""Maximum queued requests with templates of their own; further ones are refused."""

Lane = Literal["short", "long", "client"]
"""Kind of a conversation. Each has a process, so that one kind does not wait for another: short and long conversations
with the server's template, and those with a template of the client."""

T = TypeVar("T")

TEMPLATE_TEXT: Final = b"t"
TEMPLATE_ERROR: Final = b"e"
"""First byte of a reply: the rest is the text, or the field and the message of an error."""


class TemplateRenderer:
    """Renders chat templates in a process per lane, which starts with the first request. Thread-safe."""

    def __init__(self, seconds: float = TEMPLATE_SECONDS, elapsed: float = TEMPLATE_ELAPSED_SECONDS) -> None:
        self._seconds = seconds
        self._elapsed = elapsed
        self._lanes: dict[Lane, tuple[ChildWorker, ThreadPoolExecutor]] = {}
        self._variables: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()

    def start(self, template: str | None) -> None:
        """Start the process of short conversations and compile the server's template. Raises RuntimeError."""
        if template is not None:
            self.variables_of(template, lane="short").result()

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], *, lane: Lane = "long", **options: Any
    ) -> str:
        """Return what `common.text.chat_template.render` does.

        Raises RequestError as it does, and for a rendering that exceeds the limits.
        """
        return self._call(lane, _encoded({"template": template, "messages": messages, "options": options}))

    def variables_of(self, template: str, *, lane: Lane) -> Future[frozenset[str]]:
        """Return the names that a template reads; empty for invalid jinja. Cached. Raises QueueFullError."""
        name = sha256(template.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if name in self._variables:
                self._variables.move_to_end(name)
                variables: Future[frozenset[str]] = Future()
                variables.set_result(self._variables[name])
                return variables
        return self.submit(lane, partial(self._inspect, template, name, lane))

    def _inspect(self, template: str, name: bytes, lane: Lane) -> frozenset[str]:
        try:
            names = frozenset(json.loads(self._call(lane, _encoded({"template": template}))))
        except RequestError:
            names = frozenset()
        with self._lock:
            self._variables[name] = names
            if len(self._variables) > MAX_INSPECTED:
                self._variables.popitem(last=False)
        return names

    def submit(self, lane: Lane, task: Callable[[], T]) -> Future[T]:
        """Run a task, which renders, in the thread of a lane. Raises QueueFullError."""
        _, thread = self._lane(lane)
        if lane != "client":
            return thread.submit(task)
        with self._lock:
            if self._waiting >= MAX_WAITING_TEMPLATES:
                raise QueueFullError("too many requests with templates of their own; try again in a few seconds")
            self._waiting += 1
        future = thread.submit(task)
        future.add_done_callback(self._finished)
        return future

    def close(self) -> None:
        """End the processes. Idempotent."""
        with self._lock:
            self._closed = True
            lanes = self._lanes
            self._lanes = {}
        for worker, thread in lanes.values():
            thread.shutdown(wait=False, cancel_futures=True)
            worker.close()

    def _lane(self, lane: Lane) -> tuple[ChildWorker, ThreadPoolExecutor]:
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine was shut down")
            if lane not in self._lanes:
                worker = ChildWorker(TEMPLATE_PROGRAM, self._seconds, self._elapsed, name="chat templates")
                self._lanes[lane] = worker, ThreadPoolExecutor(1, f"pagoda-template-{lane}")
            return self._lanes[lane]

    def _finished(self, _: Future[Any]) -> None:
        with self._lock:
            self._waiting -= 1

    def _call(self, lane: Lane, data: bytes) -> str:
        worker, _ = self._lane(lane)
        try:
            reply = worker.call(data)
        except WorkerTimeoutError:
            raise RequestError(
                "messages",
                f"the chat template did not end within {self._elapsed:g} s; shorten the messages, or try again",
            ) from None
        except WorkerEndedError as error:
            limit = f"more than {self._seconds:g} s" if error.out_of_time else "too much memory"
            raise RequestError(
                "messages", f"the chat template needs {limit} to render the messages; shorten them"
            ) from None
        except RuntimeError:
            if self._closed:
                raise EngineDeadError("the engine was shut down") from None
            raise
        if reply[:1] == TEMPLATE_ERROR:
            field, message = json.loads(reply[1:])
            raise RequestError(field, message)
        return reply[1:].decode("utf-8", "surrogatepass")


def _encoded(request: Mapping[str, Any]) -> bytes:
    """Return a request as JSON. Raises RequestError for values that are not JSON."""
    try:
        try:
            text = json.dumps(request, ensure_ascii=False, separators=(",", ":"))
        except TypeError:  # These are other mappings, or what is refused.
            text = json.dumps(_plain(request), ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise RequestError("messages", "the messages are nested too deeply") from None
    except ValueError as error:
        raise RequestError("messages", f"the messages are not JSON values ({error})") from None
    return text.encode("utf-8", "surrogatepass")


def _plain(request: Mapping[str, Any]) -> dict[str, Any]:
    from pagoda.common.text.chat_template import plain_json  # Other children do not need jinja2.

    messages = request.get("messages")
    if not isinstance(messages, Sequence):
        raise RequestError("messages", "messages must be a non-empty list of messages")
    plain = [plain_json(f"messages[{i}]", message) for i, message in enumerate(messages)]
    return {**request, "messages": plain, "options": plain_json("chat_template_kwargs", request["options"])}


# The child's side.


def serve(prepare: Callable[[bytes], Handler], memory: int) -> None:
    """Answer requests until EOF. `prepare` gets the first frame.

    `memory`: bytes that a request may allocate beyond what the process has after `prepare`; further allocations fail.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _renounce_privileges()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Libraries may print.
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
