"""One engine of many, fast enough for clusters: the scheduler's decisions without its data structures.

It plans as `Scheduler` does for sequences that end by length: decodes first, then prompt chunks in the
order of arrival, then waiting requests while rows, tokens and blocks last; the newest sequence is preempted for lack of
blocks; the plan of a step is made when the step before it starts. Steps in which nothing but contexts changes are taken
together: their times grow evenly, so that the first and the last give the sum. The prefix cache holds shared prefixes
by number, and of sequences that were preempted what they had. How far this is from the scheduler itself is measured
(docs/guides/capacity-planning.md). The scheduler, even if the steps that it skips cost nothing, takes 20 times as long
per request as a replica (780 us, 35 us), which is why there are both.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pagoda.backends.simulated.step_time import StepLoad, StepTimeModel

NO_PREFIX: Final = -1
_NO_REQUEST: Final = -1
_NEVER: Final = float("inf")


BatchSeconds = Callable[[int, int, Sequence[tuple[int, int]], int], float]


@runtime_checkable
class SumModel(Protocol):
    """A StepTimeModel that can do without arrays where the sum of the contexts of decodes says enough."""

    @property
    def adds_contexts(self) -> bool:
        """Whether it can."""
        ...

    def batch_seconds(self, decodes: int, context: int, chunks: Sequence[tuple[int, int]], sampled: int) -> float:
        """Return the time of a step.

        `context`: tokens of the `decodes` sequences with one token, together, after the step. `chunks`: (tokens,
        context after the step) of the others. `sampled`: positions with logits.
        """
        ...


@dataclass(frozen=True, slots=True)
class RequestArrays:
    """Requests in the order of their arrival, each a list of as many entries."""

    arrivals: Sequence[float]  # Arrival times in seconds, ascending.
    prompts: Sequence[int]  # Tokens of each prompt.
    outputs: Sequence[int]  # Output tokens of each request, at least 1.
    prefixes: Sequence[int] = ()  # Number of the prefix of each prompt, or NO_PREFIX; empty: no prompt has one.
    prefix_lens: Sequence[int] = ()  # Tokens of each prompt's prefix.

    def __len__(self) -> int:
        return len(self.arrivals)


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """What bounds the steps of a replica."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int  # Number of KV blocks, without the null block; each holds `block_size` tokens.
    block_size: int
    plans_ahead: bool = True  # The next step is planned while one runs.
    prefix_caching: bool = True


@dataclass(slots=True, eq=False)
class _PartialPrompt:
    """A running sequence whose prompt is not computed yet. After a preemption, its outputs belong to it, too."""

    request: int
    computed: int
    wanted: int  # Tokens to compute before the first one is sampled.
    blocks: int  # Blocks that it does not share with other sequences.


@dataclass(slots=True)
class RequestProgress:
    """When the requests of a workload got their first token and ended, in seconds; NaN: not yet."""

    first_token: npt.NDArray[np.float64]
    finish: npt.NDArray[np.float64]
    preemptions: int = 0
    steps: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0  # Prompt tokens of all requests that were started.

    @classmethod
    def of(cls, size: int) -> RequestProgress:
        """Return that of requests that have not started."""
        return cls(np.full(size, np.nan), np.full(size, np.nan))


@dataclass(slots=True)
class _Prefix:
    """A prefix in the cache."""

    blocks: int
    users: int = 0  # Number of running sequences.


@dataclass(slots=True)
class _BlockCache:
    """What blocks hold that no running sequence may change: shared prefixes, and pages of sequences that ran."""

    prefixes: dict[int, _Prefix] = field(default_factory=dict)
    idle: OrderedDict[int, int] = field(default_factory=OrderedDict)
    # Blocks that no running sequence uses, the least recently used first: of prefixes by number, of sequences by
    # `_own_key`. The last ones of an entry are evicted first.
    idle_blocks: int = 0

    def keep(self, key: int, blocks: int) -> None:
        """Keep blocks until others are needed more."""
        if blocks:
            self.idle[key] = blocks
            self.idle_blocks += blocks

    def take(self, key: int) -> int:
        """Return the blocks that are left of an entry, which are idle no more."""
        blocks = self.idle.pop(key, 0)
        self.idle_blocks -= blocks
        return blocks

    def evict(self, blocks: int) -> None:
        """Drop idle blocks, of which there are enough."""
        self.idle_blocks -= blocks
        while blocks:
            key, count = next(iter(self.idle.items()))
            dropped = min(count, blocks)
            blocks -= dropped
            if dropped == count:
                del self.idle[key]
            else:
                self.idle[key] = count - dropped
            if key >= 0:
                self.prefixes[key].blocks -= dropped
                if dropped == count:
                    del self.prefixes[key]

    def use(self, number: int) -> None:
        """Count a running sequence as a user of a prefix."""
        self.take(number)
        self.prefixes[number].users += 1

    def release(self, number: int) -> None:
        """Count a user less."""
        entry = self.prefixes[number]
        entry.users -= 1
        if not entry.users:
            self.keep(number, entry.blocks)


