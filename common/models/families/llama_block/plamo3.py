"""PLaMo 3: four norms whose weights are stored without their offsets, norms on q and k, windows in most layers."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.family import (
    Family,
    Rename,
    Shift,
    decoder,
    fused_linear,
    gated_mlp,
    grouped_attention,
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _plamo3(config: HfConfig) -> ModelSpec:
    config.expect("linear_type", "normal")
    config.alias("sliding_window", "window_size")
    config.alias("rope_local_base_freq", "rope_local_theta")
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    norm = rms_norm(config, 1e-6)
    ropes = hf_config.rope_per_layer_type(config, config.size("head_dim"), full=1_000_000.0, sliding=10_000.0)
    full = replace(grouped_attention(config, width, ropes["full_attention"]), qk_norm=norm)
    windowed = replace(full, rope=ropes["sliding_attention"], window=config.window(2048))
    every = config.opt_size("sliding_window_pattern", 8)
    kinds = config.layer_types(
        layers, ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]
    )
    norms = Norms(norm, norm, norm, norm)
    ffn = gated_mlp(config)
    stack = (Layer((windowed if kind == "sliding_attention" else full,), ffn, norms) for kind in kinds)
    return decoder(config, stack, norm)


_LAYER = "model.layers.layers.{l}"
_MIXER = "layers.{l}.mixers.0"
_NORMS = "layers.{l}.norms"

PLAMO3 = Family(
    _plamo3,
    (
        Rename("model.embed_tokens.weight", "embed"),
        Rename("lm_head.weight", "head"),
        Shift("model.norm.weight", "final_norm", 1.0),
        Shift(f"{_LAYER}.pre_mixer_norm.weight", f"{_NORMS}.before_mixer", 1.0),
        Shift(f"{_LAYER}.post_mixer_norm.weight", f"{_NORMS}.after_mixer", 1 / 5),
        Shift(f"{_LAYER}.pre_mlp_norm.weight", f"{_NORMS}.before_ffn", 1.0),
        Shift(f"{_LAYER}.post_mlp_norm.weight", f"{_NORMS}.after_ffn", 5**-1.5),
        Shift(f"{_LAYER}.mixer.q_norm.weight", f"{_MIXER}.q_norm", 1.0),
        Shift(f"{_LAYER}.mixer.k_norm.weight", f"{_MIXER}.k_norm", 1.0),
        *fused_linear(f"{_LAYER}.mixer.qkv_proj", *(f"{_MIXER}.{part}" for part in "qkv")),
        Rename(f"{_LAYER}.mixer.o_proj.weight", f"{_MIXER}.o"),
        *fused_linear(f"{_LAYER}.mlp.gate_up_proj", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
        Rename(f"{_LAYER}.mlp.down_proj.weight", "layers.{l}.ffn.down"),
    ),
)
