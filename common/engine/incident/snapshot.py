"""The format of an incident snapshot: the state of the scheduler some steps before the incident, and all events since.

Stepping a scheduler with that state through the events (see replay) gives the same plans. Tokens are not needed: which
pages are equal follows from their digests, which are keyed with a random number that is not kept. A snapshot thus has
no prompt text and no token ids, unless they are asked for.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.borders import SequenceBorders
from pagoda.common.engine.messages import EngineStats

FORMAT: Final = 2
"""Raised when older files can no longer be replayed."""

Digest = str
"""Keyed digest of a page, in hexadecimal digits."""


class GroupSpec(msgspec.Struct, frozen=True):
    """What a KV group keeps, as far as block tables depend on it."""

    kind: str  # full, window or state
    pool: int
    window: int = 0  # tokens


class KvShape(msgspec.Struct, frozen=True):
    """The KV cache, as far as block tables depend on it."""

    groups: tuple[GroupSpec, ...]
    block_size: int
    num_blocks: tuple[int, ...]  # blocks of each pool, the null block included
    extents: bool


class PoolRecord(msgspec.Struct, frozen=True):
    """A BlockPool: its lists and arrays, by block."""

    num_free: int
    next: list[int]
    prev: list[int]
    refs: list[int]
    reserved: list[int]
    released_at: list[int]
    clock: int
    pages: dict[int, tuple[Digest, int]]  # block -> its cached page: digest and KV group
    copies: dict[int, int]  # copies of recurrent state before the next step: destination -> source
    keepers: dict[int, str]  # block -> the cache key that keeps its page, in the order in which they were kept
    keep_until: dict[int, int]
    evictions: int


class GroupTable(msgspec.Struct, frozen=True):
    """The blocks of a request in one KV group, see GroupBlocks."""

    table: list[int]
    base: int | None
    reserved: tuple[int, int]  # first and stop


class MediaRecord(msgspec.Struct, frozen=True):
    """A media item of a request."""

    digest: Digest
    kind: str
    spans: list[tuple[int, int]]  # (first position of the prompt, number of rows)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished request."""

    request_id: str
    num_prompt: int
    num_outputs: int
    limit: int  # tokens at which it ends, prompt included
    rank: tuple[float, ...]
    owner: str
    group: str
    cache_key: str
    status: str
    reads_cache: bool
    row: int  # -1: it waits
    num_row_tokens: int  # tokens known when it took its row
    resumes_at: int
    num_registered: int
    num_pages: int
    num_cached_tokens: int | None
    num_preemptions: int
    tables: list[GroupTable]
    digests: list[Digest]  # digests of all pages known at the incident
    is_masked: bool  # under a grammar or a reasoning budget
    rules: dict[str, Any]  # sampling rules that differ from the defaults; of lists the length
    token_ids: list[int] | None = None  # all known at the incident; None unless asked for
    token_cost: int = 1  # what each of its tokens takes of a step's budget
    stable_tokens: int = 0
    borders: SequenceBorders | None = None
    answer_border: int = 0
    media: list[MediaRecord] = []


class InFlightRecord(msgspec.Struct, frozen=True):
    """A step that was planned, and whose result was not known."""

    step: int
    rows: list[int]
    samples: list[bool]
    query_start: list[int]
    context: list[int]
    request_ids: list[str]
    epochs: list[int]
    prompt_tokens: int


class RowsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The row cache of media items, and what running requests hold of it."""

    rows: dict[Digest, list[int]]
    idle: list[Digest]
    free: list[int]
    held: dict[int, list[int]]  # row of a request -> numbers of its items


class SchedulerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler between two of its calls."""

    requests: list[RequestRecord]
    pools: list[PoolRecord]
    rows: dict[str, list[int]]  # arrays of RunningBatch by name, and the numbers of its rows
    free_rows: list[int]
    epochs: int
    in_flight: list[InFlightRecord]
    served: dict[str, int]  # key -> when it last got a row, in the fair queue
    rows_given: int
    lacks_blocks: bool
    prefills: bool
    added: int
    steps: int
    preemptions: int
    media: RowsRecord | None = None


class Added(msgspec.Struct, tag="add", frozen=True, kw_only=True):
    """A request was queued."""

    request_id: str
    num_prompt: int
    max_tokens: int
    priority: int
    arrival: float
    owner: str
    group: str
    cache_key: str
    reads_cache: bool
    is_masked: bool
    digests: list[Digest]
    rules: dict[str, Any]
    token_ids: list[int] | None = None
    token_cost: int = 1
    stable_tokens: int = 0
    media: list[MediaRecord] = []


class Aborted(msgspec.Struct, tag="abort", frozen=True):
    """Requests were dropped."""

    request_ids: list[str]


class Cleared(msgspec.Struct, tag="clear", frozen=True):
    """The prefix cache was emptied."""


class Planned(msgspec.Struct, tag="plan", frozen=True):
    """A step was to be planned."""

    step: int | None  # None: nothing could be computed, or `failed`
    num_seqs: int = 0
    num_tokens: int = 0
    failed: bool = False  # the scheduler raised
    withheld: int = 0  # requests that may not be in the step, since their token masks take long


class Reported(msgspec.Struct, tag="result", frozen=True):
    """The result of a step was applied."""

    step: int
    finished: dict[str, str] = {}  # reasons by request
    failed: bool = False  # the backend or the scheduler raised


Event = Added | Aborted | Cleared | Planned | Reported


class PlanDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One of the last plans, whole but for its tokens."""

    step: int
    shape: tuple[int, int, int]  # S sequences, T tokens, P pages of the longest block table
    rows: list[int]
    query_start: list[int]
    context: list[int]
    samples: list[bool]
    starts: list[int]  # rows that a request took
    tables: list[list[list[int]]]  # block tables by KV group and sequence
    encodes: dict[Digest, list[int]] = {}  # rows of media items that the step encodes


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file."""

    format: int = FORMAT
    version: str
    created: str  # UTC
    cause: str
    traceback: list[str] = []
    config: dict[str, Any] = {}  # without secrets
    engine: dict[str, Any] = {}  # backend, device, dtype, memory
    limits: Limits
    kv: KvShape | None = None
    stats: EngineStats | None = None
    why_not: str = ""  # why it cannot be replayed
    state: SchedulerRecord | None = None
    events: list[Event] = []
    plans: list[PlanDetail] = []
