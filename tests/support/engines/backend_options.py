"""What tests create backends with: small defaults, and nested options by their own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagoda.common.backend import BackendOptions, ParallelSizes, PoolingOptions, ProgramOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import KvLayout, kv_layout
from pagoda.common.models.spec import ModelSpec


def make_options(
    spec: ModelSpec,
    *,
    limits: Limits,
    layout: KvLayout | None = None,
    cache: CacheConfig | None = None,
    dtype: str = "float32",
    tensor: int = 1,
    data: int = 1,
    strict: bool = False,
    bundle: Path | None = None,
    compile_cache: Path | None = None,
    **options: Any,
) -> BackendOptions:
    return BackendOptions(
        spec=spec,
        limits=limits,
        layout=layout or kv_layout(spec, limits.block_size),
        cache=cache or CacheConfig(),
        dtype=dtype,
        parallel=ParallelSizes(tensor, data),
        programs=ProgramOptions(bundle, compile_cache, strict),
        **options,
    )


def make_pooling_options(
    spec: ModelSpec,
    *,
    limits: Limits,
    dtype: str = "float32",
    tensor: int = 1,
    strict: bool = False,
    bundle: Path | None = None,
    compile_cache: Path | None = None,
    **options: Any,
) -> PoolingOptions:
    return PoolingOptions(
        spec=spec,
        limits=limits,
        dtype=dtype,
        parallel=ParallelSizes(tensor),
        programs=ProgramOptions(bundle, compile_cache, strict),
        **options,
    )
