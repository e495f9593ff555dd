"""OPT: learned positions from row 2, LayerNorm, ReLU; the 350M size is post-norm with a narrower embedding."""

from __future__ import annotations

from pagoda.common.models import hf_config
from pagoda.common.models.family import Family, Rename, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Embedding, Layer, Mlp, ModelSpec, Norms


def _opt(config: HfConfig) -> ModelSpec:
    width = config.size("hidden_size")
    positions = config.size("max_position_embeddings")
    table_width = config.opt_size("word_embed_proj_dim", width)
    pre_norm = config.opt("do_layer_norm_before", bool, True)
    for key, supported in (
        ("layer_norm_elementwise_affine", True),
        ("learned_embeddings", True),
        ("scale_embeddings", False),
    ):
        config.expect(key, supported)
    no_final_norm = config.opt("_remove_final_layer_norm", bool, False) or not pre_norm
    norm = Norm(1e-5, kind="layer", bias=True)
    norms = Norms(before_mixer=norm, before_ffn=norm) if pre_norm else Norms(after_mixer=norm, after_ffn=norm)
    layer = Layer((_attention(config, width),), _mlp(config), norms, norm_after_add=not pre_norm)
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=width,
        layers=(layer,) * config.size("num_hidden_layers"),
        final_norm=None if no_final_norm else norm,
        tied=config.opt("tie_word_embeddings", bool, True),
        max_positions=positions,
        embedding=Embedding(
            positions=positions, position_offset=2, width=None if table_width == width else table_width
        ),
    )


def _attention(config: HfConfig, width: int) -> Attention:
    heads = config.size("num_attention_heads")
    head_dim = hf_config.head_dim(config, width, heads)
    bias = config.opt("enable_bias", bool, True)
    config.expect("attention_bias", bias)
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=None,
        qkv_bias=bias,
        out_bias=bias,
    )


def _mlp(config: HfConfig) -> Mlp:
    activation = config.activation("activation_function", "relu")
    return Mlp(config.size("ffn_dim"), activation, gated=False, bias=config.opt("enable_bias", bool, True))


# One pair of tensors per norm; `do_layer_norm_before` decides whether it is a before- or an after-norm.
_NORM_RULES = tuple(
    rule
    for side in ("before", "after")
    for rule in (
        *linear("[model.]decoder.layers.{l}.self_attn_layer_norm", f"layers.{{l}}.norms.{side}_mixer"),
        *linear("[model.]decoder.layers.{l}.final_layer_norm", f"layers.{{l}}.norms.{side}_ffn"),
    )
)

OPT = Family(
    _opt,
    (
        Rename("[model.]decoder.embed_tokens.weight", "embed"),
        Rename("[model.]decoder.embed_positions.weight", "positions"),
        Rename("[model.]decoder.project_in.weight", "embed_in"),
        Rename("[model.]decoder.project_out.weight", "embed_out"),
        *linear("[model.]decoder.final_layer_norm", "final_norm"),
        *linear("[model.]decoder.layers.{l}.self_attn.q_proj", "layers.{l}.mixers.0.q"),
        *linear("[model.]decoder.layers.{l}.self_attn.k_proj", "layers.{l}.mixers.0.k"),
        *linear("[model.]decoder.layers.{l}.self_attn.v_proj", "layers.{l}.mixers.0.v"),
        *linear("[model.]decoder.layers.{l}.self_attn.out_proj", "layers.{l}.mixers.0.o"),
        *linear("[model.]decoder.layers.{l}.fc1", "layers.{l}.ffn.up"),
        *linear("[model.]decoder.layers.{l}.fc2", "layers.{l}.ffn.down"),
        *_NORM_RULES,
        Rename("lm_head.weight", "head"),
    ),
)
