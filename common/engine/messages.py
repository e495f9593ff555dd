"""What goes into the engine and what comes out of it: token ids and numbers, no text.

These values cross a process boundary (msgpack), so they have plain Python types only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from pagoda.common.engine.pooling import Pooled, PoolingRules
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.structured_output.grammar import Grammar, Thinking

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate, or one prompt to pool; see `pooling_request`."""

    request_id: str
    prompt_token_ids: list[int]
    rules: SamplingRules
    max_tokens: int  # resolved, at least 1; prompt + max_tokens fits the model's context
    stop_token_ids: frozenset[int] = frozenset()  # end the sequence when sampled (EOS included unless ignored)
    eos_token_ids: frozenset[int] = frozenset()  # the subset of stop_token_ids with stop_reason None
    priority: int = 0  # smaller runs first
    arrival: float = 0.0  # seconds of any monotonic clock; breaks ties of priority
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    grammar: Grammar | None = None  # constrains the output, after the `thinking` if any
    thinking: Thinking | None = None
    pooling: PoolingRules | None = None  # pool the prompt; fields about generation are ignored
    # One row per EMBEDDED position of `prompt_token_ids` (see step): D numbers each, in the model's dtype.
    prompt_embeds: bytes | None = None
    encoder_token_ids: list[int] | None = None  # of an encoder-decoder model: what its encoder reads


def pooling_request(
    request_id: str, prompt_token_ids: list[int], pooling: PoolingRules, *, priority: int = 0, arrival: float = 0.0
) -> EngineRequest:
    """Return a request to pool a prompt."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        rules=SamplingRules(),
        max_tokens=0,
        priority=priority,
        arrival=arrival,
        pooling=pooling,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """One position: the chosen (or prompt) token first, then the best k."""

    token_ids: list[int]
    logprobs: list[float]  # natural log
    rank: int  # of the first token; 1 is the best
    ranks: list[int] | None = None  # of the others, unless they are the best in order


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What one step added to one request.

    A Struct, not a dataclass: one is created per request and step, and a frozen dataclass costs ten times as much.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # stop token id that ended it; None for EOS, length and abort
    logprobs: list[PositionLogprobs] | None = None  # one entry per new token, if requested
    prompt_logprobs: list[PositionLogprobs] | None = None  # in the first output; entry p is of prompt token p+1
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache, at first admission
    scheduled: float = 0.0  # in the first output: when it was first scheduled, seconds of the machine's monotonic clock
    num_preemptions: int = 0  # so far; sent with the last output and the first one after a preemption
    error: tuple[str, str] | None = None  # field and reason of finish_reason "error"
    pooled: Pooled | None = None  # the only output of a pooling request, with finish_reason "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step; counters are totals since start."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0  # of the fullest pool of KV blocks, the one that limits admission
    kv_blocks_total: int = 0  # of the same pool, without its null block
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens served from the cache
    preemptions: int = 0
    recompiles: int = 0  # programs compiled while serving; should be 0
    steps: int = 0
    last_step_tokens: int = 0  # tokens of the step these outputs come from

    @property
    def kv_usage(self) -> float:
        """Fraction of KV blocks used by requests, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """All outputs of one engine step, or of several that the client coalesced."""

    outputs: list[EngineOutput] = field(default_factory=list)
    stats: EngineStats = EngineStats()
    earlier: tuple[EngineStats, ...] = ()  # of the coalesced steps before the last
