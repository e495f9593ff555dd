"""Token counts of one HTTP request, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.server.outputs import RequestOutput
from pagoda.server.protocol.base import Body, hint


class StreamOptions(Body):
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
