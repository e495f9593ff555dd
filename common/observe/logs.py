"""Logging set-up: one escaped line per record, and the periodic statistics line."""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from pagoda.common.config.groups.observability import LoggingConfig
from pagoda.common.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.common.engine.messages import DraftStats, EngineStats

ROOT: Final = "pagoda"
FOREIGN_ROOT: Final = "vllm"
"""vLLM's logger: its entry in a --log-config-file also configures ours."""

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def one_line(text: str) -> str:
    """Escape control characters, so that the text cannot forge a second log line."""
    return text.translate(_ESCAPES)


def shortened(text: str, limit: int | None) -> str:
    """Truncate the text to `limit` characters plus an ellipsis; None: no limit."""
    return text if limit is None or len(text) <= limit else f"{text[:limit]}..."


class LineFormatter(logging.Formatter):
    """`LEVEL month-day time [module:line] message`; the lines of a traceback follow indented. `prefix`: before each."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__("%(levelname)s %(asctime)s [%(module)s:%(lineno)d] %(message)s", datefmt="%m-%d %H:%M:%S")
        self._prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return one_line(self._prefix + super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - the name is logging's
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(one_line(f"{self._prefix}    {line}") for line in text.splitlines())


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC, ISO 8601), level, logger, line, message, process; `exception`: traceback.

    `prefix`, if any, is a field of its own.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = {"prefix": prefix} if prefix else {}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "line": f"{record.module}:{record.lineno}",
            "message": record.getMessage(),
            "process": record.process,
            **self._prefix,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


FORMATTERS: Final[Mapping[str, type[LineFormatter | JsonFormatter]]] = {"text": LineFormatter, "json": JsonFormatter}
"""Values of --log-format."""


def configure(config: LoggingConfig, also: Sequence[str] = ()) -> None:
    """Set up logging for our logger and the loggers in `also`. Raises ConfigError."""
    if not config.configure_logging:
        return
    if config.log_config_file is not None:
        _configure_from(config.log_config_file)
        return
    handlers = setup_logging(config.log_level, prefix=config.log_prefix, form=config.log_format).handlers
    for name in also:
        logging.getLogger(name).handlers[:] = handlers


def configure_unless_done(config: LoggingConfig) -> None:
    """Set up logging unless the embedding program already has. Raises ConfigError."""
    if config.log_config_file is not None or not logging.getLogger(ROOT).hasHandlers():
        configure(config)


def _configure_from(path: str) -> None:
    flag = "--log-config-file"
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(flag, f"{path}: {error.strerror or error}; give a JSON file") from None
    except ValueError as error:
        raise ConfigError(flag, f"{path}: not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(flag, f"{path}: a JSON object for logging.config.dictConfig is needed")
    try:
        logging.config.dictConfig(_with_root({"version": 1, "disable_existing_loggers": False} | settings))
    except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise ConfigError(flag, f"{path}: {error}{cause}") from None


def _with_root(settings: dict[str, Any]) -> dict[str, Any]:
    """Copy the entry of vLLM's logger to ours, unless ours has an entry."""
    loggers = settings.get("loggers")
    if not isinstance(loggers, dict) or ROOT in loggers or FOREIGN_ROOT not in loggers:
        return settings
    return settings | {"loggers": loggers | {ROOT: loggers[FOREIGN_ROOT]}}


def setup_logging(
    level: str = "INFO", stream: TextIO | None = None, prefix: str = "", form: str = "text"
) -> logging.Logger:
    """Give the project's logger one handler on `stream` (default: stderr). Calling it again replaces the handler.

    `form`: one of FORMATTERS.
    """
    logger = logging.getLogger(ROOT)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(FORMATTERS[form](prefix))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


@dataclass(frozen=True, slots=True)
class Totals:
    """Token counters at one moment."""

    time: float  # Monotonic seconds.
    prompt_tokens: float
    generation_tokens: float
    drafts: DraftStats | None = None  # None: there is no speculative decoding.


def stats_line(before: Totals, now: Totals, stats: EngineStats) -> str | None:
    """Return the statistics line of an interval; None if nothing ran in it and nothing is queued."""
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
        + _drafts_of(before.drafts, now.drafts, seconds)
    )


def _drafts_of(before: DraftStats | None, now: DraftStats | None, seconds: float) -> str:
    """Return the part of the line on speculative decoding; empty without it."""
    if now is None:
        return ""
    drafts = now if before is None else now.since(before)
    if not drafts.tokens:
        return ", Drafts: none"
    by_position = ", ".join(f"{count / drafts.drafts:.2f}" for count in drafts.accepted)
    return (
        f", Mean acceptance length: {drafts.mean_length:.2f}, Drafted: {drafts.tokens / seconds:.1f} tokens/s, "
        f"Accepted: {drafts.num_accepted / seconds:.1f} tokens/s "
        f"({100.0 * drafts.num_accepted / drafts.tokens:.1f}%), by position: {by_position}"
    )
