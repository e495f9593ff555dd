"""What all answers to completion requests begin with, and the usage that they report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.server.protocol.logprobs import TokenNames
from pagoda.server.protocol.usage import StreamOptions, Usage


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

    def running_usage(self) -> dict[str, Any]:
        """`usage` of a chunk: the counts so far when asked for them, null when only the last chunk has them."""
        if not self._reports_usage:
            return {}
        options = self.stream_options
        return {"usage": self.usage.as_dict() if options is not None and options.continuous_usage_stats else None}

    def usage_chunk(self, kind: str) -> dict[str, Any] | None:
        """The last chunk of a stream, without choices; None when usage is not reported."""
        return self.frame(kind, []) | {"usage": self.usage.as_dict()} if self._reports_usage else None

    @property
    def _reports_usage(self) -> bool:
        return self.force_usage or bool(self.stream_options is not None and self.stream_options.include_usage)
