"""StableLM: LayerNorm, RoPE on a part of each head; some sizes have mixer and ffn in parallel. Orion: full RoPE."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import RULES
from pagoda.common.models.family import (
    Family,
    Stack,
    decoder,
    gated_mlp,
    layer_norm,
    pre_norm_decoder,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _stablelm(config: HfConfig) -> ModelSpec:
    config.alias("layer_norm_eps", "norm_eps")
    config.alias("partial_rotary_factor", "rope_pct")
    config.expect("rotary_scaling_factor", 1.0)
    attention = rotary_attention(config, config.size("hidden_size"), partial=0.25)
    attention = replace(attention, qkv_bias=config.opt("use_qkv_bias", bool, False))
    if config.opt("qk_layernorm", bool, False):
        attention = replace(attention, qk_norm=layer_norm(config, bias=False), qk_norm_over="own_weights")
    norm = layer_norm(config)
    parallel = config.opt("use_parallel_residual", bool, False)
    norms = Norms(before_mixer=norm, before_ffn=None if parallel else norm)
    layer = Layer((attention,), gated_mlp(config), norms, parallel=parallel)
    return decoder(config, [layer] * config.size("num_hidden_layers"), norm)


def _orion(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"))
    norm = layer_norm(config, "rms_norm_eps")
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, norm)


ORION = Family(_orion, RULES)
STABLELM = Family(
    _stablelm,
    (
        *RULES,
        Stack("[model.]layers.{l}.self_attn.q_layernorm.norms.{e}.weight", "layers.{l}.mixers.0.q_norm"),
        Stack("[model.]layers.{l}.self_attn.k_layernorm.norms.{e}.weight", "layers.{l}.mixers.0.k_norm"),
    ),
)
