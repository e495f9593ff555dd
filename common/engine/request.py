"""One sequence in the engine: what the request specifies, and its progress.

Knows token ids and blocks; queues, steps and devices are the scheduler's. While a request runs, the numbers that every
step touches live in `batch_state.RunningBatch`, under its row.
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


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one sequence. Created by `Request.of`."""

    request_id: str
    prompt: Int32
    rules: SamplingRules
    limit: int  # tokens at which it ends by length, prompt included
    max_outputs: int  # the same without the prompt
    is_plain: bool  # no logprobs of any kind
    rank: tuple[float, ...]  # position in the queue, smaller first
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    cache_salt: str | None
    reads_cache: bool  # may start from cached prefixes
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
    mask_state: TokenMaskState | None = None  # of requests with a grammar or a reasoning budget
    embeds: UInt8 | None = None  # [n, bytes] of the prompt positions that are EMBEDDED
    pooling: PoolingRules | None = None  # how a pooling model pools the prompt; None: it generates

    @classmethod
    def of(
        cls,
        request: EngineRequest,
        *,
        limit: int,
        rank: tuple[float, ...],
        mask_state: TokenMaskState | None = None,
    ) -> Request:
        """Return a waiting request. With prompt logprobs every position is computed, so the cache is not read."""
        wants_prompt = request.rules.prompt_logprobs is not None
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
            prompt_logprobs=[] if wants_prompt else None,
            mask_state=mask_state,
            embeds=None if request.prompt_embeds is None else _embed_rows(request.prompt_embeds, prompt),
            pooling=request.pooling,
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

    def embeds_of(self, start: int, stop: int) -> UInt8:
        """Return the embeddings [n, bytes] of the EMBEDDED positions in [start, stop)."""
        assert self.embeds is not None, "the request has embeddings"
        first = np.count_nonzero(self.prompt[:start] == EMBEDDED)
        return self.embeds[first : first + np.count_nonzero(self.prompt[start:stop] == EMBEDDED)]

    def page_bytes(self, start: int, stop: int) -> bytes:
        """Return the content of the page of tokens [start, stop), all known: their ids, then their embeddings."""
        ids = self.token_bytes(start, stop)
        return ids if self.embeds is None else ids + self.embeds_of(start, stop).tobytes()

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Return tokens [start, stop), all known, as native int32 bytes."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop].tobytes()
        generated = array("i", self.outputs[max(0, start - split) : stop - split]).tobytes()
        return self.prompt[start:split].tobytes() + generated


def _embed_rows(values: bytes, prompt: Int32) -> UInt8:
    return np.frombuffer(values, np.uint8).reshape(np.count_nonzero(prompt == EMBEDDED), -1)
