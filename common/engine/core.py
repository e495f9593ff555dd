"""The step loop: requests in, outputs out, with the next step planned while one runs on the device.

Knows the order of things and nothing else: the scheduler decides, the backend computes.

    plan 1, start 1, plan 2, start 2 | wait for 1, report 1 | plan 3, start 3 | wait for 2, report 2 | ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Final, Protocol

from pagoda.common.backend import Backend, PendingResult
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.scheduler import Scheduler
from pagoda.common.engine.step import StepPlan, StepResult
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import no_tokenizer, refused
from pagoda.common.engine.structured_output.token_mask import TokenMaskState
from pagoda.common.errors import ConfigError, RequestError

# Requests on their way to a scheduler: those with a grammar come in once it is compiled, the others at once.

PAUSE_SECONDS: Final = 0.005
"""How long an engine without any other work waits for a grammar before it looks for commands again."""

Add = Callable[[EngineRequest, TokenMaskState | None], None]
"""Puts a request in line. Raises RequestError."""


class GrammarQueue:
    """`structured`: makes guides; None: requests that need one are refused."""

    def __init__(self, add: Add, structured: Structured | None) -> None:
        self._add = add
        self._structured = structured
        self._coming: dict[str, tuple[EngineRequest, Future[TokenMaskState]]] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def add(self, request: EngineRequest) -> None:
        """Take a request in. Raises RequestError naming the field when it can never run."""
        if request.request_id in self._coming:
            raise RequestError("request_id", f"request {request.request_id} is already in the engine")
        if request.grammar is None and request.thinking is None:
            self._add(request, None)
            return
        if self._structured is None:
            raise no_tokenizer()
        self._coming[request.request_id] = request, self._structured.submit(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are skipped."""
        for request_id in request_ids:
            if (coming := self._coming.pop(request_id, None)) is not None:
                coming[1].cancel()

    def admit(self) -> list[EngineOutput]:
        """Put in line those that are ready; the outputs of those that cannot run."""
        outputs: list[EngineOutput] = []
        for request_id in [each for each, (_, guide) in self._coming.items() if guide.done()]:
            request, guide = self._coming.pop(request_id)
            fault = guide.exception()
            if fault is not None and not isinstance(fault, RequestError):
                # A library's own fault, a panic of its native code included, is its request's end, not the engine's.
                fault = refused(repr(fault))
            try:
                if fault is not None:
                    raise fault
                self._add(request, guide.result())
            except RequestError as error:
                outputs.append(failed(request_id, error))
        return outputs

    def pause(self) -> None:
        """Wait a moment for one to be ready."""
        wait([guide for _, guide in self._coming.values()], PAUSE_SECONDS, FIRST_COMPLETED)


def failed(request_id: str, error: RequestError) -> EngineOutput:
    """The only output of a request that could not run."""
    return EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=(error.field, str(error)))


class StepScheduler(Protocol):
    """What the step loop asks of a scheduler: the interface of another one. Most subclass scheduler.Scheduler."""

    def add(self, asked: EngineRequest, guide: TokenMaskState | None = None) -> None:
        """Put a request in line. Raises RequestError naming the field when it can never run.

        `guide`: what its tokens may be; its masks go into the plans.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests and free what they hold; unknown ids are skipped."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests running or waiting."""
        ...

    def schedule(self) -> StepPlan | None:
        """The next step; None when nothing can be computed before a result comes back or a request is added."""
        ...

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take the result of the oldest step in flight. Returns what is new for whom."""
        ...

    def stats(self, last_step_tokens: int = 0) -> EngineStats:
        """A snapshot."""
        ...

    def check_integrity(self) -> None:
        """Every row and block is accounted for. Raises RuntimeError."""
        ...


MakeScheduler = Callable[[Limits, KvManager], StepScheduler]


def make_kv_manager(backend: Backend, layout: KvLayout, limits: Limits, num_blocks: int) -> KvManager:
    """The manager of so many blocks, the null block included. Raises ConfigError."""
    if layout.block_size != limits.block_size:
        raise ConfigError("--block-size", f"{limits.block_size} differs from the cache layout's {layout.block_size}")
    return KvManager(
        layout,
        num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_num_batched_tokens,
        prefix_caching=limits.prefix_caching,
        prefers_extents=backend.capabilities.prefers_extents,
    )


def depth_of(limits: Limits) -> int:
    """Steps that are in flight at a time."""
    return 2 if limits.async_scheduling else 1


def refuse_pooling(request: EngineRequest) -> None:
    """Raises RequestError for a request that only a pooling model could answer."""
    if request.pooling is not None:
        raise RequestError("model", "the model generates text, it does not pool; start it with --runner pooling")


class EngineCore:
    """One model's engine over a backend that is loaded and has `num_blocks` KV blocks, the null block included.

    `scheduler`: makes the scheduler. `structured`: compiles grammars. Not thread-safe. When `step` raises what the
    backend raised, the engine is dead: make a new one.
    """

    def __init__(
        self,
        backend: Backend,
        layout: KvLayout,
        limits: Limits,
        num_blocks: int,
        scheduler: MakeScheduler = Scheduler,
        structured: Structured | None = None,
    ) -> None:
        self.limits = limits
        self._backend = backend
        self._kv = make_kv_manager(backend, layout, limits, num_blocks)
        self._scheduler = scheduler(limits, self._kv)
        self._intake = GrammarQueue(self._scheduler.add, structured)
        self._depth = depth_of(limits)
        self._pending: deque[tuple[StepPlan, PendingResult]] = deque()

    def add_request(self, request: EngineRequest) -> None:
        """Put a request in line. Raises RequestError naming the field when it can never run.

        One whose grammar turns out to be wrong ends with an output that says so.
        """
        refuse_pooling(request)
        self._intake.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests: their blocks are free at once and no output follows. Unknown ids are skipped."""
        request_ids = list(request_ids)
        self._intake.abort(request_ids)
        self._scheduler.abort(request_ids)

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a step is in flight."""
        return bool(self._pending) or self._scheduler.num_unfinished > 0 or len(self._intake) > 0

    def step(self) -> StepOutputs:
        """Start what can start, then wait for the oldest step. Without work, returns no outputs."""
        refused = self._intake.admit()
        while len(self._pending) < self._depth and (plan := self._scheduler.schedule()) is not None:
            self._pending.append((plan, self._backend.execute(plan)))
        if not self._pending:
            if self._scheduler.num_unfinished:
                raise RuntimeError("requests are in the engine, yet none can run and none is in flight")
            if len(self._intake) and not refused:
                self._intake.pause()
            return StepOutputs(outputs=refused, stats=self.stats)
        plan, pending = self._pending.popleft()
        found = self._scheduler.update(plan, pending.result())
        return replace(found, outputs=refused + found.outputs) if refused else found

    @property
    def stats(self) -> EngineStats:
        """A snapshot between steps."""
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests keep their blocks. True: this engine can always do it."""
        self._kv.pool.clear_cache()
        return True

    def check_integrity(self) -> None:
        """Every block and row is accounted for; walks the whole pool. Raises RuntimeError."""
        self._scheduler.check_integrity()
