"""What may be asked about sleep, before an engine is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pagoda.common.config.model import ModelConfig
from pagoda.common.engine.sleep import LEVELS, TAGS
from pagoda.common.errors import ConfigError, RequestError

MODES: Final = ("abort", "wait")
"""What becomes of requests under way: they end at once, or the engine finishes them first."""


def check_sleep(config: ModelConfig, level: int, mode: str) -> None:
    """Raises RequestError for a level or mode that there is not, ConfigError for an engine that cannot sleep."""
    _check_enabled(config)
    if level not in LEVELS:
        raise RequestError("level", f"level {level} is not 1 (weights kept in host memory) or 2 (nothing kept)")
    if mode not in MODES:
        raise RequestError("mode", f"mode {mode[:50]} is not {' or '.join(MODES)}: the KV of requests is not kept")


def check_wake_up(config: ModelConfig, tags: Iterable[str] | None) -> tuple[str, ...]:
    """The parts to wake up, all where none is named. Raises as check_sleep does."""
    _check_enabled(config)
    named = tuple(tags or TAGS)
    for tag in named:
        if tag not in TAGS:
            raise RequestError("tags", f"tag {tag[:50]} is not {' or '.join(TAGS)}")
    return named


def _check_enabled(config: ModelConfig) -> None:
    if not config.enable_sleep_mode:
        raise ConfigError("--enable-sleep-mode", "the engine cannot sleep; start it with this flag")
