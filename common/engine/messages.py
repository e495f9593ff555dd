"""What goes into the engine and what comes out of it: token ids and numbers, no text.

These values cross a process boundary (msgpack), so they have plain Python types only. At the end: what happened to
requests, which stays in the process that serves them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from typing import Final, Literal

import msgspec

from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.engine.media.items import MediaItem
from pagoda.common.engine.pooling.values import Pooled, PoolingRules
from pagoda.common.engine.sampling.rules import SamplingRules
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
    stable_tokens: int | None = None  # prompt tokens that the conversation's next request repeats; None: all
    grammar: Grammar | None = None  # constrains the output, after the `thinking` if any
    thinking: Thinking | None = None
    pooling: PoolingRules | None = None  # pool the prompt; fields about generation are ignored
    media: tuple[MediaItem, ...] = ()  # their spans are the EMBEDDED positions of `prompt_token_ids` (see step)
    encoder_token_ids: list[int] | None = None  # what the encoder of an encoder-decoder model reads
    adapter: Adapter | None = None  # the LoRA adapter that the sequence is computed with
    owner: str = ""  # the key that sent it, or rather a digest; rows are divided fairly between keys
    group: str = ""  # the caller's request that it belongs to, likewise; "": it is alone
    cache_key: str = ""  # a digest of what the caller says that shares prefixes: a conversation, a user; "": nothing


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
    rank: int  # rank of the first token; 1 is the best
    ranks: list[int] | None = None  # ranks of the other tokens, unless they are the best in order


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What one step added to one request.

    A Struct, not a dataclass: one is created per request and step, and a frozen dataclass costs ten times as much.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # stop token id that ended it; None for EOS, length and abort
    logprobs: list[PositionLogprobs] | None = None  # one entry per new token, if requested
    prompt_logprobs: list[PositionLogprobs] | None = None  # sent with the first output; entry p is of prompt token p+1
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache, at first admission
    scheduled: float = 0.0  # monotonic seconds when it was first scheduled, sent with the first output
    num_preemptions: int = 0  # preemptions so far, sent with the last output and the first one after a preemption
    error: tuple[str, str] | None = None  # field and reason of finish_reason "error"
    pooled: Pooled | None = None  # the only output of a pooling request, with finish_reason "stop"
    replica: int = 0  # the data-parallel replica that runs the sequence, sent with the first output


DRAFT_STATES: Final = ("drafted", "no_match", "acceptance", "batch_size")
"""What became of a step in which a sequence could have drafts: it has some, the proposer had no guess, none would pay
at the acceptance so far, or too many sequences run for --speculative-config.disable_by_batch_size."""


class DraftStats(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Totals of speculative decoding since start."""

    drafts: int = 0  # sequences with drafts, summed over steps
    tokens: int = 0  # drafted tokens
    accepted: tuple[int, ...] = ()  # accepted tokens by their position among a sequence's drafts
    steps: tuple[int, ...] = (0,) * len(DRAFT_STATES)  # number of steps in each of DRAFT_STATES

    @property
    def num_accepted(self) -> int:
        """Accepted tokens."""
        return sum(self.accepted)

    @property
    def mean_length(self) -> float:
        """Tokens per sequence and step with drafts: the accepted ones and the one sampled after them."""
        return 1 + self.num_accepted / self.drafts if self.drafts else 1.0

    def __add__(self, other: DraftStats) -> DraftStats:
        return DraftStats(
            drafts=self.drafts + other.drafts,
            tokens=self.tokens + other.tokens,
            accepted=tuple(map(sum, zip_longest(self.accepted, other.accepted, fillvalue=0))),
            steps=tuple(map(sum, zip(self.steps, other.steps))),
        )

    def since(self, earlier: DraftStats) -> DraftStats:
        """Return what was added after an earlier snapshot."""
        accepted = zip_longest(self.accepted, earlier.accepted, fillvalue=0)
        return DraftStats(
            drafts=self.drafts - earlier.drafts,
            tokens=self.tokens - earlier.tokens,
            accepted=tuple(now - before for now, before in accepted),
            steps=tuple(now - before for now, before in zip(self.steps, earlier.steps)),
        )


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A snapshot after a step; counters are totals since start. A Struct, since one is sent for every step."""

    running: int = 0
    waiting: int = 0  # queued until there is a slot and blocks for them
    deferred: int = 0  # queued until their grammar is compiled
    kv_blocks_used: int = 0  # blocks in use of the fullest pool, which limits admission
    kv_blocks_total: int = 0  # blocks of the fullest pool without the null block
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens served from the cache
    prefix_without_state: int = 0  # tokens whose K and V were cached, computed again for want of recurrent state
    preemptions: int = 0
    recompiles: int = 0  # programs compiled while serving; should be 0
    steps: int = 0
    drafts: DraftStats | None = None  # None: no speculative decoding
    last_step_tokens: int = 0  # prompt tokens computed plus tokens generated by the step these outputs come from
    running_adapters: tuple[str, ...] = ()  # names of the LoRA adapters of running requests
    waiting_adapters: tuple[str, ...] = ()  # names of the adapters of waiting requests
    replicas: tuple[EngineStats, ...] = ()  # statistics of each replica, with data parallelism

    @property
    def kv_usage(self) -> float:
        """Fraction of KV blocks used by requests, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0


