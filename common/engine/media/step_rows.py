"""Rows of media for the sequences of a step: which it can compute, what is encoded first, what is given back.

A sequence holds the items that overlap the chunk it computes, from that step on until the step with their last position
is planned. A waiting request holds none. A sequence that holds an item can therefore compute to the item's end, and
when no sequence holds one, all rows are free for the first sequence of the queue. Some sequence always proceeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.common.engine.media.items import PromptMedia
from pagoda.common.engine.media.rows import RowCache, RowCacheState
from pagoda.common.engine.scheduling.request import NEVER, NO_ROW, Request, RunningBatch, SchedulerPart
from pagoda.common.engine.steps.contract import FIRST_ROW, Encode, Int32


@dataclass(frozen=True, slots=True)
class MediaState:
    """The state of SchedulerMedia but for what follows from the requests."""

    cache: RowCacheState
    held: tuple[tuple[int, tuple[int, ...]], ...]  # row of a request -> numbers of the items that it holds


class SchedulerMedia(SchedulerPart[MediaState]):
    """The media of one scheduler's requests.

    `encoder_budget`: rows that the encoders of one step compute, though always those of one item.
    """

    needs = "media"

    def __init__(self, cache: RowCache, batch: RunningBatch, encoder_budget: int) -> None:
        self.cache = cache
        self._batch = batch
        self._encoder_budget = encoder_budget
        self._held: dict[int, dict[int, Int32]] = {}  # of each running request, by its row: item -> its rows of media
        self._encodes: list[Encode] = []  # of the step that is being planned
        self._encoded = 0  # rows of `_encodes` that an encoder computes

    @property
    def num_running(self) -> int:
        """Running requests with media."""
        return len(self._held)

    def started(self, request: Request) -> None:
        self._batch.media_stop[request.row] = _media_of(request).stop

    def stopped(self, request: Request) -> None:
        media = _media_of(request)
        for number in self._held.pop(request.row):
            self.cache.release(media.items[number].digest)
        self._batch.media_stop[request.row] = 0
        self._batch.media_limit[request.row] = NEVER

    # --- planning a step ---

    def limit_rows(self, rows: Int32, most_tokens: int) -> None:
        """Set how far each of `rows`, in order, can be computed in the next step with the rows that there are.

        `most_tokens`: of a step.
        """
        batch = self._batch
        claims = _Claims(self, self._held)
        for row in rows[batch.computed[rows] < batch.media_stop[rows]].tolist():
            request = batch.request_at(row)
            start = int(batch.computed[row])
            stop = min(int(batch.total[row]), start + most_tokens)
            reach = claims.reach(request, start, stop)
            batch.media_limit[row] = NEVER if reach == stop else reach

    def reach(self, request: Request, start: int, stop: int) -> int:
        """Return up to which position, at most `stop`, a request can be computed from `start` on in this step."""
        return _Claims(self, self._held).reach(request, start, stop)

    def hold_rows(self, rows: Int32, counts: Int32) -> None:
        """Hold what `counts` [n] tokens of `rows` [n] name, and plan to encode what is not in the cache."""
        batch = self._batch
        starts = batch.computed[rows]
        named = starts < batch.media_stop[rows]
        if named.any():
            stops = starts[named] + counts[named]
            self.hold(list(zip(batch.requests_at(rows[named]), starts[named].tolist(), stops.tolist())))

    def hold(self, chunks: Sequence[tuple[Request, int, int]]) -> None:
        """Hold what positions [start, stop) of requests name, and plan to encode what is not in the cache.

        What is in the cache is held first, so that nothing replaces it.
        """
        missing: list[tuple[dict[int, Int32], PromptMedia, int]] = []
        for request, start, stop in chunks:
            held = self._held.setdefault(request.row, {})
            media = _media_of(request)
            for number in dict.fromkeys(span.item for span in media.overlapping(start, stop)):
                if number in held:
                    continue
                if (digest := media.items[number].digest) in self.cache:
                    held[number] = self.cache.hold(digest)
                else:
                    missing.append((held, media, number))
        for held, media, number in missing:
            item = media.items[number]
            if item.digest in self.cache:  # the same item of another sequence
                held[number] = self.cache.hold(item.digest)
                continue
            rows = held[number] = self.cache.put(item.digest, item.num_rows)
            self._encodes.append(Encode(item=item, rows=rows))
            self._encoded += 0 if item.kind == "rows" else item.num_rows

    def name_rows(self, token_ids: Int32, rows: Int32, context: Int32, query_start: Int32) -> None:
        """Replace EMBEDDED in a step's `token_ids` [T] by the rows that its sequences hold, and give back those rows
        that no later step reads.

        `rows`, `context` [S], `query_start` [S + 1]: as in the plan.
        """
        batch = self._batch
        for index in np.flatnonzero(context < batch.media_stop[rows]).tolist():
            request = batch.request_at(int(rows[index]))
            media = _media_of(request)
            held = self._held[request.row]
            first = int(query_start[index]) - int(context[index])
            stop = int(context[index]) + int(query_start[index + 1] - query_start[index])
            for span in media.overlapping(int(context[index]), stop):
                named = held[span.item][span.row : span.row + span.stop - span.start]
                token_ids[first + span.start : first + span.stop] = FIRST_ROW + named
            for number in [number for number in held if media.ends[number] <= stop]:
                del held[number]
                self.cache.release(media.items[number].digest)

    def take_encodes(self) -> tuple[Encode, ...]:
        """Return what the step encodes, once it is planned."""
        encodes = tuple(self._encodes)
        self._encodes.clear()
        self._encoded = 0
        return encodes

    # --- incidents, and checks ---

    def state(self) -> MediaState:
        held = tuple((row, tuple(items)) for row, items in self._held.items())
        return MediaState(cache=self.cache.state(), held=held)

    def restore(self, state: MediaState, requests: Sequence[Request]) -> None:
        held = dict(state.held)
        by_digest = {digest: np.array(rows, np.int32) for digest, rows in state.cache.rows}
        for request in requests:
            if request.row != NO_ROW:
                media = _media_of(request)
                numbers = held[request.row]
                self._held[request.row] = {number: by_digest[media.items[number].digest] for number in numbers}
                self._batch.media_stop[request.row] = media.stop
        self.cache.restore(state.cache, self._references(requests))

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise RuntimeError unless the items that are held are those of running requests."""
        self.cache.check_integrity(self._references(running))

    def _references(self, requests: Iterable[Request]) -> Counter[bytes]:
        """Return how often each item is held."""
        references: Counter[bytes] = Counter()
        for request in requests:
            for number in self._held.get(request.row, ()):
                references[_media_of(request).items[number].digest] += 1
        return references


