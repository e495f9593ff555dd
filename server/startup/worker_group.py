"""A built engine, and the parts of its start: worker groups, phases, prefetched weights."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pagoda.common.backend import Backend, PoolingBackend, RankLink, Weight
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.distributed.leader import LeadingBackend
from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.sleep import Sleeper
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.server.ipc_messages import EngineInfo


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A warm engine. The caller closes `backend`."""

    core: EngineCore
    backend: Backend | PoolingBackend
    info: EngineInfo
    hosts: LeadingBackend | FollowingBackend | None = None  # the backend again, if other hosts or ranks take part
    sleeper: Sleeper | None = None  # with --enable-sleep-mode
    structured: Structured | None = None  # compiles grammars; None without a tokenizer


class WorkerGroup(Protocol):
    """Other hosts, or other ranks on this host, that execute the engine's steps."""

    def arrive(self, checkpoint: Checkpoint) -> RankLink | None:
        """Connect, once weights are on disk and the backend is imported. Return the rank for `create`, if any.

        Raises ConfigError or EngineDeadError.
        """
        ...

    def joined(self, backend: Backend) -> LeadingBackend | FollowingBackend:
        """Return this process's backend, in step with the others."""
        ...


class Phases:
    """Start-up phases and their seconds, in order."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the time in this context, unless it fails."""
        begin = time.perf_counter()
        yield
        self.seconds.append((name, time.perf_counter() - begin))


class Prefetch:
    """Iterates over `weights`, read in a thread at most `max_bytes` ahead. Re-raises the source's exception.

    Weights are read and dequantised while the main thread imports the backend or packs the last tensor.
    """

    def __init__(self, weights: Iterable[Weight], max_bytes: int) -> None:
        self._source = weights
        self._max_bytes = max_bytes
        self._ready: deque[Weight] = deque()
        self._bytes = 0
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="pagoda-weights", daemon=True).start()

    def __iter__(self) -> Iterator[Weight]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    break
                weight = self._ready.popleft()
                self._bytes -= weight[1].nbytes
                self._changed.notify_all()
            yield weight
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            for weight in self._source:
                with self._changed:
                    self._changed.wait_for(lambda: self._bytes < self._max_bytes or self._ended)
                    if self._ended:
                        return
                    self._ready.append(weight)
                    self._bytes += weight[1].nbytes
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            self.close()