def _own_key(request: int) -> int:
    return -1 - request


class Replica:
    """An engine that serves the requests it is given. Times are in seconds, requests are indices of the workload."""

    def __init__(
        self, limits: ReplicaLimits, model: StepTimeModel, workload: RequestArrays, progress: RequestProgress
    ) -> None:
        self._limits = limits
        self._model = model
        self._workload = workload
        self._progress = progress
        # (Time, request) of those that ended since the caller cleared the list.
        self.finished: list[tuple[float, int]] = []
        self._now = 0.0  # Time at which the next step starts.
        self._horizon = 0.0  # The next plan knows all requests that arrived until this time.
        self._arrived: deque[int] = deque()  # Requests that no plan knows yet.
        self._waiting: deque[int] = deque()
        self._prefills: list[_PartialPrompt] = []
        # Decoding sequences. A sequence has `base` + `clock` tokens in the cache.
        self._clock = 0  # Number of steps with decodes so far.
        self._rows: list[int] = []  # The request of each row.
        self._row_of: dict[int, int] = {}
        self._base: list[int] = []
        self._base_sum = 0
        self._batch_seconds: BatchSeconds = self._load_seconds
        if isinstance(model, SumModel) and model.adds_contexts:
            self._batch_seconds = model.batch_seconds
        self._ends: list[tuple[int, int]] = []  # Heap of (clock after the last token, request).
        self._phases = [0] * limits.block_size  # Rows that need a block at each clock modulo the block size.
        self._own_blocks: dict[int, tuple[int, int]] = {}  # Ended request -> its blocks, and those of full pages.
        self._free = limits.num_blocks
        self._cache = _BlockCache()
        # Running request -> its prefix, and the blocks that it has of it.
        self._prefix_of: dict[int, tuple[int, int]] = {}
        self._generated: dict[int, int] = {}  # Preempted request -> its generated tokens.
        self._ended: list[int] = []  # Requests that the newest step ended; the next plan does not know that.
        self._planned = 0  # Tokens beyond `clock` for which decoding sequences have blocks.
        self._least_output = 0  # No waiting request has fewer output tokens.

    # Requests.

    def add(self, request: int) -> None:
        """Queue a request that arrives now; call `run_until` with its time of arrival first."""
        output = self._workload.outputs[request]
        self._least_output = min(self._least_output, output) if self._arrived or self._waiting else output
        self._arrived.append(request)

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._rows or self._prefills or self._waiting or self._arrived)

    def next_event(self) -> float:
        """Return a time before which no request ends unless another one is added; infinite if idle."""
        if not self.is_busy:
            return _NEVER
        if not self._rows:
            return self._now
        steps = self._ends[0][0] - self._clock
        for prefill in self._prefills:
            steps = min(steps, self._left(prefill.request))
        if self._waiting or self._arrived:
            steps = min(steps, self._least_output)
        return self._now + steps * self._decode_seconds(1)

    # Time.

    def run_until(self, time: float) -> None:
        """Take all steps that start before `time`."""
        while self._now < time and self.is_busy:
            if not (self._rows or self._prefills):
                self._await_requests()
            self._see_arrivals()
            if self._prefills or (self._waiting and self._may_start()):
                self._mixed_step()
            else:
                self._decode_steps(time)

    def _await_requests(self) -> None:
        """With nothing in flight: what ended is freed, and a request that arrives is planned at once."""
        self._free_ended()
        if not self._waiting:
            self._now = max(self._now, self._workload.arrivals[self._arrived[0]])
        self._horizon = self._now

    def _see_arrivals(self) -> None:
        arrivals = self._workload.arrivals
        while self._arrived and arrivals[self._arrived[0]] <= self._horizon:
            self._waiting.append(self._arrived.popleft())

    def _free_ended(self) -> None:
        for request in self._ended:
            self._free_request(request)
        self._ended = []

    def _take_steps(self, steps: int, seconds: float, last: float) -> None:
        """Let `steps` steps of `seconds` together pass, of which the last takes `last`."""
        self._free_ended()
        self._progress.steps += steps
        self._now += seconds
        self._horizon = self._now - last if self._limits.plans_ahead else self._now
        self._clock += steps
        self._planned = 0
        while self._ends and self._ends[0][0] == self._clock:
            self._end(heapq.heappop(self._ends)[1])

    def _end(self, request: int) -> None:
        self._progress.finish[request] = self._now
        self.finished.append((self._now, request))
        if request in self._row_of:
            self._remove_row(request)
        self._ended.append(request)
        if not self._limits.plans_ahead:
            self._free_ended()

    # Steps in which only contexts grow.

    def _decode_seconds(self, steps: int) -> float:
        """Return the time of the last of `steps` decode steps from now."""
        return self._step_seconds(steps, (), len(self._rows))

    def _step_seconds(self, steps: int, chunks: Sequence[tuple[int, int]], sampled: int) -> float:
        """Return the time of a step that is the decoding sequences' `steps`-th from now."""
        rows = len(self._rows)
        return self._batch_seconds(rows, self._base_sum + rows * (self._clock + steps), chunks, sampled)

    def _load_seconds(self, decodes: int, context: int, chunks: Sequence[tuple[int, int]], sampled: int) -> float:
        """Return the time by a model that must know every context; see SumModel."""
        after = (context - self._base_sum) // decodes if decodes else 0
        query = [1] * decodes
        contexts = [base + after for base in self._base]
        for tokens, end in chunks:
            query.append(tokens)
            contexts.append(end)
        return self._model.seconds(StepLoad(np.array(query, np.int64), np.array(contexts, np.int64), sampled))

    def _decode_steps(self, time: float) -> None:
        """Take decode steps until one ends a sequence, lacks blocks, lets a request start, or starts at `time`."""
        steps = self._ends[0][0] - self._clock
        if self._arrived or (self._ended and self._waiting):
            steps = 1
        steps = min(steps, self._steps_with_blocks(steps))
        if not steps:
            self._preempt()
            return
        first = self._decode_seconds(1)
        growth = 0.0
        if steps > 1:
            growth = (self._decode_seconds(steps) - first) / (steps - 1)
            steps = _steps_before(time - self._now, first, growth, steps)
        self._take(self._blocks_of(steps))
        self._take_steps(steps, steps * first + growth * (steps * (steps - 1) / 2), first + growth * (steps - 1))

    # Steps with prompts.

    def _mixed_step(self) -> None:
        """Take a step that computes prompts, too."""
        while (needed := self._blocks_of(1)) > self._available:
            self._preempt()
        self._take(needed)
        self._planned = 1
        left = self._limits.max_num_batched_tokens - len(self._rows)
        chunks: list[tuple[_PartialPrompt, int]] = []
        for prefill in list(self._prefills):
            count = min(prefill.wanted - prefill.computed, left)
            if count > 0 and prefill in self._prefills and self._grow(prefill, count):
                chunks.append((prefill, count))
                left -= count
        preempted = len(chunks)
        chunks = [chunk for chunk in chunks if chunk[0] in self._prefills]
        while left > 0 and preempted == len(chunks) and self._waiting and (count := self._first_chunk(left)):
            chunks.append((self._start(count), count))
            preempted += 1
            left -= count
        if chunks or self._rows:
            self._run(chunks)

    def _run(self, chunks: list[tuple[_PartialPrompt, int]]) -> None:
        """Take a step of the running decodes and these chunks."""
        ended_prompts = [prefill for prefill, count in chunks if prefill.computed + count == prefill.wanted]
        parts = [(count, prefill.computed + count) for prefill, count in chunks]
        seconds = self._step_seconds(1, parts, len(self._rows) + len(ended_prompts))
        self._take_steps(1, seconds, seconds)
        for prefill, count in chunks:
            prefill.computed += count
        for prefill in ended_prompts:
            self._prefills.remove(prefill)
            self._begin_decode(prefill)

    def _begin_decode(self, prefill: _PartialPrompt) -> None:
        """Count the token that a whole prompt has sampled; the sequence decodes from the next step on, or ends."""
        request = prefill.request
        generated = self._generated.pop(request, 0) + 1
        if generated == 1:
            self._progress.first_token[request] = self._now
        left = self._workload.outputs[request] - generated
        if not left:
            self._own_blocks[request] = self._own(request, prefill.blocks, prefill.wanted)
            self._end(request)
            return
        row = len(self._rows)
        self._rows.append(request)
        self._row_of[request] = row
        self._base.append(prefill.wanted - self._clock)
        self._base_sum += self._base[row]
        self._phases[self._phase(row)] += 1
        heapq.heappush(self._ends, (self._clock + left, request))

    def _phase(self, row: int) -> int:
        return -self._base[row] % self._limits.block_size

    def _remove_row(self, request: int) -> None:
        """Remove a decoding sequence from the batch; it keeps its blocks."""
        row = self._row_of.pop(request)
        last = len(self._rows) - 1
        self._phases[self._phase(row)] -= 1
        tokens = self._base[row] + self._clock + self._planned
        own_blocks = self._pages(tokens) - self._prefix_blocks(request)
        self._own_blocks[request] = self._own(request, own_blocks, tokens - self._planned)
        self._base_sum -= self._base[row]
        moved = self._rows.pop()
        base = self._base.pop()
        if row != last:
            self._rows[row] = moved
            self._row_of[moved] = row
            self._base[row] = base

    # Rows and blocks.

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)

    @property
    def _available(self) -> int:
        """Free blocks, and those that only the cache holds."""
        return self._free + self._cache.idle_blocks

    def _take(self, blocks: int) -> None:
        if blocks > self._free:
            self._cache.evict(blocks - self._free)
            blocks = self._free
        self._free -= blocks

    def _own(self, request: int, blocks: int, tokens: int) -> tuple[int, int]:
        """Return the blocks of a sequence's own, and how many of them its first `tokens` tokens fill."""
        return blocks, tokens // self._limits.block_size - self._prefix_blocks(request)

    def _blocks_of(self, steps: int) -> int:
        """Return the blocks that the decoding sequences need in that many steps."""
        size = self._limits.block_size
        rounds, rest = divmod(steps, size)
        start = self._clock % size
        once = sum(self._phases[start : start + rest]) + sum(self._phases[: max(0, start + rest - size)])
        return rounds * len(self._rows) + once

    def _steps_with_blocks(self, steps: int) -> int:
        """Return for how many of `steps` steps there are blocks."""
        if len(self._rows) * (1 + steps // self._limits.block_size) <= self._available:
            return steps
        low = 0
        high = steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._blocks_of(middle) <= self._available else (low, middle - 1)
        return low

    def _grow(self, prefill: _PartialPrompt, count: int) -> bool:
        """Allocate the blocks of a chunk, after preemptions where they lack. False if it was preempted itself."""
        while True:
            needed = self._pages(prefill.computed + count) - prefill.blocks - self._prefix_blocks(prefill.request)
            if needed <= self._available:
                self._take(max(0, needed))
                prefill.blocks += max(0, needed)
                return True
            if self._preempt() == prefill.request:
                return False

    def _may_start(self) -> bool:
        """Whether the first waiting request could start beside the decodes alone."""
        return self._first_chunk(self._limits.max_num_batched_tokens - len(self._rows)) > 0

    def _first_chunk(self, left: int) -> int:
        """Return how many of `left` tokens the first waiting request could compute now; 0: no row or too few blocks."""
        if self._num_rows >= self._limits.max_num_seqs:
            return 0
        request = self._waiting[0]
        shared, own_blocks = self._hits(request)
        hit = (shared + own_blocks) * self._limits.block_size
        count = min(self._known(request) - hit, left)
        prefix = self._cache.prefixes.get(self._prefix(request)) if shared else None
        idle = own_blocks + (shared if prefix is not None and not prefix.users else 0)
        needed = self._pages(hit + count) - shared - own_blocks + idle
        return count if needed + self._num_rows <= self._available else 0

    @property
    def _num_rows(self) -> int:
        return len(self._rows) + len(self._prefills) + len(self._ended)

    def _known(self, request: int) -> int:
        return self._workload.prompts[request] + self._generated.get(request, 0)

    def _left(self, request: int) -> int:
        return self._workload.outputs[request] - self._generated.get(request, 0)

    def _hits(self, request: int) -> tuple[int, int]:
        """Return the cached blocks of a waiting request: of its prefix, and those after it that it had before."""
        entry = self._cache.prefixes.get(self._prefix(request))
        shareable = self._shareable(request)
        shared = 0 if entry is None else min(entry.blocks, shareable)
        if shared < shareable:
            return shared, 0
        most = (self._known(request) - 1) // self._limits.block_size - shared
        return shared, min(most, self._cache.idle.get(_own_key(request), 0))

    def _shareable(self, request: int) -> int:
        """Return the blocks of its prefix that a request can share: at least one token is left to compute."""
        if self._prefix(request) == NO_PREFIX:
            return 0
        tokens = min(self._workload.prefix_lens[request], self._known(request) - 1)
        return tokens // self._limits.block_size

    def _prefix(self, request: int) -> int:
        return (
            self._workload.prefixes[request] if self._limits.prefix_caching and self._workload.prefixes else NO_PREFIX
        )

    def _prefix_blocks(self, request: int) -> int:
        """Return the blocks that a running request shares with others."""
        shared = self._prefix_of.get(request)
        return 0 if shared is None else shared[1]

    def _start(self, count: int) -> _PartialPrompt:
        """Give the first waiting request a row; it computes `count` tokens now."""
        request = self._waiting.popleft()
        shared, own_blocks = self._hits(request)
        known_tokens = self._known(request)
        hit = (shared + own_blocks) * self._limits.block_size
        self._free += self._cache.take(_own_key(request)) - own_blocks
        number = self._prefix(request)
        if number != NO_PREFIX:
            self._share_prefix(request, number, (hit + count) // self._limits.block_size)
        blocks = self._pages(hit + count) - self._prefix_blocks(request)
        self._take(blocks - own_blocks)
        self._progress.hit_tokens += hit
        self._progress.prompt_tokens += known_tokens
        prefill = _PartialPrompt(request, hit, known_tokens, blocks)
        self._prefills.append(prefill)
        return prefill

    def _share_prefix(self, request: int, number: int, full_blocks: int) -> None:
        """Use a prefix; what the request's first `whole` blocks have of it beyond what is cached is cached now."""
        blocks = min(self._shareable(request), full_blocks)
        if not blocks:
            return
        entry = self._cache.prefixes.setdefault(number, _Prefix(0))
        self._cache.use(number)
        if blocks > entry.blocks:
            self._take(blocks - entry.blocks)
            entry.blocks = blocks
        self._prefix_of[request] = number, blocks

    def _free_request(self, request: int) -> None:
        blocks, full_blocks = self._own_blocks.pop(request)
        if self._limits.prefix_caching:
            self._cache.keep(_own_key(request), full_blocks)
            blocks -= full_blocks
        self._free += blocks
        if (shared := self._prefix_of.pop(request, None)) is not None:
            self._cache.release(shared[0])

    def _preempt(self) -> int:
        """Free the newest running sequence and put it at the head of the queue. Returns its request."""
        newest = max((*self._rows, *(prefill.request for prefill in self._prefills)), default=None)
        if newest is None or (len(self._rows) + len(self._prefills) == 1 and not self._ended):
            raise RuntimeError("the KV cache does not hold one sequence")
        if len(self._rows) + len(self._prefills) == 1:
            self._free_ended()
            return _NO_REQUEST
        self._progress.preemptions += 1
        if newest in self._row_of:
            (end,) = (end for end, request in self._ends if request == newest)
            self._generated[newest] = self._workload.outputs[newest] - (end - self._clock)
            self._ends = [entry for entry in self._ends if entry[1] != newest]
            heapq.heapify(self._ends)
            self._remove_row(newest)
        else:
            (prefill,) = (prefill for prefill in self._prefills if prefill.request == newest)
            self._prefills.remove(prefill)
            self._own_blocks[newest] = self._own(newest, prefill.blocks, prefill.computed)
        self._free_request(newest)
        self._waiting.appendleft(newest)
        return newest


def _steps_before(seconds: float, first: float, growth: float, most: int) -> int:
    """Return how many of `most` steps start within `seconds`, each `growth` longer than the one before."""
    # Step i starts at linear i + growth i^2 / 2.
    linear = first - growth / 2
    if linear * (most - 1) + growth * (most - 1) ** 2 / 2 < seconds:
        return most
    if growth * seconds <= first * first * 1e-9:
        return max(1, ceil(seconds / first))
    return max(1, ceil((sqrt(linear * linear + 2 * growth * seconds) - linear) / growth))
