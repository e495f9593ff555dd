"""Hunyuan (dense): Llama's block with a norm of q and k after RoPE."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block import llama
from pagoda.common.models.family import Family, Rename, gated_mlp, pre_norm_decoder, rms_norm, rotary_attention
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import ModelSpec

UNUSED = (
    *("cla_share_factor", "class_num", "dense_list", "pool_type", "num_media_embeds", "org_vocab_size"),
    *("im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "pad_id", "text_end_id", "text_start_id"),
)


def _hunyuan(config: HfConfig) -> ModelSpec:
    config.expect("num_experts", 1)
    config.ignore(*UNUSED)
    layers = config.size("num_hidden_layers")
    attention = hunyuan_attention(config)
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


def hunyuan_attention(config: HfConfig) -> Attention:
    """Return the attention of every layer; without layers that read another's K and V."""
    for key, supported in (
        ("add_classification_head", False),
        ("norm_type", "rms"),
        ("use_cla", False),
        ("use_qk_norm", True),
        ("use_rotary_pos_emb", True),
    ):
        config.expect(key, supported)
    config.alias("head_dim", "attention_head_dim")
    bias = config.opt("attention_bias", bool, False)
    return replace(
        rotary_attention(config, config.size("hidden_size")),
        qk_norm=rms_norm(config, 1e-5),
        qk_norm_after_rope=True,
        qkv_bias=bias,
        out_bias=bias,
    )


RULES = (
    *llama.RULES,
    Rename("[model.]layers.{l}.self_attn.query_layernorm.weight", "layers.{l}.mixers.0.q_norm"),
    Rename("[model.]layers.{l}.self_attn.key_layernorm.weight", "layers.{l}.mixers.0.k_norm"),
)

HUNYUAN = Family(_hunyuan, RULES)
