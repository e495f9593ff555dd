"""From settled settings to a running pooling engine: backend -> weights -> warm-up. There is no KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from pagoda.backends.registry import load_pooling
from pagoda.common.backend import PoolingBackend, Weight
from pagoda.common.engine.pooling_core import PoolingCore
from pagoda.server.settings.backend_options import kept_programs
from pagoda.server.settings.resolve import Resolved
from pagoda.server.wire import EngineInfo

Phase = Callable[[str], AbstractContextManager[None]]
"""Measures a phase of the start."""


def assemble_pooling(resolved: Resolved, weights: Iterable[Weight], phase: Phase) -> tuple[PoolingCore, PoolingBackend]:
    """The warm engine and its backend, which is closed by whoever ends the engine."""
    assert resolved.pooling is not None, "the model pools"
    backend = _create(resolved)
    try:
        with phase("load weights"):
            backend.load(weights)
        with phase("warm up"):
            backend.warmup()
    except BaseException:
        backend.close()
        raise
    return PoolingCore(backend, backend.limits, resolved.pooling.tasks), backend


def check_pooling_engine(resolved: Resolved) -> None:
    """Raises ConfigError where `assemble_pooling` would before it reads weights."""
    _create(resolved).close()


def _create(resolved: Resolved) -> PoolingBackend:
    """The backend, without weights."""
    return load_pooling(resolved.backend).create(
        resolved.spec,
        limits=resolved.limits,
        dtype=resolved.dtype,
        **resolved.spread,
        **kept_programs(resolved.config.compilation, resolved.backend),
        **_memory(resolved),
    )


def _memory(resolved: Resolved) -> dict[str, Any]:
    """What the backend that plans its memory is told of it."""
    if resolved.backend != "jax_tpu":
        return {}
    config = resolved.config
    stated = config.scheduler.max_num_batched_tokens is not None
    return {"memory_share": config.cache.gpu_memory_utilization, "stated": stated}


def pooling_engine_info(
    resolved: Resolved, backend: PoolingBackend, phases: tuple[tuple[str, float], ...]
) -> EngineInfo:
    """What is known of the engine."""
    return EngineInfo(
        names=resolved.config.model.names,
        limits=backend.limits,
        vocab_size=resolved.spec.vocab,
        eos_token_ids=resolved.generation.eos_token_ids,
        sampling_defaults={},
        backend=backend.capabilities.name,
        device=backend.capabilities.device,
        dtype=resolved.dtype,
        num_blocks=0,
        memory=f"weights {backend.num_bytes / (1 << 30):.2f} GiB",
        phases=phases,
        pooling=resolved.pooling,
    )
