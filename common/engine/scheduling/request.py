"""Requests in the engine: the state of one (`Request`), the queues of those that wait, the arrays of those that run.

A waiting request is in a `WaitingQueue`. A running one has a row of `RunningBatch`, which holds the numbers that every
step touches: a step over hundreds of decoding sequences is then a few numpy operations, without a loop over objects.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.kv_cache.borders import SequenceBorders
from pagoda.common.engine.lora.adapter import NO_ADAPTER, Adapter
from pagoda.common.engine.media.items import PromptMedia
from pagoda.common.engine.messages import EngineRequest, FinishReason, PositionLogprobs
from pagoda.common.engine.pooling.values import PoolingRules
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS, Bool, Int32
from pagoda.common.engine.structured_output.token_mask import TokenMaskState

Int64 = npt.NDArray[np.int64]
StateT = TypeVar("StateT")

NO_ROW: Final = -1
"""Row of a request that does not run."""

NEVER: Final = np.iinfo(np.int32).max
"""A number of tokens that no request reaches."""


class RequestStatus(Enum):
    """State of a request. PREEMPTED waits, too, but has run before."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"


FINISHED: Final[dict[RequestStatus, FinishReason]] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(slots=True)
class GroupBlocks:
    """The blocks of one request in one KV group."""

    table: list[int] = field(default_factory=list)  # block of each page, NULL_BLOCK where the window has passed
    base: int | None = None  # page p should preferably use block base + p
    reserved: range = range(0)  # blocks of the extent that is reserved for the request


SCORED_COST: Final = 2
"""What a prompt token whose logprobs are asked for counts, beside 1 of any other: its row of logits is as wide as the
vocabulary. A large budget is halved by it, and a step with logprobs takes about as long as one without."""

SCORED_WHOLE_COST: Final = 64
"""Likewise where the logprobs of all tokens are asked for, each of which is sent to the client."""


