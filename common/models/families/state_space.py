"""Decoders with state space mixers: Mamba and Mamba 2, alone or beside attention.

The families, in the order of this file:

- `Mamba2ForCausalLM`: Mamba 2; and the config keys and weight-name rules of Mamba-2 mixers that hybrid families share.
- `FalconMambaForCausalLM`, `JambaForCausalLM`, `MambaForCausalLM`: Mamba and Falcon-Mamba; Jamba: Mamba and attention
  layers without RoPE, experts in every other layer.
- `BambaForCausalLM`, `FalconH1ForCausalLM`: Bamba (Mamba-2 and attention layers) and Falcon-H1 (both side by side in
  every layer, with multipliers).
- `GraniteMoeHybridForCausalLM`: Granite 4: Mamba-2 and attention layers with Granite's multipliers, an MLP or experts
  beside a shared one.
- `NemotronHForCausalLM`: Nemotron-H and Nemotron 3: layers of one Mamba-2 mixer, one attention without RoPE, one MLP or
  one mixture, whose experts may act in a latent space (Nemotron 3 Super and Ultra).
- `Zamba2ForCausalLM`: Zamba 2: Mamba-2 layers; in front of some a transformer block whose weights take turns, with
  low-rank adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pagoda.common.models.families.experts import FFN, corrected_sigmoid_router, expert_rules
from pagoda.common.models.families.mixtures import GRANITE_MOE_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    AnswerFormat,
    Family,
    Rename,
    Rule,
    Split,
    Stack,
    decoder,
    gated_mlp,
    grouped_attention,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig, kv_heads, rope
from pagoda.common.models.mixers import Attention, Mamba, Mamba2, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Embedding, InputBlock, Layer, Mlp, ModelSpec, Moe, Norms, Router

# Mamba 2 and what its hybrids share.

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
    config.ignore("norm_before_gate", *TRAINING_KEYS)  # Files state it as true, although the gate comes first.
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
    config.expect("hidden_act", "silu")  # The convolution has the same activation.
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


# Mamba and Jamba.


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
    config.expect("hidden_act", "silu")  # The convolution has the same activation.
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
    attends = _mamba_every(config, "attn_layer", 8, 4)
    mixes = _mamba_every(config, "expert_layer", 2, 1)
    mixers = [attention if layer % attends[0] == attends[1] else mamba for layer in range(layers)]
    ffns = [moe if layer % mixes[0] == mixes[1] else mlp for layer in range(layers)]
    return pre_norm_decoder(config, mixers, ffns, norm)


def _mamba_every(config: HfConfig, kind: str, period: int, offset: int) -> tuple[int, int]:
    """Return the period and the offset of a kind of layer. `period`, `offset`: the family's defaults."""
    period = config.opt_size(f"{kind}_period", period)
    offset = config.opt(f"{kind}_offset", int, offset)
    if not 0 <= offset < period:
        raise config.error(f"{kind}_offset", f"is {offset}; it must be less than {kind}_period {period}")
    return period, offset


def _mamba_mixer_rules(source: str) -> tuple[Rule, ...]:
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


MAMBA = Family(partial(_mamba, normed=False), (*BACKBONE_RULES, *_mamba_mixer_rules("[backbone.]layers.{l}.mixer")))
FALCON_MAMBA = replace(MAMBA, build=partial(_mamba, normed=True))

_MAMBA_FEED_FORWARD = "[model.]layers.{l}.feed_forward"
JAMBA = Family(
    _jamba,
    (
        *FEED_FORWARD_RULES,
        *ATTENTION_RULES,
        *_mamba_mixer_rules("[model.]layers.{l}.mamba"),
        Rename(f"{_MAMBA_FEED_FORWARD}.router.weight", f"{FFN}.router"),
        *expert_rules(f"{_MAMBA_FEED_FORWARD}.experts"),
    ),
)


# Bamba and Falcon-H1.


