"""Backend-specific arguments of `create`, with warnings for settings that the backend ignores."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.errors import ConfigError
from pagoda.server.settings.machine import memory_options
from pagoda.server.settings.resolve import Resolved

logger = logging.getLogger(__name__)


def backend_options(resolved: Resolved) -> dict[str, Any]:
    """Return the keywords of the backend's `create`. Raise ConfigError for settings that it does not support."""
    config, backend = resolved.config, resolved.backend
    quantization = config.model.runtime_quantization
    _check_memory_utilization(config, backend)
    kernel = config.attention.kernel(backend)
    return {
        **resolved.parallel_sizes,
        **_compilation_options(config.compilation, backend, resolved.limits.max_num_seqs),
        **({"attention": kernel} if backend == "torch_cuda" else {}),
        **memory_options(config, backend),
        **({} if quantization is None else {"quantization": quantization}),
        **({"prompt_embeds": True} if config.model.enable_prompt_embeds and backend == "jax_tpu" else {}),
    }


def _check_memory_utilization(config: EngineConfig, backend: str) -> None:
    fraction = config.cache.gpu_memory_utilization
    if backend == "reference" and fraction != CacheConfig().gpu_memory_utilization:
        logger.warning("--gpu-memory-utilization has no effect on %s; use --kv-cache-memory-bytes", backend)


def _compilation_options(config: CompilationConfig, backend: str, max_num_seqs: int) -> dict[str, Any]:
    for key in config.ignored_keys:
        logger.warning("--compilation-config: %s has no effect: torch.compile is not used", key)
    if backend != "torch_cuda" and config.graph_flags:
        logger.warning("%s: no effect on %s, which captures no CUDA graphs", " and ".join(config.graph_flags), backend)
    if backend == "torch_cuda" and (too_large := [size for size in config.capture_sizes if size > max_num_seqs]):
        sizes = ", ".join(map(str, too_large))
        logger.warning("--cudagraph-capture-sizes: ignoring %s, above --max-num-seqs %d", sizes, max_num_seqs)
    return program_options(config, backend) | ({"compilation": config} if backend == "torch_cuda" else {})


def program_options(config: CompilationConfig, backend: str) -> dict[str, Any]:
    """Return jax_tpu's options for compiled programs; empty for other backends.

    Raise ConfigError if another backend is given --compiled-bundle.
    """
    bundle, cache = config.compiled_bundle, config.xla_cache_path
    if backend != "jax_tpu":
        if bundle is not None:
            raise ConfigError("--compiled-bundle", f"not supported by {backend}; drop it, or use --backend jax_tpu")
        if cache or config.xla_check_recompilation:
            logger.warning("--xla-cache-path and --xla-check-recompilation have no effect on %s", backend)
        return {}
    folder = _user_cache() / "xla" if cache is None else Path(cache).expanduser() if cache else None
    return {
        "bundle": None if bundle is None else Path(bundle),
        "compile_cache": folder,
        "strict": config.xla_check_recompilation,
    }


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda"