def _token_cost(prompt_logprobs: int | None) -> int:
    if prompt_logprobs is None:
        return 1
    return SCORED_WHOLE_COST if prompt_logprobs < 0 else SCORED_COST


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one sequence. Created by `Request.of`."""

    request_id: str
    prompt: Int32
    rules: SamplingRules
    limit: int  # tokens at which it ends by length, prompt included
    max_outputs: int  # generated tokens at which it ends by length
    is_plain: bool  # no logprobs of any kind
    rank: tuple[float, ...]  # position in the queue, smaller first
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    cache_salt: str | None
    reads_cache: bool  # may start from cached prefixes
    drafts_from: int  # generated tokens from which on no rule depends on their number: drafts are possible
    status: RequestStatus = RequestStatus.WAITING
    outputs: list[int] = field(default_factory=list)
    row: int = NO_ROW
    resumes_at: int = 0  # steps to be reported before a preempted request may run, so that none of its are in flight
    tokens: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens known when it took its row
    hashes: list[bytes] = field(default_factory=list)  # digest of each full page so far
    num_registered: int = 0  # pages in the prefix cache
    num_pages: int = 0
    groups: list[GroupBlocks] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    scheduled: float = 0.0  # when it first ran, on the scheduler's clock
    has_token_only: bool = False  # its next output has a token and nothing else, unless it finishes
    prompt_logprobs: list[PositionLogprobs] | None = None
    token_cost: int = 1  # what each token of a chunk takes of a step's budget
    mask_state: TokenMaskState | None = None  # set for a grammar or a reasoning budget
    error: tuple[str, str] | None = None  # field and reason, of a request that a logits processor failed
    stable_tokens: int = 0  # prompt tokens that later requests are expected to repeat
    borders: SequenceBorders | None = None  # where its recurrent state is kept; None: nowhere, or it has not started
    answer_border: int = 0  # tokens before the copy of its state that the next copy replaces; 0: none does
    media: PromptMedia | None = None  # what the prompt positions that are EMBEDDED name
    pooling: PoolingRules | None = None  # how a pooling model pools the prompt; None: it generates
    encoder: Int32 | None = None  # what the encoder of an encoder-decoder model reads
    adapter: Adapter | None = None  # the LoRA adapter that it is computed with
    owner: str = ""  # the key that sent it
    group: str = ""  # the caller's request that it belongs to
    cache_key: str = ""  # its cached pages are kept longer, within the bounds of this key
    parts: tuple[SchedulerPart[Any], ...] = ()  # parts of its scheduler that are told when it runs and ends

    @classmethod
    def of(
        cls,
        request: EngineRequest,
        *,
        limit: int,
        rank: tuple[float, ...],
        mask_state: TokenMaskState | None = None,
        prompt: Int32 | None = None,
    ) -> Request:
        """Return a waiting request. With prompt logprobs every position is computed, so the cache is not read.

        `prompt`: the tokens as an array that several sequences share.
        """
        wants_prompt = request.rules.prompt_logprobs is not None
        if prompt is None:
            prompt = np.array(request.prompt_token_ids, np.int32)
        return cls(
            request_id=request.request_id,
            prompt=prompt,
            rules=request.rules,
            limit=limit,
            max_outputs=limit - len(request.prompt_token_ids),
            is_plain=request.rules.logprobs is None and not wants_prompt,
            rank=rank,
            stop_token_ids=request.stop_token_ids,
            eos_token_ids=request.eos_token_ids,
            cache_salt=request.cache_salt,
            reads_cache=not (request.skip_reading_prefix_cache or wants_prompt),
            drafts_from=max([request.rules.min_tokens, *map(len, request.rules.bad_words)]),
            prompt_logprobs=[] if wants_prompt else None,
            token_cost=_token_cost(request.rules.prompt_logprobs),
            mask_state=mask_state,
            stable_tokens=len(prompt) if request.stable_tokens is None else request.stable_tokens,
            media=PromptMedia(request.media) if request.media else None,
            pooling=request.pooling,
            encoder=None if request.encoder_token_ids is None else np.array(request.encoder_token_ids, np.int32),
            adapter=request.adapter,
            owner=request.owner,
            group=request.group or request.request_id,
            cache_key=request.cache_key,
        )

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt) + len(self.outputs)

    @property
    def is_finished(self) -> bool:
        """True once it has a final status."""
        return self.status in FINISHED

    def known_tokens(self) -> Int32:
        """Return the prompt and the generated tokens, int32 [num_known]."""
        if not self.outputs:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.outputs, np.int32)])

    def page_bytes(self, start: int, stop: int) -> bytes:
        """Return the content of the page of tokens [start, stop), all known: their ids, then the rows they name."""
        ids = self.token_bytes(start, stop)
        return ids if self.media is None else ids + self.media.page_bytes(start, stop)

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Return tokens [start, stop), all known, as native int32 bytes."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop].tobytes()
        generated = array("i", self.outputs[max(0, start - split) : stop - split]).tobytes()
        return self.prompt[start:split].tobytes() + generated


def rank_of(request: Request) -> tuple[float, ...]:
    """Return the request's position in the queue, smaller first: a key to sort by."""
    return request.rank


class SharedPrompts:
    """Prompts as arrays: the sequences of one request, which are added one after the other, share theirs."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._array: Int32 = np.zeros(0, np.int32)

    def array_of(self, request: EngineRequest) -> Int32:
        """Return the prompt's token ids, int32 [n]: the last array if the request has the list that it was made of."""
        if self._ids is not request.prompt_token_ids:
            self._ids = request.prompt_token_ids
            self._array = np.array(request.prompt_token_ids, np.int32)
        return self._array


class SchedulerPart(Protocol[StateT]):
    """A concern of a scheduler with a state of its own: fairness, LoRA adapters, media, token masks, drafts.

    The scheduler calls a part at the places of a step where it matters, and reports the life of each request that
    the part concerns: it is added, started and stopped any number of times, and finished.
    """

    needs: ClassVar[str | None] = None  # field that a request must have for the part to concern it; None: none

    def added(self, request: Request) -> None:
        """The request waits for a row."""
        return

    def started(self, request: Request) -> None:
        """The request has left the queue and has a row."""
        return

    def stopped(self, request: Request) -> None:
        """The request is about to lose its row, because it ends or is preempted."""
        return

    def finished(self, request: Request) -> None:
        """The request has its final status and no row."""
        return

    def state(self) -> StateT:
        """Return a copy of the state, without what follows from the requests."""
        ...

    def restore(self, state: StateT, requests: Sequence[Request]) -> None:
        """Replace the state of a new part. `requests`: the unfinished ones that it concerns, by rank."""
        ...


