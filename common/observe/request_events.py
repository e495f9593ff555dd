"""What happened to requests since the last step: tokens, first tokens, ends. The output processor adds it, the metrics
record it. Times are seconds of the monotonic clock; 0: it did not happen, or a plug-in scheduler does not report it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

QUEUED_REQUESTS: Final = "max_num_queued_reqs"
REJECTION_REASONS: Final = (QUEUED_REQUESTS, "max_num_queued_tokens")
"""Limits of the queue for which vLLM refuses requests; pagoda has no limit on queued tokens."""


@dataclass(slots=True)
class ReplicaTokens:
    """Tokens that the sequences of one data-parallel replica generated."""

    count: int = 0
    waits: defaultdict[float, int] = field(
        default_factory=lambda: defaultdict(int)
    )  # seconds since the sequence's token before -> tokens

    def add(self, tokens: int, wait: float | None) -> None:
        """Add tokens of a sequence that came `wait` seconds after the token before; None: they are the first."""
        self.count += tokens
        if wait is not None:
            # Most sequences of a batch have the same time of their token before, so that few entries are made.
            self.waits[wait / tokens if tokens > 1 else wait] += tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A sequence has its first token, or a pooling request its vector."""

    replica: int
    latency: float | None  # seconds since the arrival; None: pooling
    prompt_tokens: int
    cached_tokens: int  # of the prompt, from the prefix cache


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

    @property
    def is_complete(self) -> bool:
        """True if it ended by itself and has an output."""
        return self.finish_reason not in ("abort", "error") and self.first_token > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """All sequences of a request have ended by themselves."""

    replica: int  # of the first sequence
    n: int
    longest: int  # tokens of the longest sequence


class RequestEvents:
    """Events in the order in which they happened; empty after `clear`."""

    def __init__(self) -> None:
        self.tokens: defaultdict[int, ReplicaTokens] = defaultdict(ReplicaTokens)  # by replica
        self.first_tokens: list[FirstToken] = []
        self.sequences: list[FinishedSequence] = []
        self.requests: list[FinishedRequest] = []

    def clear(self) -> None:
        """Forget all events."""
        self.tokens.clear()
        self.first_tokens.clear()
        self.sequences.clear()
        self.requests.clear()
