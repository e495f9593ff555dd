"""Logs: one line per record, whatever a client managed to put into it, and the periodic line about the engine.

Knows the logging module. Does not know what is logged, nor where the figures come from.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Final, TextIO

from pagoda.common.engine.messages import EngineStats

ROOT: Final = "pagoda"

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def one_line(text: str) -> str:
    """The text with control characters written as escapes, so that it cannot forge a second log line."""
    return text.translate(_ESCAPES)


def shortened(text: str, limit: int | None) -> str:
    """At most `limit` characters of the text, an ellipsis for the rest; None: all of it."""
    return text if limit is None or len(text) <= limit else f"{text[:limit]}..."


class LineFormatter(logging.Formatter):
    """`LEVEL month-day time [module:line] message`; the lines of a traceback follow indented."""

    def __init__(self) -> None:
        super().__init__(
            "%(levelname)s %(asctime)s [%(module)s:%(lineno)d] %(message)s", datefmt="%m-%d %H:%M:%S", validate=True
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The message on one line."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - the name is logging's
        """The traceback, indented."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"    {one_line(line)}" for line in text.splitlines())


def setup_logging(level: str = "INFO", stream: TextIO | None = None) -> logging.Logger:
    """Give the project's logger one handler on `stream` (default: stderr). Calling it again replaces the handler."""
    logger = logging.getLogger(ROOT)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(LineFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters at one moment. `time` in seconds of any monotonic clock."""

    time: float
    prompt_tokens: float
    generation_tokens: float


def stats_line(before: Totals, now: Totals, stats: EngineStats) -> str | None:
    """One line about the time between two moments; None when nothing ran in it and nothing waits."""
    seconds = max(now.time - before.time, 1e-9)
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generation = (now.generation_tokens - before.generation_tokens) / seconds
    if not (prompt or generation or stats.running or stats.waiting):
        return None
    hit_rate = 100.0 * stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
    return (
        f"Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: {generation:.1f} tokens/s, "
        f"Running: {stats.running} reqs, Waiting: {stats.waiting} reqs, "
        f"KV cache usage: {100.0 * stats.kv_usage:.1f}%, Prefix cache hit rate: {hit_rate:.1f}%"
    )