class WaitingQueue(Protocol):
    """A queue of requests that wait for a row. Operations are O(1) or O(log n)."""

    def push(self, request: Request) -> None:
        """Add a request."""
        ...

    def push_front(self, request: Request) -> None:
        """Add a preempted request, before all others of the same rank."""
        ...

    def peek(self) -> Request:
        """Return the next request. Raises IndexError when the queue is empty."""
        ...

    def pop(self) -> Request:
        """Remove and return the next request. Raises IndexError when the queue is empty."""
        ...

    def remove(self, request_id: str) -> Request | None:
        """Remove a request; None if it is not in the queue."""
        ...

    def __len__(self) -> int: ...


class FcfsQueue(WaitingQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._queue[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        if not self._queue:
            raise IndexError("no request is waiting")
        return self._queue[next(iter(self._queue))]

    def pop(self) -> Request:
        if not self._queue:
            raise IndexError("no request is waiting")
        return self._queue.popitem(last=False)[1]

    def remove(self, request_id: str) -> Request | None:
        return self._queue.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._queue)


class PriorityQueue(WaitingQueue):
    """By rank: (priority, arrival, order of adding). Removed requests stay in the heap until they reach its top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], str]] = []
        self._live: dict[str, Request] = {}

    def push(self, request: Request) -> None:
        self._live[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request.request_id))

    def push_front(self, request: Request) -> None:
        self.push(request)  # the rank alone decides, and it is unique

    def peek(self) -> Request:
        return self._live[self._drop_removed()]

    def pop(self) -> Request:
        request_id = self._drop_removed()
        heapq.heappop(self._heap)
        return self._live.pop(request_id)

    def remove(self, request_id: str) -> Request | None:
        return self._live.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._live)

    def _drop_removed(self) -> str:
        """Drop removed requests from the top of the heap; return the id of the first live one."""
        while self._heap:
            rank, request_id = self._heap[0]
            request = self._live.get(request_id)
            if request is not None and request.rank == rank:
                return request_id
            heapq.heappop(self._heap)
        raise IndexError("no request is waiting")


def waiting_queue(policy: str) -> WaitingQueue:
    """Return an empty queue for a --scheduling-policy."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()


def queue_rank(request: EngineRequest, policy: str, number: int) -> tuple[float, ...]:
    """Return the position of the `number`-th added request in that queue, smaller first."""
    return (float(request.priority), request.arrival, number) if policy == "priority" else (number,)


STATE_ARRAYS: Final = (
    *("computed", "total", "prefill_end", "limit", "token_cost", "capacity", "newest", "inflight", "drafts_inflight"),
    *("drafts_from", "num_drafts", "num_guesses", "next_page", "next_border", "epoch"),
)
"""Arrays of RunningBatch that BatchState has; the others follow from the requests, or from tokens."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """The state of a RunningBatch but for what follows from its requests."""

    rows: Mapping[str, Int32 | Int64]  # the arrays that STATE_ARRAYS names
    free_rows: Sequence[int]
    epochs: int


class RunningBatch:
    """State of all rows, free and taken. Arrays have shape [max_num_seqs].

    |<-------- computed -------->|<- wanted ->|
    [ prompt ........ | generated, known | in flight ]
    |<---------------------- total ----------------->|        total <= limit

    Drafts in flight count as accepted: `computed` and `total` are upper bounds, which `report` lowers by the rejected.
    """

    def __init__(self, max_num_seqs: int, max_drafts: int = 0) -> None:
        def zeros() -> Int32:
            return np.zeros(max_num_seqs, np.int32)

        self.computed = zeros()  # tokens whose KV the steps planned so far write
        self.total = zeros()  # tokens known or in flight
        self.prefill_end = zeros()  # tokens known when the row was assigned
        self.limit = zeros()  # total at which the request ends
        self.token_cost = zeros()  # what each token of a chunk takes of a step's budget
        self.capacity = zeros()  # tokens its blocks hold
        self.newest = zeros()  # id of the last token, PREVIOUS while it is in flight
        self.inflight = zeros()  # sampled tokens and drafts not yet reported
        self.drafts_inflight = zeros()  # drafts not yet reported, which `inflight` includes
        self.drafts_from = zeros()  # known tokens from which on the row may have drafts
        self.num_drafts = zeros()  # drafts of the newest step, planned or to be planned; 0 once one of them is wrong
        self.drafts = np.zeros((max_num_seqs, max_drafts), np.int32)  # their token ids
        self.num_guesses = zeros()  # guesses that the row has on the device, after its newest step
        self.guesses = np.full((max_num_seqs, max_drafts), -1, np.int32)  # their token ids, once a result had them
        self.next_page = zeros()  # known tokens at which another page can enter the prefix cache
        self.next_border: Int32 = np.full(
            max_num_seqs, NEVER, np.int32
        )  # computed tokens at which recurrent state is kept next; chunks end there
        self.adapter_slot = np.full(max_num_seqs, NO_ADAPTER, np.int32)
        self.masked: Bool = np.zeros(max_num_seqs, np.bool_)  # the request has a mask state
        self.epoch: Int64 = np.zeros(max_num_seqs, np.int64)  # unique per assignment of the row, 0 when free
        self.request: list[Request | None] = [None] * max_num_seqs
        self.media_stop = zeros()  # the position after the last one that names a row of an item; 0: none does
        self.media_limit = np.full(max_num_seqs, NEVER, np.int32)  # tokens that rows of items suffice for
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._epochs = 0
        self._by_rank: list[Request] = []
        self._has_released = False  # a request in `_by_rank` has lost its row
        self._order: Int32 | None = None  # rows by rank; None: to be rebuilt

    @property
    def running(self) -> list[Request]:
        """The requests that have rows, by rank."""
        if self._has_released:
            self._by_rank = [request for request in self._by_rank if request.row != NO_ROW]
            self._has_released = False
        return self._by_rank

    @property
    def order(self) -> Int32:
        """The rows of the running requests by rank, int32 [n]."""
        if self._order is None:
            running = self.running
            self._order = np.fromiter((request.row for request in running), np.int32, len(running))
        return self._order

    @property
    def num_free(self) -> int:
        """Free rows."""
        return len(self._free)

    def next_free(self) -> int:
        """Return the row that `assign` will use next."""
        return self._free[-1]

    def assign(self, request: Request, computed: int) -> None:
        """Give `request` the row that `next_free` named; `computed` of its tokens are in the KV cache already."""
        insort(self.running, request, key=rank_of)
        self._order = None
        row = request.row = self._free.pop()
        self._epochs += 1
        self.epoch[row] = self._epochs
        self.request[row] = request
        self.computed[row] = computed
        self.total[row] = self.prefill_end[row] = len(request.tokens)
        self.limit[row] = request.limit
        self.token_cost[row] = request.token_cost
        self.newest[row] = request.tokens[-1]
        self.inflight[row] = self.drafts_inflight[row] = self.num_guesses[row] = 0
        self.drafts_from[row] = len(request.prompt) + request.drafts_from
        self.next_page[row] = NEVER
        self.next_border[row] = NEVER
        self.masked[row] = request.mask_state is not None

    def release(self, request: Request) -> None:
        """Free the request's row."""
        row = request.row
        request.row = NO_ROW
        self._has_released = True
        self._order = None
        self.epoch[row] = 0
        self.request[row] = None
        self._free.append(row)

    def request_at(self, row: int) -> Request:
        """Return the request in a row. Raises RuntimeError if the row is free."""
        request = self.request[row]
        if request is None:
            raise RuntimeError(f"row {row} is free")
        return request

    def requests_at(self, rows: Int32) -> list[Request]:
        """Return the requests in `rows`, all of them taken."""
        return list(filter(None, map(self.request.__getitem__, rows.tolist())))

    def state(self) -> BatchState:
        """Return a copy of the state."""
        rows = {name: getattr(self, name).copy() for name in STATE_ARRAYS}
        return BatchState(rows, list(self._free), self._epochs)

    def restore(self, state: BatchState, running: Iterable[Request]) -> None:
        """Replace the state of a new batch. `running`: the requests that have rows, by rank."""
        self._by_rank = list(running)
        for name, values in state.rows.items():
            getattr(self, name)[:] = values
        self._free = list(state.free_rows)
        self._epochs = state.epochs
        for request in self._by_rank:
            self.request[request.row] = request
            self.masked[request.row] = request.mask_state is not None

    def budget_cost(self, rows: Int32, counts: Int32) -> int:
        """Return what `counts` [n] tokens of `rows` [n] spend of a step's budget."""
        return int((counts * np.where(counts > 1, self.token_cost[rows], 1)).sum())

    def num_prompt_tokens(self, rows: Int32, context: Int32, counts: Int32) -> int:
        """Return how many of the `counts` [n] tokens of `rows` [n] after `context` [n] belong to prompts."""
        left = self.prefill_end[rows] - context
        return int(np.minimum(counts, left).clip(min=0).sum())

    def token_ids(
        self, rows: Int32, counts: Int32, query_start: Int32, samples: Bool, drafts: Int32 | None = None
    ) -> Int32:
        """Return the next `counts` [n] tokens of `rows` [n], int32 [T], row by row from `query_start` [n + 1] on.

        `samples` bool [n]: these are all tokens that the row has left, then `drafts` [n] drafts. A single newest token
        may be in flight; all other tokens were known when the row was assigned.
        """
        without_drafts = counts if drafts is None else counts - drafts
        newest = samples & (without_drafts == 1)
        if drafts is None and newest.all():
            return self.newest[rows]
        ids = np.empty(query_start[-1], np.int32)
        ids[query_start[:-1][newest]] = self.newest[rows[newest]]
        if drafts is not None:
            columns = np.arange(self.drafts.shape[1])
            used = columns < drafts[:, None]
            ids[(query_start[:-1, None] + 1 + columns)[used]] = self.drafts[rows][used]
        for i in np.flatnonzero(~newest):
            row = int(rows[i])
            start = int(query_start[i])
            count = int(counts[i])
            first = int(self.computed[row])
            ids[start : start + count] = self.request_at(row).tokens[first : first + count]
        return ids

    def plan(self, rows: Int32, counts: Int32, samples: Bool, drafts: Int32 | None = None) -> None:
        """Record that the next step computes `counts` tokens of each row, among them `drafts`, and samples one where
        `samples`.
        """
        self.computed[rows] += counts
        sampling = rows[samples]
        self.total[sampling] += 1
        self.inflight[sampling] += 1
        self.newest[sampling] = PREVIOUS
        if drafts is not None:
            self.total[rows] += drafts
            self.inflight[rows] += drafts
            self.drafts_inflight[rows] += drafts

    def report(self, rows: Int32, token_ids: Int32) -> Int32:
        """Record the newest `token_ids` [n] of `rows` [n]. Returns the rows with another page for the prefix cache."""
        inflight = self.inflight[rows] - 1
        self.inflight[rows] = inflight
        self.newest[rows] = np.where(inflight == 0, token_ids, PREVIOUS)
        num_known = self.total[rows] - inflight
        return rows[num_known >= self.next_page[rows]]

    def report_drafts(self, rows: Int32, drafts: Int32, rejected: Int32) -> None:
        """Record that of the `drafts` [n] of `rows` [n] the last `rejected` [n] were wrong; before `report`.

        Drafts of the next step, if it is in flight, were guessed to follow them.
        """
        self.inflight[rows] -= drafts
        self.drafts_inflight[rows] -= drafts
        self.computed[rows] -= rejected
        self.total[rows] -= rejected
        self.num_drafts[rows[rejected > 0]] = 0
