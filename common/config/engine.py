"""The engine's configuration as the user set it, and the limits resolved from it, the model and the platform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.fields import comma_separated, json_object, option
from pagoda.common.config.groups.attention import AttentionConfig
from pagoda.common.config.groups.cache import CacheConfig, StateSnapshots
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.config.groups.model import LoadConfig, LoRAConfig, ModelConfig, MultiModalConfig
from pagoda.common.config.groups.nested.profiler import ProfilerConfig, profiler_of
from pagoda.common.config.groups.nested.speculative import SpeculativeConfig, speculative_of
from pagoda.common.config.groups.observability import LoggingConfig, ObservabilityConfig
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.errors import ConfigError

_NO_TRANSFER: Final = "prefill/decode disaggregation is not in this version; drop it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionConfig:
    """Speculative decoding, KV transfer, profiling and plugins."""

    speculative_config: Mapping[str, Any] = option(
        {},
        "Speculative decoding settings as JSON: method (ngram, suffix, or a method with a draft model), "
        "num_speculative_tokens, model, prompt_lookup_min, prompt_lookup_max, disable_by_batch_size, max_model_len, "
        "suffix_decoding_*; see docs/guides/speculative-decoding.md.",
        parse=json_object,
    )
    spec_method: str | None = option(
        None,
        "Method of speculative decoding; same as --speculative-config.method.",
        maps_to=lambda method: {"speculative_config": {"method": method}},
    )
    spec_model: str | None = option(
        None,
        "Draft model of speculative decoding; same as --speculative-config.model.",
        maps_to=lambda model: {"speculative_config": {"model": model}},
    )
    spec_tokens: int | None = option(
        None,
        "Number of draft tokens per sequence and step; same as --speculative-config.num_speculative_tokens.",
        maps_to=lambda number: {"speculative_config": {"num_speculative_tokens": number}},
    )
    kv_transfer_config: Mapping[str, Any] = option(
        {}, "Settings of KV cache transfer between engines as JSON.", parse=json_object, refused=_NO_TRANSFER
    )
    kv_events_config: Mapping[str, Any] = option(
        {},
        "Settings of KV cache event publishing as JSON.",
        parse=json_object,
        refused="KV cache events are not published; read /metrics",
    )
    ec_transfer_config: Mapping[str, Any] = option(
        {}, "Settings of encoder cache transfer between engines as JSON.", parse=json_object, refused=_NO_TRANSFER
    )
    profiler_config: Mapping[str, Any] = option(
        {},
        "Profiler settings as JSON: profiler (torch), torch_profiler_dir, torch_profiler_with_stack, "
        "torch_profiler_record_shapes, torch_profiler_with_memory, torch_profiler_with_flops, "
        "torch_profiler_use_gzip, delay_iterations, max_iterations; see docs/guides/monitoring.md.",
        parse=json_object,
    )
    additional_config: Mapping[str, Any] = option(
        {}, "Configuration for plugins, as JSON; the engine itself does not read it.", parse=json_object
    )
    plugins: tuple[str, ...] | None = option(
        None, "Comma-separated names of the installed plugins to load; default: all.", parse=comma_separated
    )
    aggregate_engine_logging: bool = option(
        False,
        "Log aggregate statistics of all data-parallel engines instead of one line per engine.",
        no_effect="the server logs the sums over all replicas in one line",
    )
    tokens_only: bool = option(
        False,
        "Serve token ids only; same as --skip-tokenizer-init.",
        maps_to=lambda on: {"skip_tokenizer_init": bool(on)},
    )

    def __post_init__(self) -> None:
        speculative_of(self.speculative_config)
        profiler_of(self.profiler_config)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The settings of --speculative-config; None without speculation."""
        return speculative_of(self.speculative_config)

    @property
    def profiler(self) -> ProfilerConfig | None:
        """The settings of --profiler-config; None without."""
        return profiler_of(self.profiler_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All engine settings as the user set them; None and "auto" values are resolved later."""

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
    simulation: SimulationConfig = SimulationConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resolved limits that the engine runs with."""

    max_model_len: int  # Maximum number of tokens of a sequence.
    max_num_batched_tokens: int  # Maximum number of tokens per step.
    max_num_seqs: int  # Maximum number of sequences per step.
    block_size: int  # Number of tokens per KV block.
    chunked_prefill: bool = True
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0  # Maximum number of tokens of one prompt per step; 0: unlimited.
    policy: str = "fcfs"
    async_scheduling: bool = True
    max_drafts: int = 0  # Maximum number of drafts per sequence and step; 0: no speculation.
    device_drafts: bool = False  # A drafter model on the device guesses the drafts.
    max_draft_len: int | None = None  # A sequence of this length has no more drafts; None: max_model_len.
    max_loras: int = 0  # Number of LoRA adapters that the sequences of a step may use; 0: none.
    media_rows: int = 0  # Rows of media items on the device; 0: prompts have none.
    max_encoder_rows: int = 0  # Rows that encoders compute per step, but always those of one item.
    snapshots: StateSnapshots = StateSnapshots()  # Where recurrent state is kept for the prefix cache.

    @property
    def max_decode_tokens(self) -> int:
        """Tokens of a generating sequence that are not known: one and its drafts, after the drafts in flight.

        A drafter on the device also writes those that it guesses after them.
        """
        return 1 + (3 if self.device_drafts else 2) * self.max_drafts

    @property
    def max_step_tokens(self) -> int:
        """Tokens of one sequence, at most, between two releases of blocks before its window."""
        return max(self.max_num_batched_tokens, self.max_decode_tokens)

    def check(self) -> None:
        """Raise ConfigError if the limits contradict each other or could starve a request."""
        tokens = self.max_num_batched_tokens
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError("--scheduling-policy", f"{self.policy} is unknown; use fcfs or priority")
        if tokens < self.max_num_seqs:
            raise ConfigError("--max-num-batched-tokens", f"{tokens} is below --max-num-seqs {self.max_num_seqs}")
        if self.max_drafts >= tokens:
            raise ConfigError(
                "--speculative-config",
                f"num_speculative_tokens is {self.max_drafts}, but a step has {tokens} tokens; use fewer, or a larger "
                "--max-num-batched-tokens",
            )
        if self.chunked_prefill:
            return
        if tokens < self.max_model_len:
            raise ConfigError(
                "--max-num-batched-tokens",
                f"{tokens} is below --max-model-len {self.max_model_len}, which needs --enable-chunked-prefill",
            )
        if self.long_prefill_token_threshold:
            raise ConfigError(
                "--long-prefill-token-threshold", "splits prompts over steps; it needs --enable-chunked-prefill"
            )
