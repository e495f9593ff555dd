"""The engine's whole configuration, and the limits that hold once model and platform are known."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.model import ModelConfig
from pagoda.common.config.scheduler import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine runs with: every None of the configuration resolved. All in tokens, sequences or blocks."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    chunked_prefill: bool = True
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    async_scheduling: bool = True
