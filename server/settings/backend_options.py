"""What a backend is told that only some backends take. What has no effect where it is said is warned about."""

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
    """Return what the backend is created with. Raises ConfigError for what it does not support."""
    config, backend = resolved.config, resolved.backend
    _warn_of_memory_share(config, backend)
    _warn_of_graphs(config.compilation, backend, resolved.limits.max_num_seqs)
    return BackendOptions(
        spec=resolved.spec,
        limits=resolved.limits,
        layout=resolved.layout,
        cache=config.cache,
        dtype=resolved.dtype,
        sampling=sampling,
        parallel=resolved.spread,
        programs=program_options(config.compilation, backend),
        compilation=config.compilation,
        quantization=config.model.quantized_here,
        attention=config.attention.kernel(backend),
        sleep_mode=config.model.enable_sleep_mode,
        prompt_embeds=config.model.enable_prompt_embeds,
    )


def _warn_of_memory_share(config: EngineConfig, backend: str) -> None:
    """A CPU shares its memory with the whole machine, so no share of it is taken."""
    share = config.cache.gpu_memory_utilization
    if backend == "reference" and share != CacheConfig().gpu_memory_utilization:
        logger.warning("--gpu-memory-utilization: %s takes no share of memory; see --kv-cache-memory-bytes", backend)


def _warn_of_graphs(config: CompilationConfig, backend: str, max_num_seqs: int) -> None:
    """Warn of compilation settings without effect."""
    for key in config.without_effect:
        logger.warning("--compilation-config: %s has no effect: nothing goes through torch.compile", key)
    if backend != "torch_cuda" and config.about_graphs:
        logger.warning("%s: %s captures no CUDA graphs", " and ".join(config.about_graphs), backend)
    if backend == "torch_cuda" and (beyond := [size for size in config.capture_sizes if size > max_num_seqs]):
        sizes = " and ".join(map(str, beyond))
        logger.warning("--cudagraph-capture-sizes: no step has %s sequences; --max-num-seqs is %d", sizes, max_num_seqs)


def program_options(config: CompilationConfig, backend: str) -> ProgramOptions:
    """Return where compiled programs come from and go to. Raises ConfigError if the backend reads no bundle."""
    bundle, kept = config.compiled_bundle, config.xla_cache_path
    if backend != "jax_tpu":
        if bundle is not None:
            raise ConfigError(
                "--compiled-bundle", f"{backend} compiles nothing ahead; drop it, or use --backend jax_tpu"
            )
        if kept or config.xla_check_recompilation:
            logger.warning("--xla-cache-path and --xla-check-recompilation: %s compiles nothing for XLA", backend)
        return ProgramOptions()
    folder = _user_cache() / "xla" if kept is None else Path(kept).expanduser() if kept else None
    return ProgramOptions(None if bundle is None else Path(bundle), folder, config.xla_check_recompilation)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda"
