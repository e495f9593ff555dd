"""Baichuan 1 and 2, Qwen 1: Llama's block with q-k-v fused; Baichuan 13B has ALiBi, Baichuan 2 a normalised head."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.family import (
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    Family,
    Normalise,
    Rename,
    Rule,
    fused_linear,
    gated_mlp,
    grouped_attention,
    linear,
    pre_norm_decoder,
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.spec import ModelSpec


def _baichuan_7b(config: HfConfig) -> ModelSpec:
    return _model(config, _rotary(config))


def _baichuan(config: HfConfig) -> ModelSpec:
    if config.size("hidden_size") == 4096:  # Baichuan2-7B, whose file differs from 13B's in no other way
        return _baichuan_7b(config)
    config.alias("max_position_embeddings", "model_max_length")
    attention = grouped_attention(config, config.size("hidden_size"), None)
    return _model(config, replace(attention, alibi_slopes=alibi_slopes(attention.heads)))


def _rotary(config: HfConfig) -> Attention:
    width = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    return grouped_attention(config, width, hf_config.rope(config, hf_config.head_dim(config, width, heads)))


def _model(config: HfConfig, attention: Attention) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


def _baichuan_head(config: HfConfig) -> tuple[Rule, ...]:
    """Return the rule of the second version's head: its file has the weight of a loss over z."""
    second = "z_loss_weight" in config
    config.ignore("z_loss_weight")
    return (Normalise("lm_head.weight", "head", axis=1),) if second else ()


def _qwen1(config: HfConfig) -> ModelSpec:
    for key, supported in (("no_bias", True), ("rotary_pct", 1.0), ("scale_attn_weights", True)):
        config.expect(key, supported)
    # Beyond the trained context, which is not served, and the dtypes and kernels of the model's own code.
    config.ignore("use_dynamic_ntk", "use_logn_attn", "max_position_embeddings", "bf16", "fp16", "fp32", "onnx_safe")
    config.ignore("softmax_in_fp32", "use_cache_kernel", "use_cache_quantization", "tokenizer_type")
    config.alias("rms_norm_eps", "layer_norm_epsilon")
    config.alias("rope_theta", "rotary_emb_base")
    config.alias("head_dim", "kv_channels")
    config.set("max_position_embeddings", config.size("seq_length"))
    config.set("intermediate_size", config.size("intermediate_size") // 2)  # the file counts gate and up
    return _model(config, replace(_rotary(config), qkv_bias=True))


_QKV = tuple("layers.{l}.mixers.0." + part for part in "qkv")
_ATTENTION = "[model.]layers.{l}.self_attn"
_RULES = (
    *(EMBED_RULES + MLP_RULES + PRE_NORM_RULES),
    *fused_linear(f"{_ATTENTION}.W_pack", *_QKV),
    *linear(f"{_ATTENTION}.o_proj", "layers.{l}.mixers.0.o"),
)
_BLOCK = "[transformer.]h.{l}"

BAICHUAN_7B = Family(_baichuan_7b, _RULES, config_rules=_baichuan_head)
BAICHUAN = Family(_baichuan, _RULES, config_rules=_baichuan_head)
QWEN1 = Family(
    _qwen1,
    (
        Rename("[transformer.]wte.weight", "embed"),
        Rename("[transformer.]ln_f.weight", "final_norm"),
        Rename("lm_head.weight", "head"),
        Rename(f"{_BLOCK}.ln_1.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_BLOCK}.ln_2.weight", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_BLOCK}.attn.c_attn", *_QKV),
        Rename(f"{_BLOCK}.attn.c_proj.weight", "layers.{l}.mixers.0.o"),
        Rename(f"{_BLOCK}.mlp.w2.weight", "layers.{l}.ffn.gate"),
        Rename(f"{_BLOCK}.mlp.w1.weight", "layers.{l}.ffn.up"),
        Rename(f"{_BLOCK}.mlp.c_proj.weight", "layers.{l}.ffn.down"),
    ),
    ignored=("*.rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias", "lm_head.weight"),
)
