"""Bloom and MPT: ALiBi instead of positions, LayerNorm, a plain MLP, fused q-k-v."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import Family, Rename, Split, fused_linear, layer_norm, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Embedding, Layer, Mlp, ModelSpec, Norms


def _bloom(config: HfConfig) -> ModelSpec:
    config.alias("hidden_size", "n_embed")
    config.alias("n_layer", "num_hidden_layers")
    config.alias("n_head", "num_attention_heads")
    config.expect("apply_residual_connection_post_layernorm", False)
    config.ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
    config.ignore("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact")  # of the training code
    norm = layer_norm(config, "layer_norm_epsilon")
    width = config.size("hidden_size")
    heads = config.size("n_head")
    spec = _model(config, width, heads, norm, Mlp(4 * width, "gelu_tanh", gated=False, bias=True))
    layer = replace(spec.layers[0], mixers=(replace(spec.layers[0].attention, qkv_bias=True, out_bias=True),))
    stack = (layer,) * config.size("n_layer")
    positions = config.opt_size("seq_length", 2048)
    return replace(spec, layers=stack, embedding=Embedding(norm=norm), max_positions=positions)


def _mpt(config: HfConfig) -> ModelSpec:
    config.expect("no_bias", True)
    config.expect("embedding_fraction", 1.0)
    config.expect("logit_scale", None)
    config.ignore("learned_pos_emb", "norm_type", "init_device", "init_config", "verbose", "emb_pdrop")
    section = config.section("attn_config") or HfConfig({})
    for key, supported in (
        *(("attn_type", "multihead_attention"), ("alibi", True), ("prefix_lm", False), ("qk_ln", False)),
        ("attn_uses_sequence_id", False),
    ):
        section.expect(key, supported)
    section.ignore("attn_impl", "attn_pdrop", "model_type")
    width = config.size("d_model")
    heads = config.size("n_heads")
    ffn = Mlp(config.opt_size("expansion_ratio", 4) * width, "gelu", gated=False)
    spec = _model(config, width, heads, layer_norm(config, "layer_norm_epsilon", bias=False), ffn)
    mixer = spec.layers[0].attention
    mixer = replace(
        mixer,
        scale=section.opt("softmax_scale", float, mixer.scale),
        qkv_clip=section.nullable("clip_qkv", float),
        alibi_slopes=alibi_slopes(heads, section.opt("alibi_bias_max", float, 8.0)),
    )
    section.finish()
    stack = (replace(spec.layers[0], mixers=(mixer,)),) * config.size("n_layers")
    return replace(spec, layers=stack, max_positions=config.size("max_seq_len"))


def _model(config: HfConfig, width: int, heads: int, norm: Norm, ffn: Mlp) -> ModelSpec:
    """Return a model of one layer."""
    if width % heads:
        raise config.error("n_head", f"{heads} does not divide the width {width}")
    dim = width // heads
    attention = Attention(heads, heads, dim, dim**-0.5, None, alibi_slopes=alibi_slopes(heads))
    layer = Layer((attention,), ffn, Norms(before_mixer=norm, before_ffn=norm))
    tied = config.opt("tie_word_embeddings", bool, True)
    return ModelSpec(config.size("vocab_size"), width, (layer,), norm, tied, max_positions=1)


_SOURCE = "[transformer.]h.{l}"
_QKV = tuple("layers.{l}.mixers.0." + name for name in "qkv")
_BLOCK = "[transformer.]blocks.{l}"

BLOOM = Family(
    _bloom,
    (
        Rename("[transformer.]word_embeddings.weight", "embed"),
        *linear("[transformer.]word_embeddings_layernorm", "embed_norm"),
        Rename("lm_head.weight", "head"),
        *linear("[transformer.]ln_f", "final_norm"),
        *linear(f"{_SOURCE}.input_layernorm", "layers.{l}.norms.before_mixer"),
        *linear(f"{_SOURCE}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_SOURCE}.self_attention.query_key_value", *_QKV, interleaved=True),
        *linear(f"{_SOURCE}.self_attention.dense", "layers.{l}.mixers.0.o"),
        *linear(f"{_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.up"),
        *linear(f"{_SOURCE}.mlp.dense_4h_to_h", "layers.{l}.ffn.down"),
    ),
)

MPT = Family(
    _mpt,
    (
        Rename("[transformer.]wte.weight", "embed"),
        Rename("lm_head.weight", "head"),
        Rename("[transformer.]norm_f.weight", "final_norm"),
        Rename(f"{_BLOCK}.norm_1.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_BLOCK}.norm_2.weight", "layers.{l}.norms.before_ffn"),
        Split(f"{_BLOCK}.attn.Wqkv.weight", _QKV),
        Rename(f"{_BLOCK}.attn.out_proj.weight", "layers.{l}.mixers.0.o"),
        Rename(f"{_BLOCK}.ffn.up_proj.weight", "layers.{l}.ffn.up"),
        Rename(f"{_BLOCK}.ffn.down_proj.weight", "layers.{l}.ffn.down"),
    ),
)
