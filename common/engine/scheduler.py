"""Who computes how many tokens in the next step, and what the results mean for each request.

There is no prefill phase and no decode phase. A request has `computed` tokens and wants `total`; a step hands out a
token budget. Chunked prompts, prefix hits, preemption by recomputation and planning ahead of results follow.

Pure: no device and no text; a clock only tells when a request first runs. Per-step work on running requests is a few
numpy operations (see rows); Python loops only over requests that need a block, start, or have news.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.batch_state import Int64, RunningBatch
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.messages import EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.request import NO_ROW, Request, RequestStatus
from pagoda.common.engine.results import ending, keep_prompt_logprobs, take_tokens
from pagoda.common.engine.step import Bool, Int32, RowStart, StepPlan, StepResult, TokenMasks
from pagoda.common.engine.structured_output.token_mask import TokenMaskState, settle
from pagoda.common.engine.waiting import FcfsQueue, PriorityQueue, WaitingQueue
from pagoda.common.errors import RequestError

# How a step's token budget is divided among the requests that run.
#
# Pure functions over rows: a few numpy operations, no walk over requests.


@dataclass(frozen=True, slots=True, eq=False)
class TokenBudget:
    """Rows [n] and how many tokens each computes, int32 [n], all positive."""

    rows: Int32
    take: Int32


def split_budget(state: RunningBatch, rows: Int32, limits: Limits, held: list[int]) -> TokenBudget:
    """One token for everyone who wants one, then chunks in the order of `rows` until the budget is spent.

    `held`: places in `rows` that get nothing in this step.
    """
    total = state.total[rows]
    want = (total - state.computed[rows]) * (total < state.limit[rows])
    want[held] = 0
    if (want == 1).all():
        return TokenBudget(rows, want)
    single, longer = rows[want == 1], rows[want > 1]
    want = want[want > 1]
    if limits.long_prefill_token_threshold:
        want = np.minimum(want, limits.long_prefill_token_threshold)
    left = limits.max_num_batched_tokens - len(single) - (np.cumsum(want) - want)
    take = np.clip(left, 0, want)
    return decode_first(
        np.concatenate([single, longer[take > 0]]),
        np.concatenate([np.ones(len(single), np.int32), take[take > 0].astype(np.int32)]),
    )


def first_chunk(want: int, budget: int, limits: Limits) -> int:
    """Tokens that a request computes in its first step, of `want` and with `budget` left; 0: it must wait."""
    if not limits.chunked_prefill:
        return want if want <= budget else 0
    return min(want, budget, limits.long_prefill_token_threshold or want)


def decode_first(rows: Int32, take: Int32) -> TokenBudget:
    """Rows with one token first, each kind in its order."""
    order = np.argsort(take > 1, kind="stable")
    return TokenBudget(rows[order], take[order])


# What guides mean for a step: who must wait for a token in flight, what may be sampled, and who ends by it.
#
# Only called while a request with a guide is unfinished: other steps pay nothing for them.


def waiting_for_newest(state: RunningBatch, rows: Int32) -> list[int]:
    """Places in `rows` [n] whose next mask follows from a token that is in flight."""
    unknown = state.inflight[rows]
    return [
        place
        for place in np.flatnonzero(unknown * state.guided[rows]).tolist()
        if (guide := state.holder(int(rows[place])).guide) is not None and guide.depends_on(int(unknown[place]))
    ]


def masks(state: RunningBatch, rows: Int32, samples: Bool) -> TokenMasks | None:
    """What the guides of those of `rows` [n] that sample (`samples` bool [n]) allow; None: everything."""
    found = [
        (place, guide.bits)
        for place in np.flatnonzero(samples & state.guided[rows]).tolist()
        if (guide := state.holder(int(rows[place])).guide) is not None and guide.bits is not None
    ]
    if not found:
        return None
    places, bits = zip(*found)
    return TokenMasks(np.array(places, np.int32), np.stack(bits))


def follow(requests: Sequence[Request], tokens: Sequence[int]) -> dict[int, RequestStatus]:
    """Lead guides on by their new `tokens`, one per request and negative where none was sampled; find the next masks.

    Returns who ended by it, by place in `requests`.
    """
    led: list[tuple[int, TokenMaskState, list[int]]] = []
    for index, (request, token) in enumerate(zip(requests, tokens)):
        if request.guide is None or token < 0 or request.is_finished:
            continue
        outputs = [*request.outputs, token]
        if ending(request, token, len(outputs)) is RequestStatus.RUNNING:
            request.guide.accept(token)
            led.append((index, request.guide, outputs))
    settle([(guide, outputs) for _, guide, outputs in led if not guide.finished and guide.error is None])
    ended = {index: RequestStatus.FINISHED_STOPPED for index, guide, _ in led if guide.finished}
    return ended | {index: RequestStatus.FINISHED_ERROR for index, guide, _ in led if guide.error is not None}


MOST_LEFT_OUT: Final = 8
"""A step that is planned ahead may go without one in so many of the running rows. Those lose half their pace; without
the step ahead every row loses what the host needs between two steps, some tenth of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class _InFlightStep:
    """A step that was planned and not reported. `stints`: who held each row when it was planned."""

    plan: StepPlan
    requests: list[Request]
    stints: Int64


