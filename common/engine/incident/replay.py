"""Steps a real scheduler through an incident snapshot, and compares its plans with those that were recorded."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from pagoda.common.engine.incident.snapshot import (
    Aborted,
    Added,
    Cleared,
    Event,
    GroupTable,
    InFlightRecord,
    KvShape,
    MediaRecord,
    PlanDetail,
    Planned,
    PoolRecord,
    Reported,
    RequestRecord,
    RowsRecord,
    SchedulerRecord,
    Snapshot,
)
from pagoda.common.engine.kv_cache.block_pool import BlockPoolState
from pagoda.common.engine.kv_cache.manager import KvManager, KvState
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout
from pagoda.common.engine.media.items import MediaItem, MediaKind
from pagoda.common.engine.media.rows import RowCacheState
from pagoda.common.engine.media.step_rows import MediaState
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.fair_queue import FairState
from pagoda.common.engine.scheduling.request import BatchState, GroupBlocks, Request, RequestStatus
from pagoda.common.engine.scheduling.scheduler import InFlightStep, Scheduler, SchedulerCounts, SchedulerState
from pagoda.common.engine.steps.contract import StepPlan, StepResult
from pagoda.common.errors import RequestError
from pagoda.common.models.mixers.caches import CacheSpec, FullCache, StateCache, WindowCache

TOKEN = 0
STOP = 1
"""Token ids of a replay: any token, and the one that ends a sequence."""


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One call of the scheduler: what it was, and how it differs from the record ("": it does not)."""

    text: str
    difference: str = ""
    error: str = ""  # what the scheduler raised, with its traceback


class Replay:
    """A scheduler in the state of a snapshot. Raises RequestError for a snapshot that cannot be replayed."""

    def __init__(self, snapshot: Snapshot) -> None:
        if snapshot.state is None or snapshot.kv is None:
            raise RequestError("snapshot", f"this snapshot cannot be replayed: {snapshot.why_not or 'it has no state'}")
        self._snapshot = snapshot
        self.scheduler = restored(snapshot, snapshot.state, snapshot.kv)
        self._details = {plan.step: plan for plan in snapshot.plans}
        self._plans: deque[StepPlan] = deque(step.plan for step in self.scheduler.in_flight)

    def recorded(self) -> Iterator[ReplayedCall]:
        """Repeat the recorded calls. Ends at the first difference, or when the scheduler raises."""
        for event in self._snapshot.events:
            try:
                call = self._repeat(event)
            except Exception as error:
                recorded = isinstance(event, Planned | Reported) and event.failed
                why = "" if recorded else "the scheduler raised, which it did not at the incident"
                yield ReplayedCall(_text(event), why, "".join(traceback.format_exception(error)))
                return
            yield call
            if call.difference:
                return

    def further(self, steps: int) -> Iterator[ReplayedCall]:
        """Run steps after the recorded ones; every sequence samples tokens up to its length."""
        for _ in range(steps):
            if not self.scheduler.num_unfinished:
                return
            plan = self.scheduler.schedule()
            if plan is not None:
                self._plans.append(plan)
            if not self._plans:
                yield ReplayedCall("stuck: requests wait, none can run and none is in flight")
                return
            text = "nothing to plan" if plan is None else f"plan step {plan.step}: {_shape(plan)}"
            if plan is None or len(self._plans) > 1:
                self._report({})
            yield ReplayedCall(text)

    def _repeat(self, event: Event) -> ReplayedCall:
        text = _text(event)
        match event:
            case Added():
                self.scheduler.add(_engine_request(event))
                _set_up(self.scheduler.requests[event.request_id], event)
            case Aborted(request_ids):
                self.scheduler.abort(request_ids)
            case Cleared():
                self.scheduler.kv.clear_cache()
            case Planned():
                plan = self.scheduler.schedule()
                if plan is not None:
                    self._plans.append(plan)
                return ReplayedCall(text, self._difference(event, plan))
            case Reported(step, finished, failed):
                if not self._plans or self._plans[0].step != step:
                    return ReplayedCall(text, f"step {step} is not the oldest in flight")
                if not failed:
                    return ReplayedCall(text, self._report(finished))
        return ReplayedCall(text)

    def _difference(self, event: Planned, plan: StepPlan | None) -> str:
        if event.failed:
            return "the scheduler raised at the incident, now it does not"
        now = None if plan is None else (plan.step, plan.num_seqs, plan.num_tokens)
        then = None if event.step is None else (event.step, event.num_seqs, event.num_tokens)
        if now != then and event.withheld:
            return f"{event.withheld} sequences waited for token masks that took long, which a replay does not know"
        if now != then:
            return f"(step, sequences, tokens) is {now}, it was {then}"
        detail = None if plan is None else self._details.get(plan.step)
        return "" if plan is None or detail is None else _detail_difference(plan, detail)

    def _report(self, finished: dict[str, str]) -> str:
        """Apply the result of the oldest step, in which these requests finish. Returns the difference."""
        plan = self._plans.popleft()
        requests = self.scheduler.in_flight[0].requests
        tokens = np.where(plan.samples, TOKEN, -1).astype(np.int32)
        for index, request in enumerate(requests):
            if finished.get(request.request_id) in ("stop", "error") and plan.samples[index]:
                tokens[index] = STOP
        outputs = self.scheduler.update(plan, StepResult(plan.step, tokens)).outputs
        ended = {output.request_id for output in outputs if output.finish_reason}
        if finished and ended != finished.keys():
            return f"{sorted(ended)} finished, it was {sorted(finished)}"
        return ""


