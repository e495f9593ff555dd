"""Flags of vLLM 0.32 that have no setting here, each with the reason: they are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NO_MEDIA: Final = "models are served text-only; drop it"
_NO_LORA: Final = "this option of LoRA adapters is not in this version; drop it"
_ONE_SERVER: Final = "one server drives all --data-parallel-size replicas; drop it"
_NO_EXPERT_PARALLELISM: Final = "expert parallelism is not in this version; drop it"
_NO_CONTEXT_PARALLELISM: Final = "context parallelism is not in this version; drop it"
_KERNELS: Final = "each backend chooses its kernels itself, except for --attention-backend; drop it"
_STATE_CACHE: Final = "recurrent state is cached in one format, where --mamba-cache-mode says; drop it"
_OFFLOAD: Final = "weights are offloaded by --cpu-offload-gb alone; use it, or drop this"
_SCHEDULING: Final = "the scheduler has no such limit; see --max-num-seqs and --max-num-batched-tokens"
_HTTP_ONLY: Final = "requests come by HTTP only; drop it"
_NO_SUPERVISOR: Final = "the server supervises its engine itself, and /health reports it; drop it"
_NUMA: Final = "there is no NUMA policy; start the server under numactl, or use --cpu-omp-threads-bind"
_TIMEOUTS: Final = "waiting for ranks has fixed limits; drop it"
_SLEEP: Final = "--enable-sleep-mode has no options; drop it"
_NO_WATERMARK: Final = "generated text is not watermarked; drop it"
_COHERE: Final = "the format of an answer follows from the model; set --tool-call-parser and --reasoning-parser"
_NOT_REPORTED: Final = "answers do not report it; drop it"

FLAGS_WITHOUT_SETTING: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_only"),
            *("mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "mm_hasher_algorithm"),
            *("mm_ipc_gpu_memory_gb", "mm_processor_device", "mm_tensor_ipc", "video_pruning_method"),
            *("trust_request_mm_kwargs", "enable_mm_processor_stats", "diffusion_config", "ec_manager_config"),
        ),
        _NO_MEDIA,
    ),
    **dict.fromkeys(
        (
            *("enable_mixed_moe_lora_format", "enable_moe_shared_loras", "enable_tower_connector_lora"),
            *("lora_target_modules", "max_lora_cls_labels", "specialize_active_lora"),
        ),
        _NO_LORA,
    ),
    **dict.fromkeys(("data_parallel_multi_port_external_lb", "dp_sync_interval"), _ONE_SERVER),
    **dict.fromkeys(
        ("elastic_ep_max_dp_size", "enable_elastic_ep", "enable_ep_weight_filter", "enable_scale_out"),
        _NO_EXPERT_PARALLELISM,
    ),
    **dict.fromkeys(("dcp_comm_backend", "dcp_q_replicate", "enable_hc_sp"), _NO_CONTEXT_PARALLELISM),
    **dict.fromkeys(
        (
            *("enable_flashinfer_autotune", "gdn_prefill_backend", "ir_op_priority", "kda_decode_backend"),
            *("kda_prefill_backend", "kernel_config", "linear_backend", "moe_backend", "sparse_indexer_topk_backend"),
            *("mamba_backend", "mamba_ssu_algorithm", "enable_batch_sharded_sampling", "performance_mode"),
            "enable_flash_late_interaction",
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            *("enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds", "mamba_config"),
            *("enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len", "use_replayssm", "engram_config"),
        ),
        _STATE_CACHE,
    ),
    **dict.fromkeys(
        (
            *("cpu_offload_params", "offload_backend", "offload_group_size", "offload_num_in_group"),
            *("offload_params", "offload_prefetch_step"),
        ),
        _OFFLOAD,
    ),
    "per_request_spec_decode_metrics": _NOT_REPORTED,
    **dict.fromkeys(
        (
            *("long_prefill_token_threshold_adaptive", "max_num_active_seqs"),
            *("max_num_scheduled_tokens", "prefill_schedule_interval", "scheduler_reserve_full_isl", "watermark"),
        ),
        _SCHEDULING,
    ),
    **dict.fromkeys(("grpc", "grpc_port"), _HTTP_ONLY),
    **dict.fromkeys(
        (
            *("data_parallel_supervisor_port", "dp_supervisor_probe_failure_threshold"),
            *("dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s"),
            *("enable_fault_tolerance", "fault_tolerance_config"),
        ),
        _NO_SUPERVISOR,
    ),
    **dict.fromkeys(("numa_bind", "numa_bind_cpus", "numa_bind_nodes"), _NUMA),
    **dict.fromkeys(("cpu_distributed_timeout_seconds", "distributed_timeout_seconds"), _TIMEOUTS),
    **dict.fromkeys(
        (
            *("enable_cumem_allocator", "enable_nccl_comm_suspend", "sleep_mode_offload_cudagraph"),
            "sleep_preserve_parameter_names",
        ),
        _SLEEP,
    ),
    "watermark_config": _NO_WATERMARK,
    **dict.fromkeys(("cohere_format", "cohere_is_reasoning_model"), _COHERE),
    **dict.fromkeys(
        ("enable_return_routed_experts", "return_sampling_mask", "enable_per_request_metrics", "aux_output_config"),
        _NOT_REPORTED,
    ),
    **dict.fromkeys(
        ("jit_monitor_mode", "jit_monitor_verbose"),
        "programs compiled while serving are counted in pagoda:recompiles_total; drop it",
    ),
    **dict.fromkeys(
        ("prefix_match_unit", "swa_bounded_replay"),
        "cached prefixes match by block, and leave in order of their last use; drop it",
    ),
    **dict.fromkeys(("fingerprint_mode", "fingerprint_value"), "answers have no system_fingerprint; drop it"),
    **dict.fromkeys(
        ("safetensors_prefetch_block_size", "safetensors_prefetch_num_threads"),
        "weights are mapped into memory, not prefetched; drop it",
    ),
    "allow_deprecated_quantization": "each --quantization is read or refused by name; drop it",
    "anthropic_disabled_thinking_effort": "/v1/messages passes thinking to chat templates that have it; drop it",
    "custom_histogram_buckets": "histograms have vLLM's default buckets, which its dashboards show; drop it",
    "device_ids": "devices are those of CUDA_VISIBLE_DEVICES or TPU_VISIBLE_CHIPS; set that",
    "enable_logging_iteration_details": "steps are not logged; vllm:iteration_tokens_total counts their tokens",
    "enable_offline_docs": "/docs always works offline; drop it",
    "enable_shm_tensor_arena": "tensors do not cross processes; drop it",
    "enable_trace_replay": "traces are not replayed; drop it",
    "fail_on_environ_validation": "unknown variables are warned of, invalid values always fail; drop it",
    "kv_cache_dtype_skip_layers": "--kv-cache-dtype holds for every layer; drop it",
    "logging_config": "set PAGODA_LOGGING_CONFIG_PATH to a JSON file of Python's logging.config",
    "model_weights": "weights are those of --model, or of --load-format; drop it",
    "model_class_overrides": "models are specifications, not classes; see --hf-overrides",
    "renderer_num_workers": "prompts are rendered in the server's own process; drop it",
    "tool_strict_level": "forced calls always fit their schemas, others if the tool has strict: true; drop it",
    "use_fp64_gumbel": "sampling noise has 32 bits, the same on every backend; drop it",
    "weight_transfer_config": "weights are not replaced from another process; drop it",
}
"""Name of a flag, with underscores -> why there is none, and what to do instead."""


def why_no_setting(name: str) -> str | None:
    """Return why there is no setting for a flag, key or keyword of vLLM; None for one that vLLM has not either."""
    return FLAGS_WITHOUT_SETTING.get(name.lstrip("-").replace("-", "_").removeprefix("no_"))
