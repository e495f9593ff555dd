"""What a backend is told that only some backends take. What has no effect where it is said is warned about."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.attention import AttentionConfig
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.errors import ConfigError
from pagoda.server.settings.machine import moves_of
from pagoda.server.settings.resolve import Resolved

logger = logging.getLogger(__name__)


def backend_options(resolved: Resolved) -> dict[str, Any]:
    """Keywords of the backend's `create`. Raises ConfigError for what it cannot do."""
    config, backend = resolved.config, resolved.backend
    made = config.model.quantized_here
    _warn_of_memory_share(config, backend)
    return {
        **resolved.spread,
        **_programs(config.compilation, backend, resolved.limits.max_num_seqs),
        **_attention(config.attention, backend),
        **moves_of(config, backend),
        **({} if made is None else {"quantization": made}),
        **({"prompt_embeds": True} if config.model.enable_prompt_embeds and backend == "jax_tpu" else {}),
    }


def _warn_of_memory_share(config: EngineConfig, backend: str) -> None:
    """A CPU shares its memory with the whole machine, so no share of it is taken."""
    share = config.cache.gpu_memory_utilization
    if backend == "reference" and share != CacheConfig().gpu_memory_utilization:
        logger.warning("--gpu-memory-utilization: %s takes no share of memory; see --kv-cache-memory-bytes", backend)


def _programs(config: CompilationConfig, backend: str, max_num_seqs: int) -> dict[str, Any]:
    """Where compiled programs come from and go to, or which steps are captured, for the backend that has such."""
    for key in config.without_effect:
        logger.warning("--compilation-config: %s has no effect: nothing goes through torch.compile", key)
    if backend != "torch_cuda" and config.about_graphs:
        logger.warning("%s: %s captures no CUDA graphs", " and ".join(config.about_graphs), backend)
    if backend == "torch_cuda" and (beyond := [size for size in config.capture_sizes if size > max_num_seqs]):
        sizes = " and ".join(map(str, beyond))
        logger.warning("--cudagraph-capture-sizes: no step has %s sequences; --max-num-seqs is %d", sizes, max_num_seqs)
    return kept_programs(config, backend) | ({"compilation": config} if backend == "torch_cuda" else {})


def kept_programs(config: CompilationConfig, backend: str) -> dict[str, Any]:
    """Where compiled programs come from and go to, for the backend that has such. Raises ConfigError."""
    bundle, kept = config.compiled_bundle, config.xla_cache_path
    if backend != "jax_tpu":
        if bundle is not None:
            raise ConfigError(
                "--compiled-bundle", f"{backend} compiles nothing ahead; drop it, or use --backend jax_tpu"
            )
        if kept or config.xla_check_recompilation:
            logger.warning("--xla-cache-path and --xla-check-recompilation: %s compiles nothing for XLA", backend)
        return {}
    folder = _user_cache() / "xla" if kept is None else Path(kept).expanduser() if kept else None
    return {
        "bundle": None if bundle is None else Path(bundle),
        "compile_cache": folder,
        "strict": config.xla_check_recompilation,
    }


def _attention(config: AttentionConfig, backend: str) -> dict[str, str]:
    """The attention kernel, for the backend that has several."""
    kernel = config.kernel(backend)
    return {"attention": kernel} if backend == "torch_cuda" else {}


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda"
