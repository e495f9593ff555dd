"""Log-probabilities in the formats of the chat API, the completions API, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import Logprob, LogprobsOnePosition, PromptLogprobs

LOWEST: Final = -9999.0
"""Replaces minus infinity, which JSON has no number for."""


class TokenNames:
    """Token strings of log-probabilities: the token's text, or token_id:N with `as_ids` or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        """Return the token as a string."""
        if self._tokenizer is None or self._as_ids:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def raw(self, token: int) -> list[int]:
        """Return the token's bytes, which may be part of a character."""
        if self._tokenizer is None:
            return list(self.text(token).encode())
        return list(self._tokenizer.token_bytes(token))


def finite(value: float) -> float:
    """Return the log-probability, at least LOWEST."""
    return max(value, LOWEST)


def best(position: LogprobsOnePosition, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` most likely candidates of a position, best first; -1: all."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if count < 0 else ranked[:count]


def chat_logprobs(positions: Sequence[LogprobsOnePosition], count: int, names: TokenNames) -> list[dict[str, Any]]:
    """Return `logprobs.content`: one entry per generated token with its `count` best candidates."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": finite(logprob.logprob), "bytes": names.raw(token)}

    return [
        entry(*next(iter(position.items()))) | {"top_logprobs": [entry(*item) for item in best(position, count)]}
        for position in positions
    ]


class CompletionLogprobs:
    """Builds `logprobs` of the completions API, whose text_offset continues from chunk to chunk."""

    def __init__(self, count: int, names: TokenNames) -> None:
        self._count = count
        self._names = names
        self._offset = 0

    def take(self, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition | None]) -> dict[str, Any]:
        """Return the entries of the next tokens; null for a position without log-probabilities (a prompt's first)."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for token, position in zip(token_ids, positions):
            text = self._names.text(token)
            offsets.append(self._offset)
            self._offset += len(text)
            tokens.append(text)
            chosen = None if position is None else position.get(token)
            logprobs.append(None if chosen is None else finite(chosen.logprob))
            tops.append(None if position is None else self._top(token, position))
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}

    def _top(self, token: int, position: LogprobsOnePosition) -> dict[str, float]:
        """Return the chosen token, then the best candidates, as vLLM does."""
        candidates = ({token: position[token]} if token in position else {}) | dict(best(position, self._count))
        top: dict[str, float] = {}
        for each, logprob in candidates.items():
            top.setdefault(self._names.text(each), finite(logprob.logprob))
        return top


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate chunks of completion logprobs."""
    keys = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {key: [each for part in parts for each in part[key]] for key in keys}


def prompt_logprobs(positions: PromptLogprobs) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: per prompt token, token id -> logprob, rank and text; null for the first."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in position.items()
        }
        for position in positions
    ]
