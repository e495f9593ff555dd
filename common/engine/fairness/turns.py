"""Threads that serve the keys in turn, so that what one key sends in a flood does not keep others waiting."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class TurnThreads(Generic[ResultT]):
    """Runs calls in a few threads, the keys in turn, the calls of one key in order. Thread-safe.

    One thread is kept free of the calls of any one key ("", which is no key, may use all). Threads start when they are
    first needed and have `stack_bytes` of stack.
    """

    def __init__(self, threads: int, name: str, stack_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._most_of_key, self._stack_bytes = max(1, threads - 1), stack_bytes
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, deque[tuple[Future[ResultT], Callable[[], ResultT]]]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def submit(self, owner: str, call: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `call` once it is the owner's turn. The future can be cancelled until then."""
        future: Future[ResultT] = Future()
        with self._lock:
            self._lines.setdefault(owner, deque()).append((future, call))
        usual = threading.stack_size(self._stack_bytes)
        try:
            self._pool.submit(self._serve)
        finally:
            threading.stack_size(usual)
        return future

    def _serve(self) -> None:
        """Run calls while there are some that may; those of a key that may not are left to the thread that runs one."""
        while (entry := self._next()) is not None:
            owner, future, call = entry
            try:
                _run(future, call)
            finally:
                with self._lock:
                    self._running[owner] -= 1
            del entry, future, call  # their results are not kept while the next call runs

    def _next(self) -> tuple[str, Future[ResultT], Callable[[], ResultT]] | None:
        with self._lock:
            may_run = (owner for owner in self._lines if not owner or self._running[owner] < self._most_of_key)
            if (owner := next(may_run, None)) is None:
                return None
            line = self._lines.pop(owner)
            future, call = line.popleft()
            if line:
                self._lines[owner] = line  # behind the other owners
            self._running = +self._running  # without the keys that run nothing
            self._running[owner] += 1
            return owner, future, call


def _run(future: Future[ResultT], call: Callable[[], ResultT]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