def _bamba(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-5)
    config.ignore("z_loss_coefficient", "attn_rotary_emb")
    attention = _bamba_attention(config, partial=0.5)
    mamba = hybrid_mamba2(config, norm)
    attending = config.opt("attn_layer_indices", list, [])
    mlp = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    mixers = [attention if layer in attending else mamba for layer in range(layers)]
    return pre_norm_decoder(config, mixers, [mlp] * layers, norm)


def _falcon_h1(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-5)
    normed = config.opt("mamba_rms_norm", bool, False)
    config.expect("mamba_use_mlp", True)
    config.ignore("mlp_expansion_factor", "attn_layer_indices")
    width = config.opt_size("mamba_d_ssm", 1024)
    mamba = replace(
        hybrid_mamba2(config, norm if normed else None, width),
        norm_before_gate=config.opt("mamba_norm_before_gate", bool, True),
    )
    config.expect("projectors_bias", mamba.bias)
    attention = _bamba_attention(config)
    mlp = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    layer = Layer((mamba, attention), mlp, Norms(before_mixer=norm, before_ffn=norm))
    return replace(
        decoder(config, [layer] * config.size("num_hidden_layers"), norm),
        embedding=Embedding(scale=config.opt("embedding_multiplier", float, 1.0)),
        logit_scale=config.opt("lm_head_multiplier", float, 1.0),
        weight_scales=_bamba_weight_scales(config),
    )


def _bamba_attention(config: HfConfig, partial: float = 1.0) -> Attention:
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), partial=partial)
    return replace(attention, qkv_bias=bias, out_bias=bias)


def _bamba_weight_scales(config: HfConfig) -> tuple[tuple[str, float], ...]:
    """Return the factors of the linear layers: of inputs on weights alone, of outputs on weights and biases."""
    attention_in = config.opt("attention_in_multiplier", float, 1.0)
    mamba_in = config.opt("ssm_in_multiplier", float, 1.0)
    parts = _bamba_floats(config, "ssm_multipliers", 5)
    gate, down = _bamba_floats(config, "mlp_multipliers", 2)
    inputs = {
        **{f"mixers.0.{part}": mamba_in for part in ("gate", "v", "b", "c", "step")},
        **{f"mixers.1.{part}": attention_in for part in "qkv"},
    }
    outputs = {
        **{f"mixers.0.{part}": factor for part, factor in zip(("gate", "v", "b", "c", "step"), parts)},
        "mixers.0.o": config.opt("ssm_out_multiplier", float, 1.0),
        "mixers.1.k": config.opt("key_multiplier", float, 1.0),
        "mixers.1.o": config.opt("attention_out_multiplier", float, 1.0),
        "ffn.gate": gate,
        "ffn.down": down,
    }
    scales = [*inputs.items(), *outputs.items(), *((f"{name}_bias", factor) for name, factor in outputs.items())]
    return tuple((f"layers.*.{name}", factor) for name, factor in scales if factor != 1)


def _bamba_floats(config: HfConfig, key: str, count: int) -> list[float]:
    factors = config.opt(key, list, [1.0] * count)
    if len(factors) != count or not all(isinstance(factor, int | float) for factor in factors):
        raise config.error(key, f"is {factors}; it must be {count} numbers")
    return [float(factor) for factor in factors]


def _bamba_rules(attention: str) -> tuple[Rule, ...]:
    """`attention`: the mixer that attends."""
    return (
        *FEED_FORWARD_RULES,
        *(
            rule
            for part in "qkvo"
            for rule in linear(f"[model.]layers.{{l}}.self_attn.{part}_proj", f"layers.{{l}}.{attention}.{part}")
        ),
        *mamba2_rules("[model.]layers.{l}.mamba"),
    )


BAMBA = Family(_bamba, _bamba_rules("mixers.0"))
FALCON_H1 = Family(_falcon_h1, _bamba_rules("mixers.1"))


# Granite 4.

_GRANITE4_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


