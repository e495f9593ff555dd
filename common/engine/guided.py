"""What guides mean for a step: who must wait for a token in flight, what may be sampled, and who ends by it.

Only called while a request with a guide is unfinished: other steps pay nothing for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagoda.common.engine.guide import Guide, settle
from pagoda.common.engine.request import Request, RequestStatus
from pagoda.common.engine.results import ending
from pagoda.common.engine.rows import Rows
from pagoda.common.engine.step import Bool, Int32, TokenMasks


def waiting_for_newest(state: Rows, rows: Int32) -> list[int]:
    """Places in `rows` [n] whose next mask follows from a token that is in flight."""
    unknown = state.inflight[rows]
    return [
        place
        for place in np.flatnonzero(unknown * state.guided[rows]).tolist()
        if (guide := state.holder(int(rows[place])).guide) is not None and guide.depends_on(int(unknown[place]))
    ]


def masks(state: Rows, rows: Int32, samples: Bool) -> TokenMasks | None:
    """What the guides of those of `rows` [n] that sample (`samples` bool [n]) allow; None: everything."""
    found = [
        (place, guide.bits)
        for place in np.flatnonzero(samples & state.guided[rows]).tolist()
        if (guide := state.holder(int(rows[place])).guide) is not None and guide.bits is not None
    ]
    if not found:
        return None
    places, bits = zip(*found)
    return TokenMasks(np.array(places, np.int32), np.stack(bits))


def follow(requests: Sequence[Request], tokens: Sequence[int]) -> dict[int, RequestStatus]:
    """Lead guides on by their new `tokens`, one per request and negative where none was sampled; find the next masks.

    Returns who ended by it, by place in `requests`.
    """
    led: list[tuple[int, Guide, list[int]]] = []
    for index, (request, token) in enumerate(zip(requests, tokens)):
        if request.guide is None or token < 0 or request.is_finished:
            continue
        outputs = [*request.outputs, token]
        if ending(request, token, len(outputs)) is RequestStatus.RUNNING:
            request.guide.accept(token)
            led.append((index, request.guide, outputs))
    settle([(guide, outputs) for _, guide, outputs in led if not guide.finished and guide.error is None])
    ended = {index: RequestStatus.FINISHED_STOPPED for index, guide, _ in led if guide.finished}
    return ended | {index: RequestStatus.FINISHED_ERROR for index, guide, _ in led if guide.error is not None}
