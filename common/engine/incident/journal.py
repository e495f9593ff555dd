"""Records what a scheduler does: its state every some hundred steps, and its calls since, in bounded memory."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, Final

from pagoda.common.config.engine import Limits
from pagoda.common.engine.incident.snapshot import (
    Aborted,
    Added,
    Cleared,
    Event,
    GroupSpec,
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
)
from pagoda.common.engine.kv_cache.block_pool import BlockPoolState
from pagoda.common.engine.kv_cache.borders import SequenceBorders
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.media.step_rows import MediaState
from pagoda.common.engine.messages import EngineRequest, StepOutputs
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.request import Request
from pagoda.common.engine.scheduling.scheduler import InFlightStep, Scheduler
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.models.mixers.caches import StateCache, WindowCache

SEGMENT_STEPS: Final = 1024
"""Steps after which the state is taken again. A snapshot has one to two segments."""

SEGMENT_PAGES: Final = 65_536
"""Likewise pages of the requests added."""

SEGMENT_EVENTS: Final = 16_384

NUM_PLANS: Final = 8
"""Newest plans that are kept whole."""


@dataclass(slots=True)
class _Queued:
    """An Added event; its digests grow with the request."""

    request: EngineRequest
    state: Request


@dataclass(slots=True)
class _Plan:
    plan: StepPlan | None = None
    step: int | None = None
    num_seqs: int = 0
    num_tokens: int = 0
    failed: bool = True  # cleared when the scheduler returns
    withheld: int = 0


@dataclass(slots=True)
class _Result:
    step: int
    finished: dict[str, str] = field(default_factory=dict)
    failed: bool = True


_Entry = _Queued | list[str] | None | _Plan | _Result


@dataclass(slots=True)
class _Segment:
    start: _Captured
    entries: list[_Entry] = field(default_factory=list)
    steps: int = 0
    pages: int = 0

    @property
    def is_full(self) -> bool:
        return self.steps >= SEGMENT_STEPS or self.pages >= SEGMENT_PAGES or len(self.entries) >= SEGMENT_EVENTS


class Journal:
    """The record of one scheduler. Call a method before or after each call of the scheduler, as they say."""

    def __init__(self, scheduler: Scheduler, layout: KvLayout, num_blocks: tuple[int, ...]) -> None:
        self._scheduler = scheduler
        self._layout = layout
        self._num_blocks = num_blocks
        self._before: _Segment | None = None
        self._segment = _Segment(_Captured(scheduler))
        self._plans: deque[StepPlan] = deque(maxlen=NUM_PLANS)

    def added(self, request: EngineRequest) -> None:
        """After `add`."""
        state = self._scheduler.requests[request.request_id]
        kept = replace(request, media=()) if request.media else request  # `state` has the items without payloads, later
        self._segment.entries.append(_Queued(kept, state))
        self._segment.pages += len(request.prompt_token_ids) // self._layout.block_size

    def aborting(self, request_ids: list[str]) -> None:
        """Before `abort`."""
        if request_ids:
            self._segment.entries.append(request_ids)

    def clearing(self) -> None:
        """Before the prefix cache is emptied."""
        self._segment.entries.append(None)

    def schedule(self, schedule: Callable[[], StepPlan | None]) -> StepPlan | None:
        """Call `schedule` and record its plan."""
        if self._segment.is_full:
            self._before, self._segment = self._segment, _Segment(_Captured(self._scheduler))
        entry = _Plan()
        self._segment.entries.append(entry)
        plan = schedule()
        entry.failed = False
        masks = self._scheduler.masks
        entry.withheld = masks.num_withheld if masks.num_requests else 0
        if plan is not None:
            entry.step = plan.step
            entry.num_seqs = len(plan.rows)
            entry.num_tokens = len(plan.token_ids)
            self._plans.append(_without_payloads(plan))
            self._segment.steps += 1
        return plan

    def update(self, plan: StepPlan, update: Callable[[], StepOutputs]) -> StepOutputs:
        """Call `update`, which takes the result of `plan`, and record what finished."""
        entry = _Result(plan.step)
        self._segment.entries.append(entry)
        before = self._scheduler.num_unfinished
        outputs = update()
        entry.failed = False
        if self._scheduler.num_unfinished != before:
            entry.finished = {
                output.request_id: output.finish_reason for output in outputs.outputs if output.finish_reason
            }
        return outputs

    def state(self, *, tokens: bool = False) -> tuple[SchedulerRecord, list[Event], list[PlanDetail], KvShape]:
        """Return the oldest state kept, the events since, the last plans and the KV cache's shape."""
        key = secrets.token_bytes(32)  # not kept, so that digests say nothing about tokens

        def keyed(digest: bytes) -> str:
            return blake2b(digest, digest_size=12, key=key).hexdigest()

        segments = [segment for segment in (self._before, self._segment) if segment is not None]
        first = segments[0].start.record(keyed, tokens=tokens)
        entries = [entry for segment in segments for entry in tuple(segment.entries)]
        events = [_event(entry, keyed, tokens=tokens) for entry in entries]
        return first, events, [_detail(plan, keyed) for plan in tuple(self._plans)], self._kv_shape()

    def _kv_shape(self) -> KvShape:
        groups = []
        for group in self._layout.groups:
            match group.spec:
                case WindowCache(window=window):
                    groups.append(GroupSpec("window", group.pool, window))
                case StateCache():
                    groups.append(GroupSpec("state", group.pool))
                case _:
                    groups.append(GroupSpec("full", group.pool))
        extents = self._scheduler.kv.pools[0].extents
        layout = self._layout
        return KvShape(
            groups=tuple(groups),
            block_size=layout.block_size,
            num_blocks=self._num_blocks,
            extents=extents,
        )


