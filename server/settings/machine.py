"""Checks that need no model: the backend, its devices and the libraries that settings name are available.

They run before a model's files are read and import no framework, because the engine process waits for them.
"""

from __future__ import annotations

from typing import Final

from pagoda.backends.registry import check_moves, choose_backend, parallel_sizes
from pagoda.common.backend import ParallelSizes
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.structured_output.grammar import is_installed, not_installed
from pagoda.common.errors import ConfigError

_STRUCTURED_OUTPUTS: Final = "--structured-outputs-config"


def check_machine(config: EngineConfig) -> tuple[str, ParallelSizes]:
    """Return the backend and how it distributes a model. Raise ConfigError for what this machine lacks."""
    backend = choose_backend(config.model.backend)
    sizes = parallel_sizes(backend, config.parallel)
    check_moves(backend, sleep_mode=config.model.enable_sleep_mode, cpu_offload_gb=config.cache.cpu_offload_gb)
    _check_grammar_library(config.structured_outputs)
    return backend, sizes


def _check_grammar_library(config: StructuredOutputsConfig) -> None:
    if config.is_engine_explicit and not is_installed(config.engine):
        raise ConfigError(_STRUCTURED_OUTPUTS, f"backend {config.engine}: {not_installed(config.engine)}")
