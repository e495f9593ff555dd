"""What all answers to completion requests begin with, and the usage that they report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import msgspec

from pagoda.server.protocol.logprobs import TokenNames
from pagoda.server.protocol.usage import StreamOptions, Usage

_encode: Final = msgspec.json.Encoder().encode
_MARK: Final = "\ufdd0"
"""Stands for the text in a frame. No other string of one is this character alone, whatever ids clients choose."""

_PLAIN: Final = " !#$&'()*+,/:;=?@[]~"
"""What an id may have in a header beside letters, digits and _.- ; the rest is escaped as in a URL."""


REQUEST_ID_HEADER: Final = "x-request-id"


def id_header(name: str) -> dict[str, str]:
    """The header that names an answer, whatever characters its client chose."""
    return {REQUEST_ID_HEADER: quote(name, safe=_PLAIN, errors="replace")}


class TextEvent:
    """Events that differ in one text only: what is around it is encoded once. Most tokens of most streams are such."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        parts = _encode(chunk(_MARK)).split(_encode(_MARK))
        self._before, self._after = b"data: " + parts[0], parts[-1] + b"\n\n"

    def __call__(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + _encode(text) + self._after


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """One answer's identity. `force_usage`: report usage at the end of a stream even when not asked."""

    id: str
    created: int
    model: str
    usage: Usage
    names: TokenNames
    stream_options: StreamOptions | None = None
    force_usage: bool = False

    def frame(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The object around choices."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def whole(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer that is not streamed: the frame, what only other servers fill in as null, and the usage."""
        unfilled = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
        usage = {"prompt_tokens_details": None} | self.usage.as_dict()
        return self.frame(kind, choices) | unfilled | {"usage": usage}

    def running_usage(self) -> dict[str, Any]:
        """`usage` of a chunk: the counts so far when asked for them, null when only the last chunk has them."""
        if not self._reports_usage:
            return {}
        return {"usage": self.usage.as_dict() if self.has_running_usage else None}

    @property
    def has_running_usage(self) -> bool:
        """Whether each chunk counts."""
        options = self.stream_options
        return self._reports_usage and options is not None and bool(options.continuous_usage_stats)

    def usage_chunk(self, kind: str) -> dict[str, Any] | None:
        """The last chunk of a stream, without choices; None when usage is not reported."""
        return self.frame(kind, []) | {"usage": self.usage.as_dict()} if self._reports_usage else None

    @property
    def _reports_usage(self) -> bool:
        return self.force_usage or bool(self.stream_options is not None and self.stream_options.include_usage)
