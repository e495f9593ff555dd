"""The scheduler: how many tokens of which requests the next step computes, and what a step's result means for them.

There is no prefill phase and no decode phase. A request has `computed` tokens and wants `total`; a step hands out a
token budget. Chunked prefill, prefix hits, preemption by recomputation and planning ahead of results follow from that.
A step may also compute drafts, guesses of a sequence's next tokens, of which its result has those that were right.

Uses no device and no text; the clock only records when a request first runs. Per-step work on running requests is a
few numpy operations on a RunningBatch; Python loops only over requests that start, finish or need a block or a mask.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.common.engine.lora.adapter import LORA_FIELD, NO_ADAPTER, Adapter, AdapterLoad
from pagoda.common.engine.lora.slots import AdapterQueue, AdapterSlots
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, PositionLogprobs, StepOutputs
from pagoda.common.engine.scheduling.fair_queue import FairQueue
from pagoda.common.engine.scheduling.request import (
    FINISHED,
    NO_ROW,
    Int64,
    Request,
    RequestStatus,
    RunningBatch,
    WaitingQueue,
    queue_rank,
    waiting_queue,
)
from pagoda.common.engine.speculative.device import DeviceDrafts
from pagoda.common.engine.speculative.proposer import DraftPlanner
from pagoda.common.engine.steps.contract import Bool, Int32, RowStart, StepPlan, StepResult, TokenLogprobs, TokenMasks
from pagoda.common.engine.structured_output.grammar import GRAMMAR_FIELD, refused
from pagoda.common.engine.structured_output.step_masks import StepMasks, end_at, masked_sequences
from pagoda.common.engine.structured_output.token_mask import TokenMaskState
from pagoda.common.errors import RequestError

PROCESSOR_FIELD: Final = "extra_args"
"""The field that errors of logits processors name: what a request gives them."""

RUNNING: Final = RequestStatus.RUNNING
Ending: TypeAlias = tuple[Request, RequestStatus]


@dataclass(frozen=True, slots=True, eq=False)
class _InFlightStep:
    """A planned step whose result has not been reported."""

    plan: StepPlan
    requests: list[Request]
    epochs: Int64  # [S] of each row when the step was planned
    prompt_tokens: int  # computed by it; recomputed tokens of preempted requests count
    void: list[int] = field(default_factory=list)  # sequences that sampled without their mask; they run again


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
        self.running: list[Request] = []  # by rank: the last is preempted first
        self.adapters: AdapterSlots | None = None
        self._shares_adapters = False
        self._fair = FairQueue() if limits.policy == "fcfs" and not limits.max_loras else None
        self._lacks_blocks = False  # the next waiting request could not start for lack of blocks
        self._last_prompt: tuple[list[int], Int32] = [], np.zeros(0, np.int32)
        self.waiting: WaitingQueue = waiting_queue(limits.policy) if self._fair is None else self._fair
        if limits.max_loras:
            self._use_adapters(AdapterSlots(limits.max_loras, ready=()))
        self._requests: dict[str, Request] = {}
        self._batch = RunningBatch(limits.max_num_seqs, limits.max_drafts)
        if limits.device_drafts and drafter is None:
            drafter = DeviceDrafts()
        self._drafter = drafter if limits.max_drafts else None
        self._order: Int32 | None = None  # rows of `running`; None: to be rebuilt
        self._prefills = False  # the newest step computes prompt tokens
        self._in_flight: deque[_InFlightStep] = deque()
        self._num_masked = 0  # unfinished requests with token masks
        self._masks = StepMasks(clock)
        self._num_embedded = 0  # unfinished requests with prompt embeddings
        self._num_adapted = 0  # unfinished requests with LoRA adapters
        self._added = self._steps = self._preemptions = self._queries = self._hits = self._recompiles = 0

    def _use_adapters(self, slots: AdapterSlots) -> None:
        self.adapters, self.waiting = slots, AdapterQueue(slots, lambda: waiting_queue(self.limits.policy))

    def share_adapters(self, slots: AdapterSlots) -> None:
        """Use slots that other schedulers use, too. Before the first request."""
        assert not self._requests, "before the first request"
        self._use_adapters(slots)
        self._shares_adapters = True

    # --- adding and aborting requests ---

    def add(self, request: EngineRequest, mask_state: TokenMaskState | None = None) -> None:
        """Queue a request. Raises RequestError naming the field if it can never run."""
        self._check(request)
        num_prompt = len(request.prompt_token_ids)
        # The last token is sampled but never computed, so it needs no slot in the cache.
        limit = min(num_prompt + request.max_tokens, self.limits.max_model_len, self.kv.max_tokens + 1)
        self._added += 1
        rank = queue_rank(request, self.limits.policy, self._added)
        queued = Request.of(request, limit=limit, rank=rank, mask_state=mask_state, prompt=self._prompt_of(request))
        self._requests[queued.request_id] = queued
        self._num_masked += mask_state is not None
        self._num_embedded += queued.embeds is not None
        self._num_adapted += queued.adapter is not None
        self.waiting.push(queued)

    def _prompt_of(self, request: EngineRequest) -> Int32:
        """Return the prompt as an array, which the sequences of one request share."""
        if self._last_prompt[0] is not request.prompt_token_ids:
            self._last_prompt = request.prompt_token_ids, np.array(request.prompt_token_ids, np.int32)
        return self._last_prompt[1]

    def _check(self, request: EngineRequest) -> None:
        num_prompt = len(request.prompt_token_ids)
        if request.request_id in self._requests:
            raise RequestError("request_id", f"request {request.request_id} is already in the engine")
        if not num_prompt:
            raise RequestError("prompt", "the prompt is empty")
        if request.max_tokens < 1:
            raise RequestError("max_tokens", f"{request.max_tokens} is not a positive number of tokens")
        if num_prompt >= self.limits.max_model_len:
            raise RequestError(
                "prompt", f"{num_prompt} tokens leave no room to answer in a context of {self.limits.max_model_len}"
            )
        if request.adapter is not None and self.adapters is None:
            raise RequestError(LORA_FIELD, "the engine has no LoRA adapters; start it with --enable-lora")
        if not self.kv.fits(num_prompt + 1):
            raise RequestError(
                "prompt",
                f"{num_prompt} tokens do not fit the KV cache of "
                f"{per_pool(pool.num_blocks - 1 for pool in self.kv.pools)} blocks of {self.kv.block_size} tokens",
            )

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are skipped. Results of steps in flight are discarded for them."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)
        self._drop_finished()

    def fail_adapter(self, adapter: Adapter, error: RequestError) -> list[EngineOutput]:
        """End the waiting requests of an adapter that cannot be read. Returns their outputs."""
        assert isinstance(self.waiting, AdapterQueue)
        outputs = []
        for request_id in self.waiting.of(adapter):
            self._finish(self._requests[request_id], RequestStatus.FINISHED_ERROR)
            outputs.append(failed_output(request_id, error))
        return outputs

    def missing_adapters(self) -> list[Adapter]:
        """Return the adapters of waiting requests that are in no slot, the most urgent first."""
        if not self._num_adapted or self.adapters is None or not isinstance(self.waiting, AdapterQueue):
            return []
        return [adapter for adapter in self.waiting.adapters() if adapter not in self.adapters]

    @staticmethod
    def adapter_loads(plan: StepPlan) -> tuple[AdapterLoad, ...]:
        """Return the slots whose content changes before the step."""
        return plan.adapter_loads

    def request(self, request_id: str) -> Request:
        """Return an unfinished request. Raises KeyError for any other."""
        return self._requests[request_id]

    @property
    def unfinished(self) -> list[Request]:
        """Requests running or waiting."""
        return list(self._requests.values())

    @property
    def num_unfinished(self) -> int:
        """Number of requests running or waiting."""
        return len(self._requests)

    def stats(self, last_step_tokens: int = 0) -> EngineStats:
        """Return a snapshot of the counters."""
        used, total = self.kv.usage()
        running, waiting = self._adapter_names() if self._num_adapted else ((), ())
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_blocks_used=used,
            kv_blocks_total=total,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            preemptions=self._preemptions,
            recompiles=self._recompiles,
            steps=self._steps,
            drafts=None if self._drafter is None else self._drafter.stats(),
            last_step_tokens=last_step_tokens,
            running_adapters=running,
            waiting_adapters=waiting,
        )

    def _adapter_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the adapters of running and of waiting requests."""
        assert self.adapters is not None
        assert isinstance(self.waiting, AdapterQueue)
        waiting = self.waiting.adapters()
        return tuple(each.name for each in self.adapters.running), tuple(each.name for each in waiting)

    # --- planning ---

    @property
    def num_withheld(self) -> int:
        """How many requests may have to miss the next step because their token masks take long."""
        return self._masks.num_withheld if self._num_masked else 0

    @property
    def awaits_drafts(self) -> bool:
        """True while no step is planned because the proposer waits for what becomes of the drafts in flight."""
        if self._drafter is None or self._drafter.plans_ahead or not self._in_flight:
            return False
        return self._in_flight[-1].plan.num_drafts is not None

    def schedule(self) -> StepPlan | None:
        """Return the next step; None when nothing can be computed before a result or a request arrives."""
        if self.awaits_drafts:
            return None
        if self._num_masked and self._masks.has_late:
            self._masks.catch_up()
            while (plan := self._schedule()) is None and self._masks.has_late and not self._in_flight:
                self._masks.catch_up()
            return plan
        return self._schedule()

    def _schedule(self) -> StepPlan | None:
        if self._fair is not None and len(self._fair):
            self._make_room(self._fair)
        preemptions = self._preemptions
        budget = self._budget_running()
        if self.kv.snapshot_tokens:
            self._snapshot(budget)
        self._register_chunks(budget)
        starts: list[RowStart] = []
        if len(self.waiting) and self._preemptions == preemptions:
            budget, starts = self._admit(budget)
        if not len(budget.rows):
            return None
        return self._plan(budget, starts)

    def _make_room(self, queue: FairQueue) -> None:
        """Preempt a sequence of a request or key that keeps the next waiting one from running at all."""
        if not self._batch.num_free or self._lacks_blocks:
            self._lacks_blocks = False
            if self.running and (victim := queue.victim(self.running)) is not None:
                self._preempt(victim)

    def _budget_running(self) -> TokenBudget:
        """Return what running requests compute, with blocks allocated for all of it; preempts where blocks lack."""
        if drafting := self._drafter is not None and self._drafter.active:
            self._drafter.propose(self._batch, self._running_rows(), self.limits)
            if self._num_masked:
                self._batch.num_drafts[self._slow_rows()] = 0
        while True:
            rows = self._running_rows()
            reserved = int(self._batch.num_drafts[rows].sum()) if drafting else 0
            budget = split_budget(self._batch, rows, self.limits, self.kv.snapshot_tokens, reserved)
            end = self._batch.computed[budget.rows] + budget.tokens
            short = np.flatnonzero(end > self._batch.capacity[budget.rows])
            if all(self._ensure_blocks(int(budget.rows[i]), int(end[i])) for i in short):
                return self._add_drafts(budget) if drafting else budget

    def _add_drafts(self, budget: TokenBudget) -> TokenBudget:
        """Return the budget with the proposed drafts, as far as blocks are free for them."""
        batch = self._batch
        rows = budget.rows
        drafts = batch.num_drafts[rows]
        if not drafts.any():
            return budget
        end = batch.computed[rows] + budget.tokens + drafts
        for i in np.flatnonzero(end > batch.capacity[rows]).tolist():
            row = int(rows[i])
            if not self._allocate(row, int(end[i])):
                drafts[i] -= end[i] - batch.capacity[row]
                batch.num_drafts[row] = drafts[i]
        return decode_first(rows, budget.tokens + drafts, drafts) if drafts.any() else budget

    def _running_rows(self) -> Int32:
        if self._order is None:
            self._order = np.fromiter((request.row for request in self.running), np.int32, len(self.running))
        if not self._num_masked or not self._masks.num_withheld:
            return self._order
        inflight = self._batch.inflight
        rows = [each.row for each in self.running if not self._masks.withholds(each, int(inflight[each.row]))]
        return np.array(rows, np.int32)

    def _slow_rows(self) -> list[int]:
        """Return the rows whose masks take long, so that drafts would need several such."""
        return [request.row for request in self._masks.slow.values() if request.row != NO_ROW]

    def _ensure_blocks(self, row: int, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens of a row. False after a preemption: split again."""
        if self._allocate(row, num_tokens):
            return True
        if len(self.running) == 1:
            request = self._batch.request_at(row)
            raise RuntimeError(f"no free KV block for request {request.request_id}, the only one running")
        self._preempt(self.running[-1])
        return False

    def _allocate(self, row: int, num_tokens: int) -> bool:
        request = self._batch.request_at(row)
        accepted = int(
            self._batch.computed[row] - self._batch.drafts_inflight[row]
        )  # lower bound: drafts in flight may be rejected
        if not self.kv.allocate(request, row, accepted, num_tokens):
            return False
        self._batch.capacity[row] = self.kv.capacity(request)
        return True

    def _preempt(self, victim: Request) -> None:
        """Free a request's row and blocks and move it to the head of the queue."""
        self._preemptions += 1
        self._free_row(victim)
        self.running.remove(victim)
        victim.resumes_at = self._steps
        victim.num_preemptions += 1
        victim.has_token_only = False
        victim.status = RequestStatus.PREEMPTED
        self.waiting.push_front(victim)

    def _snapshot(self, budget: TokenBudget) -> None:
        """Put the recurrent state of rows at a border of snapshots into the prefix cache, before it is replaced."""
        computed = self._batch.computed[budget.rows]
        for i in np.flatnonzero(computed % self.kv.snapshot_tokens == 0):
            self.kv.snapshot(self._batch.request_at(int(budget.rows[i])), int(computed[i]))

    def _register_chunks(self, budget: TokenBudget) -> None:
        """Enter the pages that prompt chunks fill in this step into the prefix cache; no preemption follows."""
        known = budget.tokens if budget.drafts is None else budget.tokens - budget.drafts
        for i in np.flatnonzero(known > 1):
            row = int(budget.rows[i])
            self._register(self._batch.request_at(row), int(self._batch.computed[row] + budget.tokens[i]))

    def _register(self, request: Request, num_tokens: int) -> None:
        self.kv.register(request, num_tokens)
        if self.kv.caches_prefixes:
            # A page can be entered once its last token is computed, which is certain once the next token is known.
            self._batch.next_page[request.row] = (request.num_registered + 1) * self.kv.block_size + 1

    def _admit(self, budget: TokenBudget) -> tuple[TokenBudget, list[RowStart]]:
        """Start waiting requests, in order, while there is a row, a token and a block for the first of the queue."""
        left = self.limits.max_num_batched_tokens - self._cost(budget)
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
            if self._fair is not None:
                self._fair.start(request)
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

    def _cost(self, budget: TokenBudget) -> int:
        """Return what the running requests spend of a step's tokens."""
        counts = budget.tokens
        return int((counts * np.where(counts > 1, self._batch.token_cost[budget.rows], 1)).sum())

    def _start(self, request: Request, left: int) -> int:
        """Move a waiting request to a row. Returns the tokens it computes now, of `left`; 0 when it must wait."""
        if request.resumes_at > self._steps - len(self._in_flight):
            return 0
        if request.mask_state is not None and request.mask_state.is_stale:
            return 0
        hit = self.kv.find_prefix(request)
        want = request.num_known - hit.num_tokens
        count = first_chunk(want, left, self.limits, max_chunk=self.kv.snapshot_tokens, cost=request.token_cost)
        row = self._batch.next_free()
        end = hit.num_tokens + count
        # Leave one block per running request where they grow: without it the new request would soon be preempted, or
        # preempt others.
        if not count:
            return 0
        if not self.kv.admit(request, row, hit, end, headroom=len(self.running)):
            self._lacks_blocks = True
            return 0
        request.tokens = request.known_tokens()
        slot = NO_ADAPTER
        if request.adapter is not None and self.adapters is not None:
            slot = self.adapters.acquire(request.adapter)
        self._batch.assign(request, hit.num_tokens, slot)
        self._batch.capacity[row] = self.kv.capacity(request)
        self._register(request, end)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            request.scheduled = self._clock()
            if self.kv.caches_prefixes and request.reads_cache:
                self._queries += request.num_known
                self._hits += hit.num_tokens
        if request.prompt_logprobs:
            request.prompt_logprobs.clear()
        request.status = RUNNING
        insort(self.running, request, key=_rank)
        self._order = None
        return count

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
        guesses = self._plan_guesses(self._drafter, rows, end, samples) if self.limits.device_drafts else None
        plan = StepPlan(
            step=self._steps,
            starts=tuple(starts),
            rows=rows.copy(),
            query_start=query_start,
            context=context,
            token_ids=batch.token_ids(rows, counts, query_start, samples, drafts),
            block_tables=self.kv.tables(rows, int((end if guesses is None else end + guesses).max())),
            samples=samples,
            state_copies=self.kv.take_copies() if self.kv.snapshot_tokens else (),
            num_drafts=drafts,
            num_guesses=guesses,
            masked=masked_sequences(batch, rows, samples, drafts) if self._num_masked else None,
            embeds=batch.embeds(rows, counts) if self._num_embedded else None,
            adapter_slots=self._adapter_slots(rows) if self._num_adapted else None,
            adapter_loads=() if self.adapters is None else self.adapters.take_loads(),
        )
        # While a prompt is unfinished, every step computes some of it, unless drafts take all of the budget.
        may_prefill = self._prefills or bool(starts) or drafts is not None
        prompt_tokens = self._count_prompt_tokens(rows, context, counts) if may_prefill else 0
        self._prefills = prompt_tokens > 0
        self._in_flight.append(_InFlightStep(plan, batch.requests_at(rows), batch.epoch[rows], prompt_tokens))
        batch.plan(rows, counts, samples, drafts)
        self._steps += 1
        return plan

    def _plan_guesses(self, drafter: DraftPlanner | None, rows: Int32, end: Int32, samples: Bool) -> Int32 | None:
        """Return how many tokens the drafter guesses after each sequence [S], as far as blocks are free for them.

        `end` [S]: the sequence's tokens after the step. None: no sequence has guesses.
        """
        assert isinstance(drafter, DeviceDrafts), "drafts are guessed on the device"
        batch = self._batch
        guesses = drafter.guesses(batch, rows, end, samples, self.limits)
        if self._num_masked and (slow := self._slow_rows()):
            guesses[np.isin(rows, slow)] = 0
        for i in np.flatnonzero((guesses > 0) & (end + guesses > batch.capacity[rows])).tolist():
            row = int(rows[i])
            if not self._allocate(row, int(end[i] + guesses[i])):
                guesses[i] = max(0, batch.capacity[row] - end[i])
        batch.num_guesses[rows] = guesses
        return guesses if guesses.any() else None

    def _adapter_slots(self, rows: Int32) -> Int32 | None:
        slots = self._batch.adapter_slot[rows]
        return slots if (slots != NO_ADAPTER).any() else None

    def _count_prompt_tokens(self, rows: Int32, context: Int32, counts: Int32) -> int:
        left = self._batch.prefill_end[rows] - context
        return int(np.minimum(counts, left).clip(min=0).sum())

    # --- results ---

    def token_masks(self, plan: StepPlan) -> TokenMasks | None:
        """Return the masks of the oldest step in flight; None if no sequence samples under a grammar."""
        if plan.masked is None:
            return None
        step = self._in_flight[0]
        if step.plan is not plan:
            raise RuntimeError(f"the token masks of step {plan.step} depend on the result of step {step.plan.step}")
        masks, late = self._masks.of_step(step.requests, plan, self._batch.guesses)
        for index in late:
            self._run_again(step.requests[index])
        return masks

    def _run_again(self, request: Request) -> None:
        """Discard what steps in flight sample for a request, since they have no mask of it, and compute it again."""
        for step in self._in_flight:
            if request in step.requests:
                step.void.append(step.requests.index(request))
        if request.row != NO_ROW and self._batch.inflight[request.row]:
            self._preempt(request)

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take the result of the oldest step in flight. Returns the outputs of its requests."""
        step = self._in_flight.popleft()
        if step.plan is not plan or result.step != plan.step:
            raise RuntimeError(f"got the result of step {result.step}, expected step {step.plan.step}")
        self._recompiles += result.recompiles
        failures = self._fail_late() if self._num_masked else []
        live = plan.samples & (self._batch.epoch[plan.rows] == step.epochs)
        requests = step.requests
        sampled = result.token_ids
        drafts = None
        if step.void:
            sampled = sampled.copy()
            sampled[step.void] = -1
        if plan.num_drafts is not None:
            sampled, drafts = self._take_drafts(plan, sampled, live)
        if result.guesses is not None:
            self._batch.guesses[plan.rows[live], : result.guesses.shape[1]] = result.guesses[live]
        with_full_page = self._batch.report(plan.rows[live], sampled[live])
        tokens = sampled.tolist()
        if drafts is not None:
            drop_after_ends(requests, tokens, drafts)
        keep_prompt_logprobs(requests, result)
        ended_early: dict[int, RequestStatus] = {}
        late: list[int] = []
        if self._num_masked:
            ended_early, late = self._masks.advance(requests, tokens, finish_status, drafts)
        if result.failed:
            ended_early |= fail_requests(
                requests, {index: (PROCESSOR_FIELD, why) for index, why in result.failed.items()}
            )
        if result.refused:
            fields = {index: requests[index].rules.history_field for index in result.refused}
            errors = {index: (fields[index], f"{fields[index]}: {why}") for index, why in result.refused.items()}
            ended_early |= fail_requests(requests, errors)
        outputs, ended = append_tokens(requests, tokens, result.logprobs, ended_early, drafts)
        for row in with_full_page.tolist():
            request = self._batch.request_at(row)
            self._register(request, request.num_known - 1)
        for request, status in ended:
            self._finish(request, status)
        if ended or failures:
            self._drop_finished()
        if late:
            for request in [requests[index] for index in late if not requests[index].is_finished]:
                self._masks.add_late([request])
                self._run_again(request)
        generated = len(outputs) if drafts is None else sum(len(output.new_token_ids) for output in outputs)
        return StepOutputs(outputs=failures + outputs, stats=self.stats(step.prompt_tokens + generated))

    def _fail_late(self) -> list[EngineOutput]:
        """End the requests whose grammar failed while a late mask was computed. `_drop_finished` must follow."""
        outputs = []
        for request, error in self._masks.take_failed():
            self._finish(request, RequestStatus.FINISHED_ERROR)
            outputs.append(failed_output(request.request_id, refused(error)))
        return outputs

    def _take_drafts(self, plan: StepPlan, token_ids: Int32, live: Bool) -> tuple[Int32, list[list[int]]]:
        """Report the drafts of the `live` sequences. Returns the newest token [S] and the accepted drafts of each."""
        assert plan.num_drafts is not None
        accepted = np.count_nonzero(token_ids >= 0, axis=1).astype(np.int32) - 1
        drafts = plan.num_drafts[live]
        self._batch.report_drafts(plan.rows[live], drafts, drafts - accepted[live])
        if self._drafter is not None:
            self._drafter.report(self._batch, plan.rows[live], drafts, accepted[live])
        lists = [ids[: max(count, 0)] for ids, count in zip(token_ids.tolist(), accepted.tolist())]
        return token_ids[np.arange(plan.num_seqs), accepted], lists

    # --- finishing ---

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Free a request's row and blocks, or remove it from the queue. `_drop_finished` must follow."""
        if request.row == NO_ROW:
            self.waiting.remove(request.request_id)
        else:
            self._free_row(request)
        request.status = status
        if request.mask_state is not None:
            self._masks.drop(request)
            request.mask_state.release()
        if self._drafter is not None:
            self._drafter.finish(request.request_id, request.outputs)
        self._num_masked -= request.mask_state is not None
        self._num_embedded -= request.embeds is not None
        request.embeds = None  # an incident's record may hold the request for some time
        self._num_adapted -= request.adapter is not None
        del self._requests[request.request_id]

    def _free_row(self, request: Request) -> None:
        """Free blocks and row. Later steps may reuse both at once, because steps run in order."""
        self.kv.free(request, request.row)
        self._batch.release(request)
        if self._fair is not None:
            self._fair.end(request)
        if request.adapter is not None and self.adapters is not None:
            self.adapters.release(request.adapter)
        self._order = None

    def _drop_finished(self) -> None:
        self.running = [request for request in self.running if request.status is RUNNING]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless rows, requests and blocks add up."""
        for pool in self.kv.pools:
            pool.check_integrity()
        if self._batch.num_free + len(self.running) != self.limits.max_num_seqs:
            raise RuntimeError(f"{self._batch.num_free} rows are free with {len(self.running)} requests running")
        if len(self.running) + len(self.waiting) != len(self._requests):
            raise RuntimeError(
                f"{len(self._requests)} requests, {len(self.running)} running, {len(self.waiting)} waiting"
            )
        if self.adapters is not None and not self._shares_adapters:
            self.adapters.check_integrity(self.running)
        for pool in self.kv.pools:
            if not self.running and pool.num_free != pool.num_blocks - 1:
                raise RuntimeError(f"nothing runs, yet only {pool.num_free} blocks are free")


def failed_output(request_id: str, error: RequestError) -> EngineOutput:
    """Return the only output of a request that cannot run."""
    return EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=(error.field, str(error)))


def _rank(request: Request) -> tuple[float, ...]:
    return request.rank


# The token budget of a step.


@dataclass(frozen=True, slots=True, eq=False)
class TokenBudget:
    """How many tokens each row computes in a step."""

    rows: Int32  # [n]
    tokens: Int32  # [n], all positive
    drafts: Int32 | None = None  # [n] how many of the tokens are drafts


def split_budget(
    batch: RunningBatch, rows: Int32, limits: Limits, max_chunk: int = 0, reserved: int = 0
) -> TokenBudget:
    """Give one token to every row that wants one, then chunks in the order of `rows` until the budget is spent.

    `max_chunk`: chunks end at multiples of it; 0: anywhere. `reserved`: tokens that chunks may not take.
    """
    total = batch.total[rows]
    want = (total - batch.computed[rows]) * (total < batch.limit[rows])
    if (want == 1).all():
        return TokenBudget(rows, want)
    single = rows[want == 1]
    longer = rows[want > 1]
    want = want[want > 1]
    if limits.long_prefill_token_threshold:
        want = np.minimum(want, limits.long_prefill_token_threshold)
    if max_chunk:
        want = np.minimum(want, max_chunk - batch.computed[longer] % max_chunk)
    cost = batch.token_cost[longer]
    spent = want * cost
    left = limits.max_num_batched_tokens - len(single) - reserved - (np.cumsum(spent) - spent)
    tokens = np.clip(np.maximum(left // cost, left > 0), 0, want)
    return decode_first(
        np.concatenate([single, longer[tokens > 0]]),
        np.concatenate([np.ones(len(single), np.int32), tokens[tokens > 0].astype(np.int32)]),
    )


def first_chunk(want: int, left: int, limits: Limits, max_chunk: int = 0, cost: int = 1) -> int:
    """Return how many of `want` tokens a request computes in its first step, with `left` available; 0: it must wait.

    `max_chunk`: most tokens of a chunk; 0: any number. A cached prefix ends at a multiple of it. `cost`: of a token.
    """
    if not limits.chunked_prefill:
        return want if want <= left else 0
    return min(want, max(left // cost, 1), limits.long_prefill_token_threshold or want, max_chunk or want)


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


def fail_requests(requests: Sequence[Request], failed: Mapping[int, tuple[str, str]]) -> dict[int, RequestStatus]:
    """Give the unfinished requests of failed sequences their error: field, reason. Returns their status by index."""
    for index, error in failed.items():
        requests[index].error = error
    return {index: RequestStatus.FINISHED_ERROR for index in failed if not requests[index].is_finished}


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
    stopped = stopped and token in request.stop_token_ids  # else it ended the grammar
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
