"""Flags of older releases: each warns, and becomes the setting that replaced it, or says why it is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.fields import Becomes, json_object, option
from pagoda.common.errors import ConfigError

_ALWAYS_SO: Final = "the engine always works like this"
_OLD_ENGINE: Final = "it steered an engine that is gone; the scheduler needs no such setting"
_NO_PROMPT_ADAPTERS: Final = "prompt adapters are gone from vLLM too; put the prompt into the request"
_NO_LORA: Final = "LoRA adapters are not in this version; merge the adapter into the weights and serve those"
_DEVICES: Final = {"cpu": "reference", "cuda": "torch_cuda", "tpu": "jax_tpu"}


def _into(setting: str, key: str) -> Becomes:
    """The value becomes one key of a JSON setting."""
    return lambda value: {setting: {key: value}}


def _renamed(setting: str) -> Becomes:
    return lambda value: {setting: value}


def _task(value: str) -> Mapping[str, Any]:
    if value == "transcription":
        raise ConfigError("--task", "transcription reads audio; this version serves text only: drop it, or name a task")
    if value in ("auto", "generate", "draft"):
        return {} if value == "auto" else {"runner": value}
    convert = {"embed": "embed", "embedding": "embed", "classify": "classify", "reward": "reward"}.get(value)
    return {"runner": "pooling"} if convert is None else {"runner": "pooling", "convert": convert}


def _device(value: str) -> Mapping[str, Any]:
    return {} if value == "auto" else {"backend": _DEVICES[value]}


def _when_on(becomes: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Any]]:
    return lambda on: becomes if on else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeprecatedConfig:
    """What older command lines say."""

    task: str | None = option(
        None,
        "What the model is for.",
        choices=("auto", "generate", "embed", "embedding", "classify", "reward", "score", "draft", "transcription"),
        deprecated="--runner",
        becomes=_task,
    )
    device: str | None = option(None, "Device.", choices=("auto", *_DEVICES), deprecated="--backend", becomes=_device)
    rope_scaling: Mapping[str, Any] = option(
        {},
        "Scaling of rotary positions.",
        parse=json_object,
        deprecated="--hf-overrides.rope_scaling",
        becomes=_into("hf_overrides", "rope_scaling"),
    )
    rope_theta: float | None = option(
        None,
        "Base of rotary positions.",
        deprecated="--hf-overrides.rope_theta",
        becomes=_into("hf_overrides", "rope_theta"),
    )
    override_pooler_config: Mapping[str, Any] = option(
        {}, "Pooling.", parse=json_object, deprecated="--pooler-config", becomes=_renamed("pooler_config")
    )
    disable_log_requests: bool | None = option(
        None,
        "Do not log requests.",
        deprecated="--enable-log-requests",
        becomes=lambda off: {"enable_log_requests": not off},
    )
    guided_decoding_backend: str | None = option(
        None,
        "Engine of structured output.",
        choices=("auto", "guidance", "lm-format-enforcer", "outlines", "xgrammar"),
        deprecated="--structured-outputs-config.backend",
        becomes=_into("structured_outputs_config", "backend"),
    )
    guided_decoding_disable_fallback: bool | None = option(
        None,
        "Try no second engine.",
        deprecated="--structured-outputs-config.disable_fallback",
        becomes=_into("structured_outputs_config", "disable_fallback"),
    )
    guided_decoding_disable_any_whitespace: bool | None = option(
        None,
        "No white space in JSON.",
        deprecated="--structured-outputs-config.disable_any_whitespace",
        becomes=_into("structured_outputs_config", "disable_any_whitespace"),
    )
    guided_decoding_disable_additional_properties: bool | None = option(
        None,
        "No properties beyond the schema's.",
        deprecated="--structured-outputs-config.disable_additional_properties",
        becomes=_into("structured_outputs_config", "disable_additional_properties"),
    )
    num_redundant_experts: int | None = option(
        None,
        "Redundant experts.",
        deprecated="--eplb-config.num_redundant_experts",
        becomes=_into("eplb_config", "num_redundant_experts"),
    )
    eplb_window_size: int | None = option(
        None,
        "Window of the expert balancer.",
        deprecated="--eplb-config.window_size",
        becomes=_into("eplb_config", "window_size"),
    )
    eplb_step_interval: int | None = option(
        None,
        "Steps between rebalancing.",
        deprecated="--eplb-config.step_interval",
        becomes=_into("eplb_config", "step_interval"),
    )
    eplb_log_balancedness: bool | None = option(
        None,
        "Log how balanced experts are.",
        deprecated="--eplb-config.log_balancedness",
        becomes=_into("eplb_config", "log_balancedness"),
    )
    enable_multimodal_encoder_data_parallel: bool | None = option(
        None,
        "Spread encoders by batch.",
        deprecated="--mm-encoder-tp-mode",
        becomes=_when_on({"mm_encoder_tp_mode": "data"}),
    )
    disable_mm_preprocessor_cache: bool | None = option(
        None,
        "Keep no processed media.",
        deprecated="--mm-processor-cache-gb 0",
        becomes=_when_on({"mm_processor_cache_gb": 0.0}),
    )
    cuda_graph_sizes: tuple[int, ...] = option(
        (),
        "Batch sizes to capture.",
        aliases=("--CUDA-graph-sizes",),
        deprecated="--cudagraph-capture-sizes",
        becomes=_renamed("cudagraph_capture_sizes"),
    )
    max_seq_len_to_capture: int | None = option(
        None, "Longest sequence in a graph.", no_effect="graphs are captured per batch size, of any length"
    )
    use_v2_block_manager: bool = option(True, "The newer block manager.", no_effect=_ALWAYS_SO)
    disable_async_output_proc: bool = option(False, "Outputs in step with the model.", no_effect=_OLD_ENGINE)
    num_scheduler_steps: int = option(1, "Steps per plan.", no_effect=_OLD_ENGINE)
    multi_step_stream_outputs: bool = option(True, "Stream between planned steps.", no_effect=_ALWAYS_SO)
    num_lookahead_slots: int = option(0, "Slots kept for speculation.", no_effect=_OLD_ENGINE)
    scheduler_delay_factor: float = option(0.0, "Wait before the next prompt.", no_effect=_OLD_ENGINE)
    preemption_mode: str | None = option(
        None, "What happens to a preempted request.", refused="it is recomputed; use recompute", accepts=("recompute",)
    )
    enable_reasoning: bool | None = option(
        None,
        "Tell thinking from answer.",
        deprecated="--reasoning-parser",
        no_effect="--reasoning-parser decides",
    )
    override_neuron_config: Mapping[str, Any] = option(
        {}, "Settings of Neuron devices.", parse=json_object, no_effect="there is no Neuron backend to read it"
    )
    enable_lora_bias: bool = option(False, "Biases in adapters.", refused=_NO_LORA)
    lora_extra_vocab_size: int = option(256, "Vocabulary of adapters.", no_effect="it matters with --enable-lora only")
    long_lora_scaling_factors: tuple[float, ...] = option((), "Scaling of long adapters.", refused=_NO_LORA)
    qlora_adapter_name_or_path: str | None = option(None, "QLoRA adapter.", refused=_NO_LORA)
    prompt_adapters: tuple[str, ...] = option((), "Prompt adapters.", refused=_NO_PROMPT_ADAPTERS)
    enable_prompt_adapter: bool = option(False, "Serve prompt adapters.", refused=_NO_PROMPT_ADAPTERS)
    max_prompt_adapters: int = option(1, "Prompt adapters at once.", no_effect="there are no prompt adapters")
    max_prompt_adapter_token: int = option(0, "Longest prompt adapter.", no_effect="there are no prompt adapters")
