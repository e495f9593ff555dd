"""The text of one answer as it grows: stream out what is safe, stop at a stop string.

Knows one sequence's tokens and stop strings; knows nothing of the engine. Streamed text and whole text are the same by
construction, however the tokens were chunked: whole characters only, and nothing that may still begin a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.common.text.text_stream import open_stream
from pagoda.common.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental text of one answer.

    `stop`: the answer ends before the stop string that is complete first (of several complete at the same character,
    the longest), or after it with `include_stop_str_in_output`; one that is complete within the first `min_tokens`
    tokens does not count. Bytes at the very end that are only part of a character are dropped.
    `stop_hit` is the stop string that ended the text; `num_tokens` counts the tokens taken, up to the one that did.
    """

    __slots__ = ("_include", "_min_tokens", "_parts", "_pending", "_stop", "_stream", "num_tokens", "stop_hit")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = open_stream(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._parts: list[str] = []  # emitted
        self._pending = ""  # decoded but not emitted: it may begin a stop string, so every match lies within it
        self.num_tokens = 0
        self.stop_hit: str | None = None

    @property
    def text(self) -> str:
        """Everything emitted so far; after the end, the whole text."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """The text that is safe to emit now. `finished`: no more tokens come, so nothing is held back."""
        if self.stop_hit is not None:
            return ""
        if not self._stop:
            self.num_tokens += len(token_ids)
            return self._emit(self._stream.push(token_ids))
        for token in token_ids:
            if self._completes_stop(token):
                return self._flush(len(self._pending))
        return self._flush(len(self._pending) if finished else self._safe_length())

    def _completes_stop(self, token: int) -> bool:
        """Take one token; True when it completed a stop string, beyond which the pending text is then cut off."""
        searched = len(self._pending)
        self._pending += self._stream.push((token,))
        self.num_tokens += 1
        if len(self._pending) == searched or self.num_tokens <= self._min_tokens:
            return False
        matches: list[tuple[int, int, str]] = []
        for stop in self._stop:
            start = self._pending.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return False
        end, start, self.stop_hit = min(matches)
        self._pending = self._pending[: end if self._include else start]
        return True

    def _safe_length(self) -> int:
        """Length of the pending text before its longest suffix that begins a stop string."""
        pending = self._pending
        safe = len(pending)
        for stop in self._stop:
            start = pending.find(stop[0], max(0, len(pending) - len(stop) + 1), safe)
            while start >= 0 and not stop.startswith(pending[start:]):
                start = pending.find(stop[0], start + 1, safe)
            if start >= 0:
                safe = start
        return safe

    def _flush(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return self._emit(text)

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