def _text(event: Event) -> str:
    match event:
        case Added():
            return f"add {event.request_id}: {event.num_prompt} prompt tokens, at most {event.max_tokens} more"
        case Aborted(request_ids):
            return f"abort {', '.join(request_ids)}"
        case Cleared():
            return "clear the prefix cache"
        case Planned():
            if event.step is None:
                return "plan: the scheduler raised" if event.failed else "plan: nothing"
            return f"plan step {event.step}: {event.num_seqs} sequences, {event.num_tokens} tokens"
        case Reported(step, finished, failed):
            end = "; it failed" if failed else ""
            names = f"; finished: {', '.join(f'{name} ({why})' for name, why in finished.items())}" if finished else ""
            return f"result of step {step}{names}{end}"


def _shape(plan: StepPlan) -> str:
    return f"{plan.num_seqs} sequences, {plan.num_tokens} tokens"


def _detail_difference(plan: StepPlan, detail: PlanDetail) -> str:
    pairs = {
        "rows": (plan.rows.tolist(), detail.rows),
        "query_start": (plan.query_start.tolist(), detail.query_start),
        "context": (plan.context.tolist(), detail.context),
        "samples": (plan.samples.tolist(), detail.samples),
        "starts": ([start.row for start in plan.starts], detail.starts),
        "block tables": ([table.tolist() for table in plan.block_tables], detail.tables),
        "encodes": ({encode.item.digest.hex(): encode.rows.tolist() for encode in plan.encodes}, detail.encodes),
    }
    names = [name for name, (now, then) in pairs.items() if now != then]
    return f"{', '.join(names)} of step {plan.step} differ" if names else ""


# From the state in a file to a scheduler.


def restored(snapshot: Snapshot, record: SchedulerRecord, shape: KvShape) -> Scheduler:
    """Return a scheduler in the state of the file."""
    limits = snapshot.limits
    kv = KvManager(
        _layout(shape),
        shape.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_step_tokens,
        prefix_caching=limits.prefix_caching,
        snapshots=limits.snapshots,
        prefers_extents=shape.extents,
    )
    scheduler = Scheduler(limits, kv)
    scheduler.restore(_scheduler_state(record))
    return scheduler


def _scheduler_state(record: SchedulerRecord) -> SchedulerState:
    requests = {request.request_id: _request(request) for request in record.requests}
    return SchedulerState(
        requests=tuple(request for request in requests.values() if not request.is_finished),
        in_flight=tuple(_in_flight(step, requests) for step in record.in_flight),
        batch=BatchState(
            rows={name: np.array(values) for name, values in record.rows.items()},
            free_rows=record.free_rows,
            epochs=record.epochs,
        ),
        kv=KvState(
            pools=tuple(_pool_state(pool) for pool in record.pools),
            copies=tuple(pool.copies for pool in record.pools),
        ),
        counts=SchedulerCounts(added=record.added, steps=record.steps, preemptions=record.preemptions),
        prefills=record.prefills,
        fairness=FairState(record.served, record.rows_given, record.lacks_blocks),
        media=None if record.media is None else _media_state(record.media),
    )


def _media_state(record: RowsRecord) -> MediaState:
    cache = RowCacheState(
        rows=tuple((bytes.fromhex(digest), tuple(rows)) for digest, rows in record.rows.items()),
        idle=tuple(bytes.fromhex(digest) for digest in record.idle),
        free=tuple(record.free),
    )
    return MediaState(cache=cache, held=tuple((row, tuple(items)) for row, items in record.held.items()))