def _granite_hybrid(config: HfConfig) -> ModelSpec:
    config.expect("normalization_function", "rmsnorm")
    config.ignore("init_method")
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    stated_kinds = config.opt("layer_types", list, config.opt("layers_block_type", list, ["mamba"] * layers))
    if len(stated_kinds) != layers or not set(stated_kinds) <= _GRANITE4_KINDS.keys():
        raise config.error(
            "layer_types", f"is {stated_kinds}; it must have {layers} entries of {', '.join(_GRANITE4_KINDS)}"
        )
    mixers: dict[str, Mixer] = {"attention": _granite4_attention(config), "mamba": hybrid_mamba2(config, norm)}
    kinds = [mixers[_GRANITE4_KINDS[name]] for name in stated_kinds]
    spec = pre_norm_decoder(config, kinds, [_granite4_ffn(config)] * layers, norm)
    scale = config.opt("residual_multiplier", float, 1.0)
    return replace(
        spec,
        layers=tuple(replace(layer, residual_scale=scale) for layer in spec.layers),
        embedding=Embedding(scale=config.opt("embedding_multiplier", float, 1.0)),
        logit_scale=1 / config.opt("logits_scaling", float, 1.0),
    )


def _granite4_attention(config: HfConfig) -> Attention:
    width = config.size("hidden_size")
    bias = config.opt("attention_bias", bool, False)
    config.expect("position_embedding_type", "rope", "nope")
    if config.opt("position_embedding_type", str, "nope") == "rope":
        attention = rotary_attention(config, width)
    else:
        config.ignore("rope_theta", "rope_scaling", "rope_parameters")
        attention = grouped_attention(config, width, None)
    scale = config.opt("attention_multiplier", float, 1.0)
    return replace(attention, scale=scale, qkv_bias=bias, out_bias=bias)


def _granite4_ffn(config: HfConfig) -> Mlp | Moe:
    experts = config.opt("num_local_experts", int, 8)
    expert = gated_mlp(config)
    shared = replace(expert, width=config.opt_size("shared_intermediate_size", 1024))
    router = Router(config.opt("num_experts_per_tok", int, 2), renormalise=True)
    return Moe(experts, expert, router, shared) if experts else shared


_GRANITE4_SHARED = "[model.]layers.{l}.shared_mlp"

GRANITE_HYBRID = Family(
    _granite_hybrid,
    (
        *GRANITE_MOE_RULES,
        Split(f"{_GRANITE4_SHARED}.input_linear.weight", (f"{FFN}.gate", f"{FFN}.up")),
        Rename(f"{_GRANITE4_SHARED}.output_linear.weight", f"{FFN}.down"),
        *mamba2_rules("[model.]layers.{l}.mamba"),
    ),
    answers=AnswerFormat(tools="granite4"),
)


# Nemotron-H.

_NEMOTRON_H_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_H_OTHER_NAMES: Final = {"linear_attention": "mamba", "full_attention": "attention"}


def _nemotron_h(config: HfConfig) -> ModelSpec:
    config.alias("head_dim", "attention_head_dim")
    config.alias("layer_norm_epsilon", "rms_norm_eps", "norm_eps")
    config.expect("sliding_window", None)
    config.expect("mamba_proj_bias", False)
    config.expect("num_query_groups", config.opt_size("num_key_value_heads", 8))
    config.ignore("rope_theta", "partial_rotary_factor")  # The model has no RoPE.
    config.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    config.ignore("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", *TRAINING_KEYS)
    norm = Norm(config.opt("layer_norm_epsilon", float, 1e-5))
    kinds = _nemotron_h_kinds(config)
    mixer = Norms(before_mixer=norm)
    ffn = Norms(before_ffn=norm)
    mlp = Mlp(
        config.opt_size("intermediate_size", 21504),
        config.activation("mlp_hidden_act", "relu2"),
        gated=False,
        bias=config.opt("mlp_bias", bool, False),
    )
    layers = {
        "mamba": Layer((_nemotron_h_mamba2(config),), None, mixer),
        "attention": Layer((grouped_attention(config, config.size("hidden_size"), None),), None, mixer),
        "mlp": Layer((), mlp, ffn),
    }
    if "moe" in kinds:
        layers["moe"] = Layer((), _nemotron_h_moe(config, mlp), ffn)
    else:
        config.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor")
        config.ignore("moe_intermediate_size", "moe_shared_expert_intermediate_size", "norm_topk_prob")
        config.ignore("n_group", "topk_group", "moe_latent_size")
    return decoder(config, [layers[kind] for kind in kinds], norm)


