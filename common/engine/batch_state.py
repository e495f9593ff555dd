"""The numbers of running requests that every step touches, as one array per number, indexed by row.

A step over hundreds of decoding sequences is then a handful of numpy operations and no walk over objects.

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
    """All rows, free and taken. Arrays are int32 [max_num_seqs] unless said otherwise.

    `computed`: tokens whose KV is written by the steps planned so far. `total`: tokens known or in flight.
    `limit`: total at which the request ends. `capacity`: tokens its blocks hold. `newest`: id of the last token,
    PREVIOUS while it is in flight. `inflight`: sampled tokens not yet reported. `next_page`: number of known tokens
    at which another page can enter the prefix cache. `guided`: bool, there is a guide. `stint`: int64, unique to one
    stay of one request in a row; 0 when free.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.computed: Int32 = np.zeros(max_num_seqs, np.int32)
        self.total: Int32 = np.zeros(max_num_seqs, np.int32)
        self.limit: Int32 = np.zeros(max_num_seqs, np.int32)
        self.capacity: Int32 = np.zeros(max_num_seqs, np.int32)
        self.newest: Int32 = np.zeros(max_num_seqs, np.int32)
        self.inflight: Int32 = np.zeros(max_num_seqs, np.int32)
        self.next_page: Int32 = np.zeros(max_num_seqs, np.int32)
        self.guided: Bool = np.zeros(max_num_seqs, np.bool_)
        self.stint: Int64 = np.zeros(max_num_seqs, np.int64)
        self.request: list[Request | None] = [None] * max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._stints = 0

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def next_free(self) -> int:
        """The row that `take` will give next."""
        return self._free[-1]

    def take(self, request: Request, computed: int) -> None:
        """Give `request` its row (the one `next_free` named); `computed` tokens are in the cache already."""
        row = request.row = self._free.pop()
        self._stints += 1
        self.stint[row] = self._stints
        self.request[row] = request
        self.computed[row] = computed
        self.total[row] = len(request.tokens)
        self.limit[row] = request.limit
        self.newest[row] = request.tokens[-1]
        self.inflight[row] = 0
        self.next_page[row] = NEVER
        self.guided[row] = request.guide is not None

    def release(self, request: Request) -> None:
        """Take the row away."""
        row, request.row = request.row, NO_ROW
        self.stint[row] = 0
        self.request[row] = None
        self._free.append(row)

    def holder(self, row: int) -> Request:
        """Who holds a row. Raises RuntimeError when nobody does."""
        request = self.request[row]
        if request is None:
            raise RuntimeError(f"row {row} is free")
        return request

    def holders(self, rows: Int32) -> list[Request]:
        """Who holds each of `rows`, all of them taken."""
        return [request for row in rows.tolist() if (request := self.request[row]) is not None]

    def embeds(self, rows: Int32, take: Int32) -> UInt8 | None:
        """[n, row] the embeddings among the next `take` tokens of `rows`, in order; None where there are none."""
        starts = self.computed[rows]
        spans = zip(self.holders(rows), starts.tolist(), (starts + take).tolist())
        found = [request.embeds_of(*span) for request, *span in spans if request.embeds is not None]
        found = [part for part in found if len(part)]
        return np.concatenate(found) if found else None

    def token_ids(self, rows: Int32, take: Int32, query_start: Int32, samples: Bool) -> Int32:
        """int32 [T]: the next `take` [n] tokens of `rows` [n], row by row from `query_start` [n + 1] on.

        `samples` bool [n]: these are all that a row has. A lone newest token may still be in flight; everything else
        was known when its row was taken.
        """
        newest = samples & (take == 1)
        if newest.all():
            return self.newest[rows]
        ids = np.empty(query_start[-1], np.int32)
        ids[query_start[:-1][newest]] = self.newest[rows[newest]]
        for i in np.flatnonzero(~newest):
            row, start, count = int(rows[i]), int(query_start[i]), int(take[i])
            first = int(self.computed[row])
            ids[start : start + count] = self.holder(row).tokens[first : first + count]
        return ids

    def plan(self, rows: Int32, take: Int32, samples: npt.NDArray[np.bool_]) -> None:
        """Note that the next step computes `take` tokens of each row and samples one more where `samples`."""
        self.computed[rows] += take
        sampling = rows[samples]
        self.total[sampling] += 1
        self.inflight[sampling] += 1
        self.newest[sampling] = PREVIOUS

    def report(self, rows: Int32, token_ids: Int32) -> Int32:
        """Note the sampled `token_ids` [n] of `rows` [n]. Returns the rows with another page for the prefix cache."""
        left = self.inflight[rows] - 1
        self.inflight[rows] = left
        self.newest[rows] = np.where(left == 0, token_ids, PREVIOUS)
        known = self.total[rows] - left
        return rows[known >= self.next_page[rows]]