def _media_items(records: Sequence[MediaRecord]) -> tuple[MediaItem, ...]:
    """Return items without payloads."""
    return tuple(
        MediaItem(
            digest=bytes.fromhex(record.digest),
            kind=cast(MediaKind, record.kind),
            payload=b"",
            shape=(),
            dtype="",
            grid=(1, 1, 1),
            spans=tuple((start, length) for start, length in record.spans),
        )
        for record in records
    )


def _in_flight(step: InFlightRecord, requests: Mapping[str, Request]) -> InFlightStep:
    plan = StepPlan(
        step=step.step,
        starts=(),
        rows=np.array(step.rows, np.int32),
        query_start=np.array(step.query_start, np.int32),
        context=np.array(step.context, np.int32),
        token_ids=np.zeros(step.query_start[-1], np.int32),
        block_tables=(),
        samples=np.array(step.samples, np.bool_),
    )
    return InFlightStep(
        plan=plan,
        requests=[requests[request_id] for request_id in step.request_ids],
        epochs=np.array(step.epochs, np.int64),
        prompt_tokens=step.prompt_tokens,
    )


def _layout(shape: KvShape) -> KvLayout:
    def spec(kind: str, pool: int, window: int) -> CacheSpec:
        # Pools differ in kind; the head size tells those of one kind apart.
        match kind:
            case "window":
                return WindowCache(1, pool + 1, window)
            case "state":
                return StateCache(pool + 1, inputs=0)
            case _:
                return FullCache(1, pool + 1)

    groups = [KvGroup(spec(group.kind, group.pool, group.window), (0,), pool=group.pool) for group in shape.groups]
    return KvLayout(tuple(groups), shape.block_size)


def _pool_state(record: PoolRecord) -> BlockPoolState:
    keys: list[tuple[bytes, int] | None] = [None] * len(record.refs)
    for block, (digest, group) in record.pages.items():
        keys[block] = bytes.fromhex(digest), group
    return BlockPoolState(
        num_free=record.num_free,
        next=record.next,
        prev=record.prev,
        keys=keys,
        refs=record.refs,
        reserved=record.reserved,
        released_at=record.released_at,
        clock=record.clock,
        keepers=record.keepers,
        keep_until=record.keep_until,
        evictions=record.evictions,
    )


def _engine_request(event: Added) -> EngineRequest:
    return EngineRequest(
        request_id=event.request_id,
        prompt_token_ids=[TOKEN] * event.num_prompt,
        rules=SamplingRules(),
        max_tokens=event.max_tokens,
        stop_token_ids=frozenset({STOP}),
        priority=event.priority,
        arrival=event.arrival,
        skip_reading_prefix_cache=not event.reads_cache,
        owner=event.owner,
        group=event.group,
        cache_key=event.cache_key,
        media=_media_items(event.media),
    )


def _set_up(request: Request, event: Added | RequestRecord) -> None:
    request.hashes = [bytes.fromhex(digest) for digest in event.digests]
    request.token_cost = event.token_cost
    request.stable_tokens = event.stable_tokens


def _request(record: RequestRecord) -> Request:
    """Return a request of the record."""
    plain = EngineRequest(
        request_id=record.request_id,
        prompt_token_ids=[TOKEN] * record.num_prompt,
        rules=SamplingRules(),
        max_tokens=max(1, record.limit - record.num_prompt),
        stop_token_ids=frozenset({STOP}),
        skip_reading_prefix_cache=not record.reads_cache,
        owner=record.owner,
        group=record.group,
        cache_key=record.cache_key,
        media=_media_items(record.media),
    )
    request = Request.of(plain, limit=record.limit, rank=tuple(record.rank))
    _set_up(request, record)
    request.outputs = [TOKEN] * record.num_outputs
    request.status = RequestStatus[record.status]
    request.row = record.row
    request.resumes_at = record.resumes_at
    request.tokens = np.full(record.num_row_tokens, TOKEN, np.int32)
    request.num_registered = record.num_registered
    request.num_pages = record.num_pages
    request.num_cached_tokens = record.num_cached_tokens
    request.num_preemptions = record.num_preemptions
    request.groups = [_group_blocks(table) for table in record.tables]
    request.borders = record.borders
    request.answer_border = record.answer_border
    return request


def _group_blocks(record: GroupTable) -> GroupBlocks:
    start, stop = record.reserved
    return GroupBlocks(list(record.table), record.base, range(start, stop))