def _nemotron_h_kinds(config: HfConfig) -> list[str]:
    """Return the kind of each layer, from its letter in `hybrid_override_pattern` or from `layers_block_type`."""
    pattern = config.opt("hybrid_override_pattern", str, "")
    stated_kinds = config.opt(
        "layer_types", list, config.opt("layers_block_type", list, [_NEMOTRON_H_LETTERS.get(c, c) for c in pattern])
    )
    kinds = [_NEMOTRON_H_OTHER_NAMES.get(kind, kind) for kind in stated_kinds]
    unknown = set(kinds) - set(_NEMOTRON_H_LETTERS.values())
    if unknown or not kinds:
        problem = f"has {unknown.pop()!r}" if unknown else "is empty"
        raise config.error("layers_block_type", f"{problem}; supported: {', '.join(_NEMOTRON_H_LETTERS.values())}")
    config.expect("num_hidden_layers", len(kinds))
    return kinds


def _nemotron_h_mamba2(config: HfConfig) -> Mamba2:
    """Return the mixer. Its steps are limited by `time_step_limit`, not by `time_step_min`, of the initialisation."""
    config.expect("mamba_hidden_act", "silu")
    config.ignore("expand")
    heads = config.opt_size("mamba_num_heads", 128)
    return Mamba2(
        heads=heads,
        head_dim=config.opt_size("mamba_head_dim", 64),
        groups=groups(config, "n_groups", heads, 8),
        state_dim=config.opt_size("ssm_state_size", 128),
        taps=config.opt_size("conv_kernel", 4),
        norm=Norm(config.opt("layer_norm_epsilon", float, 1e-5)),
        bias=config.opt("use_bias", bool, False),
        conv_bias=config.opt("use_conv_bias", bool, True),
        step_limit=step_limit(config),
    )


def _nemotron_h_moe(config: HfConfig, mlp: Mlp) -> Moe:
    if mlp.bias:
        raise config.error("mlp_bias", "is True; with experts only False is supported")
    config.expect("n_shared_experts", 1)
    expert = Mlp(config.size("moe_intermediate_size"), mlp.activation, gated=False)
    shared = Mlp(config.size("moe_shared_expert_intermediate_size"), mlp.activation, gated=False)
    latent = config.nullable("moe_latent_size", int)
    if latent is not None and latent < 1:
        raise config.error("moe_latent_size", f"is {latent}; it must be at least 1")
    return Moe(config.size("n_routed_experts"), expert, corrected_sigmoid_router(config), shared, latent=latent)


def _nemotron_h_rules(backbone: str) -> tuple[Rule, ...]:
    layer = f"{backbone}layers.{{l}}"
    mixer = f"{layer}.mixer"
    return (
        *(rule for part in "qkvo" for rule in linear(f"{mixer}.{part}_proj", f"layers.{{l}}.mixers.0.{part}")),
        *(rule for part in ("up", "down") for rule in linear(f"{mixer}.{part}_proj", f"{FFN}.{part}")),
        *(Stack(f"{mixer}.experts.{{e}}.{part}_proj.weight", f"{FFN}.experts.{part}") for part in ("up", "down")),
        *(Rename(f"{mixer}.experts.{part}_proj", f"{FFN}.experts.{part}") for part in ("up", "down")),
        *(Rename(f"{mixer}.shared_experts.{part}_proj.weight", f"{FFN}.shared.{part}") for part in ("up", "down")),
        Rename(f"{mixer}.fc1_latent_proj.weight", f"{FFN}.latent_in"),
        Rename(f"{mixer}.fc2_latent_proj.weight", f"{FFN}.latent_out"),
        Rename(f"{mixer}.gate.weight", f"{FFN}.router"),
        Rename(f"{mixer}.gate.e_score_correction_bias", f"{FFN}.router_correction"),
        Rename(f"{layer}.norm.weight", "layers.{l}.norms.before_ffn"),
    )


