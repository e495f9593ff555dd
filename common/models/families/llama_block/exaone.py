"""EXAONE 3: Llama's block. EXAONE 4: norms after mixer and ffn, qk norm; beside layers with windows, no RoPE."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    FOUR_NORM_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    decoder,
    gated_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _exaone4(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-5)
    ffn = gated_mlp(config)
    norms = Norms(after_mixer=norm, after_ffn=norm)
    return decoder(config, (Layer((mixer,), ffn, norms) for mixer in exaone4_attentions(config)), norm)


def exaone4_attentions(config: HfConfig) -> list[Attention]:
    """Return the attention of each layer: with windows in some, then the others have no RoPE."""
    layers = config.size("num_hidden_layers")
    full = replace(rotary_attention(config, config.size("hidden_size")), qk_norm=rms_norm(config, 1e-5))
    windowed = full
    if (window := config.window(4096)) is not None:
        full, windowed = replace(full, rope=None), replace(full, window=window)
    if "layer_types" in config or window is None:
        config.ignore("sliding_window_pattern")
    else:
        config.expect("sliding_window_pattern", 4, "LLLG")
    pattern = ["sliding_attention" if (layer + 1) % 4 and window else "full_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


def _exaone(config: HfConfig) -> ModelSpec:
    config.alias("num_hidden_layers", "num_layers")
    config.alias("rms_norm_eps", "layer_norm_epsilon")
    config.alias("hidden_act", "activation_function")
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"))
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


_SOURCE = "[transformer.]h.{l}"

EXAONE = Family(
    _exaone,
    (
        Rename("[transformer.]wte.weight", "embed"),
        Rename("lm_head.weight", "head"),
        Rename("[transformer.]ln_f.weight", "final_norm"),
        Rename(f"{_SOURCE}.ln_1.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_SOURCE}.ln_2.weight", "layers.{l}.norms.before_ffn"),
        *(Rename(f"{_SOURCE}.attn.attention.{x}_proj.weight", "layers.{l}.mixers.0." + x) for x in "qkv"),
        Rename(f"{_SOURCE}.attn.attention.out_proj.weight", "layers.{l}.mixers.0.o"),
        Rename(f"{_SOURCE}.mlp.c_fc_0.weight", "layers.{l}.ffn.gate"),
        Rename(f"{_SOURCE}.mlp.c_fc_1.weight", "layers.{l}.ffn.up"),
        Rename(f"{_SOURCE}.mlp.c_proj.weight", "layers.{l}.ffn.down"),
    ),
    ignored=("*.rotary.inv_freq", "*.rotary_emb.inv_freq", "lm_head.weight"),
)
EXAONE4 = Family(_exaone4, (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *FOUR_NORM_RULES))
