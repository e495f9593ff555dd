"""Decoders with linear-attention or short-convolution layers: configs and tensor layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

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
from pagoda.common.weights.gguf.families.latent import JOINED_LATENTS, LATENTS, decoder_of_latents
from pagoda.common.weights.gguf.layouts import (
    ATTENTION,
    BLOCK_SPARSE,
    EXPERT_NAMES,
    GATED,
    PRE_NORMS,
    QK_NORM,
    ROOT,
    SHARED,
    Array,
    Change,
    RowChange,
    TensorLayout,
    as_row,
    log_rate,
    taps,
)
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

# Tensors.


def _reordered(axis: int, per_head: str) -> Change:
    """Value heads in turns over the key heads -> those of a key head together. `per_head`: config key of channels."""

    def change(array: Array, config: Mapping[str, Any]) -> Array:
        return _grouped_values(array, config, axis, config[per_head] if per_head else 1)

    return RowChange(change) if axis == 0 else change


def _grouped_values(array: Array, config: Mapping[str, Any], axis: int, channels: int) -> Array:
    keys = config["linear_num_key_heads"]
    shape = array.shape
    tiled = array.reshape(*shape[:axis], -1, keys, channels, *shape[axis + 1 :])
    return tiled.swapaxes(axis, axis + 1).reshape(shape)


@RowChange
def _after_keys(array: Array, config: Mapping[str, Any]) -> Array:
    """Rows of q, k and v, of which v is reordered."""
    begin = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = _grouped_values(array[begin:], config, 0, config["linear_value_head_dim"])
    return np.concatenate([array[:begin], values])


_DELTA: Final = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{stem: name.replace("shared_experts", "shared_expert") for stem, name in SHARED.items()},
}


def _delta_layout(changes: Mapping[str, Change]) -> TensorLayout:
    return TensorLayout(
        ROOT,
        {**ATTENTION, **QK_NORM, **GATED, **EXPERT_NAMES, **_DELTA},
        whole={"ssm_a": "linear_attn.A_log"},
        changes={"ssm_a": log_rate, "ssm_conv1d": taps, "ffn_gate_inp_shexp": as_row, **changes},
        norm_plus_one=True,
        plain_norms=frozenset({"ssm_norm"}),
    )


_VALUE: Final = "linear_value_head_dim"
_QWEN35: Final = _delta_layout(
    {
        "attn_qkv": _after_keys,
        "attn_gate": _reordered(0, _VALUE),
        "ssm_beta": _reordered(0, ""),
        "ssm_alpha": _reordered(0, ""),
        "ssm_dt": _reordered(0, ""),
        "ssm_a": lambda array, config: _grouped_values(log_rate(array, config), config, 0, 1),
        "ssm_conv1d": lambda array, config: taps(_after_keys(array, config), config),
        "ssm_out": _reordered(1, _VALUE),
    }
)
_LFM2_LAYOUT: Final = TensorLayout(
    {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    {
        **ATTENTION,
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.{e}.w1",
        "ffn_up_exps": "feed_forward.experts.{e}.w3",
        "ffn_down_exps": "feed_forward.experts.{e}.w2",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    changes={"shortconv.conv": taps},
)


def _channel_taps(array: Array, config: Mapping[str, Any]) -> Array:
    """Taps of a convolution, with axes of one element -> [C, 1, K]."""
    return array.reshape(-1, 1, array.shape[-1])


def _decay(array: Array, config: Mapping[str, Any]) -> Array:
    """A = -exp(A_log), with axes of one element -> A_log [N]."""
    return log_rate(array.reshape(-1), config)


_SPARSE: Final = "block_sparse_moe"
_KDA: Final = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{kind}_{part}": f"self_attn.{kind}_{part}_proj" for kind in "fg" for part in "ab"},
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_KIMI_LINEAR: Final = TensorLayout(
    ROOT,
    {
        **ATTENTION,
        **LATENTS,
        **GATED,
        **PRE_NORMS,
        **BLOCK_SPARSE,
        **{stem: name.replace("mlp.", f"{_SPARSE}.") for stem, name in SHARED.items()},
        **_KDA,
        "exp_probs_b.bias": f"{_SPARSE}.gate.e_score_correction_bias",
    },
    whole={"ssm_a": "self_attn.A_log"},
    changes={"ssm_a": _decay, **{f"ssm_conv1d_{part}": _channel_taps for part in "qkv"}},
    joined=JOINED_LATENTS,
)

LAYOUTS: Final[Mapping[str, TensorLayout]] = {
    "kimi-linear": _KIMI_LINEAR,
    "lfm2": _LFM2_LAYOUT,
    "lfm2moe": _LFM2_LAYOUT,
    "qwen3next": _delta_layout({}),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
}
