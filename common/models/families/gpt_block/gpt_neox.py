"""GPT-NeoX and Pythia: LayerNorm, RoPE on a part of each head, mixer and ffn in parallel, q-k-v fused head by head."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    Family,
    Rename,
    decoder,
    fused_linear,
    layer_norm,
    linear,
    plain_mlp,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _gpt_neox(config: HfConfig) -> ModelSpec:
    config.alias("partial_rotary_factor", "rotary_pct")
    config.alias("rope_theta", "rotary_emb_base")
    bias = config.opt("attention_bias", bool, True)
    attention = rotary_attention(config, config.size("hidden_size"), partial=0.25)
    attention = replace(attention, qkv_bias=bias, out_bias=bias)
    norm = layer_norm(config)
    layer = Layer(
        (attention,),
        plain_mlp(config, "gelu", bias=True),
        Norms(before_mixer=norm, before_ffn=norm),
        parallel=config.opt("use_parallel_residual", bool, True),
    )
    return decoder(config, [layer] * config.size("num_hidden_layers"), norm)


_SOURCE = "[gpt_neox.]layers.{l}"
_TARGET = "layers.{l}.mixers.0"

GPT_NEOX = Family(
    _gpt_neox,
    (
        Rename("[gpt_neox.]embed_in.weight", "embed"),
        Rename("embed_out.weight", "head"),
        *linear("[gpt_neox.]final_layer_norm", "final_norm"),
        *linear(f"{_SOURCE}.input_layernorm", "layers.{l}.norms.before_mixer"),
        *linear(f"{_SOURCE}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
        *fused_linear(
            f"{_SOURCE}.attention.query_key_value", f"{_TARGET}.q", f"{_TARGET}.k", f"{_TARGET}.v", interleaved=True
        ),
        *linear(f"{_SOURCE}.attention.dense", f"{_TARGET}.o"),
        *linear(f"{_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.up"),
        *linear(f"{_SOURCE}.mlp.dense_4h_to_h", "layers.{l}.ffn.down"),
    ),
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq", "embed_out.weight"),
    heads=("score.*", "classifier.*", "embed_out.*"),
)
