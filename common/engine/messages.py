"""What goes into the engine and what comes out of it: token ids and numbers, no text.

These values cross a process boundary (msgpack), so they hold plain Python types only.
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
    """One sequence to generate, or to pool; `pooling_request` makes the latter.

    `max_tokens`: resolved, at least 1, and prompt + max_tokens fits the model's context (0 only with prompt_logprobs
    work is refused by the caller). `stop_token_ids`: end the sequence when sampled (EOS included unless ignored).
    `eos_token_ids`: the subset of them for which `stop_reason` stays None. `priority`: smaller runs first.
    `arrival`: seconds, any monotonic clock; ties of priority go to the earlier. `grammar`: what the answer spells,
    after the `thinking` if there is any.
    `pooling`: how a pooling model pools the prompt, in place of everything about generation.
    `prompt_embeds`: the rows, one after another, of the prompt's places that are EMBEDDED in `prompt_token_ids` (see
    step): D numbers each, in the model's dtype.
    """

    request_id: str
    prompt_token_ids: list[int]
    rules: SamplingRules
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    pooling: PoolingRules | None = None
    prompt_embeds: bytes | None = None


def pooling_request(
    request_id: str, prompt_token_ids: list[int], pooling: PoolingRules, *, priority: int = 0, arrival: float = 0.0
) -> EngineRequest:
    """A prompt for a pooling model."""
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
    """One position: the chosen (or prompt) token first, then the best k. Natural logs; rank 1 is the best.

    `rank`: the first token's. `ranks`: those of the others, where they are not the best in order.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    ranks: list[int] | None = None


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What one step added to one request. `logprobs`: one entry per new token, when asked for.

    A Struct, not a dataclass: one is made per request and step, and a frozen dataclass costs ten times as much.

    `prompt_logprobs`: sent once, whole, with the first output: entry p is of prompt token p+1 (so len = prompt-1).
    `stop_reason`: the stop token id that ended it, None for EOS, length and abort.
    `num_cached_tokens`: prompt tokens that came from the prefix cache (at first admission). `scheduled`: with the first
    output only, when the request first got a place in a step; monotonic seconds, the same clock for all processes of
    the machine. `num_preemptions`: so far; an output that brings only a token leaves it out, but not the first after a
    preemption and not the last. `error`: the field and the reason with which a request ended as "error", such as a
    grammar that leaves no token; None otherwise. `pooled`: the one answer of a pooling model,
    which comes with finish_reason "stop" and no tokens.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    num_cached_tokens: int = 0
    scheduled: float = 0.0
    num_preemptions: int = 0
    error: tuple[str, str] | None = None
    pooled: Pooled | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step; counters are totals since start."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    preemptions: int = 0
    recompiles: int = 0  # programs compiled while serving; more than none is a fault
    steps: int = 0
    last_step_tokens: int = 0  # tokens of the step these outputs come from

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by requests, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """All outputs of one engine step, or of several that its reader joined: `earlier` is then of those but the last."""

    outputs: list[EngineOutput] = field(default_factory=list)
    stats: EngineStats = EngineStats()
    earlier: tuple[EngineStats, ...] = ()
