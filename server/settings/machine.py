"""What a machine can do with any model: the backend, its devices, and the libraries that were asked for.

Asked before a model's files are; imports no framework, and little else, because the engine's process waits for it.
"""

from __future__ import annotations

from typing import Final

from pagoda.backends.registry import check_moves, choose_backend, spread
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.structured_outputs import StructuredOutputsConfig
from pagoda.common.errors import ConfigError
from pagoda.common.structured.refusal import is_installed, not_installed

_GRAMMARS: Final = "--structured-outputs-config"


def check_machine(config: EngineConfig) -> tuple[str, dict[str, int]]:
    """The backend, and what its `create` is told about devices. Raises ConfigError for what cannot be had here."""
    backend = choose_backend(config.model.backend)
    spread_over = spread(backend, config.parallel)
    moves_of(config, backend)
    _check_grammars(config.structured_outputs)
    return backend, spread_over


def moves_of(config: EngineConfig, backend: str) -> dict[str, bool]:
    """What the backend is told about memory that goes and comes back. Raises ConfigError for one that cannot do it."""
    return check_moves(backend, sleep_mode=config.model.enable_sleep_mode, cpu_offload_gb=config.cache.cpu_offload_gb)


def _check_grammars(config: StructuredOutputsConfig) -> None:
    """Raises ConfigError when the library that is named is not installed; unnamed, requests that need it fail."""
    if config.is_engine_stated and not is_installed(config.engine):
        raise ConfigError(_GRAMMARS, f"backend {config.engine}: {not_installed(config.engine)}")
