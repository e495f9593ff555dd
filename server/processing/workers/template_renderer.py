"""Chat templates, rendered in other processes, because a template or messages may take any time and memory.

python -P -m pagoda.server.processing.workers.template_renderer        (started by TemplateRenderer, never by hand)
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from typing import Any, Final, Literal, TypeVar

from pagoda.common.errors import EngineDeadError, QueueFullError, RequestError
from pagoda.common.text.chat_template import plain_json, render, variables_of
from pagoda.server.processing.workers.worker import ChildWorker, Handler, WorkerEndedError, WorkerTimeoutError, serve

PROGRAM: Final = (sys.executable, "-P", "-m", "pagoda.server.processing.workers.template_renderer")
SECONDS: Final = 5.0
"""Maximum time of a rendering, in seconds of processor time: a busy machine refuses none."""
ELAPSED_SECONDS: Final = 60.0
"""Maximum time of a rendering on however busy a machine."""
MEMORY_BYTES: Final = 256 << 20
"""Memory for templates, messages and text, beyond the 20 MB of the process."""
MAX_INSPECTED: Final = 32
MAX_WAITING: Final = 64
"""Maximum queued requests with templates of their own; further ones are refused."""

Lane = Literal["short", "long", "client"]
"""Kind of a conversation. Each has a process, so that one kind does not wait for another: short and long conversations
with the server's template, and those with a template of the client."""

T = TypeVar("T")

_TEXT: Final = b"t"
_ERROR: Final = b"e"


class TemplateRenderer:
    """Renders chat templates in a process per lane, which starts with the first request. Thread-safe."""

    def __init__(self, seconds: float = SECONDS, elapsed: float = ELAPSED_SECONDS) -> None:
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
                known: Future[frozenset[str]] = Future()
                known.set_result(self._variables[name])
                return known
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
            if self._waiting >= MAX_WAITING:
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
                worker = ChildWorker(PROGRAM, self._seconds, self._elapsed, name="chat templates")
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
        if reply[:1] == _ERROR:
            field, message = json.loads(reply[1:])
            raise RequestError(field, message)
        return reply[1:].decode("utf-8", "surrogatepass")


def _encoded(request: Mapping[str, Any]) -> bytes:
    """Return a request as JSON. Raises RequestError for values that are not JSON."""
    try:
        try:
            text = json.dumps(request, ensure_ascii=False, separators=(",", ":"))
        except TypeError:  # other mappings, or what is refused
            text = json.dumps(_plain(request), ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise RequestError("messages", "the messages are nested too deeply") from None
    except ValueError as error:
        raise RequestError("messages", f"the messages are not JSON values ({error})") from None
    return text.encode("utf-8", "surrogatepass")


def _plain(request: Mapping[str, Any]) -> dict[str, Any]:
    messages = request.get("messages")
    if not isinstance(messages, Sequence):
        raise RequestError("messages", "messages must be a non-empty list of messages")
    plain = [plain_json(f"messages[{i}]", message) for i, message in enumerate(messages)]
    return {**request, "messages": plain, "options": plain_json("chat_template_kwargs", request["options"])}


# The child.


def handler(_: bytes) -> Handler:
    """Return what renders a request."""
    return _rendered


def _rendered(data: bytes) -> bytes:
    """Return the reply to a request. A MemoryError ends the process."""
    try:
        request = json.loads(data.decode("utf-8", "surrogatepass"))
        if "messages" in request:
            text = render(request["template"], request["messages"], **request["options"])
        else:
            text = json.dumps(sorted(variables_of(request["template"])))
    except RecursionError:
        return _ERROR + json.dumps(["messages", "the messages are nested too deeply"]).encode()
    except RequestError as error:
        return _ERROR + json.dumps([error.field, str(error)]).encode()
    return _TEXT + text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(handler, MEMORY_BYTES)
