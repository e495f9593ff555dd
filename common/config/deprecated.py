"""Deprecated flags: each maps to the setting that replaced it, has no effect, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import MapsTo, json_object, option

_ALWAYS_ON: Final = "the engine always does this"
_V0_ENGINE: Final = "it applies to vLLM's V0 engine only"
_NO_PROMPT_ADAPTERS: Final = "prompt adapters were removed from vLLM too; put the prompt into the request"
_NO_ADAPTER_LIMITS: Final = "prompt adapters are not supported"
_DEVICES: Final = {"cpu": "reference", "cuda": "torch_cuda", "tpu": "jax_tpu"}
_NO_DEVICE: Final = "there is no backend for it; use auto, cpu, cuda or tpu"
_USE_GUIDANCE: Final = "use auto or guidance, which take the same schemas, expressions and grammars"


def _json_key(setting: str, key: str) -> MapsTo:
    """Map the value to one key of a JSON setting."""
    return lambda value: {setting: {key: value}}


def _renamed(setting: str) -> MapsTo:
    return lambda value: {setting: value}


def _task(value: str) -> Mapping[str, Any]:
    if value in ("auto", "generate"):
        return {} if value == "auto" else {"runner": value}
    convert = {"embed": "embed", "embedding": "embed", "classify": "classify", "reward": "reward"}.get(value)
    return {"runner": "pooling"} if convert is None else {"runner": "pooling", "convert": convert}


def _device(value: str) -> Mapping[str, Any]:
    return {} if value == "auto" else {"backend": _DEVICES[value]}


def _graph_sizes(sizes: tuple[int, ...]) -> Mapping[str, Any]:
    """Several sizes are those to capture, a single one is the largest, as in vLLM."""
    return {"max_cudagraph_capture_size": sizes[0]} if len(sizes) == 1 else {"cudagraph_capture_sizes": sizes}


def _if_on(settings: Mapping[str, Any]) -> MapsTo:
    return lambda on: settings if on else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeprecatedConfig:
    """Flags of older releases."""

    task: str | None = option(
        None,
        "Task of the model.",
        choices=("auto", "generate", "embed", "embedding", "classify", "reward", "score"),
        refused_values={
            "transcription": "it needs audio input, and this version serves text only; drop it, or name another task",
            "draft": "draft models belong to speculative decoding; name it in --speculative-config.model",
        },
        deprecated="--runner",
        maps_to=_task,
    )
    device: str | None = option(
        None,
        "Device type.",
        choices=("auto", *_DEVICES),
        refused_values=dict.fromkeys(("hpu", "neuron", "xpu", "rocm", "openvino"), _NO_DEVICE),
        deprecated="--backend",
        maps_to=_device,
    )
    rope_scaling: Mapping[str, Any] = option(
        {},
        "RoPE scaling parameters as JSON.",
        parse=json_object,
        deprecated="--hf-overrides.rope_scaling",
        maps_to=_json_key("hf_overrides", "rope_scaling"),
        stands_for="hf_overrides",
    )
    rope_theta: float | None = option(
        None,
        "RoPE base frequency (theta).",
        deprecated="--hf-overrides.rope_theta",
        maps_to=_json_key("hf_overrides", "rope_theta"),
        stands_for="hf_overrides",
    )
    override_pooler_config: Mapping[str, Any] = option(
        {},
        "Overrides of the model's pooling settings as JSON.",
        parse=json_object,
        deprecated="--pooler-config",
        maps_to=_renamed("pooler_config"),
        stands_for="pooler_config",
    )
    disable_log_requests: bool | None = option(
        None,
        "Disable logging of requests.",
        deprecated="--enable-log-requests",
        maps_to=lambda off: {"enable_log_requests": not off},
    )
    guided_decoding_backend: str | None = option(
        None,
        "Grammar backend of structured output.",
        choices=("auto", "guidance", "xgrammar"),
        refused_values=dict.fromkeys(("lm-format-enforcer", "outlines"), _USE_GUIDANCE),
        deprecated="--structured-outputs-config.backend",
        maps_to=_json_key("structured_outputs_config", "backend"),
        stands_for="structured_outputs_config",
    )
    guided_decoding_disable_fallback: bool | None = option(
        None,
        "Disable the fallback to another grammar backend.",
        deprecated="--structured-outputs-config.disable_fallback",
        maps_to=_json_key("structured_outputs_config", "disable_fallback"),
        no_effect="there is no fallback backend",
    )
    guided_decoding_disable_any_whitespace: bool | None = option(
        None,
        "Generate JSON without white space.",
        deprecated="--structured-outputs-config.disable_any_whitespace",
        maps_to=_json_key("structured_outputs_config", "disable_any_whitespace"),
        stands_for="structured_outputs_config",
    )
    guided_decoding_disable_additional_properties: bool | None = option(
        None,
        "Reject properties that are not in the JSON schema.",
        deprecated="--structured-outputs-config.disable_additional_properties",
        maps_to=_json_key("structured_outputs_config", "disable_additional_properties"),
        stands_for="structured_outputs_config",
    )
    num_redundant_experts: int | None = option(
        None,
        "Number of redundant experts of EPLB.",
        deprecated="--eplb-config.num_redundant_experts",
        maps_to=_json_key("eplb_config", "num_redundant_experts"),
        stands_for="eplb_config",
    )
    eplb_window_size: int | None = option(
        None,
        "Window size of EPLB load statistics, in steps.",
        deprecated="--eplb-config.window_size",
        maps_to=_json_key("eplb_config", "window_size"),
        stands_for="eplb_config",
    )
    eplb_step_interval: int | None = option(
        None,
        "Interval between EPLB rebalancing, in steps.",
        deprecated="--eplb-config.step_interval",
        maps_to=_json_key("eplb_config", "step_interval"),
        stands_for="eplb_config",
    )
    eplb_log_balancedness: bool | None = option(
        None,
        "Log the balancedness of experts in each step.",
        deprecated="--eplb-config.log_balancedness",
        maps_to=_json_key("eplb_config", "log_balancedness"),
        stands_for="eplb_config",
    )
    enable_multimodal_encoder_data_parallel: bool | None = option(
        None,
        "Use data parallelism for multimodal encoders.",
        deprecated="--mm-encoder-tp-mode",
        maps_to=_if_on({"mm_encoder_tp_mode": "data"}),
        stands_for="mm_encoder_tp_mode",
    )
    disable_mm_preprocessor_cache: bool | None = option(
        None,
        "Disable the multimodal processor cache.",
        deprecated="--mm-processor-cache-gb 0",
        maps_to=_if_on({"mm_processor_cache_gb": 0.0}),
        stands_for="mm_processor_cache_gb",
    )
    cuda_graph_sizes: tuple[int, ...] = option(
        (),
        "Batch sizes for CUDA graph capture; a single number is the largest.",
        aliases=("--CUDA-graph-sizes",),
        deprecated="--cudagraph-capture-sizes, or --max-cudagraph-capture-size for a single number",
        maps_to=_graph_sizes,
    )
    max_seq_len_to_capture: int | None = option(
        None,
        "Maximum sequence length covered by CUDA graphs.",
        no_effect="CUDA graphs are captured per batch size and cover every length",
    )
    use_v2_block_manager: bool = option(True, "Use block manager V2.", no_effect=_ALWAYS_ON)
    disable_async_output_proc: bool = option(False, "Disable asynchronous output processing.", no_effect=_V0_ENGINE)
    num_scheduler_steps: int = option(1, "Number of forward steps per scheduler call.", no_effect=_V0_ENGINE)
    multi_step_stream_outputs: bool = option(
        True, "Stream the output of every step with multi-step scheduling.", no_effect=_ALWAYS_ON
    )
    num_lookahead_slots: int = option(0, "Number of lookahead slots for speculative decoding.", no_effect=_V0_ENGINE)
    scheduler_delay_factor: float = option(
        0.0,
        "Delay before scheduling the next prompt, as a factor of the previous prompt's latency.",
        no_effect=_V0_ENGINE,
    )
    preemption_mode: Literal["recompute"] | None = option(
        None,
        "How preempted requests resume.",
        no_effect="preempted requests are always recomputed",
        refused_values={"swap": "preempted requests are recomputed; use recompute, or drop it"},
    )
    enable_reasoning: bool | None = option(
        None, "Enable reasoning output.", deprecated="--reasoning-parser", no_effect="--reasoning-parser enables it"
    )
    override_neuron_config: Mapping[str, Any] = option(
        {}, "Overrides of the Neuron configuration as JSON.", parse=json_object, no_effect="there is no Neuron backend"
    )
    enable_lora_bias: bool = option(
        False, "Enable bias in LoRA adapters.", refused="biases of LoRA adapters are not supported; merge the adapter"
    )
    lora_extra_vocab_size: int = option(
        256, "Maximum extra vocabulary of LoRA adapters.", no_effect="LoRA adapters have no tokens of their own"
    )
    long_lora_scaling_factors: tuple[float, ...] = option(
        (), "Scaling factors of long-context LoRA adapters.", refused="LoRA adapters have one context length; drop it"
    )
    qlora_adapter_name_or_path: str | None = option(
        None, "Name or path of a QLoRA adapter.", refused="use --enable-lora with --lora-modules name=path"
    )
    prompt_adapters: tuple[str, ...] = option((), "Prompt adapters to load.", refused=_NO_PROMPT_ADAPTERS)
    enable_prompt_adapter: bool = option(False, "Enable prompt adapters.", refused=_NO_PROMPT_ADAPTERS)
    max_prompt_adapters: int = option(1, "Maximum number of prompt adapters in a batch.", no_effect=_NO_ADAPTER_LIMITS)
    max_prompt_adapter_token: int = option(0, "Maximum number of prompt adapter tokens.", no_effect=_NO_ADAPTER_LIMITS)
