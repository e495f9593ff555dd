"""Log-probabilities in the shapes of the chat API, the completions API, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import Logprob, LogprobsOnePosition, PromptLogprobs

LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenNames:
    """How tokens are written: as text, or as token_id:N when asked for or when there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        """The token as a string."""
        if self._tokenizer is None or self._as_ids:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def raw(self, token: int) -> list[int]:
        """The token's own bytes, which its text does not show when it is an id, or part of a character."""
        if self._tokenizer is None:
            return list(self.text(token).encode())
        return list(self._tokenizer.token_bytes(token))


def finite(value: float) -> float:
    """A log-probability that JSON can carry."""
    return max(value, LOWEST)


def best(position: LogprobsOnePosition, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely candidates of a position, best first; -1: all that are there."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if count < 0 else ranked[:count]


def chat_logprobs(positions: Sequence[LogprobsOnePosition], count: int, names: TokenNames) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`: one per generated token, each with its `count` best candidates."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": finite(logprob.logprob), "bytes": names.raw(token)}

    return [
        entry(*next(iter(position.items()))) | {"top_logprobs": [entry(*item) for item in best(position, count)]}
        for position in positions
    ]


class CompletionLogprobs:
    """Builds `logprobs` of the completions API, of which text_offset runs on from chunk to chunk."""

    def __init__(self, count: int, names: TokenNames) -> None:
        self._count = count
        self._names = names
        self._offset = 0

    def take(self, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition | None]) -> dict[str, Any]:
        """The next tokens. A position without probabilities (the first of a prompt) has null."""
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
        """As in vLLM the chosen token itself, then the best candidates."""
        shown = ({token: position[token]} if token in position else {}) | dict(best(position, self._count))
        top: dict[str, float] = {}
        for each, logprob in shown.items():
            top.setdefault(self._names.text(each), finite(logprob.logprob))
        return top


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Chunks of completion logprobs as one."""
    keys = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {key: [each for part in parts for each in part[key]] for key in keys}


def prompt_logprobs(positions: PromptLogprobs) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: token id -> logprob, rank and text, per prompt token; null for the first."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in position.items()
        }
        for position in positions
    ]
