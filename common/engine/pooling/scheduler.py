"""The scheduler of pooling models: whole prompts in, vectors out. Generates no tokens and caches nothing.

Prompts run in queue order, as many per step as fit the token budget; a longer prompt runs in a step of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.common.backend import PoolingBackend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.lora.adapter import LORA_FIELD
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.pooling.values import Pooled, PoolingRules, PoolingTask, PoolPlan, PoolResult
from pagoda.common.engine.scheduling.request import Request, RequestStatus, queue_rank, waiting_queue
from pagoda.common.engine.steps.contract import Float32
from pagoda.common.engine.structured_output.token_mask import TokenMaskState
from pagoda.common.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class _InFlightBatch:
    plan: PoolPlan
    requests: tuple[Request, ...]
    scheduled: float  # monotonic seconds


class PoolingScheduler:
    """Implements core.StepScheduler for pooling models.

    `tasks`: tasks that requests may name. `clock`: monotonic seconds.
    """

    def __init__(
        self, limits: Limits, tasks: tuple[PoolingTask, ...], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._tasks = tasks
        self._clock = clock
        self._waiting = waiting_queue(limits.policy)
        self._requests: dict[str, Request] = {}  # running and waiting
        self._parts: dict[str, list[Float32]] = {}  # unfinished request -> outputs of the task's parts so far
        self._in_flight: deque[_InFlightBatch] = deque()
        self._added = self._steps = self._recompiles = 0

    def add(self, request: EngineRequest, mask_state: TokenMaskState | None = None) -> None:
        """Queue a request. Raises RequestError naming the field if it can never run."""
        self._check(request)
        self._added += 1
        rank = queue_rank(request, self._limits.policy, self._added)
        state = Request.of(request, limit=len(request.prompt_token_ids), rank=rank)
        self._requests[state.request_id] = state
        self._waiting.push(state)

    def _check(self, request: EngineRequest) -> None:
        length = len(request.prompt_token_ids)
        if request.pooling is None:
            raise RequestError("model", "the model pools prompts, it generates no text; request embeddings or classes")
        if request.adapter is not None:
            raise RequestError(LORA_FIELD, "LoRA adapters are of generating models; merge it into the checkpoint")
        if request.pooling.task not in self._tasks:
            raise RequestError(
                "task", f"task {request.pooling.task} is not one of this model's: {', '.join(self._tasks)}"
            )
        if not length:
            raise RequestError("prompt", "the prompt is empty")
        if length > self._limits.max_model_len:
            raise RequestError(
                "prompt", f"the prompt has {length} tokens, the model takes {self._limits.max_model_len}; shorten it"
            )
        if request.request_id in self._requests:
            raise RequestError("request_id", f"request {request.request_id} is already in the engine")

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; results in flight for them are discarded. Unknown ids are skipped."""
        for request_id in request_ids:
            self._parts.pop(request_id, None)
            if (request := self._requests.pop(request_id, None)) is not None:
                request.status = RequestStatus.FINISHED_ABORTED
                self._waiting.remove(request_id)

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests."""
        return len(self._requests)

    def schedule(self) -> PoolPlan | None:
        """Return the next step; None if no request is waiting."""
        if not (batch := self._next_batch()):
            return None
        plan = make_plan(batch, [self._rules(request) for request in batch])
        self._in_flight.append(_InFlightBatch(plan, batch, self._clock()))
        return plan

    def _rules(self, request: Request) -> PoolingRules:
        """Return the rules of the next part of a request's task."""
        return _rules(request).parts()[len(self._parts.get(request.request_id, ()))]

    def _next_batch(self) -> tuple[Request, ...]:
        """Take requests from the queue while the next prompt fits the budget; at least one if any is waiting."""
        batch: list[Request] = []
        budget = self._limits.max_num_batched_tokens
        while len(self._waiting) and len(batch) < self._limits.max_num_seqs:
            length = len(self._waiting.peek().prompt)
            if batch and length > budget:
                break
            budget -= length
            request = self._waiting.pop()
            request.status = RequestStatus.RUNNING
            batch.append(request)
        return tuple(batch)

    def token_masks(self, plan: PoolPlan) -> None:
        """Return None: nothing is sampled."""

    def update(self, plan: PoolPlan, result: PoolResult) -> StepOutputs:
        """Apply the result of the oldest step in flight and return its outputs."""
        batch = self._in_flight.popleft()
        if batch.plan is not plan:
            raise RuntimeError("got the result of another pooling step")
        self._steps += 1
        self._recompiles += result.recompiles
        outputs: list[EngineOutput] = []
        for request, rules, vector in zip(batch.requests, plan.rules, result.vectors, strict=True):
            if request.is_finished:
                continue
            selected = self._joined(request, rules.select(vector, np.asarray(request.prompt)))
            if selected is None:
                request.status = RequestStatus.WAITING
                self._waiting.push(request)
                continue
            request.status = RequestStatus.FINISHED_STOPPED
            del self._requests[request.request_id]
            outputs.append(
                EngineOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason="stop",
                    scheduled=batch.scheduled,
                    pooled=Pooled.of(selected),
                )
            )
        return StepOutputs(outputs=outputs, stats=self.stats(plan.num_tokens))

    def _joined(self, request: Request, output: Float32) -> Float32 | None:
        """Return the output of a request, None while parts of its task are left."""
        count = len(_rules(request).parts())
        if count == 1:
            return output
        outputs = self._parts.setdefault(request.request_id, [])
        outputs.append(output)
        if len(outputs) < count:
            return None
        del self._parts[request.request_id]
        return np.concatenate([output.ravel() for output in outputs])

    def stats(self, last_step_tokens: int = 0) -> EngineStats:
        """Return a snapshot."""
        waiting = len(self._waiting)
        return EngineStats(
            running=len(self._requests) - waiting,
            waiting=waiting,
            steps=self._steps,
            last_step_tokens=last_step_tokens,
            recompiles=self._recompiles,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every unfinished request is in the queue or in a step."""
        running = sum(not request.is_finished for batch in self._in_flight for request in batch.requests)
        if running + len(self._waiting) != len(self._requests):
            raise RuntimeError(f"{len(self._requests)} requests, {running} running, {len(self._waiting)} waiting")


def make_plan(batch: Sequence[Request], rules: Sequence[PoolingRules]) -> PoolPlan:
    """Return the step that pools these requests, each by its rules."""
    query_start = np.cumsum([0, *(len(request.prompt) for request in batch)], dtype=np.int32)
    types: np.ndarray | None = None
    if any(rule.second_text is not None for rule in rules):
        types = np.zeros(query_start[-1], np.int32)
        for rule, begin, end in zip(rules, query_start[:-1].tolist(), query_start[1:].tolist()):
            if rule.second_text is not None:
                types[begin + rule.second_text : end] = 1
    return PoolPlan(np.concatenate([request.prompt for request in batch]), query_start, types, tuple(rules))


def _rules(request: Request) -> PoolingRules:
    assert request.pooling is not None, "add() refuses the others"
    return request.pooling


def pooling_core(
    backend: PoolingBackend,
    limits: Limits,
    tasks: tuple[PoolingTask, ...],
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """Return the engine of a pooling model over a loaded backend. `tasks`: tasks that requests may name."""
    return EngineCore(backend.execute, PoolingScheduler(limits, tasks, clock), limits)
