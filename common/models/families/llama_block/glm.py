"""ChatGLM 2 and 3, GLM-4 of 2024 (Glm) and 2025 (Glm4, four norms): interleaved RoPE on half of each head."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
    decoder,
    fused_linear,
    gated_mlp,
    linear,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms


def _glm(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1.5625e-07)
    return _model(config, Norms(before_mixer=norm, before_ffn=norm), norm)


def _glm4(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1.5625e-07)
    return _model(config, Norms(norm, norm, norm, norm), norm)


def _model(config: HfConfig, norms: Norms, final_norm: Norm) -> ModelSpec:
    config.default("head_dim", 128)
    attention = rotary_attention(config, config.size("hidden_size"), partial=0.5, interleaved=True)
    attention = replace(attention, qkv_bias=config.opt("attention_bias", bool, True))
    layer = Layer((attention,), gated_mlp(config), norms)
    return decoder(config, [layer] * config.size("num_hidden_layers"), final_norm)


def _chatglm(config: HfConfig) -> ModelSpec:
    for key, supported in (
        ("add_bias_linear", False),
        ("apply_residual_connection_post_layernorm", False),
        ("interleaved_qkv", False),
        ("post_layer_norm", True),
        ("pre_seq_len", 0),
        ("prefix_projection", False),
        ("quantization_bit", 0),
        ("rmsnorm", True),
    ):
        config.expect(key, supported)
    config.ignore("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion")
    config.ignore("fp32_residual_connection", "vocab_size")
    heads = config.size("num_attention_heads")
    head_dim = config.size("kv_channels")
    width = config.size("hidden_size")
    grouped = config.opt("multi_query_attention", bool, False)
    groups = config.opt_size("multi_query_group_num", 1)
    interleaved = config.opt("original_rope", bool, True)
    rope = Rope(10_000.0 * config.opt("rope_ratio", float, 1.0), head_dim // 2, interleaved=interleaved)
    norm = Norm(config.opt("layernorm_epsilon", float, 1e-5))
    bias = config.opt("add_qkv_bias", bool, False)
    kv_heads = groups if grouped else heads
    layer = Layer(
        (Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope, qkv_bias=bias),),
        Mlp(config.size("ffn_hidden_size"), "silu", gated=True),
        Norms(before_mixer=norm, before_ffn=norm),
    )
    return ModelSpec(
        vocab=config.size("padded_vocab_size"),
        width=width,
        layers=(layer,) * config.size("num_layers"),
        final_norm=norm,
        tied=config.opt("tie_word_embeddings", bool, False),
        max_positions=config.size("seq_length"),
    )


_RULES = (
    *EMBED_RULES,
    *ATTENTION_RULES,
    *PRE_NORM_RULES,
    *fused_linear("[model.]layers.{l}.mlp.gate_up_proj", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
    *linear("[model.]layers.{l}.mlp.down_proj", "layers.{l}.ffn.down"),
)

GLM = Family(_glm, _RULES)
GLM4 = Family(
    _glm4,
    (
        *_RULES,
        Rename("[model.]layers.{l}.post_self_attn_layernorm.weight", "layers.{l}.norms.after_mixer"),
        Rename("[model.]layers.{l}.post_mlp_layernorm.weight", "layers.{l}.norms.after_ffn"),
    ),
)

_SOURCE = "[transformer.]encoder.layers.{l}"
_QKV = tuple("layers.{l}.mixers.0." + name for name in "qkv")

CHATGLM = Family(
    _chatglm,
    (
        Rename("[transformer.]embedding.word_embeddings.weight", "embed"),
        Rename("[transformer.]output_layer.weight", "head"),
        Rename("[transformer.]encoder.final_layernorm.weight", "final_norm"),
        Rename(f"{_SOURCE}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_SOURCE}.post_attention_layernorm.weight", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_SOURCE}.self_attention.query_key_value", *_QKV),
        Rename(f"{_SOURCE}.self_attention.dense.weight", "layers.{l}.mixers.0.o"),
        *fused_linear(f"{_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
        Rename(f"{_SOURCE}.mlp.dense_4h_to_h.weight", "layers.{l}.ffn.down"),
    ),
    ignored=("*.rotary_pos_emb.inv_freq", "transformer.output_layer.weight"),
    heads=("score.*", "classifier_head.*", "transformer.output_layer.*"),
)
