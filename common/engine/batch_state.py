"""The numbers of running requests that every step reads or writes, one array per number, indexed by row.

A step over hundreds of decoding sequences is then a few numpy operations, without a loop over objects.

    |<-------- computed -------->|<- wanted ->|
    [ prompt ........ | generated, known | in flight ]
    |<---------------------- total ----------------->|        total <= limit
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.request import NO_ROW, Request
from pagoda.common.engine.step import PREVIOUS, Bool, Int32, UInt8

Int64 = npt.NDArray[np.int64]
NEVER: Final = np.iinfo(np.int32).max


class RunningBatch:
    """State of all rows, free and taken. Arrays have shape [max_num_seqs]."""

    def __init__(self, max_num_seqs: int) -> None:
        def zeros() -> Int32:
            return np.zeros(max_num_seqs, np.int32)

        self.computed = zeros()  # tokens whose KV the steps planned so far write
        self.total = zeros()  # tokens known or in flight
        self.limit = zeros()  # total at which the request ends
        self.capacity = zeros()  # tokens its blocks hold
        self.newest = zeros()  # id of the last token, PREVIOUS while it is in flight
        self.inflight = zeros()  # sampled tokens not yet reported
        self.next_page = zeros()  # known tokens at which another page can enter the prefix cache
        self.masked: Bool = np.zeros(max_num_seqs, np.bool_)  # the request has a mask state
        self.epoch: Int64 = np.zeros(max_num_seqs, np.int64)  # unique per assignment of the row, 0 when free
        self.request: list[Request | None] = [None] * max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._epochs = 0

    @property
    def num_free(self) -> int:
        """Free rows."""
        return len(self._free)

    def next_free(self) -> int:
        """Return the row that `assign` will use next."""
        return self._free[-1]

    def assign(self, request: Request, computed: int) -> None:
        """Give `request` the row that `next_free` named; `computed` of its tokens are in the KV cache already."""
        row = request.row = self._free.pop()
        self._epochs += 1
        self.epoch[row] = self._epochs
        self.request[row] = request
        self.computed[row] = computed
        self.total[row] = len(request.tokens)
        self.limit[row] = request.limit
        self.newest[row] = request.tokens[-1]
        self.inflight[row] = 0
        self.next_page[row] = NEVER
        self.masked[row] = request.mask_state is not None

    def release(self, request: Request) -> None:
        """Free the request's row."""
        row, request.row = request.row, NO_ROW
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
        return [request for row in rows.tolist() if (request := self.request[row]) is not None]

    def embeds(self, rows: Int32, counts: Int32) -> UInt8 | None:
        """Return the embeddings [n, bytes] among the next `counts` tokens of `rows`, in order; None without any."""
        starts = self.computed[rows]
        spans = zip(self.requests_at(rows), starts.tolist(), (starts + counts).tolist())
        parts = [request.embeds_of(*span) for request, *span in spans if request.embeds is not None]
        parts = [part for part in parts if len(part)]
        return np.concatenate(parts) if parts else None

    def token_ids(self, rows: Int32, counts: Int32, query_start: Int32, samples: Bool) -> Int32:
        """Return the next `counts` [n] tokens of `rows` [n], int32 [T], row by row from `query_start` [n + 1] on.

        `samples` bool [n]: these are all tokens that the row has left. A single newest token may be in flight; all
        other tokens were known when the row was assigned.
        """
        newest = samples & (counts == 1)
        if newest.all():
            return self.newest[rows]
        ids = np.empty(query_start[-1], np.int32)
        ids[query_start[:-1][newest]] = self.newest[rows[newest]]
        for i in np.flatnonzero(~newest):
            row, start, count = int(rows[i]), int(query_start[i]), int(counts[i])
            first = int(self.computed[row])
            ids[start : start + count] = self.request_at(row).tokens[first : first + count]
        return ids

    def plan(self, rows: Int32, counts: Int32, samples: Bool) -> None:
        """Record that the next step computes `counts` tokens of each row and samples one where `samples`."""
        self.computed[rows] += counts
        sampling = rows[samples]
        self.total[sampling] += 1
        self.inflight[sampling] += 1
        self.newest[sampling] = PREVIOUS

    def report(self, rows: Int32, token_ids: Int32) -> Int32:
        """Record the sampled `token_ids` [n] of `rows` [n]. Returns the rows with another page for the prefix cache."""
        left = self.inflight[rows] - 1
        self.inflight[rows] = left
        self.newest[rows] = np.where(left == 0, token_ids, PREVIOUS)
        known = self.total[rows] - left
        return rows[known >= self.next_page[rows]]