def total_stats(replicas: Sequence[EngineStats]) -> EngineStats:
    """Return the sums over all replicas, and the statistics of each."""
    named = ("running_adapters", "waiting_adapters")
    apart = ("drafts", "replicas", *named)
    summed = (name for name in EngineStats.__struct_fields__ if name not in apart)
    totals = {name: sum(getattr(replica, name) for replica in replicas) for name in summed}
    totals |= {name: tuple(dict.fromkeys(chain(*(getattr(replica, name) for replica in replicas)))) for name in named}
    drafts = [replica.drafts for replica in replicas if replica.drafts is not None]
    return EngineStats(**totals, drafts=sum(drafts, DraftStats()) if drafts else None, replicas=tuple(replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """All outputs of one engine step, or of several that the client coalesced."""

    outputs: list[EngineOutput] = field(default_factory=list)
    stats: EngineStats = EngineStats()
    earlier: tuple[EngineStats, ...] = ()  # statistics of the coalesced steps before the last


# What happened to requests since the last step. The output processor adds it, the metrics record it. Times are seconds
# of the monotonic clock; 0: it did not happen, or a plug-in scheduler does not report it.

QUEUED_REQUESTS: Final = "max_num_queued_reqs"
QUEUED_TOKENS: Final = "max_num_queued_tokens"
OVERLOAD: Final = "max_overload_seconds"
KEY_SHARE: Final = "max_key_share"
GRAMMAR_CHECKS: Final = "grammar_checks"
TEXT_LENGTH: Final = "text_length"
REJECTION_REASONS: Final = (QUEUED_REQUESTS, QUEUED_TOKENS, OVERLOAD, KEY_SHARE, GRAMMAR_CHECKS, TEXT_LENGTH)
"""Limits for which requests are refused: the first two are vLLM's."""


@dataclass(slots=True)
class ReplicaTokens:
    """Tokens that the sequences of one data-parallel replica generated."""

    count: int = 0
    # Seconds since the sequence's token before -> tokens; most sequences of a batch have the same.
    waits: defaultdict[float, int] = field(default_factory=partial(defaultdict, int))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A sequence has its first token, or a pooling request its vector."""

    replica: int
    latency: float | None  # seconds since the arrival; None: pooling
    prompt_tokens: int
    cached_tokens: int  # prompt tokens from the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSequence:
    """One of a request's n sequences, or a pooling request, has ended."""

    replica: int
    finish_reason: str
    arrival: float
    queued: float  # sent to the engine
    scheduled: float  # first scheduled
    first_token: float
    last_token: float
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    generation_tokens: int | None  # None: pooling
    max_tokens: int | None
    adapter: str | None = None  # name of its LoRA adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """All sequences of a request have ended by themselves."""

    replica: int  # replica that runs the first sequence
    n: int
    longest: int  # tokens of the longest sequence


@dataclass(frozen=True, slots=True)
class RequestEvents:
    """Events in the order in which they happened."""

    # The tokens of each replica.
    tokens: defaultdict[int, ReplicaTokens] = field(default_factory=partial(defaultdict, ReplicaTokens))
    first_tokens: list[FirstToken] = field(default_factory=list)
    sequences: list[FinishedSequence] = field(default_factory=list)
    requests: list[FinishedRequest] = field(default_factory=list)