NEMOTRON_H = Family(
    _nemotron_h,
    (*BACKBONE_RULES, *mamba2_rules("[backbone.]layers.{l}.mixer"), *_nemotron_h_rules("[backbone.]")),
    ignored=("lm_head.weight", "mtp.*"),
)


# Zamba 2.

_ZAMBA2_KINDS = ("mamba", "linear_attention", "hybrid")
_ZAMBA2_DERIVED = ("attention_hidden_size", "ffn_hidden_size", "kv_channels", "num_query_groups", "hybrid_layer_ids")
"""Keys that follow from others."""


def _zamba2(config: HfConfig) -> ModelSpec:
    config.expect("use_long_context", False)
    # The code of transformers shares the blocks' weights with those of the head.
    config.expect("tie_word_embeddings", True)
    config.expect("use_shared_mlp_adapter", True)
    config.ignore("use_mem_eff_path", "gated_linear_unit", *_ZAMBA2_DERIVED, *TRAINING_KEYS)
    norm = rms_norm(config, 1e-5)
    bias = config.opt("add_bias_linear", bool, False)
    mamba = _zamba2_mamba(config, bias)
    attention = _zamba2_attention(config)
    mlp = gated_mlp(config, bias=bias)
    rank = config.opt_size("adapter_rank", 128)
    hybrids = _zamba2_hybrids(config)
    owners = _zamba2_owners(config)
    layers = []
    for index in range(config.size("num_hidden_layers")):
        if index in hybrids:
            block = InputBlock(mlp, norm, owners[index], rank)
            layers.append(Layer((attention, mamba), None, Norms(before_mixer=norm), block=block))
        else:
            layers.append(Layer((mamba,), None, Norms(before_mixer=norm)))
    return decoder(config, layers, norm, tied=True)


def _zamba2_hybrids(config: HfConfig) -> list[int]:
    """Return the layers with a transformer block."""
    layers = config.size("num_hidden_layers")
    kinds = config.layer_kinds("layers_block_type", layers, config.need("layers_block_type", list), _ZAMBA2_KINDS)
    return [index for index, kind in enumerate(kinds) if kind == "hybrid"]


def _zamba2_owners(config: HfConfig) -> dict[int, int]:
    """Return, by layer with a block, the first one with the same weights: they take turns."""
    hybrids = _zamba2_hybrids(config)
    blocks = config.opt_size("num_mem_blocks", 1)
    return {layer: hybrids[turn % blocks] for turn, layer in enumerate(hybrids)}


def _zamba2_attention(config: HfConfig) -> Attention:
    heads = config.size("num_attention_heads")
    adapted = config.opt("use_shared_attention_adapter", bool, False)
    head_dim = 2 * config.size("hidden_size") // heads
    config.expect("attention_head_dim", head_dim)
    config.expect("head_dim", head_dim)
    config.default("intermediate_size", 4 * config.size("hidden_size"))
    rotary = config.opt("use_mem_rope", bool, False)
    if not rotary:
        config.ignore("rope_theta", "rope_scaling", "rope_parameters")
    return Attention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=rope(config, head_dim) if rotary else None,
        beside_embedding=True,
        adapter_rank=config.opt_size("adapter_rank", 128) if adapted else None,
    )


