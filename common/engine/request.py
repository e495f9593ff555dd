"""One sequence on its way through the engine: what was asked, and how far it is.

Knows token ids and blocks. Does not know queues, steps or devices. While a request runs, the numbers that every step
touches live in `rows.Rows`, under its row.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from pagoda.common.engine.messages import EngineRequest, FinishReason, PositionLogprobs
from pagoda.common.engine.pooling import PoolingRules
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.step import EMBEDDED, Int32, UInt8
from pagoda.common.engine.structured_output.token_mask import TokenMaskState

NO_ROW: Final = -1


class RequestStatus(Enum):
    """Where a request is. PREEMPTED waits too, but has run before."""

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
    """The blocks of one request in one KV group.

    `table[p]`: the block of page p, NULL_BLOCK where the window has passed. `base`: page p would like block `base + p`.
    `reserved`: the blocks softly kept for it.
    """

    table: list[int] = field(default_factory=list)
    base: int | None = None
    reserved: range = range(0)


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one sequence. Made by `Request.of`.

    `limit`: tokens at which it ends by length, prompt included. `rank`: its place in line, smaller first.
    `max_outputs`: the same, without the prompt. `tokens`: every token known when it took its row. `resumes_at`: how
    many steps must be reported before a preempted request may run again, so that nothing of it is in flight.
    `hashes`: digest of each full page so far. `num_registered`: pages in the hash map. `is_plain`: no logprobs asked.
    `is_brief`: its next output has a token and nothing else to say, unless it ends. `scheduled`: when it first ran.
    `guide`: what its tokens may be, for those with a grammar or a budget of thinking. `embeds`: the rows of the
    prompt's places that are EMBEDDED, as bytes [n, row].
    """

    request_id: str
    prompt: Int32
    rules: SamplingRules
    limit: int
    max_outputs: int
    is_plain: bool
    rank: tuple[float, ...]
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    cache_salt: str | None
    reads_cache: bool
    status: RequestStatus = RequestStatus.WAITING
    outputs: list[int] = field(default_factory=list)
    row: int = NO_ROW
    resumes_at: int = 0
    tokens: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_pages: int = 0
    groups: list[GroupBlocks] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    scheduled: float = 0.0
    is_brief: bool = False
    prompt_logprobs: list[PositionLogprobs] | None = None
    guide: TokenMaskState | None = None
    embeds: UInt8 | None = None
    pooling: PoolingRules | None = None  # how a pooling model pools the prompt; None: it generates

    @classmethod
    def of(
        cls, asked: EngineRequest, *, limit: int, rank: tuple[float, ...], guide: TokenMaskState | None = None
    ) -> Request:
        """A waiting request. One that wants prompt logprobs computes every position, so it never reads the cache."""
        wants_prompt = asked.rules.prompt_logprobs is not None
        prompt = np.array(asked.prompt_token_ids, np.int32)
        return cls(
            request_id=asked.request_id,
            prompt=prompt,
            rules=asked.rules,
            limit=limit,
            max_outputs=limit - len(asked.prompt_token_ids),
            is_plain=asked.rules.logprobs is None and not wants_prompt,
            rank=rank,
            stop_token_ids=asked.stop_token_ids,
            eos_token_ids=asked.eos_token_ids,
            cache_salt=asked.cache_salt,
            reads_cache=not (asked.skip_reading_prefix_cache or wants_prompt),
            prompt_logprobs=[] if wants_prompt else None,
            guide=guide,
            embeds=None if asked.prompt_embeds is None else _rows(asked.prompt_embeds, prompt),
            pooling=asked.pooling,
        )

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt) + len(self.outputs)

    @property
    def is_finished(self) -> bool:
        """True once nothing more will come of it."""
        return self.status in FINISHED

    def known_tokens(self) -> Int32:
        """int32 [num_known]: the prompt, then what was generated."""
        if not self.outputs:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.outputs, np.int32)])

    def embeds_of(self, start: int, stop: int) -> UInt8:
        """[n, row] the rows of the places that are EMBEDDED in [start, stop), where the request has any."""
        assert self.embeds is not None, "the request has embeddings"
        first = np.count_nonzero(self.prompt[:start] == EMBEDDED)
        return self.embeds[first : first + np.count_nonzero(self.prompt[start:stop] == EMBEDDED)]

    def page_bytes(self, start: int, stop: int) -> bytes:
        """What the page of tokens [start, stop), all known, is made of: their ids, then rows of those without one."""
        ids = self.token_bytes(start, stop)
        return ids if self.embeds is None else ids + self.embeds_of(start, stop).tobytes()

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop) as native int32 bytes; all must be known."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop].tobytes()
        generated = array("i", self.outputs[max(0, start - split) : stop - split]).tobytes()
        return self.prompt[start:split].tobytes() + generated


def _rows(values: bytes, prompt: Int32) -> UInt8:
    return np.frombuffer(values, np.uint8).reshape(np.count_nonzero(prompt == EMBEDDED), -1)
