"""Incremental detokenisation of one sequence, with stop strings.

Streamed and whole text are equal however the tokens were chunked: only whole characters are emitted, and no text that
may be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final, Protocol

from pagoda.common.text.token_bytes import TokenBytes
from pagoda.common.text.tokenizer import Tokenizer

CONTEXT_TOKENS: Final = 8
"""Prompt tokens that a WindowStream decodes as context, so that the first piece keeps its leading space."""
MAX_WINDOW: Final = 64
"""Tokens a WindowStream buffers for an incomplete character; longer than any byte run that can still complete one."""
REPLACEMENT: Final = "\ufffd"

_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental text of one sequence.

    `stop`: the text ends before the first complete stop string (the longest of those that complete at the same
    character), or after it with `include_stop_str_in_output`. A stop string completed within the first `min_tokens`
    tokens is ignored. An incomplete character at the very end is dropped.
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
        self._parts: list[str] = []  # pieces of text that were emitted
        self._pending = ""  # decoded but not emitted, as it may begin a stop string; every match lies within it
        self.num_tokens = 0  # tokens consumed, up to the one that completed a stop string
        self.stop_hit: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        """All text emitted so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """Return the text that can be emitted now. `finished`: these are the last tokens, so emit all pending text."""
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
        """Consume one token. If it completes a stop string, truncate the pending text there and return True."""
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
        """Length of the pending text before its longest suffix that is a prefix of a stop string."""
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
        text = self._pending[:length]
        self._pending = self._pending[length:]
        return self._emit(text)

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class TextStream(Protocol):
    """Token ids to text, piece by piece; the bytes of an incomplete character are buffered until it is whole."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text these tokens complete."""
        ...

    def peek(self, token_id: int) -> str:
        """Return the text that a token would complete if it were the next."""
        ...

    def finish(self) -> str:
        """Return what stands for an incomplete character at the end."""
        ...


class TokenPieces:
    """The text that each token adds to a sequence, as log-probabilities show it.

    A character of several tokens belongs to the token that completes it; those before it add "". Hence the tokens join
    to the text, special tokens and an incomplete character at the very end apart.
    """

    __slots__ = ("_special", "_stream", "_text_of")

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """`before`: the tokens before the sequence, such as an answer's prompt."""
        self._stream = open_stream(tokenizer, before)
        self._special = tokenizer.special_ids
        self._text_of = tokenizer.token_text

    def push(self, token_id: int) -> str:
        """Return what the next token adds."""
        return self._text_of(token_id) if token_id in self._special else self._stream.push((token_id,))

    def finish(self) -> str:
        """Return what stands for an incomplete character at the end, where the text shows one."""
        return self._stream.finish()

    def peek(self, token_id: int) -> str:
        """Return what a token would add if it were the next."""
        return self._text_of(token_id) if token_id in self._special else self._stream.peek(token_id)


def open_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> TextStream:
    """Return a stream for the text that follows a prompt; options as in `Tokenizer.decode`."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    table = tokenizer.byte_table
    if table is None:
        return WindowStream(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
    at_start = table.strip_first_space and all(token in skipped for token in prompt_token_ids)
    return ByteStream(table, skipped, at_start)


class ByteStream:
    """Concatenates the tokens' bytes and decodes them as UTF-8, invalid bytes as U+FFFD. Serves nearly all tokenizers.

    Fast path for the usual case of one token of whole characters after no incomplete one: a table lookup.
    """

    __slots__ = ("_at_start", "_decoder", "_incomplete", "_skipped", "_table", "_texts")

    def __init__(self, table: TokenBytes, skipped: frozenset[int], at_start: bool) -> None:
        self._table = table
        self._texts = table.texts
        self._skipped = skipped
        self._at_start = at_start  # the next byte is the first of the whole text; drop it if it is a space
        self._decoder = _Utf8Decoder("replace")
        self._incomplete = False  # the decoder has buffered part of a character

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text these tokens complete."""
        if len(token_ids) == 1 and not (self._incomplete or self._at_start):
            token = token_ids[0]
            if token in self._skipped:
                return ""
            text = self._texts[token]
            if text is not None:
                return text
        return self._decode(token_ids)

    def peek(self, token_id: int) -> str:
        """Return the text that a token would complete if it were the next."""
        if not (self._incomplete or self._at_start):
            text = self._texts[token_id]
            if text is not None:
                return text if token_id not in self._skipped else ""
        data = b"" if token_id in self._skipped else self._table[token_id]
        if self._at_start:
            data = data.removeprefix(b" ")
        return codecs.utf_8_decode(self._decoder.getstate()[0] + data, "replace", False)[0]

    def finish(self) -> str:
        """Return what stands for an incomplete character at the end."""
        return self._decoder.decode(b"", True)

    def _decode(self, token_ids: Sequence[int]) -> str:
        table = self._table
        skipped = self._skipped
        data = b"".join([table[token] for token in token_ids if token not in skipped])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        text = self._decoder.decode(data)
        self._incomplete = bool(self._decoder.getstate()[0])
        return text


class WindowStream:
    """Decodes a short window with and without the new token; the difference is the new text. Serves any tokenizer.

    Window tokens [0, read) are already emitted and serve as context until the next character is whole.
    """

    __slots__ = ("_read", "_skip", "_spaces", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip: bool, spaces: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._spaces = spaces
        visible = [token for token in prompt_token_ids if not (skip and token in tokenizer.special_ids)]
        self._window = visible[-CONTEXT_TOKENS:]
        self._read = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text these tokens complete."""
        return "".join([self._push(token) for token in token_ids])

    def peek(self, token_id: int) -> str:
        """Return the text that a token would complete if it were the next."""
        window = list(self._window)
        read = self._read
        text = self._push(token_id)
        self._window = window
        self._read = read
        return text

    def finish(self) -> str:
        """Return what stands for an incomplete character at the end."""
        return self._text(self._window)[len(self._text(self._window[: self._read])) :]

    def _push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        before = self._text(self._window[: self._read])
        after = self._text(self._window)
        unread = len(self._window) - self._read
        if unread < MAX_WINDOW and (len(after) <= len(before) or after.endswith(REPLACEMENT)):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip, self._spaces)