def _zamba2_mamba(config: HfConfig, bias: bool) -> Mamba2:
    heads = config.opt_size("n_mamba_heads", 8)
    width = config.opt_size("mamba_expand", 2) * config.size("hidden_size")
    if width % heads:
        raise config.error("n_mamba_heads", f"{heads} does not divide the {width} channels of the mixer")
    config.expect("mamba_headdim", width // heads)
    config.expect("time_step_limit", None)  # The steps have no upper limit.
    config.ignore("use_conv_bias")  # The convolution has a bias, whatever the key says.
    return Mamba2(
        heads=heads,
        head_dim=width // heads,
        groups=groups(config, "mamba_ngroups", heads, 1),
        state_dim=config.opt_size("mamba_d_state", 64),
        taps=config.opt_size("mamba_d_conv", 4),
        norm=Norm(1e-5),
        bias=bias,
        step_limit=(config.opt("time_step_min", float, 0.001), math.inf),
    )


_ZAMBA2_SOURCE = "[model.]layers.{l}"
_ZAMBA2_TARGET = "layers.{l}"


def _zamba2_config_rules(config: HfConfig) -> tuple[Rule, ...]:
    owners = _zamba2_owners(config)
    return tuple(rule for use, layer in enumerate(owners) for rule in _zamba2_adapters(use, layer, owners[layer]))


def _zamba2_adapters(use: int, layer: int, owner: int) -> Iterator[Rule]:
    """Yield the rules of a layer's mixer and adapters. A file has those of all uses of a block in its first layer."""
    yield from mamba2_rules(f"[model.]layers.{layer}.mamba_decoder.mamba", f"layers.{layer}.mixers.1")
    source = f"[model.]layers.{owner}.shared_transformer"
    for part in "qkv":
        adapter = f"{source}.self_attn.linear_{part}_adapter_list.{use}"
        target = f"layers.{layer}.mixers.0.{part}_adapter"
        yield Rename(f"{adapter}.0.weight", target)
        yield Rename(f"{adapter}.1.weight", f"{target}_out")
    adapter = f"{source}.feed_forward.gate_up_proj_adapter_list.{use}"
    target = f"layers.{layer}.block"
    yield Rename(f"{adapter}.0.weight", f"{target}.ffn_adapter")
    yield Split(f"{adapter}.1.weight", tuple(f"{target}.ffn.{part}_adapter_out" for part in ("gate", "up")))


_ZAMBA2_BLOCK = f"{_ZAMBA2_SOURCE}.shared_transformer"

ZAMBA2 = Family(
    _zamba2,
    (
        *EMBED_RULES,
        Rename("[model.]final_layernorm.weight", "final_norm"),
        Rename(f"{_ZAMBA2_SOURCE}.input_layernorm.weight", f"{_ZAMBA2_TARGET}.norms.before_mixer"),
        Rename(f"{_ZAMBA2_SOURCE}.mamba_decoder.input_layernorm.weight", f"{_ZAMBA2_TARGET}.norms.before_mixer"),
        *mamba2_rules(f"{_ZAMBA2_SOURCE}.mamba"),
        *(
            Rename(f"{_ZAMBA2_BLOCK}.self_attn.{part}_proj.weight", f"{_ZAMBA2_TARGET}.mixers.0.{part}")
            for part in "qkvo"
        ),
        Rename(f"{_ZAMBA2_BLOCK}.input_layernorm.weight", f"{_ZAMBA2_TARGET}.block.norm"),
        Rename(f"{_ZAMBA2_BLOCK}.pre_ff_layernorm.weight", f"{_ZAMBA2_TARGET}.block.ffn_norm"),
        *(
            Split(
                f"{_ZAMBA2_BLOCK}.feed_forward.gate_up_proj.{kind}",
                tuple(f"{_ZAMBA2_TARGET}.block.ffn.{part}" for part in parts),
            )
            for kind, parts in (("weight", ("gate", "up")), ("bias", ("gate_bias", "up_bias")))
        ),
        *linear(f"{_ZAMBA2_BLOCK}.feed_forward.down_proj", f"{_ZAMBA2_TARGET}.block.ffn.down"),
        Rename(f"{_ZAMBA2_SOURCE}.linear.weight", f"{_ZAMBA2_TARGET}.block.out"),
    ),
    # These are copies of shared weights in the layers that share them.
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.*.shared_transformer.*"),
    config_rules=_zamba2_config_rules,
)
