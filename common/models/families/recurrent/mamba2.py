"""Mamba 2; and the config keys and weight-name rules of Mamba-2 mixers that hybrid families share."""

from __future__ import annotations

import math
from typing import Any

from pagoda.common.models.family import EMBED_RULES, Family, Rename, Rule, Split, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Mamba2
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, ModelSpec, Norms

CONTEXT = 1 << 17
"""Maximum context in tokens of models without attention whose config states none: their state does not grow with it."""

TRAINING_KEYS = (
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "time_step_init_scheme"),
    *("time_step_scale", "rescale_prenorm_residual", "residual_in_fp32", "num_logits_to_keep", "fused_add_norm"),
    *("chunk_size", "use_mamba_kernels", "use_associative_scan", "use_falcon_mambapy", "use_mambapy", "rms_norm"),
)
"""Keys of how parameters are initialised, of precision and of kernels."""


def _mamba2(config: HfConfig) -> ModelSpec:
    norm = Norm(config.opt("layer_norm_epsilon", float, 1e-5))
    width = config.size("hidden_size")
    heads = config.opt_size("num_heads", 128)
    config.expect("hidden_act", "silu")
    config.expect("rms_norm", True)
    config.ignore("norm_before_gate", *TRAINING_KEYS)  # published as true, though the gate comes first
    mixer = Mamba2(
        heads=heads,
        head_dim=config.opt_size("head_dim", 64),
        groups=groups(config, "n_groups", heads, 8),
        state_dim=config.opt_size("state_size", 128),
        taps=config.opt_size("conv_kernel", 4),
        norm=norm,
        bias=config.opt("use_bias", bool, False),
        conv_bias=config.opt("use_conv_bias", bool, True),
        step_limit=step_limit(config),
    )
    config.expect("intermediate_size", mixer.width)
    if mixer.width != config.opt_size("expand", 2) * width:
        raise config.error("expand", f"times hidden_size {width} is not num_heads * head_dim, {mixer.width}")
    layer = Layer((mixer,), None, Norms(before_mixer=norm))
    return recurrent_decoder(config, layer, norm)


def recurrent_decoder(config: HfConfig, layer: Layer, norm: Norm, *, tied: bool = False) -> ModelSpec:
    """Return a decoder of equal layers without attention. `tied`: the family's default."""
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=config.size("hidden_size"),
        layers=(layer,) * config.size("num_hidden_layers"),
        final_norm=norm,
        tied=config.opt("tie_word_embeddings", bool, tied),
        max_positions=config.opt_size("max_position_embeddings", CONTEXT),
    )


def hybrid_mamba2(config: HfConfig, norm: Norm | None, width: int | None = None) -> Mamba2:
    """Return the mixer that the keys `mamba_*` describe. `width`: channels of all heads, default: by `mamba_expand`."""
    config.expect("hidden_act", "silu")  # also the activation of the convolution
    config.ignore("mamba_chunk_size", *TRAINING_KEYS)
    heads = config.opt_size("mamba_n_heads", 128)
    expand = config.opt_size("mamba_expand", 2)
    width = expand * config.size("hidden_size") if width is None else width
    if width % heads:
        raise config.error("mamba_n_heads", f"{heads} does not divide the {width} channels of the mixer")
    if config.auto_size("mamba_d_head", width // heads) != width // heads:
        raise config.error("mamba_d_head", f"times mamba_n_heads {heads} is not the {width} channels of the mixer")
    return Mamba2(
        heads=heads,
        head_dim=width // heads,
        groups=groups(config, "mamba_n_groups", heads, 1),
        state_dim=config.opt_size("mamba_d_state", 256),
        taps=config.opt_size("mamba_d_conv", 4),
        norm=norm,
        bias=config.opt("mamba_proj_bias", bool, False),
        conv_bias=config.opt("mamba_conv_bias", bool, True),
        step_limit=step_limit(config),
    )


def groups(config: HfConfig, key: str, heads: int, default: int) -> int:
    """Return the number of groups of heads with the same b and c. Raises ModelError unless it divides `heads`."""
    count = config.opt_size(key, default)
    if heads % count:
        raise config.error(key, f"{count} does not divide the {heads} heads of the mixer")
    return count


def step_limit(config: HfConfig) -> tuple[float, float]:
    """Return `time_step_limit`; transformers 5 writes an infinite limit as an object."""
    limits = [_number(limit) for limit in config.opt("time_step_limit", list, [0.0, math.inf])]
    if len(limits) != 2 or not limits[0] <= limits[1]:
        raise config.error("time_step_limit", f"is {limits}; it must be the least and the largest step")
    return limits[0], limits[1]


def _number(value: Any) -> float:
    return float(value["__float__"] if isinstance(value, dict) else value)


def mamba2_rules(source: str, target: str = "layers.{l}.mixers.0") -> tuple[Rule, ...]:
    """Return the rules of a Mamba-2 mixer."""
    projections = tuple(f"{target}.{part}" for part in ("gate", "v", "b", "c", "step"))
    return (
        Split(f"{source}.in_proj.weight", projections),
        Split(f"{source}.in_proj.bias", tuple(f"{name}_bias" for name in projections)),
        Split(f"{source}.conv1d.weight", tuple(f"{target}.{part}_conv" for part in "vbc")),
        Split(f"{source}.conv1d.bias", tuple(f"{target}.{part}_conv_bias" for part in "vbc")),
        Rename(f"{source}.dt_bias", f"{target}.step_offset"),
        Rename(f"{source}.A_log", f"{target}.decay_rate"),
        Rename(f"{source}.D", f"{target}.skip"),
        Rename(f"{source}.norm.weight", f"{target}.norm"),
        *linear(f"{source}.out_proj", f"{target}.o"),
    )


BACKBONE_RULES = (
    Rename("[backbone.]embeddings.weight", "embed"),
    Rename("[backbone.]embedding.weight", "embed"),
    Rename("[backbone.]layers.{l}.norm.weight", "layers.{l}.norms.before_mixer"),
    Rename("[backbone.]norm_f.weight", "final_norm"),
    Rename("lm_head.weight", "head"),
)

FEED_FORWARD_RULES = (
    *EMBED_RULES,
    Rename("[model.]final_layernorm.weight", "final_norm"),
    *linear("[model.]layers.{l}.feed_forward.gate_proj", "layers.{l}.ffn.gate"),
    *linear("[model.]layers.{l}.feed_forward.up_proj", "layers.{l}.ffn.up"),
    *linear("[model.]layers.{l}.feed_forward.down_proj", "layers.{l}.ffn.down"),
    Rename("[model.]layers.{l}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
    Rename("[model.]layers.{l}.pre_ff_layernorm.weight", "layers.{l}.norms.before_ffn"),
)
"""Of hybrid families that call their MLP `feed_forward`: all but the mixers."""

MAMBA2 = Family(_mamba2, (*BACKBONE_RULES, *mamba2_rules("[backbone.]layers.{l}.mixer")))
