"""Ling and Ring 2.5: seven layers of lightning attention with RoPE to one of latent attention, experts."""

from __future__ import annotations

from typing import Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import leading_dense
from pagoda.common.models.families.latent.deepseek import latent_attention
from pagoda.common.models.families.recurrent.bailing_hybrid import HYBRID_RULES, hybrid_kinds
from pagoda.common.models.families.sigmoid_mixtures.bailing import bailing_moe, name_keys
from pagoda.common.models.family import Family, Rename, Split, pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import LightningAttention, Mixer
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.spec import ModelSpec

_OFF: Final = ("use_bias", "use_qkv_bias", "linear_silu", "use_linear_silu", "use_mla_nope", "use_nGPT", "value_norm")


def _ling25(config: HfConfig) -> ModelSpec:
    for key in _OFF:
        config.expect(key, False)
    config.expect("linear_rope", True)
    config.expect("rope_interleave", True)
    config.ignore("moe_router_enable_routed_scaling", "moe_router_enable_shared_expert", "num_kv_heads_for_linear_attn")
    name_keys(config, "sigmoid")
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    kinds = hybrid_kinds(config, layers, 8)
    linear = [_linear_attention(config, layer, layers) for layer in range(layers)]
    _keys_of_latent_attention(config)
    latent = latent_attention(config, interleaved=True, eps=norm.eps)
    mixers: list[Mixer] = [latent if kind == "full_attention" else linear[at] for at, kind in enumerate(kinds)]
    return pre_norm_decoder(config, mixers, leading_dense(config, lambda: bailing_moe(config), 0), norm)


def _linear_attention(config: HfConfig, layer: int, layers: int) -> LightningAttention:
    heads = config.size("num_attention_heads")
    norm = rms_norm(config, 1e-6)
    head_dim = hf_config.head_dim(config, config.size("hidden_size"), heads)
    if "rotary_dim" in config:
        config.default("partial_rotary_factor", config.size("rotary_dim") / head_dim)
    depth = 1 - (layer - 1) / max(layers - 1, 1) + 1e-5  # the first layer's slopes are the steepest, beyond 1
    return LightningAttention(
        head_dim=head_dim,
        slopes=tuple(slope * depth for slope in alibi_slopes(heads)),
        norm=norm,
        groups=config.opt_size("group_norm_size", 1),
        scale=head_dim**-0.5,
        silu=False,
        qk_norm=norm if config.opt("use_qk_norm", bool, False) else None,
        rope=hf_config.rope(config, head_dim, theta=6e5),
    )


def _keys_of_latent_attention(config: HfConfig) -> None:
    """Give keys that describe lightning attention the values of latent attention, all of whose RoPE part is rotated."""
    config.set("head_dim", config.size("qk_rope_head_dim"))
    config.set("num_key_value_heads", config.size("num_attention_heads"))
    config.set("partial_rotary_factor", 1.0)
    if "q_lora_rank" not in config:
        config.set("q_lora_rank", None)


_SOURCE = "[model.]layers.{l}.attention"
_TARGET = "layers.{l}.mixers.0"

LING25 = Family(
    _ling25,
    (
        *HYBRID_RULES,
        Split(f"{_SOURCE}.query_key_value.weight", tuple(f"{_TARGET}.{part}" for part in "qkv")),
        Rename(f"{_SOURCE}.query_layernorm.weight", f"{_TARGET}.q_norm"),
        Rename(f"{_SOURCE}.key_layernorm.weight", f"{_TARGET}.k_norm"),
        Rename(f"{_SOURCE}.g_norm.weight", f"{_TARGET}.norm"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "*.slope", "model.mtp.*"),
)
