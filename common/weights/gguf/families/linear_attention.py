"""Decoders with linear-attention or short-convolution layers: their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pagoda.common.weights.gguf.decoder_keys import (
    EVERY_LAYER,
    EXPERT_WIDTH,
    EXPERTS,
    KV_HEADS,
    RMS,
    ROUTED,
    DecoderKeys,
    Value,
    any_layer,
    sigmoid_experts,
    softmax_experts,
)
from pagoda.common.weights.gguf.families.latent import decoder_of_latents
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor


def _lfm2(metadata: Metadata, config: Config) -> Config:
    attends = metadata.layers_with(KV_HEADS, config["num_hidden_layers"])
    return {
        "layer_types": ["full_attention" if layer else "conv" for layer in attends],
        "conv_bias": any_layer(metadata, config, "shortconv.conv.bias"),
    }


_LFM2: Final = DecoderKeys(
    "Lfm2ForCausalLM",
    "lfm2",
    ("norm_eps", RMS),
    fixed={"block_auto_adjust_ff_dim": False},
    values={"conv_L_cache": ("shortconv.l_cache", int, None)},
    absent=("hidden_act",),
    some_layers=True,
    more=_lfm2,
    theta=1_000_000.0,
)


def _lfm2_moe(metadata: Metadata) -> Config:
    keys = DecoderKeys(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        ("norm_eps", RMS),
        values={
            **_LFM2.values,
            **EXPERTS,
            **EXPERT_WIDTH,
            "num_dense_layers": ("leading_dense_block_count", int, 0),
            "norm_topk_prob": ("expert_weights_norm", bool, True),
            "routed_scaling_factor": ("expert_weights_scale", float, 1.0),
        },
        absent=("hidden_act",),
        some_layers=True,
        more=lambda metadata, config: {**_lfm2(metadata, config), **sigmoid_experts(metadata, config)},
        theta=1_000_000.0,
    )
    config = keys(metadata)
    return {**config, "use_expert_bias": any_layer(metadata, config, "exp_probs_b.bias")}


def _delta(metadata: Metadata, config: Config) -> Config:
    """Keys of Qwen's gated delta rule."""
    value_heads = metadata.need("ssm.time_step_rank", int)
    inner = metadata.need("ssm.inner_size", int)
    layers = config["num_hidden_layers"]
    attends = [has_tensor(metadata, f"blk.{layer}.attn_q.weight") for layer in range(layers)]
    metadata.ignore("full_attention_interval", "rope.dimension_sections")
    return {
        "layer_types": ["full_attention" if layer else "linear_attention" for layer in attends],
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
        "linear_num_key_heads": metadata.need("ssm.group_count", int),
        "linear_key_head_dim": metadata.need("ssm.state_size", int),
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel", int),
        "attention_bias": any_layer(metadata, config, "attn_q.bias"),
    }


def _delta_experts(metadata: Metadata, config: Config) -> Config:
    return {**_delta(metadata, config), **softmax_experts(metadata, config)}


def _kimi_linear(metadata: Metadata) -> Config:
    config = decoder_of_latents(metadata)
    heads = metadata.need("attention.head_count", int)
    attends = metadata.layers_with(KV_HEADS, config["num_hidden_layers"])
    sigmoid_experts(metadata, config)
    for key, (name, kind, default) in ROUTED.items():
        config[key] = metadata.need(name, kind) if default is None else metadata.opt(name, kind, default)
    metadata.ignore("rope.freq_base", "rope.dimension_count")
    return {
        **config,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "norm_topk_prob": metadata.opt("expert_weights_norm", bool, True),
        "linear_attn_config": {
            "head_dim": metadata.need("kda.head_dim", int),
            "num_heads": heads,
            "short_conv_kernel_size": metadata.need("ssm.conv_kernel", int),
            "full_attn_layers": [layer for layer, attend in enumerate(attends, 1) if attend],
            "kda_layers": [layer for layer, attend in enumerate(attends, 1) if not attend],
        },
    }


_DELTA_EXPERTS: Final[Mapping[str, Value]] = {
    **EXPERTS,
    **EXPERT_WIDTH,
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int, None),
}

CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "kimi-linear": _kimi_linear,
    "lfm2": _LFM2,
    "lfm2moe": _lfm2_moe,
    "qwen3next": DecoderKeys(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        fixed=EVERY_LAYER,
        values={**_DELTA_EXPERTS, "norm_topk_prob": ("expert_weights_norm", bool, True)},
        partial=True,
        more=_delta_experts,
    ),
    "qwen35": DecoderKeys("Qwen3_5ForCausalLM", "qwen3_5_text", partial=True, more=_delta),
    "qwen35moe": DecoderKeys(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", values=_DELTA_EXPERTS, partial=True, more=_delta_experts
    ),
}
