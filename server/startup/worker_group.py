"""An engine that was built: what whoever runs it gets."""

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
from pagoda.common.engine.data_parallel import Engine
from pagoda.common.engine.sleep import Sleeper
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.server.ipc_messages import EngineInfo


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A warm engine and what is known about it. `backend` is closed by whoever ends the engine.

    `hosts`: the backend again where it works together with other hosts' or ranks'. `sleeper`: with --enable-sleep-mode.
    `structured`: what compiles grammars; None without a tokenizer.
    """

    core: Engine
    backend: Backend | PoolingBackend
    info: EngineInfo
    hosts: LeadingBackend | FollowingBackend | None = None
    sleeper: Sleeper | None = None
    structured: Structured | None = None


# Who else computes the engine's steps: other hosts, or other ranks on this one.


class WorkerGroup(Protocol):
    """The others, met or started."""

    def arrive(self, checkpoint: Checkpoint) -> RankLink | None:
        """Once the weights are on disk and the backend is imported; the rank that `create` gets, if there are ranks.

        Raises ConfigError or EngineDeadError.
        """
        ...

    def joined(self, backend: Backend) -> LeadingBackend | FollowingBackend:
        """This process's backend, in step with the others'."""
        ...


# How long the parts of a start take.


class Phases:
    """Start-up phases and their seconds, in order."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure what is done in this context, unless it fails."""
        begin = time.perf_counter()
        yield
        self.seconds.append((name, time.perf_counter() - begin))


# Read ahead: run an iterator of arrays in a thread, within a budget of bytes.
#
# Reading and dequantising weights then goes on while the main thread imports the backend or packs the last tensor.


class Prefetch:
    """Iterates over `weights`, at most `max_bytes` ahead. An exception of the source is raised in its place."""

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
