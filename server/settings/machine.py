"""Checks that need no model: the backend, its devices and the libraries that settings name are available.

They run before a model's files are read, and import no framework, because the engine's process waits for them.
"""

from __future__ import annotations

from typing import Final

from pagoda.backends.registry import check_moves, choose_backend, parallel_sizes
from pagoda.common.backend import ParallelSizes
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.structured_output.grammar import is_installed, not_installed
from pagoda.common.errors import ConfigError

_GRAMMARS: Final = "--structured-outputs-config"


def check_machine(config: EngineConfig) -> tuple[str, ParallelSizes]:
    """Return the backend and how it distributes a model. Raises ConfigError for what this machine lacks."""
    backend = choose_backend(config.model.backend)
    spread_over = parallel_sizes(backend, config.parallel)
    check_moves(backend, sleep_mode=config.model.enable_sleep_mode, cpu_offload_gb=config.cache.cpu_offload_gb)
    _check_grammars(config.structured_outputs)
    return backend, spread_over


def _check_grammars(config: StructuredOutputsConfig) -> None:
    """Raise ConfigError if the settings name a grammar library that is not installed."""
    if config.is_engine_stated and not is_installed(config.engine):
        raise ConfigError(_GRAMMARS, f"backend {config.engine}: {not_installed(config.engine)}")
