"""Beam search over token ids and log-probabilities: each step keeps the likeliest continuations of all beams.

The caller gets the best next tokens of each live beam from the engine and passes them to `take`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.common.errors import RequestError

MAX_WIDTH: Final = 1_024
MAX_LENGTH_PENALTY: Final = 100.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Options of a beam search."""

    beam_width: int  # Number of answers.
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # With 0 or 1 nothing is sampled, so no other value has an effect.
    length_penalty: float = 1.0  # The length of a beam to this power divides its logprob.
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    skip_special_tokens: bool = True  # Leave special tokens out of the answers' text.
    watermarking: None = None
    early_stopping: bool = False  # End once `beam_width` answers are complete, even if a live beam is better.

    def __post_init__(self) -> None:
        for name, value, maximum in (
            ("beam_width", self.beam_width, MAX_WIDTH),
            ("max_tokens", self.max_tokens, 2**31),
        ):
            if type(value) is not int or not 1 <= value <= maximum:
                raise RequestError(name, f"{name} must be an integer between 1 and {maximum}")
        for name in ("structured_outputs", "watermarking"):
            if getattr(self, name):
                raise RequestError(name, f"{name} is not supported in a beam search; leave it unset")
        if self.temperature not in (0, 1):
            raise RequestError("temperature", "temperature must be 0 or 1 in a beam search: nothing is sampled")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise RequestError("length_penalty", f"length_penalty must be between -{MAX_LENGTH_PENALTY} and 100.0")

    @property
    def candidates(self) -> int:
        """Best next tokens needed per live beam: twice the width, because some may end an answer."""
        return 2 * self.beam_width


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0  # Sum of the log-probabilities of its tokens.
    ended: bool = False  # Its last token ends it.

    def score(self, length_penalty: float) -> float:
        """Return the length-normalised logprob; the ending token does not count as length."""
        length = max(1, len(self.token_ids) - self.ended)
        return float(self.logprob / length**length_penalty)


class BeamSearch:
    """The search for one prompt. `ends`: tokens that end an answer; `room`: tokens left in the context."""

    def __init__(self, params: BeamSearchParams, ends: Collection[int], room: int) -> None:
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(ends)
        self._steps_left = min(params.max_tokens, room)
        self._done: list[Beam] = []
        self.live: list[Beam] = [Beam()]

    @property
    def finished(self) -> bool:
        """True when the search is over."""
        return not self.live or not self._steps_left or self._is_complete

    def take(self, candidates: Sequence[Mapping[int, float]]) -> None:
        """Advance by one step. `candidates`: token id -> log-probability for each live beam."""
        width = self._params.beam_width
        best = heapq.nlargest(2 * width, self._continued(candidates), key=lambda beam: beam.logprob)
        self._done += [beam for beam in best[:width] if beam.ended]
        self._done = sorted(self._done, key=self._score, reverse=True)[:width]
        self.live = [beam for beam in best if not beam.ended][:width]
        self._steps_left -= 1

    def best(self) -> list[Beam]:
        """Return the answers, best first, including unfinished beams if too few have ended."""
        beams = self._done if self._is_complete else [*self._done, *self.live]
        return sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]

    @property
    def _is_complete(self) -> bool:
        if len(self._done) < self._params.beam_width:
            return False
        best = max(map(self._score, self.live), default=-math.inf)
        return self._params.early_stopping or best <= self._score(self._done[-1])

    def _continued(self, candidates: Sequence[Mapping[int, float]]) -> Iterator[Beam]:
        for beam, tokens in zip(self.live, candidates):
            for token, logprob in tokens.items():
                yield Beam((*beam.token_ids, token), beam.logprob + logprob, token in self._ends)

    def _score(self, beam: Beam) -> float:
        return beam.score(self._params.length_penalty)
