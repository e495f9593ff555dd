"""The engine's whole configuration, and the limits that hold once model and platform are known."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.config.fields import ExtensionConfig
from pagoda.common.config.groups.attention import AttentionConfig
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.config.groups.model import LoadConfig, LoRAConfig, ModelConfig, MultiModalConfig
from pagoda.common.config.groups.observability import LoggingConfig, ObservabilityConfig
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for."""

    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    attention: AttentionConfig = AttentionConfig()
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    multimodal: MultiModalConfig = MultiModalConfig()
    lora: LoRAConfig = LoRAConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    logging: LoggingConfig = LoggingConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    compilation: CompilationConfig = CompilationConfig()
    extension: ExtensionConfig = ExtensionConfig()


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

    def check(self) -> None:
        """Raise ConfigError for limits that would starve someone or promise what does not happen."""
        tokens = self.max_num_batched_tokens
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError("--scheduling-policy", f"{self.policy} is not known; use fcfs or priority")
        if tokens < self.max_num_seqs:
            raise ConfigError("--max-num-batched-tokens", f"{tokens} is below --max-num-seqs {self.max_num_seqs}")
        if self.chunked_prefill:
            return
        if tokens < self.max_model_len:
            raise ConfigError(
                "--max-num-batched-tokens", f"{tokens} cannot hold a whole prompt of {self.max_model_len}"
            )
        if self.long_prefill_token_threshold:
            raise ConfigError("--long-prefill-token-threshold", "splits prompts, which needs --enable-chunked-prefill")