class _Claims:
    """What sequences of a step would take of the row cache and of the encoders, one after the other."""

    def __init__(self, part: SchedulerMedia, held: dict[int, dict[int, Int32]]) -> None:
        self._cache = part.cache
        self._held = held
        self._room = part.cache.num_available
        self._encoded = part._encoded
        self._budget = part._encoder_budget
        self._claimed: set[bytes] = set()

    def reach(self, request: Request, start: int, stop: int) -> int:
        """Return the position before which everything from `start` on can be computed, at most `stop`."""
        media = _media_of(request)
        held = self._held.get(request.row, {})
        for span in media.overlapping(start, stop):
            if span.item not in held and not self._claim(media, span.item):
                return span.start
        return stop

    def _claim(self, media: PromptMedia, number: int) -> bool:
        """Take the rows of an item, and the work of its encoder, if there is enough of both."""
        item = media.items[number]
        if item.digest in self._claimed or self._cache.is_held(item.digest):
            return True
        count = item.num_rows
        encoded = 0 if item.kind == "rows" or item.digest in self._cache else count
        if count > self._room or (self._encoded and self._encoded + encoded > self._budget and encoded):
            return False
        self._room -= count
        self._encoded += encoded
        self._claimed.add(item.digest)
        return True


def _media_of(request: Request) -> PromptMedia:
    assert request.media is not None, "only requests with media are passed to this part"
    return request.media
