"""Qwen2 and 2.5 (biases on q, k, v), Qwen3 (norms on q and k) and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    Stack,
    gated_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Ffn, Mlp, ModelSpec, Moe, Router


def _qwen2(config: HfConfig) -> ModelSpec:
    config.expect("qkv_bias", True)
    config.ignore("attention_bias")  # q, k and v always have biases, o never
    attention = replace(rotary_attention(config, config.size("hidden_size")), qkv_bias=True)
    return _dense(config, attention)


def _qwen3(config: HfConfig) -> ModelSpec:
    return _dense(config, _qk_norm_attention(config))


def _qwen3_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.ignore("max_window_layers")  # the window, if used, applies to every layer
    attention = replace(_qk_norm_attention(config), window=_window(config))
    mlp_only = config.opt("mlp_only_layers", list, [])
    sparse_step = config.opt_size("decoder_sparse_step", 1)
    dense, moe = gated_mlp(config), _moe(config)
    ffns: list[Ffn] = [dense if layer in mlp_only or (layer + 1) % sparse_step else moe for layer in range(layers)]
    return pre_norm_decoder(config, [attention] * layers, ffns, rms_norm(config, 1e-6))


def _dense(config: HfConfig, attention: Attention) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    window, first = _window(config), config.opt("max_window_layers", int, 28)
    default = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    mixers = [
        replace(attention, window=window) if kind == "sliding_attention" else attention
        for kind in config.layer_types(layers, default)
    ]
    return pre_norm_decoder(config, mixers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


def _qk_norm_attention(config: HfConfig) -> Attention:
    config.expect("use_qk_norm", True)
    bias = config.opt("attention_bias", bool, False)
    return replace(
        rotary_attention(config, config.size("hidden_size")),
        qk_norm=rms_norm(config, 1e-6),
        qkv_bias=bias,
        out_bias=bias,
    )


def _window(config: HfConfig) -> int | None:
    window = config.window(4096)
    return window if config.opt("use_sliding_window", bool, False) else None


def _moe(config: HfConfig) -> Moe:
    expert = Mlp(config.size("moe_intermediate_size"), config.activation("hidden_act", "silu"), gated=True)
    router = Router(config.size("num_experts_per_tok"), config.opt("norm_topk_prob", bool, False))
    return Moe(config.size("num_experts", "num_local_experts"), expert, router)


_COMMON_RULES = (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *PRE_NORM_RULES)
MOE_RULES = (
    Rename("[model.]layers.{l}.mlp.gate.weight", "layers.{l}.ffn.router"),
    Stack("[model.]layers.{l}.mlp.experts.{e}.gate_proj.weight", "layers.{l}.ffn.experts.gate"),
    Stack("[model.]layers.{l}.mlp.experts.{e}.up_proj.weight", "layers.{l}.ffn.experts.up"),
    Stack("[model.]layers.{l}.mlp.experts.{e}.down_proj.weight", "layers.{l}.ffn.experts.down"),
)

QWEN2 = Family(_qwen2, _COMMON_RULES)
QWEN3 = Family(_qwen3, (*_COMMON_RULES, *QK_NORM_RULES))
QWEN3_MOE = Family(_qwen3_moe, (*_COMMON_RULES, *QK_NORM_RULES, *MOE_RULES))