class Scheduler:
    """Plans steps and takes their results, in the same order. `settings`: --additional-config, for subclasses.

    `clock`: monotonic seconds.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KvManager,
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits.check()
        self.limits = limits
        self.settings = settings or {}
        self.kv = kv
        self._clock = clock
        self.running: list[Request] = []
        self.waiting: WaitingQueue = PriorityQueue() if limits.policy == "priority" else FcfsQueue()
        self._requests: dict[str, Request] = {}
        self._rows = RunningBatch(limits.max_num_seqs)
        self._order: Int32 | None = None
        self._flights: deque[_InFlightStep] = deque()
        self._guided = 0  # unfinished requests with a guide
        self._embedded = 0  # unfinished requests with embeddings in their prompts
        self._added = self._steps = self._preemptions = self._queries = self._hits = self._recompiles = 0

    # --- requests come and go ---

    def add(self, asked: EngineRequest, guide: TokenMaskState | None = None) -> None:
        """Put a request in line. Raises RequestError naming the field when it can never run."""
        self._check(asked)
        prompt = len(asked.prompt_token_ids)
        # The last token is sampled, never computed, so it needs no place in the cache.
        limit = min(prompt + asked.max_tokens, self.limits.max_model_len, self.kv.max_tokens + 1)
        self._added += 1
        first = (float(asked.priority), asked.arrival) if self.limits.policy == "priority" else ()
        request = Request.of(asked, limit=limit, rank=(*first, self._added), guide=guide)
        self._requests[request.request_id] = request
        self._guided += guide is not None
        self._embedded += request.embeds is not None
        self.waiting.push(request)

    def _check(self, asked: EngineRequest) -> None:
        """Raises RequestError for what can never run."""
        prompt = len(asked.prompt_token_ids)
        if asked.request_id in self._requests:
            raise RequestError("request_id", f"request {asked.request_id} is already in the engine")
        if not prompt:
            raise RequestError("prompt", "the prompt is empty")
        if asked.max_tokens < 1:
            raise RequestError("max_tokens", f"{asked.max_tokens} is not a positive number of tokens")
        if prompt >= self.limits.max_model_len:
            raise RequestError(
                "prompt", f"{prompt} tokens leave no room to answer in a context of {self.limits.max_model_len}"
            )
        if not self.kv.fits(prompt + 1):
            raise RequestError(
                "prompt",
                f"{prompt} tokens do not fit the KV cache of {self.kv.pool.num_blocks - 1} blocks "
                f"of {self.kv.block_size} tokens",
            )

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are skipped. What is in flight for them will be dropped."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)
        self._forget_finished()

    @property
    def num_unfinished(self) -> int:
        """Requests running or waiting."""
        return len(self._requests)

    def stats(self, last_step_tokens: int = 0) -> EngineStats:
        """A snapshot."""
        total = self.kv.pool.num_blocks - 1
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_blocks_used=total - self.kv.pool.num_free,
            kv_blocks_total=total,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            preemptions=self._preemptions,
            recompiles=self._recompiles,
            steps=self._steps,
            last_step_tokens=last_step_tokens,
        )

    # --- planning ---

    def schedule(self) -> StepPlan | None:
        """The next step; None when nothing can be computed before a result comes back or a request is added."""
        if self._flights and self._guided and self._leaves_many_out():
            return None
        preemptions = self._preemptions
        share = self._share_running()
        self._register_chunks(share)
        starts: list[RowStart] = []
        if len(self.waiting) and self._preemptions == preemptions:
            share, starts = self._admit(share)
        if not len(share.rows):
            return None
        return self._plan(share, starts)

    def _share_running(self) -> TokenBudget:
        """What running requests compute, with blocks for all of it."""
        while True:
            rows = self._running_rows()
            share = split_budget(self._rows, rows, self.limits, self._held(rows))
            end = self._rows.computed[share.rows] + share.take
            short = np.flatnonzero(end > self._rows.capacity[share.rows])
            if all(self._grow(int(share.rows[i]), int(end[i])) for i in short):
                return share

    def _leaves_many_out(self) -> bool:
        """Whether a step planned now would go without so many rows that planning it later gains more."""
        rows = self._running_rows()
        return len(self._held(rows)) * MOST_LEFT_OUT > len(rows)

    def _held(self, rows: Int32) -> list[int]:
        """Places of rows that cannot be planned before a token in flight is known."""
        return waiting_for_newest(self._rows, rows) if self._guided else []

    def _running_rows(self) -> Int32:
        if self._order is None:
            self._order = np.fromiter((request.row for request in self.running), np.int32, len(self.running))
        return self._order

    def _grow(self, row: int, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of a row. False when a request had to go for it: then divide anew."""
        request = self._rows.holder(row)
        if self.kv.allocate(request, row, int(self._rows.computed[row]), num_tokens):
            self._rows.capacity[row] = self.kv.capacity(request)
            return True
        if len(self.running) == 1:
            raise RuntimeError(f"request {request.request_id} runs alone and found no block")
        self._preempt(self.running[-1])
        return False

    def _preempt(self, victim: Request) -> None:
        """Take row and blocks from a request and put it at the head of the line."""
        self._preemptions += 1
        self._leave_row(victim)
        self.running.remove(victim)
        victim.resumes_at = self._steps
        victim.num_preemptions += 1
        victim.is_brief = False
        victim.status = RequestStatus.PREEMPTED
        self.waiting.push_front(victim)

    def _register_chunks(self, share: TokenBudget) -> None:
        """Enter the pages that prompt chunks fill in this step. Safe from here on: no one is preempted after this."""
        for i in np.flatnonzero(share.take > 1):
            row = int(share.rows[i])
            self._register(self._rows.holder(row), int(self._rows.computed[row] + share.take[i]))

    def _register(self, request: Request, num_tokens: int) -> None:
        self.kv.register(request, num_tokens)
        if self.kv.caches_prefixes:
            # A page can be entered once its last token is computed, and that is sure once its successor is known.
            self._rows.next_page[request.row] = (request.num_registered + 1) * self.kv.block_size + 1

    def _admit(self, share: TokenBudget) -> tuple[TokenBudget, list[RowStart]]:
        """Start waiting requests, in order, while there is a row, a token and a block for the first in line."""
        budget = self.limits.max_num_batched_tokens - int(share.take.sum())
        rows: list[int] = []
        takes: list[int] = []
        starts: list[RowStart] = []
        while len(self.waiting) and budget > 0 and self._rows.num_free:
            request = self.waiting.peek()
            take = self._start(request, budget)
            if not take:
                break
            self.waiting.pop()
            budget -= take
            rows.append(request.row)
            takes.append(take)
            starts.append(RowStart(request.row, request.tokens, len(request.prompt), request.rules))
        if not rows:
            return share, starts
        all_rows = np.concatenate([share.rows, np.array(rows, np.int32)])
        all_takes = np.concatenate([share.take, np.array(takes, np.int32)])
        return decode_first(all_rows, all_takes), starts

    def _start(self, request: Request, budget: int) -> int:
        """Let a waiting request run. Returns the tokens it computes now; 0 when it must wait."""
        if request.resumes_at > self._steps - len(self._flights):
            return 0
        hit = self.kv.find_prefix(request)
        take = first_chunk(request.num_known - hit.num_tokens, budget, self.limits)
        row, end = self._rows.next_free(), hit.num_tokens + take
        # One block for each running request: without it the newcomer would soon be preempted, or preempt.
        if not take or not self.kv.admit(request, row, hit, end, headroom=len(self.running)):
            return 0
        request.tokens = request.known_tokens()
        self._rows.take(request, hit.num_tokens)
        self._rows.capacity[row] = self.kv.capacity(request)
        self._register(request, end)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            request.scheduled = self._clock()
            if self.kv.caches_prefixes and request.reads_cache:
                self._queries += request.num_known
                self._hits += hit.num_tokens
        if request.prompt_logprobs:
            request.prompt_logprobs.clear()
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_rank)
        self._order = None
        return take

    def _plan(self, share: TokenBudget, starts: list[RowStart]) -> StepPlan:
        state, rows, take = self._rows, share.rows, share.take
        context = state.computed[rows]
        end = context + take
        samples: Bool = end == state.total[rows]
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(take, out=query_start[1:])
        plan = StepPlan(
            step=self._steps,
            starts=tuple(starts),
            rows=rows.copy(),
            query_start=query_start,
            context=context,
            token_ids=state.token_ids(rows, take, query_start, samples),
            block_tables=self.kv.tables(rows, int(end.max())),
            samples=samples,
            masks=masks(state, rows, samples) if self._guided else None,
            embeds=state.embeds(rows, take) if self._embedded else None,
        )
        self._flights.append(_InFlightStep(plan, state.holders(rows), state.stint[rows]))
        state.plan(rows, take, samples)
        self._steps += 1
        return plan

    # --- results ---

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take the result of the oldest step in flight. Returns what is new for whom."""
        flight = self._flights.popleft()
        if flight.plan is not plan or result.step != plan.step:
            raise RuntimeError(f"got the result of step {result.step}, expected step {flight.plan.step}")
        self._recompiles += result.recompiles
        live = plan.samples & (self._rows.stint[plan.rows] == flight.stints)
        ripe = self._rows.report(plan.rows[live], result.token_ids[live])
        requests, tokens = flight.requests, result.token_ids.tolist()
        keep_prompt_logprobs(requests, result)
        followed = follow(requests, tokens) if self._guided else {}
        outputs, ended = take_tokens(requests, tokens, result.logprobs, followed)
        for row in ripe.tolist():
            request = self._rows.holder(row)
            self._register(request, request.num_known - 1)
        for request, status in ended:
            self._finish(request, status)
        if ended:
            self._forget_finished()
        return StepOutputs(outputs=outputs, stats=self.stats(plan.num_tokens))

    # --- leaving ---

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Free what a request holds, wherever it is. `_forget_finished` must follow."""
        if request.row == NO_ROW:
            self.waiting.remove(request.request_id)
        else:
            self._leave_row(request)
        request.status = status
        self._guided -= request.guide is not None
        self._embedded -= request.embeds is not None
        del self._requests[request.request_id]

    def _leave_row(self, request: Request) -> None:
        """Free blocks and row. Later steps may use both at once: steps run in order."""
        self.kv.free(request, request.row)
        self._rows.release(request)
        self._order = None

    def _forget_finished(self) -> None:
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def check_integrity(self) -> None:
        """Rows, requests and blocks add up. Raises RuntimeError."""
        self.kv.pool.check_integrity()
        if self._rows.num_free + len(self.running) != self.limits.max_num_seqs:
            raise RuntimeError(f"{self._rows.num_free} rows are free with {len(self.running)} requests running")
        if len(self.running) + len(self.waiting) != len(self._requests):
            raise RuntimeError(
                f"{len(self._requests)} requests, {len(self.running)} running, {len(self.waiting)} waiting"
            )
        if not self.running and self.kv.pool.num_free != self.kv.pool.num_blocks - 1:
            raise RuntimeError(f"nothing runs, yet only {self.kv.pool.num_free} blocks are free")


def _rank(request: Request) -> tuple[float, ...]:
    return request.rank
