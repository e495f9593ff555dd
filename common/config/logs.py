"""What is logged, how, and where to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def level_name(text: str) -> str:
    """A level's name in capitals. Raises ValueError."""
    name = {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(text.strip().upper(), text.strip().upper())
    if name not in LEVELS:
        raise ValueError(f"no log level; choose from {', '.join(LEVELS)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Logs of the server and the engine. A program that uses pagoda as a library keeps the logging it has set up."""

    configure_logging: bool = option(True, "Set up logging; without it, log records go where Python sends them.")
    log_level: str = option("INFO", "How much is logged: DEBUG, INFO, WARNING, ERROR or CRITICAL.", parse=level_name)
    log_prefix: str = option("", "Text in front of each log line.")
    log_config_file: str | None = option(None, "JSON for logging.config.dictConfig, in place of the usual logging.")

    def __post_init__(self) -> None:
        if self.log_config_file is not None and not self.configure_logging:
            raise ConfigError("--log-config-file", "logging is not set up at all; drop --no-configure-logging")
