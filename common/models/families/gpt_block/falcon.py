"""Falcon: LayerNorm, mixer and ffn in parallel, few KV heads, q-k-v fused by KV head."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import Family, Rename, decoder, fused_linear, layer_norm, linear, rotary_attention
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms


def _falcon(config: HfConfig) -> ModelSpec:
    grouped = config.opt("new_decoder_architecture", bool, "n_head_kv" in config)
    config.alias("hidden_size", "n_embed")
    config.alias("num_attention_heads", "n_head")
    config.alias("num_hidden_layers", "n_layer")
    config.default("max_position_embeddings", 2048)
    config.expect("apply_residual_connection_post_layernorm", False)
    width = config.size("hidden_size")
    bias = config.opt("bias", bool, False)
    attention = rotary_attention(config, width)
    attention = replace(attention, kv_heads=_kv_heads(config, grouped), qkv_bias=bias, out_bias=bias)
    if config.opt("alibi", bool, False):  # scaled like the scores
        slopes = tuple(slope * attention.scale for slope in alibi_slopes(attention.heads))
        attention = replace(attention, rope=None, alibi_slopes=slopes)
    activation = config.activation("activation", "gelu")
    ffn = Mlp(config.opt_size("ffn_hidden_size", 4 * width), activation, gated=False, bias=bias)
    norm = layer_norm(config, "layer_norm_epsilon")
    parallel = config.opt("parallel_attn", bool, True)
    norms_before = config.opt_size("num_ln_in_parallel_attn", 2 if grouped else 1)
    if (grouped and not parallel) or norms_before > (2 if grouped else 1):
        raise config.error("num_ln_in_parallel_attn", f"is {norms_before}, parallel_attn {parallel}: not supported")
    norms = Norms(before_mixer=norm, before_ffn=norm if norms_before == 2 or not parallel else None)
    layer = Layer((attention,), ffn, norms, parallel=parallel)
    return decoder(config, [layer] * config.size("num_hidden_layers"), norm, tied=True)


def _kv_heads(config: HfConfig, grouped: bool) -> int:
    config.alias("num_kv_heads", "n_head_kv")
    heads = config.size("num_attention_heads")
    kv_heads = config.opt_size("num_kv_heads", heads)
    if config.opt("multi_query", bool, True) and not grouped:
        return 1
    if heads % kv_heads:
        raise config.error("num_kv_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    return kv_heads


_SOURCE = "[transformer.]h.{l}"
_QKV = tuple("layers.{l}.mixers.0." + name for name in "qkv")

FALCON = Family(
    _falcon,
    (
        Rename("[transformer.]word_embeddings.weight", "embed"),
        Rename("lm_head.weight", "head"),
        *linear("[transformer.]ln_f", "final_norm"),
        *linear(f"{_SOURCE}.input_layernorm", "layers.{l}.norms.before_mixer"),
        *linear(f"{_SOURCE}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
        *linear(f"{_SOURCE}.ln_attn", "layers.{l}.norms.before_mixer"),
        *linear(f"{_SOURCE}.ln_mlp", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_SOURCE}.self_attention.query_key_value", *_QKV, interleaved=True),
        *linear(f"{_SOURCE}.self_attention.dense", "layers.{l}.mixers.0.o"),
        *linear(f"{_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.up"),
        *linear(f"{_SOURCE}.mlp.dense_4h_to_h", "layers.{l}.ffn.down"),
    ),
)
