"""The scheduler: how many tokens of which requests the next step computes, and what a step's result means for them.

There is no prefill phase and no decode phase. A request has `computed` tokens and wants `total`; a step hands out a
token budget. Chunked prefill, prefix hits, preemption by recomputation and planning ahead of results follow from that.
A step may also compute drafts, guesses of a sequence's next tokens, of which its result has those that were right.

    schedule:
        token masks: compute late ones for a while; sequences whose mask stays late miss the step
        enter recurrent states at borders into the prefix cache, before a step replaces them
        fairness: preempt a sequence if it keeps another key or request from running at all
        drafts: propose the next tokens of running sequences
        budget = one token for each running sequence that wants one, chunks of prompts while tokens last; a chunk ends
            before a media item for which there are no rows
        allocate blocks for all of it; where blocks lack, preempt the newest sequence and split the budget again
        enter pages that the step fills into the prefix cache
        unless blocks lacked: while tokens, rows and blocks last, start the next waiting request
        return the plan: rows, token ids, positions, block tables, which sequences sample
    update:
        drafts: keep those that were right; rows: the tokens are known now, unless the sequence has lost its row
        token masks: advance by the tokens, compute those of the next ones, or leave them for the next step
        append the tokens; enter the pages that they fill into the prefix cache
        finish requests at a stop token, at their length, or with an error

Fairness, LoRA adapters, media, token masks and drafts are parts with a state of their own (`SchedulerPart`): a request
knows those that it concerns, and a scheduler without drafts or adapters has no such part.

Uses no device and no text; the clock only records when a request first runs. Per-step work on running requests is a
few numpy operations on a RunningBatch; Python loops only over requests that start, finish or need a block or a mask.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.manager import KvManager, KvState, PrefixHit, RunningBlocks
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.common.engine.lora.adapter import LORA_FIELD
from pagoda.common.engine.lora.slots import AdapterSlots, AdaptersState, SchedulerAdapters
from pagoda.common.engine.media.rows import RowCache
from pagoda.common.engine.media.step_rows import MediaState, SchedulerMedia
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, PositionLogprobs, StepOutputs
from pagoda.common.engine.scheduling.fair_queue import FairQueue, FairState
from pagoda.common.engine.scheduling.request import (
    FINISHED,
    NEVER,
    NO_ROW,
    BatchState,
    Int64,
    Request,
    RequestStatus,
    RunningBatch,
    SchedulerPart,
    SharedPrompts,
    StateT,
    WaitingQueue,
    queue_rank,
    rank_of,
    waiting_queue,
)
from pagoda.common.engine.speculative.proposer import DraftPlanner
from pagoda.common.engine.speculative.step_drafts import DraftsState, step_drafts
from pagoda.common.engine.steps.contract import (
    Bool,
    Encode,
    Int32,
    RowStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from pagoda.common.engine.structured_output.grammar import GRAMMAR_FIELD, refused
from pagoda.common.engine.structured_output.step_masks import MasksState, StepMasks, end_at, masked_sequences
from pagoda.common.engine.structured_output.token_mask import TokenMaskState
from pagoda.common.errors import RequestError

PROCESSOR_FIELD: Final = "extra_args"
"""The field that errors of logits processors name: what a request gives them."""

RUNNING: Final = RequestStatus.RUNNING
Ending: TypeAlias = tuple[Request, RequestStatus]


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """A planned step whose result has not been reported."""

    plan: StepPlan
    requests: list[Request]
    epochs: Int64  # [S] epochs of the rows when the step was planned
    prompt_tokens: int  # prompt tokens that it computes; recomputed tokens of preempted requests count
    void: list[int] = field(default_factory=list)  # sequences that sampled without their mask; they run again


@dataclass(slots=True)
class SchedulerCounts:
    """What a scheduler has counted since its start."""

    added: int = 0  # requests
    steps: int = 0  # steps planned
    preemptions: int = 0
    queries: int = 0  # tokens looked up in the prefix cache
    hits: int = 0  # tokens found in it
    without_state: int = 0  # tokens that were in it but for their recurrent state
    recompiles: int = 0  # programs compiled while serving


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A scheduler between two of its calls. It shares its requests and plans with the scheduler."""

    requests: tuple[Request, ...]  # the unfinished ones, in the order in which they were added
    in_flight: tuple[InFlightStep, ...]  # the oldest first
    batch: BatchState
    kv: KvState
    counts: SchedulerCounts
    prefills: bool  # the newest step computes prompt tokens
    fairness: FairState | None = None
    adapters: AdaptersState | None = None
    media: MediaState | None = None
    masks: MasksState | None = None
    drafts: DraftsState | None = None


