"""Checks that need no model: the backend, its devices and the libraries that settings name are available.

They run before a model's files are read, and import no framework, because the engine's process waits for them.
"""

from __future__ import annotations

from typing import Final

from pagoda.backends.registry import check_moves, choose_backend, spread
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.structured_output.grammar import is_installed, not_installed
from pagoda.common.errors import ConfigError

_GRAMMARS: Final = "--structured-outputs-config"


def check_machine(config: EngineConfig) -> tuple[str, dict[str, int]]:
    """Return the backend and the device arguments of its `create`. Raises ConfigError for what this machine lacks."""
    backend = choose_backend(config.model.backend)
    spread_over = spread(backend, config.parallel)
    moves_of(config, backend)
    _check_grammars(config.structured_outputs)
    return backend, spread_over


def moves_of(config: EngineConfig, backend: str) -> dict[str, bool]:
    """Return the backend's arguments for sleep mode and offloading. Raises ConfigError if it supports neither."""
    return check_moves(backend, sleep_mode=config.model.enable_sleep_mode, cpu_offload_gb=config.cache.cpu_offload_gb)


def _check_grammars(config: StructuredOutputsConfig) -> None:
    """Raise ConfigError if the settings name a grammar library that is not installed."""
    if config.is_engine_stated and not is_installed(config.engine):
        raise ConfigError(_GRAMMARS, f"backend {config.engine}: {not_installed(config.engine)}")