Keyed = Callable[[bytes], str]


class _Captured:
    """A copy of a scheduler's state that shares what never changes: prompts, digests, plans. Taken in milliseconds."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._state = scheduler.state()
        self._requests = [(request, _Values.of(request)) for request in self._state.requests]

    def record(self, keyed: Keyed, *, tokens: bool) -> SchedulerRecord:
        """Return it as part of a snapshot."""
        state = self._state
        counts = state.counts
        fairness = state.fairness
        unfinished = {request.request_id for request in state.requests}
        ended = [(request, _Values.of(request)) for step in state.in_flight for request in step.requests]
        requests = self._requests + [pair for pair in ended if pair[0].request_id not in unfinished]
        return SchedulerRecord(
            requests=[values.record(request, keyed, tokens=tokens) for request, values in requests],
            pools=[_pool(pool, copies, keyed) for pool, copies in zip(state.kv.pools, state.kv.copies)],
            rows={name: values.tolist() for name, values in state.batch.rows.items()},
            free_rows=list(state.batch.free_rows),
            epochs=state.batch.epochs,
            in_flight=[_in_flight(step) for step in state.in_flight],
            served={} if fairness is None else dict(fairness.served),
            rows_given=0 if fairness is None else fairness.rows_given,
            lacks_blocks=fairness is not None and fairness.lacks_blocks,
            prefills=state.prefills,
            added=counts.added,
            steps=counts.steps,
            preemptions=counts.preemptions,
            media=None if state.media is None else _rows_record(state.media, keyed),
        )


def _in_flight(step: InFlightStep) -> InFlightRecord:
    plan = step.plan
    return InFlightRecord(
        step=plan.step,
        rows=plan.rows.tolist(),
        samples=plan.samples.tolist(),
        query_start=plan.query_start.tolist(),
        context=plan.context.tolist(),
        request_ids=[request.request_id for request in step.requests],
        epochs=step.epochs.tolist(),
        prompt_tokens=step.prompt_tokens,
    )


def _rows_record(media: MediaState, keyed: Keyed) -> RowsRecord:
    return RowsRecord(
        rows={keyed(digest): list(rows) for digest, rows in media.cache.rows},
        idle=[keyed(digest) for digest in media.cache.idle],
        free=list(media.cache.free),
        held={row: list(numbers) for row, numbers in media.held},
    )


def _media(request: Request, keyed: Keyed) -> list[MediaRecord]:
    items = () if request.media is None else request.media.items
    return [MediaRecord(keyed(item.digest), item.kind, list(item.spans)) for item in items]


def _without_payloads(plan: StepPlan) -> StepPlan:
    """Return a plan to keep: media take megabytes."""
    if not plan.encodes:
        return plan
    kept = tuple(replace(encode, item=replace(encode.item, payload=b"")) for encode in plan.encodes)
    return replace(plan, encodes=kept)


def _pool(pool: BlockPoolState, copies: Mapping[int, int], keyed: Keyed) -> PoolRecord:
    return PoolRecord(
        num_free=pool.num_free,
        next=list(pool.next),
        prev=list(pool.prev),
        refs=list(pool.refs),
        reserved=list(pool.reserved),
        released_at=list(pool.released_at),
        clock=pool.clock,
        pages={block: (keyed(key[0]), key[1]) for block, key in enumerate(pool.keys) if key is not None},
        copies=dict(copies),
        keepers=dict(pool.keepers),
        keep_until=dict(pool.keep_until),
        evictions=pool.evictions,
    )


@dataclass(frozen=True, slots=True)
class _Values:
    """What changes in a Request."""

    num_outputs: int
    status: str
    row: int
    num_row_tokens: int
    resumes_at: int
    num_registered: int
    num_pages: int
    num_cached_tokens: int | None
    num_preemptions: int
    borders: SequenceBorders | None
    answer_border: int
    tables: tuple[GroupTable, ...]

    @classmethod
    def of(cls, request: Request) -> _Values:
        groups = request.groups
        return cls(
            num_outputs=len(request.outputs),
            status=request.status.name,
            row=request.row,
            num_row_tokens=len(request.tokens),
            resumes_at=request.resumes_at,
            num_registered=request.num_registered,
            num_pages=request.num_pages,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            borders=request.borders,
            answer_border=request.answer_border,
            tables=tuple(
                GroupTable(list(group.table), group.base, (group.reserved.start, group.reserved.stop))
                for group in groups
            ),
        )

    def record(self, request: Request, keyed: Keyed, *, tokens: bool) -> RequestRecord:
        return RequestRecord(
            request_id=request.request_id,
            num_prompt=len(request.prompt),
            num_outputs=self.num_outputs,
            limit=request.limit,
            rank=request.rank,
            owner=request.owner,
            group=request.group,
            cache_key=request.cache_key,
            status=self.status,
            reads_cache=request.reads_cache,
            row=self.row,
            num_row_tokens=self.num_row_tokens,
            resumes_at=self.resumes_at,
            num_registered=self.num_registered,
            num_pages=self.num_pages,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            borders=self.borders,
            answer_border=self.answer_border,
            tables=list(self.tables),
            digests=[keyed(digest) for digest in tuple(request.hashes)],
            is_masked=request.mask_state is not None,
            token_cost=request.token_cost,
            stable_tokens=request.stable_tokens,
            rules=shown_rules(request.rules),
            token_ids=request.known_tokens().tolist() if tokens else None,
            media=_media(request, keyed),
        )


def _event(entry: _Entry, keyed: Keyed, *, tokens: bool) -> Event:
    match entry:
        case None:
            return Cleared()
        case list():
            return Aborted(entry)
        case _Plan():
            return Planned(
                step=entry.step,
                num_seqs=entry.num_seqs,
                num_tokens=entry.num_tokens,
                failed=entry.failed,
                withheld=entry.withheld,
            )
        case _Result():
            return Reported(entry.step, entry.finished, entry.failed)
        case _Queued(request, state):
            return Added(
                request_id=request.request_id,
                num_prompt=len(request.prompt_token_ids),
                max_tokens=request.max_tokens,
                priority=request.priority,
                arrival=request.arrival,
                owner=request.owner,
                group=request.group,
                cache_key=request.cache_key,
                reads_cache=state.reads_cache,
                is_masked=state.mask_state is not None,
                token_cost=state.token_cost,
                stable_tokens=state.stable_tokens,
                digests=[keyed(digest) for digest in tuple(state.hashes)],
                rules=shown_rules(request.rules),
                token_ids=state.known_tokens().tolist() if tokens else None,
                media=_media(state, keyed),
            )


def _detail(plan: StepPlan, keyed: Keyed) -> PlanDetail:
    return PlanDetail(
        step=plan.step,
        shape=(plan.num_seqs, plan.num_tokens, max((table.shape[1] for table in plan.block_tables), default=0)),
        rows=plan.rows.tolist(),
        query_start=plan.query_start.tolist(),
        context=plan.context.tolist(),
        samples=plan.samples.tolist(),
        starts=[start.row for start in plan.starts],
        tables=[table.tolist() for table in plan.block_tables],
        encodes={keyed(encode.item.digest): encode.rows.tolist() for encode in plan.encodes},
    )


def shown_rules(rules: SamplingRules) -> dict[str, Any]:
    """Return the rules that differ from the defaults; of lists the length, of seeds and plug-ins' arguments nothing."""
    hidden = {"seed", "extra_args"}
    plain = SamplingRules()
    shown: dict[str, Any] = {}
    for rule in fields(SamplingRules):
        value = getattr(rules, rule.name)
        if rule.name not in hidden and value != getattr(plain, rule.name):
            shown[rule.name] = len(value) if isinstance(value, tuple) else value
    return shown


def why_not_replayable(scheduler: object, limits: Limits) -> str:
    """Return why a scheduler cannot be recorded; empty if it can."""
    if type(scheduler) is not Scheduler:
        return f"the scheduler is a {type(scheduler).__name__}"
    if limits.max_drafts:
        return "speculative decoding"
    return "LoRA adapters" if limits.max_loras else ""
