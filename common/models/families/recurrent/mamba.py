"""Mamba and Falcon-Mamba; Jamba: Mamba and attention layers without RoPE, experts in every other layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagoda.common.models.families.experts import FFN, expert_rules
from pagoda.common.models.families.recurrent.mamba2 import (
    BACKBONE_RULES,
    FEED_FORWARD_RULES,
    TRAINING_KEYS,
    recurrent_decoder,
)
from pagoda.common.models.family import (
    ATTENTION_RULES,
    Family,
    Rename,
    Rule,
    Split,
    gated_mlp,
    grouped_attention,
    linear,
    pre_norm_decoder,
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Mamba
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, ModelSpec, Moe, Norms, Router


def _mamba(config: HfConfig, *, normed: bool) -> ModelSpec:
    """`normed`: the low-rank step, b and c have norms without weights."""
    width = config.size("hidden_size")
    config.expect("hidden_act", "silu")
    mixer = Mamba(
        channels=config.opt_size("intermediate_size", config.opt_size("expand", 2) * width),
        state_dim=config.opt_size("state_size", 16),
        step_rank=config.auto_size("time_step_rank", -(-width // 16)),
        taps=config.opt_size("conv_kernel", 4),
        part_norm=Norm(config.opt("mixer_rms_eps", float, 1e-6), scale=False) if normed else None,
        bias=config.opt("use_bias", bool, False),
        conv_bias=config.opt("use_conv_bias", bool, True),
    )
    config.expect("rms_norm", True)
    config.ignore("d_model", "n_layer", "d_inner", "ssm_cfg", "pad_vocab_size_multiple", *TRAINING_KEYS)
    norm = Norm(config.opt("layer_norm_epsilon", float, 1e-5))
    return recurrent_decoder(config, Layer((mixer,), None, Norms(before_mixer=norm)), norm, tied=True)


def _jamba(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    norm = rms_norm(config, 1e-6)
    config.expect("mamba_inner_layernorms", True)
    config.expect("hidden_act", "silu")  # also the activation of the convolution
    config.expect("sliding_window", None)
    config.ignore("n_ctx", "calc_logits_for_entire_prompt", *TRAINING_KEYS)
    mamba = Mamba(
        channels=config.opt_size("mamba_expand", 2) * width,
        state_dim=config.opt_size("mamba_d_state", 16),
        step_rank=config.auto_size("mamba_dt_rank", -(-width // 16)),
        taps=config.opt_size("mamba_d_conv", 4),
        part_norm=norm,
        bias=config.opt("mamba_proj_bias", bool, False),
        conv_bias=config.opt("mamba_conv_bias", bool, True),
    )
    attention = grouped_attention(config, width, None)
    mlp = gated_mlp(config)
    experts = config.opt_size("num_experts", 16)
    router = Router(config.opt_size("num_experts_per_tok", 2), False)
    moe = Moe(experts, mlp, router) if experts > 1 else mlp
    attends = _every(config, "attn_layer", 8, 4)
    mixes = _every(config, "expert_layer", 2, 1)
    mixers = [attention if layer % attends[0] == attends[1] else mamba for layer in range(layers)]
    ffns = [moe if layer % mixes[0] == mixes[1] else mlp for layer in range(layers)]
    return pre_norm_decoder(config, mixers, ffns, norm)


def _every(config: HfConfig, what: str, period: int, offset: int) -> tuple[int, int]:
    """Return the period and the offset of a kind of layer. `period`, `offset`: the family's defaults."""
    period = config.opt_size(f"{what}_period", period)
    offset = config.opt(f"{what}_offset", int, offset)
    if not 0 <= offset < period:
        raise config.error(f"{what}_offset", f"is {offset}; it must be less than {what}_period {period}")
    return period, offset


def _mixer_rules(source: str) -> tuple[Rule, ...]:
    target = "layers.{l}.mixers.0"
    return (
        Split(f"{source}.in_proj.weight", (f"{target}.v", f"{target}.gate")),
        Split(f"{source}.in_proj.bias", (f"{target}.v_bias", f"{target}.gate_bias")),
        *linear(f"{source}.conv1d", f"{target}.v_conv"),
        Split(f"{source}.x_proj.weight", (f"{target}.step_a", f"{target}.b", f"{target}.c")),
        Rename(f"{source}.dt_layernorm.weight", f"{target}.step_a_norm"),
        Rename(f"{source}.b_layernorm.weight", f"{target}.b_norm"),
        Rename(f"{source}.c_layernorm.weight", f"{target}.c_norm"),
        Rename(f"{source}.dt_proj.weight", f"{target}.step"),
        Rename(f"{source}.dt_proj.bias", f"{target}.step_offset"),
        Rename(f"{source}.A_log", f"{target}.decay_rate"),
        Rename(f"{source}.D", f"{target}.skip"),
        *linear(f"{source}.out_proj", f"{target}.o"),
    )


MAMBA = Family(partial(_mamba, normed=False), (*BACKBONE_RULES, *_mixer_rules("[backbone.]layers.{l}.mixer")))
FALCON_MAMBA = replace(MAMBA, build=partial(_mamba, normed=True))

_FEED_FORWARD = "[model.]layers.{l}.feed_forward"
JAMBA = Family(
    _jamba,
    (
        *FEED_FORWARD_RULES,
        *ATTENTION_RULES,
        *_mixer_rules("[model.]layers.{l}.mamba"),
        Rename(f"{_FEED_FORWARD}.router.weight", f"{FFN}.router"),
        *expert_rules(f"{_FEED_FORWARD}.experts"),
    ),
)