class Scheduler:
    """Plans steps and takes their results, in the same order."""

    def __init__(
        self,
        limits: Limits,
        kv: KvManager,
        settings: Mapping[str, Any] | None = None,  # --additional-config, for subclasses
        clock: Callable[[], float] = time.monotonic,
        drafter: DraftPlanner | None = None,  # proposes at most limits.max_drafts tokens; None: no drafts of the host
    ) -> None:
        limits.check()
        self.limits = limits
        self.settings = settings or {}
        self.kv = kv
        self._clock = clock
        self.in_flight: deque[InFlightStep] = deque()  # planned steps without a result, the oldest first
        self.requests: dict[str, Request] = {}  # the unfinished ones, running or waiting
        self._batch = RunningBatch(limits.max_num_seqs, limits.max_drafts)
        self._blocks = RunningBlocks(kv, self._batch)
        self._prefills = False  # the newest step computes prompt tokens
        self._prompts = SharedPrompts()
        self._counts = SchedulerCounts()
        self.masks = StepMasks(clock)
        self._drafts = step_drafts(drafter, limits, self._batch, self._blocks)
        self._fair = FairQueue() if limits.policy == "fcfs" and not limits.max_loras else None
        self.waiting: WaitingQueue = waiting_queue(limits.policy) if self._fair is None else self._fair
        self.adapters: SchedulerAdapters | None = None
        if limits.max_loras:
            slots = AdapterSlots(limits.max_loras, ready=())
            self.adapters = SchedulerAdapters(slots, self._batch, lambda: waiting_queue(limits.policy))
            self.waiting = self.adapters.queue
        self._media: SchedulerMedia | None = None
        if limits.media_rows:
            # A prompt that is computed in one step has all its items encoded in that step.
            budget = limits.max_encoder_rows if limits.chunked_prefill else NEVER
            self._media = SchedulerMedia(RowCache(limits.media_rows), self._batch, budget)
        parts: tuple[SchedulerPart[Any] | None, ...] = (
            *(self._fair, self.adapters, self._media, self.masks, self._drafts),
        )
        self._parts = tuple(part for part in parts if part is not None)

    # --- adding and ending requests ---

    def add(self, request: EngineRequest, mask_state: TokenMaskState | None = None) -> None:
        """Queue a request. Raises RequestError naming the field if it can never run."""
        if request.request_id in self.requests:
            raise RequestError("request_id", f"request {request.request_id} is already in the engine")
        check_request(request, self.limits, self.kv, has_adapters=self.adapters is not None)
        num_prompt = len(request.prompt_token_ids)
        # The last token is sampled but never computed, so it needs no slot in the cache.
        limit = min(num_prompt + request.max_tokens, self.limits.max_model_len, self.kv.max_tokens + 1)
        self._counts.added += 1
        rank = queue_rank(request, self.limits.policy, self._counts.added)
        prompt = self._prompts.array_of(request)
        queued = Request.of(request, limit=limit, rank=rank, mask_state=mask_state, prompt=prompt)
        queued.parts = _parts_of(queued, self._parts)
        self.requests[queued.request_id] = queued
        for part in queued.parts:
            part.added(queued)
        self.waiting.push(queued)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are skipped. Results of steps in flight are discarded for them."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)

    def fail(self, request_ids: Iterable[str], error: RequestError) -> list[EngineOutput]:
        """End requests that cannot run on; unknown ids are skipped. Returns their outputs, which have the error."""
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ERROR)
                outputs.append(failed_output(request_id, error))
        return outputs

    @property
    def running(self) -> list[Request]:
        """Running requests by rank; the last is preempted first."""
        return self._batch.running

    @property
    def num_unfinished(self) -> int:
        """Number of requests running or waiting."""
        return len(self.requests)

    def stats(self, last_step_tokens: int = 0) -> EngineStats:
        """Return a snapshot of the counters."""
        used, total = self.kv.usage()
        running, waiting = ((), ()) if self.adapters is None else self.adapters.names()
        counts = self._counts
        return EngineStats(
            running=len(self._batch.running),
            waiting=len(self.waiting),
            kv_blocks_used=used,
            kv_blocks_total=total,
            prefix_queries=counts.queries,
            prefix_hits=counts.hits,
            prefix_without_state=counts.without_state,
            preemptions=counts.preemptions,
            recompiles=counts.recompiles,
            steps=counts.steps,
            drafts=None if self._drafts is None else self._drafts.stats(),
            last_step_tokens=last_step_tokens,
            running_adapters=running,
            waiting_adapters=waiting,
        )

    # --- planning ---

    @property
    def awaits_drafts(self) -> bool:
        """True while no step is planned because the proposer waits for what becomes of the drafts in flight."""
        if self._drafts is None or self._drafts.plans_ahead or not self.in_flight:
            return False
        return self.in_flight[-1].plan.num_drafts is not None

    def schedule(self) -> StepPlan | None:
        """Return the next step; None when nothing can be computed before a result or a request arrives."""
        if self._drafts is not None and self.awaits_drafts:
            return None
        masks = self.masks
        if masks.num_requests and masks.has_late:
            masks.catch_up()
            while (plan := self._schedule()) is None and masks.has_late and not self.in_flight:
                masks.catch_up()
            return plan
        return self._schedule()

    def _schedule(self) -> StepPlan | None:
        if self.kv.borders is not None:
            self._blocks.snapshot()
        is_waiting = len(self.waiting) > 0
        if is_waiting and self._fair is not None:
            victim = self._fair.make_room(self._batch.num_free, self.running)
            if victim is not None:
                self._preempt(victim)
        preemptions = self._counts.preemptions
        budget = self._budget_running()
        if self._media is not None and self._media.num_running:
            self._media.hold_rows(budget.rows, budget.tokens)
        self._blocks.register_chunks(budget.rows, budget.tokens, budget.drafts)
        starts: list[RowStart] = []
        if is_waiting and self._counts.preemptions == preemptions:
            budget, starts = self._admit(budget)
        if not len(budget.rows):
            return None
        return self._plan(budget, starts)

    def _budget_running(self) -> TokenBudget:
        """Return what running requests compute, with blocks allocated for all of it; preempts where blocks lack."""
        batch = self._batch
        drafts = self._drafts
        if drafts is not None and not drafts.propose(_rows_to_run(batch, self.masks), self.masks.slow_rows):
            drafts = None
        while True:
            rows = _rows_to_run(batch, self.masks)
            if self._media is not None and self._media.num_running:
                self._media.limit_rows(rows, self.limits.max_num_batched_tokens)
            reserved = 0 if drafts is None else int(batch.num_drafts[rows].sum())
            budget = split_budget(batch, rows, self.limits, reserved)
            if self._blocks.allocate_all(budget.rows, batch.computed[budget.rows] + budget.tokens):
                break
            newest = self.running[-1]
            if len(self.running) == 1:
                raise RuntimeError(f"no free KV block for request {newest.request_id}, the only one running")
            self._preempt(newest)
        if drafts is None or (allocated := drafts.allocate(budget.rows, budget.tokens)) is None:
            return budget
        return decode_first(budget.rows, budget.tokens + allocated, allocated)

    def _preempt(self, victim: Request) -> None:
        """Free a request's row and blocks and move it to the head of the queue."""
        self._counts.preemptions += 1
        self._free_row(victim)
        victim.resumes_at = self._counts.steps
        victim.num_preemptions += 1
        victim.has_token_only = False
        victim.status = RequestStatus.PREEMPTED
        self.waiting.push_front(victim)

    def _admit(self, budget: TokenBudget) -> tuple[TokenBudget, list[RowStart]]:
        """Start waiting requests, in order, while there is a row, a token and a block for the first of the queue."""
        left = self.limits.max_num_batched_tokens - self._batch.budget_cost(budget.rows, budget.tokens)
        rows: list[int] = []
        counts: list[int] = []
        starts: list[RowStart] = []
        while len(self.waiting) and left > 0 and self._batch.num_free:
            try:
                request = self.waiting.peek()
            except IndexError:  # all that wait, wait for an adapter
                break
            count = self._start(request, left)
            if not count:
                break
            self.waiting.pop()
            for part in request.parts:
                part.started(request)
            left -= count if count == 1 else count * request.token_cost
            rows.append(request.row)
            counts.append(count)
            start = RowStart(request.row, request.tokens, len(request.prompt), request.rules, request.encoder)
            starts.append(start)
        if not rows:
            return budget, starts
        all_rows = np.concatenate([budget.rows, np.array(rows, np.int32)])
        all_counts = np.concatenate([budget.tokens, np.array(counts, np.int32)])
        drafts = budget.drafts
        if drafts is not None:
            drafts = np.concatenate([drafts, np.zeros(len(rows), np.int32)])
        return decode_first(all_rows, all_counts, drafts), starts

    def _start(self, request: Request, left: int) -> int:
        """Move a waiting request to a row. Returns the tokens it computes now, of `left`; 0 when it must wait."""
        if request.resumes_at > self._counts.steps - len(self.in_flight):
            return 0
        if request.mask_state is not None and request.mask_state.is_stale:
            return 0
        hit = self.kv.find_prefix(request)
        want = request.num_known - hit.num_tokens
        count = first_chunk(want, left, self.limits, cost=request.token_cost)
        border = self.kv.set_borders(request, hit)
        if self.limits.chunked_prefill:
            count = min(count, border - hit.num_tokens)
        if self._media is not None and request.media is not None:
            end = self._media.reach(request, hit.num_tokens, hit.num_tokens + count)
            count = end - hit.num_tokens if self.limits.chunked_prefill or end == request.num_known else 0
        row = self._batch.next_free()
        end = hit.num_tokens + count
        # Leave one block per running request where they grow: without it the new request would soon be preempted, or
        # preempt others.
        if not count:
            return 0
        if not self.kv.admit(request, row, hit, end, headroom=len(self.running)):
            if self._fair is not None:
                self._fair.lacks_blocks = True
            return 0
        request.tokens = request.known_tokens()
        self._batch.assign(request, hit.num_tokens)
        self._batch.capacity[row] = self.kv.capacity(request)
        self._batch.next_border[row] = self.kv.next_border(request, end - 1)
        self._blocks.register(request, end)
        if self._media is not None and request.media is not None:
            self._media.hold([(request, hit.num_tokens, end)])
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            request.scheduled = self._clock()
            self._count_hit(request, hit)
        if request.prompt_logprobs:
            request.prompt_logprobs.clear()
        request.status = RUNNING
        return count

    def _count_hit(self, request: Request, hit: PrefixHit) -> None:
        if self.kv.caches_prefixes and request.reads_cache:
            self._counts.queries += request.num_known
            self._counts.hits += hit.num_tokens
            self._counts.without_state += hit.num_matched - hit.num_tokens

    def _plan(self, budget: TokenBudget, starts: list[RowStart]) -> StepPlan:
        batch = self._batch
        rows = budget.rows
        counts = budget.tokens
        drafts = budget.drafts
        context = batch.computed[rows]
        end = context + counts
        samples: Bool = (end if drafts is None else end - drafts) == batch.total[rows]
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        guesses = None
        if self._drafts is not None and self.limits.device_drafts:
            guesses = self._drafts.allocate_guesses(rows, end, samples, self.masks.slow_rows)
        token_ids = batch.token_ids(rows, counts, query_start, samples, drafts)
        encodes: tuple[Encode, ...] = ()
        if self._media is not None and self._media.num_running:
            self._media.name_rows(token_ids, rows=rows, context=context, query_start=query_start)
            encodes = self._media.take_encodes()
        plan = StepPlan(
            step=self._counts.steps,
            starts=tuple(starts),
            rows=rows.copy(),
            query_start=query_start,
            context=context,
            token_ids=token_ids,
            block_tables=self.kv.tables(rows, int((end if guesses is None else end + guesses).max())),
            samples=samples,
            state_copies=() if self.kv.borders is None else self.kv.take_copies(),
            num_drafts=drafts,
            num_guesses=guesses,
            masked=masked_sequences(batch, rows, samples, drafts) if self.masks.num_requests else None,
            encodes=encodes,
            adapter_slots=None if self.adapters is None else self.adapters.slots_of(rows),
            adapter_loads=() if self.adapters is None else self.adapters.slots.take_loads(),
        )
        # While a prompt is unfinished, every step computes some of it, unless drafts take all of the budget.
        may_prefill = self._prefills or bool(starts) or drafts is not None
        prompt_tokens = batch.num_prompt_tokens(rows, context, counts) if may_prefill else 0
        self._prefills = prompt_tokens > 0
        self.in_flight.append(InFlightStep(plan, batch.requests_at(rows), batch.epoch[rows], prompt_tokens))
        batch.plan(rows, counts, samples, drafts)
        self._counts.steps += 1
        return plan

    # --- results ---

    def token_masks(self, plan: StepPlan) -> TokenMasks | None:
        """Return the masks of the oldest step in flight; None if no sequence samples under a grammar."""
        if plan.masked is None:
            return None
        step = self.in_flight[0]
        if step.plan is not plan:
            raise RuntimeError(f"the token masks of step {plan.step} depend on the result of step {step.plan.step}")
        masks, late = self.masks.of_step(step.requests, plan, masked=plan.masked, guesses=self._batch.guesses)
        for index in late:
            self._run_again(step.requests[index])
        return masks

    def _run_again(self, request: Request) -> None:
        """Discard what steps in flight sample for a request, since they have no mask of it, and compute it again."""
        for step in self.in_flight:
            if request in step.requests:
                step.void.append(step.requests.index(request))
        if request.row != NO_ROW and self._batch.inflight[request.row]:
            self._preempt(request)

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take the result of the oldest step in flight. Returns the outputs of its requests."""
        step = self.in_flight.popleft()
        if step.plan is not plan or result.step != plan.step:
            raise RuntimeError(f"got the result of step {result.step}, expected step {step.plan.step}")
        batch = self._batch
        num_masked = self.masks.num_requests
        self._counts.recompiles += result.recompiles
        failures: list[EngineOutput] = []
        if num_masked:
            for request, why in self.masks.take_failed():
                failures += self.fail([request.request_id], refused(why))
        live = plan.samples & (batch.epoch[plan.rows] == step.epochs)
        requests = step.requests
        sampled = result.token_ids
        drafts = None
        if step.void:
            sampled = sampled.copy()
            sampled[step.void] = -1
        if plan.num_drafts is not None and self._drafts is not None:
            sampled, drafts = self._drafts.take(plan, plan.num_drafts, sampled, live)
        if result.guesses is not None:
            batch.guesses[plan.rows[live], : result.guesses.shape[1]] = result.guesses[live]
        with_full_page = batch.report(plan.rows[live], sampled[live])
        tokens = sampled.tolist()
        if drafts is not None:
            drop_after_ends(requests, tokens, drafts)
        keep_prompt_logprobs(requests, result)
        ended_early: dict[int, RequestStatus] = {}
        late: list[int] = []
        if num_masked:
            ended_early, late = self.masks.advance(requests, tokens, finish_status, drafts)
        if result.failed or result.refused:
            ended_early |= fail_requests(requests, result)
        outputs, ended = append_tokens(requests, tokens, result.logprobs, ended_early, drafts)
        for row in with_full_page.tolist():
            request = batch.request_at(row)
            self._blocks.register(request, request.num_known - 1)
        for request, status in ended:
            self._finish(request, status)
        if late:
            for request in [requests[index] for index in late if not requests[index].is_finished]:
                self.masks.add_late([request])
                self._run_again(request)
        generated = len(outputs) if drafts is None else sum(len(output.new_token_ids) for output in outputs)
        return StepOutputs(outputs=failures + outputs, stats=self.stats(step.prompt_tokens + generated))

    # --- finishing ---

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Free a request's row and blocks, or remove it from the queue."""
        if request.row == NO_ROW:
            self.waiting.remove(request.request_id)
        else:
            self._free_row(request)
        request.status = status
        for part in request.parts:
            part.finished(request)
        if request.media is not None:
            request.media = request.media.without_payloads()  # an incident's record may hold the request for some time
        del self.requests[request.request_id]

    def _free_row(self, request: Request) -> None:
        """Free blocks and row. Later steps may reuse both at once, because steps run in order."""
        self.kv.free(request, request.row)
        for part in request.parts:
            part.stopped(request)
        self._batch.release(request)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless rows, requests and blocks add up."""
        for pool in self.kv.pools:
            pool.check_integrity()
        if self._batch.num_free + len(self.running) != self.limits.max_num_seqs:
            raise RuntimeError(f"{self._batch.num_free} rows are free with {len(self.running)} requests running")
        if len(self.running) + len(self.waiting) != len(self.requests):
            raise RuntimeError(
                f"{len(self.requests)} requests, {len(self.running)} running, {len(self.waiting)} waiting"
            )
        if self.adapters is not None:
            self.adapters.check_integrity(self.running)
        if self._media is not None:
            self._media.check_integrity(self.running)
        for pool in self.kv.pools:
            if not self.running and pool.num_free != pool.num_blocks - 1:
                raise RuntimeError(f"nothing runs, yet only {pool.num_free} blocks are free")

    # --- incident snapshots ---

    def state(self) -> SchedulerState:
        """Return the state; takes milliseconds. What changes in a request is not copied."""
        return SchedulerState(
            requests=tuple(self.requests.values()),
            in_flight=tuple(self.in_flight),
            batch=self._batch.state(),
            kv=self.kv.state(),
            counts=replace(self._counts),
            prefills=self._prefills,
            fairness=None if self._fair is None else self._fair.state(),
            adapters=None if self.adapters is None else self.adapters.state(),
            media=None if self._media is None else self._media.state(),
            masks=self.masks.state(),
            drafts=None if self._drafts is None else self._drafts.state(),
        )

    def restore(self, state: SchedulerState) -> None:
        """Replace the state of a new scheduler, whose requests are then those of `state`."""
        requests = sorted(state.requests, key=rank_of)
        self._batch.restore(state.batch, [request for request in requests if request.row != NO_ROW])
        self.kv.restore(state.kv, self.running)
        self.in_flight.extend(state.in_flight)
        self._counts = replace(state.counts)
        self._prefills = state.prefills
        for request in requests:
            request.parts = _parts_of(request, self._parts)
            self.requests[request.request_id] = request
            if request.row == NO_ROW:
                self.waiting.push(request)
        _restore_part(self._fair, state.fairness, requests)
        _restore_part(self.adapters, state.adapters, requests)
        _restore_part(self._media, state.media, requests)
        _restore_part(self.masks, state.masks, requests)
        _restore_part(self._drafts, state.drafts, requests)


def _parts_of(request: Request, parts: Sequence[SchedulerPart[Any]]) -> tuple[SchedulerPart[Any], ...]:
    """Return the parts that a request concerns."""
    return tuple(part for part in parts if part.needs is None or getattr(request, part.needs) is not None)


def _rows_to_run(batch: RunningBatch, masks: StepMasks) -> Int32:
    """Return the rows of running requests, by rank, without those that have to wait for a token mask."""
    return masks.rows_to_run(batch) if masks.num_requests else batch.order


def _restore_part(part: SchedulerPart[StateT] | None, state: StateT | None, requests: Sequence[Request]) -> None:
    if part is not None and state is not None:
        part.restore(state, [request for request in requests if part in request.parts])


def check_request(request: EngineRequest, limits: Limits, kv: KvManager, *, has_adapters: bool) -> None:
    """Raise RequestError naming the field if a request could not run even alone."""
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise RequestError("prompt", "the prompt is empty")
    if request.max_tokens < 1:
        raise RequestError("max_tokens", f"{request.max_tokens} is not a positive number of tokens")
    if num_prompt >= limits.max_model_len:
        raise RequestError(
            "prompt", f"{num_prompt} tokens leave no room to answer in a context of {limits.max_model_len}"
        )
    sizes = [item.num_rows for item in request.media]
    rows = max(sizes, default=0) if limits.chunked_prefill else sum(sizes)
    if rows > limits.media_rows:
        what = "a media item has" if limits.chunked_prefill else "media that are computed in one step have"
        raise RequestError("prompt", f"{what} {rows} rows, the engine has room for {limits.media_rows}")
    if request.adapter is not None and not has_adapters:
        raise RequestError(LORA_FIELD, "the engine has no LoRA adapters; start it with --enable-lora")
    if not kv.fits(num_prompt + 1):
        raise RequestError(
            "prompt",
            f"{num_prompt} tokens do not fit the KV cache of "
            f"{per_pool(pool.num_blocks - 1 for pool in kv.pools)} blocks of {kv.block_size} tokens",
        )


def failed_output(request_id: str, error: RequestError) -> EngineOutput:
    """Return the only output of a request that cannot run."""
    return EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=(error.field, str(error)))


# The token budget of a step.


@dataclass(frozen=True, slots=True, eq=False)
class TokenBudget:
    """How many tokens each row computes in a step."""

    rows: Int32  # [n]
    tokens: Int32  # [n], all positive
    drafts: Int32 | None = None  # [n] how many of the tokens are drafts


def split_budget(batch: RunningBatch, rows: Int32, limits: Limits, reserved: int = 0) -> TokenBudget:
    """Give one token to every row that wants one, then chunks in the order of `rows` until the budget is spent.

    `reserved`: tokens that chunks may not take.
    """
    total = batch.total[rows]
    known = np.minimum(total, batch.media_limit[rows]) if limits.media_rows else total
    want = (known - batch.computed[rows]) * (total < batch.limit[rows])
    if (want == 1).all():
        return TokenBudget(rows, want)
    single = rows[want == 1]
    longer = rows[want > 1]
    want = want[want > 1]
    if limits.long_prefill_token_threshold:
        want = np.minimum(want, limits.long_prefill_token_threshold)
    want = np.minimum(want, batch.next_border[longer] - batch.computed[longer])
    cost = batch.token_cost[longer]
    spent = want * cost
    left = limits.max_num_batched_tokens - len(single) - reserved - (np.cumsum(spent) - spent)
    tokens = np.clip(np.maximum(left // cost, left > 0), 0, want)
    return decode_first(
        np.concatenate([single, longer[tokens > 0]]),
        np.concatenate([np.ones(len(single), np.int32), tokens[tokens > 0].astype(np.int32)]),
    )


def first_chunk(want: int, left: int, limits: Limits, cost: int = 1) -> int:
    """Return how many of `want` tokens a request computes in its first step, with `left` available; 0: it must wait.

    `cost`: of a token.
    """
    if not limits.chunked_prefill:
        return want if want <= left else 0
    return min(want, max(left // cost, 1), limits.long_prefill_token_threshold or want)


def decode_first(rows: Int32, tokens: Int32, drafts: Int32 | None = None) -> TokenBudget:
    """Return rows with one token first, then those with drafts, then chunks, each group in its order."""
    if drafts is None:
        order = np.argsort(tokens > 1, kind="stable")
        return TokenBudget(rows[order], tokens[order])
    order = np.argsort(np.where(drafts > 0, 1, 2 * (tokens > 1)), kind="stable")
    return TokenBudget(rows[order], tokens[order], drafts[order])


# The result of a step: each request's new tokens, whether it finishes, the logprobs it reports.


def append_tokens(
    requests: Sequence[Request],
    tokens: Sequence[int],
    logprobs: Mapping[int, TokenLogprobs],
    ended_by_mask: Mapping[int, RequestStatus],
    drafts: Sequence[list[int]] | None = None,
) -> tuple[list[EngineOutput], list[Ending]]:
    """Append each request's new tokens. Returns the outputs, and the final status of the requests that end.

    `tokens`: the newest of each request, negative where none was sampled. `drafts`: the accepted ones before it, none
    of which ends the request. `logprobs`, `ended_by_mask`: by index in `requests`. Results of finished requests are
    dropped. A request that was preempted after the step was planned still gets its tokens: they will not be sampled
    again.
    """
    outputs: list[EngineOutput] = []
    ended: list[Ending] = []
    for index, (request, token) in enumerate(zip(requests, tokens)):
        if token < 0 or (request.status is not RUNNING and request.is_finished):
            continue
        if drafts is not None:
            request.outputs.extend(drafts[index])
        request.outputs.append(token)
        status = RUNNING
        if token in request.stop_token_ids or len(request.outputs) == request.max_outputs or index in ended_by_mask:
            status = finish_status(request, token, len(request.outputs))
            if status is RUNNING:
                status = ended_by_mask.get(index, RUNNING)
            if status is not RUNNING:
                ended.append((request, status))
        new = [token] if drafts is None else [*drafts[index], token]
        if status is RUNNING and request.has_token_only:
            output = EngineOutput(
                request_id=request.request_id,
                new_token_ids=new,
                num_cached_tokens=request.num_cached_tokens or 0,
            )
        else:
            output = _detailed_output(request, new, status, logprobs.get(index))
        outputs.append(output)
    return outputs, ended


def drop_after_ends(requests: Sequence[Request], tokens: list[int], drafts: Sequence[list[int]]) -> None:
    """Drop what comes after a draft that stops its request; no draft reaches its length. Arguments as above."""
    for index, (request, accepted) in enumerate(zip(requests, drafts)):
        if request.stop_token_ids.isdisjoint(accepted):
            continue
        for count, token in enumerate(accepted, 1):
            if finish_status(request, token, len(request.outputs) + count) is not RUNNING:
                end_at(index, count, tokens, drafts)
                break


def finish_status(request: Request, token: int, generated: int) -> RequestStatus:
    """Return the status after `token`, the last of `generated`. Stop tokens count from `min_tokens` on."""
    if token in request.stop_token_ids and generated >= request.rules.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    return RequestStatus.FINISHED_LENGTH if generated == request.max_outputs else RUNNING


def fail_requests(requests: Sequence[Request], result: StepResult) -> dict[int, RequestStatus]:
    """Give the requests of the result's failed sequences their error: field, reason.

    Returns the status of the unfinished ones by index.
    """
    errors = {index: (PROCESSOR_FIELD, why) for index, why in result.failed.items()}
    for index, why in result.refused.items():
        history_field = requests[index].rules.history_field
        errors[index] = history_field, f"{history_field}: {why}"
    for index, error in errors.items():
        requests[index].error = error
    return {index: RequestStatus.FINISHED_ERROR for index in errors if not requests[index].is_finished}


def keep_prompt_logprobs(requests: Sequence[Request], result: StepResult) -> None:
    """Append a chunk's prompt logprobs to those of the chunks before."""
    for index, block in result.prompt_logprobs.items():
        request = requests[index]
        if request.prompt_logprobs is not None and not request.is_finished:
            request.prompt_logprobs.extend(_positions(block))


