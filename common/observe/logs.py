"""Logs: one line per record, whatever a client managed to put into it, and the periodic line about the engine.

Knows the logging module. Does not know what is logged, nor where the figures come from.
"""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from pagoda.common.config.groups.observability import LoggingConfig
from pagoda.common.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.common.engine.messages import EngineStats

ROOT: Final = "pagoda"
FOREIGN_ROOT: Final = "vllm"
"""A configuration file written for that logger is meant for ours."""

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
    """`LEVEL month-day time [module:line] message`; the lines of a traceback follow indented. `prefix`: before each."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__("%(levelname)s %(asctime)s [%(module)s:%(lineno)d] %(message)s", datefmt="%m-%d %H:%M:%S")
        self._prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The message on one line."""
        return one_line(self._prefix + super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - the name is logging's
        """The traceback, indented."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(one_line(f"{self._prefix}    {line}") for line in text.splitlines())


def configure(config: LoggingConfig, also: Sequence[str] = ()) -> None:
    """Set up logging as the configuration says, for the loggers `also` besides our own. Raises ConfigError."""
    if not config.configure_logging:
        return
    if config.log_config_file is not None:
        _configure_from(config.log_config_file)
        return
    handlers = setup_logging(config.log_level, prefix=config.log_prefix).handlers
    for name in also:
        logging.getLogger(name).handlers[:] = handlers


def configure_unless_done(config: LoggingConfig) -> None:
    """Set up logging, unless the program around has done so. Raises ConfigError."""
    if config.log_config_file is not None or not logging.getLogger(ROOT).hasHandlers():
        configure(config)


def _configure_from(path: str) -> None:
    flag = "--log-config-file"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(flag, f"{path}: {error.strerror or error}; give a JSON file") from None
    except ValueError as error:
        raise ConfigError(flag, f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(flag, f"{path}: a JSON object for logging.config.dictConfig is needed")
    try:
        logging.config.dictConfig(_ours({"version": 1, "disable_existing_loggers": False} | found))
    except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise ConfigError(flag, f"{path}: {error}{cause}") from None


def _ours(found: dict[str, Any]) -> dict[str, Any]:
    """The configuration with our logger in it, should it name only the one it was written for."""
    loggers = found.get("loggers")
    if not isinstance(loggers, dict) or ROOT in loggers or FOREIGN_ROOT not in loggers:
        return found
    return found | {"loggers": loggers | {ROOT: loggers[FOREIGN_ROOT]}}


def setup_logging(level: str = "INFO", stream: TextIO | None = None, prefix: str = "") -> logging.Logger:
    """Give the project's logger one handler on `stream` (default: stderr). Calling it again replaces the handler."""
    logger = logging.getLogger(ROOT)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(LineFormatter(prefix))
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
