"""The step loop of a pooling model: whole prompts in, vectors out. No tokens are generated, nothing is cached.

The same to its users as `EngineCore`. Prompts run in the order of their line, as many at a time as a step's budget
holds; one that is longer than the budget has a step to itself.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from pagoda.common.backend import PendingVectors, PoolingBackend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import depth_of
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.pooling import Pooled, PoolingRules, PoolingTask, PoolPlan
from pagoda.common.errors import RequestError

Rank: TypeAlias = tuple[float, ...]
"""A place in line, smaller first."""


class PoolingCore:
    """One pooling model's engine over a backend that is loaded. `tasks`: those that requests may ask for.

    `clock`: monotonic seconds. Not thread-safe. When `step` raises what the backend raised, the engine is dead: make a
    new one.
    """

    def __init__(
        self,
        backend: PoolingBackend,
        limits: Limits,
        tasks: tuple[PoolingTask, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._backend, self._tasks, self._clock = backend, tasks, clock
        self._depth = depth_of(limits)
        self._by_priority = limits.policy == "priority"
        self._line: list[tuple[Rank, str]] = []  # a heap; requests that were aborted stay in it
        self._waiting: dict[str, tuple[Rank, EngineRequest]] = {}
        self._running: dict[str, EngineRequest] = {}
        self._pending: deque[tuple[tuple[EngineRequest, ...], float, PendingVectors]] = deque()
        self._added = self._steps = 0

    def add_request(self, request: EngineRequest) -> None:
        """Put a request in line. Raises RequestError naming the field when it can never run."""
        rules, length = request.pooling, len(request.prompt_token_ids)
        if rules is None:
            raise RequestError("model", "the model pools prompts, it generates no text; ask for embeddings or classes")
        if rules.task not in self._tasks:
            raise RequestError("task", f"task {rules.task} is none of this model's: {', '.join(self._tasks)}")
        if not length:
            raise RequestError("prompt", "the prompt is empty")
        if length > self.limits.max_model_len:
            raise RequestError(
                "prompt", f"the prompt has {length} tokens, the model takes {self.limits.max_model_len}; shorten it"
            )
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError("request_id", f"request {request.request_id} is under way already")
        rank = (request.priority, request.arrival, self._added) if self._by_priority else (self._added,)
        heapq.heappush(self._line, (rank, request.request_id))
        self._waiting[request.request_id] = rank, request
        self._added += 1

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests: no output follows. What is in a step already is computed in vain. Unknown ids are skipped."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        """True while a request is waiting or a step is in flight."""
        return bool(self._pending) or bool(self._waiting)

    def step(self) -> StepOutputs:
        """Start what can start, then wait for the oldest step. Without work, returns no outputs."""
        while len(self._pending) < self._depth and (batch := self._next_batch()):
            self._running.update((request.request_id, request) for request in batch)
            self._pending.append((batch, self._clock(), self._backend.pool(make_plan(batch))))
        if not self._pending:
            if self._waiting:
                raise RuntimeError("requests are in line, yet none can run and none is in a step")
            return StepOutputs(stats=self.stats)
        batch, scheduled, pending = self._pending.popleft()
        vectors = pending.result()
        self._steps += 1
        outputs = [
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason="stop",
                scheduled=scheduled,
                pooled=Pooled.of(vector),
            )
            for request, vector in zip(batch, vectors, strict=True)
            if self._running.get(request.request_id) is request
        ]
        for output in outputs:
            del self._running[output.request_id]
        return StepOutputs(outputs=outputs, stats=self._snapshot(sum(len(r.prompt_token_ids) for r in batch)))

    @property
    def stats(self) -> EngineStats:
        """A snapshot between steps."""
        return self._snapshot(0)

    def reset_prefix_cache(self) -> bool:
        """Nothing is cached, so all of it is forgotten. True."""
        return True

    def check_integrity(self) -> None:
        """Every request is in line or in a step. Raises RuntimeError."""
        in_steps = {request.request_id for batch, _, _ in self._pending for request in batch}
        in_line = {request_id for _, request_id in self._line}
        if lost := (self._running.keys() - in_steps) | (self._waiting.keys() - in_line):
            raise RuntimeError(f"nobody will answer {', '.join(sorted(lost))}")

    def _next_batch(self) -> tuple[EngineRequest, ...]:
        """The first in line, and those behind it as long as the next one fits."""
        batch: list[EngineRequest] = []
        room = self.limits.max_num_batched_tokens
        while self._line and len(batch) < self.limits.max_num_seqs:
            rank, request_id = self._line[0]
            if self._waiting.get(request_id, (None,))[0] == rank:
                request = self._waiting[request_id][1]
                length = len(request.prompt_token_ids)
                if batch and length > room:
                    break
                room -= length
                batch.append(request)
                del self._waiting[request_id]
            heapq.heappop(self._line)
        return tuple(batch)

    def _snapshot(self, tokens: int) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            steps=self._steps,
            last_step_tokens=tokens,
            recompiles=self._backend.recompiles,
        )


def make_plan(batch: tuple[EngineRequest, ...]) -> PoolPlan:
    """The step that pools these requests, all of which say how."""
    prompts = [np.array(request.prompt_token_ids, np.int32) for request in batch]
    rules = tuple(_rules(request) for request in batch)
    query_start = np.cumsum([0, *map(len, prompts)], dtype=np.int32)
    types: np.ndarray | None = None
    if any(rule.second_text is not None for rule in rules):
        types = np.zeros(query_start[-1], np.int32)
        for rule, begin, end in zip(rules, query_start[:-1].tolist(), query_start[1:].tolist()):
            if rule.second_text is not None:
                types[begin + rule.second_text : end] = 1
    return PoolPlan(np.concatenate(prompts), query_start, types, rules)


def _rules(request: EngineRequest) -> PoolingRules:
    assert request.pooling is not None, "add_request refuses the others"
    return request.pooling
