"""Backend-specific arguments of `create`, with warnings for settings that the backend ignores."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pagoda.common.backend import BackendOptions, ProgramOptions
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.engine.sampling import SamplerOptions
from pagoda.common.errors import ConfigError
from pagoda.server.settings.resolve import Resolved

logger = logging.getLogger(__name__)


def backend_options(resolved: Resolved, sampling: SamplerOptions) -> BackendOptions:
    """Return the options of the backend's `create`. Raise ConfigError for settings that it does not support."""
    config, backend = resolved.config, resolved.backend
    _warn_memory_utilization(config, backend)
    _warn_compilation(config.compilation, backend, resolved.limits.max_num_seqs)
    return BackendOptions(
        spec=resolved.spec,
        limits=resolved.limits,
        layout=resolved.layout,
        cache=config.cache,
        dtype=resolved.dtype,
        sampling=sampling,
        parallel=resolved.parallel_sizes,
        programs=program_options(config.compilation, backend),
        compilation=config.compilation,
        quantization=config.model.runtime_quantization,
        attention=config.attention.kernel(backend),
        sleep_mode=config.model.enable_sleep_mode,
        prompt_embeds=config.model.enable_prompt_embeds,
    )


def _warn_memory_utilization(config: EngineConfig, backend: str) -> None:
    fraction = config.cache.gpu_memory_utilization
    if backend == "reference" and fraction != CacheConfig().gpu_memory_utilization:
        logger.warning("--gpu-memory-utilization has no effect on %s; use --kv-cache-memory-bytes", backend)


def _warn_compilation(config: CompilationConfig, backend: str, max_num_seqs: int) -> None:
    for key in config.ignored_keys:
        logger.warning("--compilation-config: %s has no effect: torch.compile is not used", key)
    if backend != "torch_cuda" and config.graph_flags:
        logger.warning("%s: no effect on %s, which captures no CUDA graphs", " and ".join(config.graph_flags), backend)
    if backend == "torch_cuda" and (too_large := [size for size in config.capture_sizes if size > max_num_seqs]):
        sizes = ", ".join(map(str, too_large))
        logger.warning("--cudagraph-capture-sizes: ignoring %s, above --max-num-seqs %d", sizes, max_num_seqs)


def program_options(config: CompilationConfig, backend: str) -> ProgramOptions:
    """Return where compiled programs come from and go to; defaults for backends other than jax_tpu.

    Raise ConfigError if another backend is given --compiled-bundle.
    """
    bundle, cache = config.compiled_bundle, config.xla_cache_path
    if backend != "jax_tpu":
        if bundle is not None:
            raise ConfigError("--compiled-bundle", f"not supported by {backend}; drop it, or use --backend jax_tpu")
        if cache or config.xla_check_recompilation:
            logger.warning("--xla-cache-path and --xla-check-recompilation have no effect on %s", backend)
        return ProgramOptions()
    folder = _user_cache() / "xla" if cache is None else Path(cache).expanduser() if cache else None
    return ProgramOptions(None if bundle is None else Path(bundle), folder, config.xla_check_recompilation)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda"