def _detailed_output(
    request: Request, tokens: list[int], status: RequestStatus, logprobs: TokenLogprobs | None
) -> EngineOutput:
    """Return the output of a request that starts, ends, was preempted or reports logprobs.

    Prompt logprobs and the schedule time go out with the first output.
    """
    prompt_logprobs = request.prompt_logprobs
    request.prompt_logprobs = None
    request.has_token_only = request.is_plain
    token = tokens[-1]
    stopped = status is RequestStatus.FINISHED_STOPPED and token not in request.eos_token_ids
    stopped = stopped and token in request.stop_token_ids  # Any other last token ended the grammar.
    grammar_error = None if request.mask_state is None else request.mask_state.error
    error = request.error if grammar_error is None else (GRAMMAR_FIELD, f"{GRAMMAR_FIELD}: {grammar_error}")
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=tokens,
        finish_reason=FINISHED.get(status),
        stop_reason=token if stopped else None,
        logprobs=None if logprobs is None else _positions(logprobs, request.rules.logprob_token_ids)[: len(tokens)],
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens or 0,
        scheduled=request.scheduled if len(request.outputs) == len(tokens) else 0.0,
        num_preemptions=request.num_preemptions,
        error=error,
    )


def _positions(block: TokenLogprobs, only: Sequence[int] = ()) -> list[PositionLogprobs]:
    """Return the block as messages. `only`: report these tokens instead of the best; the block then has all tokens."""
    columns = zip(block.token_ids.tolist(), block.logprobs.tolist(), block.ranks.tolist())
    if not only:
        return [PositionLogprobs(token_ids=ids, logprobs=values, rank=rank) for ids, values, rank in columns]
    positions = []
    for ids, values, rank in columns:
        rank_of = {token: position for position, token in enumerate(ids[1:], start=1)}
        ranks = [rank_of[token] for token in only]
        positions.append(
            PositionLogprobs(
                token_ids=[ids[0], *only],
                logprobs=[values[0], *(values[position] for position in ranks)],
                rank=rank,
                ranks=ranks,
            )
        )
    return positions
