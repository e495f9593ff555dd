"""Qwen3-Next and Qwen3.5: three layers of the gated delta rule to one of gated attention, dense or with experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import FUSED_EXPERT_RULES, MOE_RULES
from pagoda.common.models.families.llama_block.qwen import SHARED_RULES
from pagoda.common.models.family import (
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    Split,
    fused_linear,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention, GatedDelta, Mixer
from pagoda.common.models.spec import Ffn, Mlp, ModelSpec, Moe, Router


def _qwen3_next(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.expect("use_sliding_window", False)
    mixers: dict[str, Mixer] = {"linear_attention": _gated_delta(config), "full_attention": _attention(config)}
    norm = rms_norm(config, 1e-6, unit_offset=True)
    return pre_norm_decoder(config, [mixers[kind] for kind in _kinds(config, layers)], _ffns(config, layers), norm)


def _qwen3_5(config: HfConfig, moe: bool = False) -> ModelSpec:
    """Read what the text configurations of Qwen3.5 call otherwise than Qwen3-Next; `moe`: experts in all layers."""
    config.expect("attn_output_gate", True)
    config.expect("mamba_ssm_dtype", "float32")
    config.expect("norm_topk_prob", True)
    config.expect("mlp_only_layers", [])
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    if moe:
        config.default("num_experts", 256)
        config.default("num_experts_per_tok", 8)
        config.default("intermediate_size", config.opt_size("moe_intermediate_size", 512))  # no layer is dense
    else:
        config.default("num_experts", 0)
    return _qwen3_next(config)


def _kinds(config: HfConfig, layers: int) -> list[str]:
    """Return the kind of mixer of each layer."""
    interval = config.opt_size("full_attention_interval", 4)
    default = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    kinds = config.opt("layer_types", list, default)
    unknown = set(kinds) - {"linear_attention", "full_attention"}
    if unknown:
        raise config.error("layer_types", f"has {unknown.pop()!r}; supported: linear_attention, full_attention")
    if len(kinds) != layers:
        raise config.error("layer_types", f"has {len(kinds)} entries for {layers} layers")
    return kinds


def _attention(config: HfConfig) -> Attention:
    heads = config.size("num_attention_heads")
    head_dim = config.opt_size("head_dim", 256)
    bias = config.opt("attention_bias", bool, False)
    return Attention(
        heads=heads,
        kv_heads=hf_config.kv_heads(config, heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=hf_config.rope(config, head_dim, partial=0.25),
        qk_norm=rms_norm(config, 1e-6, unit_offset=True),
        qkv_bias=bias,
        out_bias=bias,
        output_gate=True,
    )


def _gated_delta(config: HfConfig) -> GatedDelta:
    key_heads = config.opt_size("linear_num_key_heads", 16)
    value_heads = config.opt_size("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise config.error("linear_num_key_heads", f"{key_heads} does not divide linear_num_value_heads {value_heads}")
    config.expect("hidden_act", "silu")  # also the activation of the convolution
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.opt_size("linear_key_head_dim", 128),
        value_dim=config.opt_size("linear_value_head_dim", 128),
        taps=config.opt_size("linear_conv_kernel_dim", 4),
        norm=rms_norm(config, 1e-6),
    )


def _ffns(config: HfConfig, layers: int) -> list[Ffn]:
    dense = gated_mlp(config)
    experts = config.opt("num_experts", int, 512)
    mlp_only = config.opt("mlp_only_layers", list, [])
    step = config.opt_size("decoder_sparse_step", 1)
    if experts < 1:
        return [dense] * layers
    expert = replace(dense, width=config.opt_size("moe_intermediate_size", 512))
    shared = replace(dense, width=config.opt_size("shared_expert_intermediate_size", 512))
    router = Router(config.opt_size("num_experts_per_tok", 10), config.opt("norm_topk_prob", bool, True))

    def ffn(layer: int) -> Mlp | Moe:
        if layer in mlp_only or (layer + 1) % step:
            return dense
        return Moe(experts, expert, router, shared, shared_gate=True)

    return [ffn(layer) for layer in range(layers)]


_ATTENTION = "[model.]layers.{l}.self_attn"
_LINEAR = "[model.]layers.{l}.linear_attn"
_TARGET = "layers.{l}.mixers.0"

RULES = (
    *EMBED_RULES,
    *MLP_RULES,
    *PRE_NORM_RULES,
    *MOE_RULES,
    *SHARED_RULES,
    *FUSED_EXPERT_RULES,
    *QK_NORM_RULES,
    *fused_linear(f"{_ATTENTION}.q_proj", f"{_TARGET}.q", f"{_TARGET}.gate", interleaved=True),
    *linear(f"{_ATTENTION}.k_proj", f"{_TARGET}.k"),
    *linear(f"{_ATTENTION}.v_proj", f"{_TARGET}.v"),
    *linear(f"{_ATTENTION}.o_proj", f"{_TARGET}.o"),
    Split(
        f"{_LINEAR}.in_proj_qkvz.weight",
        (f"{_TARGET}.q", f"{_TARGET}.k", f"{_TARGET}.v", f"{_TARGET}.gate"),
        interleaved=True,
    ),
    Split(f"{_LINEAR}.in_proj_ba.weight", (f"{_TARGET}.beta", f"{_TARGET}.decay"), interleaved=True),
    Split(f"{_LINEAR}.in_proj_qkv.weight", (f"{_TARGET}.q", f"{_TARGET}.k", f"{_TARGET}.v")),
    Rename(f"{_LINEAR}.in_proj_z.weight", f"{_TARGET}.gate"),
    Rename(f"{_LINEAR}.in_proj_b.weight", f"{_TARGET}.beta"),
    Rename(f"{_LINEAR}.in_proj_a.weight", f"{_TARGET}.decay"),
    Split(f"{_LINEAR}.conv1d.weight", (f"{_TARGET}.q_conv", f"{_TARGET}.k_conv", f"{_TARGET}.v_conv")),
    Rename(f"{_LINEAR}.A_log", f"{_TARGET}.decay_rate"),
    Rename(f"{_LINEAR}.dt_bias", f"{_TARGET}.decay_offset"),
    Rename(f"{_LINEAR}.norm.weight", f"{_TARGET}.norm"),
    Rename(f"{_LINEAR}.out_proj.weight", f"{_TARGET}.o"),
)

# mtp: layers that only propose drafts
QWEN3_NEXT = Family(_qwen3_next, RULES, ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "mtp.*"))
QWEN3_5 = replace(QWEN3_NEXT, build=_qwen3_5)
QWEN3_5_MOE = replace(QWEN3_NEXT, build=partial(_qwen3_5, moe=True))
