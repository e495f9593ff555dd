"""Token counts of one HTTP request, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import msgspec
from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.server.http.fields.base import RequestBody, hint
from pagoda.server.http.fields.logprobs import TokenNames
from pagoda.server.outputs import RequestOutput


class StreamOptions(RequestBody):
    """What a stream reports besides its text."""

    include_usage: bool | None = Field(False)
    continuous_usage_stats: bool | None = Field(False)
    include_obfuscation: Any = hint(why="streams are not padded")


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Refuse stream_options without a stream, and running counts without a final one."""
    if options is None:
        return
    if not stream:
        raise RequestError("stream_options", "stream_options are only allowed when stream is true")
    if options.continuous_usage_stats and not options.include_usage:
        raise RequestError("stream_options", "continuous_usage_stats needs include_usage")


class Usage:
    """Counts prompt tokens once per prompt and generated tokens of every choice."""

    __slots__ = ("_cached", "_completion", "_details", "_prompt", "_reasoning")

    def __init__(self, *, details: bool) -> None:
        self._details = details
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completion = 0
        self._reasoning: int | None = None

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in what an output (a delta) added."""
        self._prompt[prompt_index] = len(output.prompt_token_ids or ())
        self._cached[prompt_index] = output.num_cached_tokens or 0
        for completion in output.outputs:
            self._completion += len(completion.token_ids)

    def count_reasoning(self, tokens: int | None) -> None:
        """Tokens of an answer that were thinking; None: nobody looked for any."""
        if tokens is not None:
            self._reasoning = (self._reasoning or 0) + tokens

    def count_dropped(self, tokens: int) -> None:
        """Tokens that were generated and are not shown."""
        self._completion += tokens

    def forget_generated(self) -> None:
        """Report prompts only: nothing that was generated is shown."""
        self._completion = 0

    def as_dict(self) -> dict[str, Any]:
        """`usage` as it goes over the wire."""
        prompt = sum(self._prompt.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._completion,
            "completion_tokens": self._completion,
        }
        if self._details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached.values())}
        if self._reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoning}
        return usage


# What all answers to completion requests begin with, and the usage that they report.

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
class ResponseMeta:
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
