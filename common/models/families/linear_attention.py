"""Decoders with linear attention (delta rules, lightning attention) or short convolutions in most layers.

The families, in the order of this file:

- `Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`: Qwen3-Next and Qwen3.5: three layers of the
  gated delta rule to one of gated attention, dense or with experts.
- `OlmoHybridForCausalLM`: OLMo Hybrid: three layers of the gated delta rule with beta up to 2 to one of OLMo 3's block.
- `KimiLinearForCausalLM`: Kimi Linear: three layers of KDA to one of latent attention without RoPE, a dense layer, then
  experts.
- `BailingMoeV3ForCausalLM`: Ling 3: five layers of KDA to one of latent attention with an output gate per head, experts
  with sigmoid scores.
- `MiniMaxForCausalLM`, `MiniMaxText01ForCausalLM`: MiniMax-Text-01: seven layers of lightning attention to one of
  attention, experts, updates of normalised values.
- `BailingMoeV2_5ForCausalLM`: Ling and Ring 2.5: seven layers of lightning attention with RoPE to one of latent
  attention, experts.
- `Lfm2ForCausalLM`, `Lfm2MoeForCausalLM`: LFM2, dense or with experts: short gated convolutions, and attention with QK
  norm in some layers.
- `Lfm3ForCausalLM`: LFM3: longer convolutions, and attention in windows or to all tokens, with output gates and four
  norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import (
    BLOCK_SPARSE_RULES,
    FFN,
    FUSED_EXPERT_RULES,
    MOE_RULES,
    expert_rules,
    leading_dense,
    routed_moe,
    shared_rules,
)
from pagoda.common.models.families.latent import DEEPSEEK_RULES, latent_attention
from pagoda.common.models.families.qwen import SHARED_RULES
from pagoda.common.models.families.sigmoid_mixtures import bailing_moe, name_keys
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    AnswerFormat,
    Family,
    Rename,
    Reshape,
    Rule,
    Split,
    Zeros,
    decoder,
    fused_linear,
    gated_mlp,
    grouped_attention,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import (
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mixer,
    ShortConvolution,
)
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import LinearScaling, Rope
from pagoda.common.models.spec import ExpertGroups, Ffn, Layer, Mlp, ModelSpec, Moe, Norms, Router

_KINDS: Final = ("linear_attention", "full_attention")

# Qwen3-Next and Qwen3.5.


def _qwen3_next(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.expect("use_sliding_window", False)
    mixers: dict[str, Mixer] = {
        "linear_attention": _qwen3_next_gated_delta(config),
        "full_attention": _qwen3_next_attention(config),
    }
    norm = rms_norm(config, 1e-6, unit_offset=True)
    return pre_norm_decoder(
        config, [mixers[kind] for kind in _qwen3_next_kinds(config, layers)], _qwen3_next_ffns(config, layers), norm
    )


def _qwen3_5(config: HfConfig, moe: bool = False) -> ModelSpec:
    """Read what the text configurations of Qwen3.5 call otherwise than Qwen3-Next; `moe`: experts in all layers."""
    config.expect("attn_output_gate", True)
    config.expect("mamba_ssm_dtype", "float32")
    config.expect("norm_topk_prob", True)
    config.expect("mlp_only_layers", [])
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    if moe:
        config.default("num_experts", 256)
        config.default("num_experts_per_tok", 8)
        config.default("intermediate_size", config.opt_size("moe_intermediate_size", 512))  # No layer is dense.
    else:
        config.default("num_experts", 0)
    return _qwen3_next(config)


def _qwen3_next_kinds(config: HfConfig, layers: int) -> tuple[str, ...]:
    """Return the kind of mixer of each layer."""
    interval = config.opt_size("full_attention_interval", 4)
    default = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    return config.layer_kinds("layer_types", layers, default, _KINDS)


def _qwen3_next_attention(config: HfConfig) -> Attention:
    heads = config.size("num_attention_heads")
    head_dim = config.opt_size("head_dim", 256)
    bias = config.opt("attention_bias", bool, False)
    return Attention(
        heads=heads,
        kv_heads=hf_config.kv_heads(config, heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=hf_config.rope(config, head_dim, partial=0.25),
        qk_norm=rms_norm(config, 1e-6, unit_offset=True),
        qkv_bias=bias,
        out_bias=bias,
        output_gate=True,
    )


def _qwen3_next_gated_delta(config: HfConfig) -> GatedDelta:
    key_heads = config.opt_size("linear_num_key_heads", 16)
    value_heads = config.opt_size("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise config.error("linear_num_key_heads", f"{key_heads} does not divide linear_num_value_heads {value_heads}")
    config.expect("hidden_act", "silu")  # The convolution has the same activation.
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.opt_size("linear_key_head_dim", 128),
        value_dim=config.opt_size("linear_value_head_dim", 128),
        taps=config.opt_size("linear_conv_kernel_dim", 4),
        norm=rms_norm(config, 1e-6),
    )


def _qwen3_next_ffns(config: HfConfig, layers: int) -> list[Ffn]:
    dense = gated_mlp(config)
    experts = config.opt("num_experts", int, 512)
    mlp_only = config.opt("mlp_only_layers", list, [])
    step = config.opt_size("decoder_sparse_step", 1)
    if experts < 1:
        return [dense] * layers
    expert = replace(dense, width=config.opt_size("moe_intermediate_size", 512))
    shared = replace(dense, width=config.opt_size("shared_expert_intermediate_size", 512))
    router = Router(config.opt_size("num_experts_per_tok", 10), config.opt("norm_topk_prob", bool, True))

    def ffn(layer: int) -> Mlp | Moe:
        if layer in mlp_only or (layer + 1) % step:
            return dense
        return Moe(experts, expert, router, shared, shared_gate=True)

    return [ffn(layer) for layer in range(layers)]


_ATTENTION = "[model.]layers.{l}.self_attn"
_LINEAR = "[model.]layers.{l}.linear_attn"
_TARGET = "layers.{l}.mixers.0"

QWEN3_NEXT_RULES = (
    *EMBED_RULES,
    *MLP_RULES,
    *PRE_NORM_RULES,
    *MOE_RULES,
    *SHARED_RULES,
    *FUSED_EXPERT_RULES,
    *QK_NORM_RULES,
    *fused_linear(f"{_ATTENTION}.q_proj", f"{_TARGET}.q", f"{_TARGET}.gate", interleaved=True),
    *linear(f"{_ATTENTION}.k_proj", f"{_TARGET}.k"),
    *linear(f"{_ATTENTION}.v_proj", f"{_TARGET}.v"),
    *linear(f"{_ATTENTION}.o_proj", f"{_TARGET}.o"),
    Split(
        f"{_LINEAR}.in_proj_qkvz.weight",
        (f"{_TARGET}.q", f"{_TARGET}.k", f"{_TARGET}.v", f"{_TARGET}.gate"),
        interleaved=True,
    ),
    Split(f"{_LINEAR}.in_proj_ba.weight", (f"{_TARGET}.beta", f"{_TARGET}.decay"), interleaved=True),
    Split(f"{_LINEAR}.in_proj_qkv.weight", (f"{_TARGET}.q", f"{_TARGET}.k", f"{_TARGET}.v")),
    Rename(f"{_LINEAR}.in_proj_z.weight", f"{_TARGET}.gate"),
    Rename(f"{_LINEAR}.in_proj_b.weight", f"{_TARGET}.beta"),
    Rename(f"{_LINEAR}.in_proj_a.weight", f"{_TARGET}.decay"),
    Split(f"{_LINEAR}.conv1d.weight", (f"{_TARGET}.q_conv", f"{_TARGET}.k_conv", f"{_TARGET}.v_conv")),
    Rename(f"{_LINEAR}.A_log", f"{_TARGET}.decay_rate"),
    Rename(f"{_LINEAR}.dt_bias", f"{_TARGET}.decay_offset"),
    Rename(f"{_LINEAR}.norm.weight", f"{_TARGET}.norm"),
    Rename(f"{_LINEAR}.out_proj.weight", f"{_TARGET}.o"),
)

# The module `mtp` only proposes drafts: `drafters.in_mtp_module`.
QWEN3_NEXT = Family(_qwen3_next, QWEN3_NEXT_RULES, ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "mtp.*"))
QWEN3_5 = replace(QWEN3_NEXT, build=_qwen3_5)
QWEN3_5_MOE = replace(QWEN3_NEXT, build=partial(_qwen3_5, moe=True))


# OLMo Hybrid.


def _olmo_hybrid(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    ffn = gated_mlp(config)
    config.expect("hidden_act", "silu")  # The convolution has the same activation.
    config.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
    kinds = ["linear_attention" if layer % 4 != 3 else "full_attention" for layer in range(layers)]
    if "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    kind_layers = {
        "linear_attention": Layer((_olmo_hybrid_gated_delta(config),), ffn, Norms(before_mixer=norm, before_ffn=norm)),
        "full_attention": Layer((_olmo_hybrid_attention(config, norm),), ffn, Norms(after_mixer=norm, after_ffn=norm)),
    }
    return decoder(
        config, [kind_layers[kind] for kind in config.layer_kinds("layer_types", layers, kinds, _KINDS)], norm
    )


def _olmo_hybrid_attention(config: HfConfig, norm: Norm) -> Attention:
    width = config.size("hidden_size")
    bias = config.opt("attention_bias", bool, False)
    rope = config.opt("rope_parameters", dict, {"rope_theta": config.opt("rope_theta", float, 0.0)})
    if not rope.get("rope_theta"):
        attention = grouped_attention(config, width, None)
    else:
        attention = rotary_attention(config, width, theta=500_000.0)
    return replace(attention, qk_norm=norm, qk_norm_over="full", qkv_bias=bias, out_bias=bias)


def _olmo_hybrid_gated_delta(config: HfConfig) -> GatedDelta:
    heads = config.size("num_attention_heads")
    key_heads = config.opt_size("linear_num_key_heads", heads)
    value_heads = config.opt_size("linear_num_value_heads", heads)
    key_dim = config.opt_size("linear_key_head_dim", int(0.75 * config.size("hidden_size") / key_heads))
    if value_heads % key_heads:
        raise config.error("linear_num_key_heads", f"{key_heads} does not divide linear_num_value_heads {value_heads}")
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=config.opt_size("linear_value_head_dim", 2 * key_dim),
        taps=config.opt_size("linear_conv_kernel_dim", 4),
        norm=Norm(1e-5),  # The model's code ignores rms_norm_eps here.
        beta_scale=2.0 if config.opt("linear_allow_neg_eigval", bool, True) else 1.0,
    )


_LAYER = "[model.]layers.{l}"
_OLMO_HYBRID_NORMS = (
    ("attention_layer_norm", "before_mixer"),
    ("input_layernorm", "before_mixer"),
    ("feedforward_layer_norm", "before_ffn"),
    ("feedforward_layer_norm", "after_mixer"),
    ("post_attention_layernorm", "after_mixer"),
    ("post_attention_layernorm", "before_ffn"),
    ("post_feedforward_layernorm", "after_ffn"),
)

OLMO_HYBRID = Family(
    _olmo_hybrid,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *QK_NORM_RULES,
        *MLP_RULES,
        *(Rename(f"{_LAYER}.{name}.weight", f"layers.{{l}}.norms.{norm}") for name, norm in _OLMO_HYBRID_NORMS),
        *(Rename(f"{_LINEAR}.{part}_proj.weight", f"{_TARGET}.{part}") for part in "qkvo"),
        *(Rename(f"{_LINEAR}.{part}_conv1d.weight", f"{_TARGET}.{part}_conv") for part in "qkv"),
        Rename(f"{_LINEAR}.g_proj.weight", f"{_TARGET}.gate"),
        Rename(f"{_LINEAR}.b_proj.weight", f"{_TARGET}.beta"),
        Rename(f"{_LINEAR}.a_proj.weight", f"{_TARGET}.decay"),
        Rename(f"{_LINEAR}.A_log", f"{_TARGET}.decay_rate"),
        Rename(f"{_LINEAR}.dt_bias", f"{_TARGET}.decay_offset"),
        Rename(f"{_LINEAR}.o_norm.weight", f"{_TARGET}.norm"),
    ),
)


# Kimi Linear.


def _kimi_linear(config: HfConfig) -> ModelSpec:
    for key, name in _KIMI_NAMES.items():
        config.alias(key, name)
    config.expect("moe_router_activation_func", "sigmoid")
    config.expect("use_grouped_topk", True)
    config.expect("mla_use_nope", True)
    config.expect("hidden_act", "silu")
    config.ignore("num_nextn_predict_layers", "rope_theta", "rope_scaling", "rope_parameters")
    norm = rms_norm(config, 1e-5)
    layers = config.size("num_hidden_layers")
    kda, kinds = _kimi_kda(config, layers, norm)
    mixers: dict[str, Mixer] = {"linear_attention": kda, "full_attention": _kimi_latent_attention(config)}
    ffns = leading_dense(config, lambda: routed_moe(config, _kimi_router(config), shared=1), 1)
    norms = Norms(before_mixer=norm, before_ffn=norm)
    stack = [Layer((mixers[kind],), ffn, norms) for kind, ffn in zip(kinds, ffns)]
    return decoder(config, stack, norm)


_KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Key of other families -> key of this one."""


def _kimi_kda(config: HfConfig, layers: int, norm: Norm) -> tuple[KimiDelta, tuple[str, ...]]:
    """Return the mixer, and the kind of mixer of each layer."""
    kinds = ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(layers)]
    head_dim = config.opt_size("linear_head_dim", 128)
    heads = config.opt_size("linear_num_heads", 32)
    taps = config.opt_size("linear_conv_kernel_dim", 4)
    section = config.section("linear_attn_config")
    if section is not None:
        head_dim = section.opt_size("head_dim", head_dim)
        heads = section.opt_size("num_heads", heads)
        taps = section.opt_size("short_conv_kernel_size", taps)
        attending = section.opt("full_attn_layers", list, [])  # The layers are counted from 1.
        kinds = ["full_attention" if layer + 1 in attending else "linear_attention" for layer in range(layers)]
        section.expect("kda_layers", [layer + 1 for layer, kind in enumerate(kinds) if kind == "linear_attention"])
        section.finish()
    mixer = KimiDelta(heads, head_dim, rank=head_dim, taps=taps, norm=norm)
    return mixer, config.layer_kinds("layer_types", layers, kinds, _KINDS)


def _kimi_latent_attention(config: HfConfig) -> LatentAttention:
    heads = config.size("num_attention_heads")
    rope_dim = config.size("qk_rope_head_dim")
    nope_dim = config.size("qk_nope_head_dim")
    config.expect("num_key_value_heads", heads)
    config.ignore("head_dim", "qk_head_dim")
    return LatentAttention(
        heads=heads,
        query_rank=config.nullable("q_lora_rank", int),
        latent_dim=config.size("kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=config.size("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5,
        rope=Rope(10_000.0, rope_dim, LinearScaling(math.inf)),  # All angles are 0, so that no position is encoded.
        norm=Norm(1e-6),  # The model's code ignores rms_norm_eps here.
        bias=config.opt("attention_bias", bool, False),
    )


def _kimi_router(config: HfConfig) -> Router:
    groups = ExpertGroups(config.opt_size("n_group", 1), config.opt_size("topk_group", 1), "best_two")
    return Router(
        config.opt_size("num_experts_per_tok", 8),
        config.opt("norm_topk_prob", bool, True),
        scores="sigmoid",
        correction=True,
        groups=None if groups.count == groups.used else groups,
        scale=config.opt("routed_scaling_factor", float, 2.446),
    )


_KIMI_KDA = {
    **{f"{part}_proj.weight": part for part in "qkvo"},
    **{f"{part}_conv1d.weight": f"{part}_conv" for part in "qkv"},
    "b_proj.weight": "beta",
    "f_a_proj.weight": "decay_a",
    "f_b_proj.weight": "decay_b",
    "g_a_proj.weight": "gate_a",
    "g_b_proj.weight": "gate_b",
    "o_norm.weight": "norm",
    "dt_bias": "decay_offset",
}

KDA_RULES: tuple[Rule, ...] = (
    *(Rename(f"{_ATTENTION}.{name}", f"{_TARGET}.{part}") for name, part in _KIMI_KDA.items()),
    Reshape(f"{_ATTENTION}.A_log", f"{_TARGET}.decay_rate"),
)

_KIMI_MLP = ("gate", "up", "down")  # The code of transformers writes dense layers under the name of mixtures.

KIMI_LINEAR = Family(
    _kimi_linear,
    (
        *(rule for rule in DEEPSEEK_RULES if rule not in MOE_RULES),
        *BLOCK_SPARSE_RULES,
        *(Rename(f"[model.]layers.{{l}}.block_sparse_moe.{part}_proj.weight", f"{FFN}.{part}") for part in _KIMI_MLP),
        Rename("[model.]layers.{l}.block_sparse_moe.gate.e_score_correction_bias", f"{FFN}.router_correction"),
        *shared_rules("[model.]layers.{l}.block_sparse_moe.shared_experts"),
        *KDA_RULES,
    ),
)


# Ling 3.

_LING3_NAMES: Final = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
}
_LING3_FIXED: Final[tuple[tuple[str, Any], ...]] = (
    *(("no_kda_lora", True), ("use_kda_lora", False), ("linear_attention", "kda"), ("linear_silu", True)),
    *(("rope_interleave", True), ("group_norm_size", 1), ("use_bias", False), ("use_qkv_bias", False)),
    *(("scale_router_input", False), ("use_mla_nope", False), ("use_nGPT", False), ("up_proj_norm", False)),
    *(("value_norm", False), ("moe_router_enable_expert_bias", True)),
)


def _ling3(config: HfConfig) -> ModelSpec:
    for key, name in _LING3_NAMES.items():
        config.alias(key, name)
    for key, supported in _LING3_FIXED:
        config.expect(key, supported)
    # KDA always norms q and k; the width of RoPE is qk_rope_head_dim.
    config.ignore("use_qk_norm", "num_mtp_layers", "rotary_dim", "partial_rotary_factor")
    name_keys(config, "sigmoid")
    layers = config.size("num_hidden_layers")
    heads = config.size("num_attention_heads")
    norm = rms_norm(config, 1e-6)
    kda = _ling3_kda(config, heads, norm)
    config.set("head_dim", config.size("qk_rope_head_dim"))
    if "q_lora_rank" not in config:
        config.set("q_lora_rank", None)
    gated = config.opt("gated_attention_proj_granularity_type", str, "head_wise") == "head_wise"
    config.expect("gated_attention_proj_granularity_type", "head_wise")
    latent = replace(latent_attention(config, interleaved=True), gate_per_head=gated)
    mixers: dict[str, Mixer] = {"linear_attention": kda, "full_attention": latent}
    ffns = leading_dense(config, lambda: bailing_moe(config), 2)
    return pre_norm_decoder(config, [mixers[kind] for kind in hybrid_kinds(config, layers, 6)], ffns, norm)


def _ling3_kda(config: HfConfig, heads: int, norm: Norm) -> KimiDelta:
    config.expect("linear_num_heads", heads)
    head_dim = config.opt_size("linear_head_dim", config.opt_size("head_dim", 128))
    taps = config.opt_size("linear_conv_kernel_dim", config.opt_size("short_conv_kernel_size", 4))
    bound = config.nullable("kda_lower_bound", float, -5.0)
    bound = bound if config.opt("kda_safe_gate", bool, True) else None
    return KimiDelta(heads, head_dim, None, taps, norm, bound)


def hybrid_kinds(config: HfConfig, layers: int, group: int) -> tuple[str, ...]:
    """Return the kind of mixer of each layer: the last of each `layer_group_size` attends. `group`: its default."""
    group = config.opt_size("layer_group_size", group)
    if "layer_types" not in config and layers % group:
        raise config.error("layer_group_size", f"is {group}, which does not divide num_hidden_layers {layers}")
    kinds = ["linear_attention" if (layer + 1) % group else "full_attention" for layer in range(layers)]
    return config.layer_kinds("layer_types", layers, kinds, _KINDS)


def _ling3_of_hub(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules with the name that the hub's files have for the mixer."""
    for rule in rules:
        if not isinstance(rule, Zeros) and ".self_attn." in rule.source:
            yield replace(rule, source=rule.source.replace(".self_attn.", ".attention."))


_SOURCE = "[model.]layers.{l}.attention"

HYBRID_RULES: Final[tuple[Rule, ...]] = (
    *DEEPSEEK_RULES,
    *_ling3_of_hub(DEEPSEEK_RULES),
    Rename("[model.]word_embeddings.weight", "embed"),
    Rename(f"{_SOURCE}.dense.weight", f"{_TARGET}.o"),
    Rename(f"{_SOURCE}.g_proj.weight", f"{_TARGET}.gate"),
    Rename("[model.]layers.{l}.mlp.gate.expert_bias", f"{FFN}.router_correction"),
)

LING3 = Family(
    _ling3,
    (*HYBRID_RULES, *_ling3_of_hub(KDA_RULES), Rename(f"{_SOURCE}.f_proj.weight", f"{_TARGET}.decay")),
    # The layer after the last one of Ling-3.0-flash and tiny only proposes drafts.
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.42.*", "model.layers.24.*", "model.mtp.*"),
)


# MiniMax-Text-01.

_MINIMAX_FACTORS = {"full_attention": "full_attn", "linear_attention": "linear_attn", "mlp": "mlp"}


def _minimax(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-5)
    width = config.size("hidden_size")
    config.expect("postnorm", True)
    config.expect("hidden_act", "silu")  # Queries, keys and values of lightning attention have the same activation.
    config.expect("shared_intermediate_size", 0)
    config.ignore("block_size", "shared_moe_mode")
    first, rest, update = *_minimax_norms(config, norm), _minimax_update(config)
    head_dim = config.opt_size("head_dim", width // config.size("num_attention_heads"))
    partial = config.opt_size("rotary_dim", head_dim) / head_dim
    attention = replace(rotary_attention(config, width, theta=1e6, partial=partial), window=config.window(None))
    router = Router(config.opt_size("num_experts_per_tok", 2), renormalise=True)
    moe = Moe(config.size("num_local_experts", "num_experts"), gated_mlp(config), router)

    def mixer(index: int, kind: str) -> Mixer:
        if kind == "full_attention":
            return attention
        depth = 1 - index / (layers - 1 + 1e-5) + 1e-5
        slopes = tuple(2 ** (-8 * head / attention.heads) * depth for head in range(1, attention.heads + 1))
        return LightningAttention(head_dim, slopes, Norm(1e-6))  # The model's code ignores rms_norm_eps here.

    stack = (
        Layer(
            (mixer(index, kind),),
            moe,
            Norms(before_mixer=rest if index else first, before_ffn=rest),
            residual_scale=update,
            norm_residual=True,
        )
        for index, kind in enumerate(_minimax_kinds(config, layers))
    )
    return decoder(config, stack, rest)


def _minimax_kinds(config: HfConfig, layers: int) -> tuple[str, ...]:
    """Return the kind of mixer of each layer; `attn_type_list` has 1 for attention."""
    listed = config.opt("attn_type_list", list, [1 - layer % 2 for layer in range(layers)])
    kinds = ["full_attention" if kind else "linear_attention" for kind in listed]
    return config.layer_kinds("layer_types", layers, kinds, _KINDS)


def _minimax_factors(config: HfConfig) -> tuple[float, float]:
    """Return the factors on the residual and on the update, which must be those of all sums."""
    pairs = set()
    for old, new in _MINIMAX_FACTORS.items():
        alpha, beta = (config.opt(f"layernorm_{old}_{part}", float, 1.0) for part in ("alpha", "beta"))
        alpha, beta = (
            config.opt(f"{new}_{part}_factor", float, default) for part, default in (("alpha", alpha), ("beta", beta))
        )
        pairs.add((alpha, beta))
    if len(pairs) > 1:
        raise config.error("mlp_alpha_factor", "or mlp_beta_factor differs from that of a kind of attention")
    return pairs.pop()


def _minimax_update(config: HfConfig) -> float:
    """Return the factor on updates if that on the residual is 1: every sum is normalised before it is read."""
    alpha, beta = _minimax_factors(config)
    return beta / alpha


def _minimax_norms(config: HfConfig, norm: Norm) -> tuple[Norm, Norm]:
    """Return the norm of the embeddings, and that of sums which are divided by the factor on the residual."""
    return norm, replace(norm, eps=norm.eps / _minimax_factors(config)[0] ** 2)


MINIMAX = Family(
    _minimax,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        *BLOCK_SPARSE_RULES,
        Split(f"{_ATTENTION}.qkv_proj.weight", tuple(f"{_TARGET}.{part}" for part in "qkv"), interleaved=True),
        Rename(f"{_ATTENTION}.output_gate.weight", f"{_TARGET}.gate"),
        Rename(f"{_ATTENTION}.norm.weight", f"{_TARGET}.norm"),
        Rename(f"{_ATTENTION}.out_proj.weight", f"{_TARGET}.o"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "*.slope_rate", "*.*_decay"),
)


# Ling 2.5.

_LING25_OFF: Final = (
    "use_bias",
    "use_qkv_bias",
    "linear_silu",
    "use_linear_silu",
    "use_mla_nope",
    "use_nGPT",
    "value_norm",
)


def _ling25(config: HfConfig) -> ModelSpec:
    for key in _LING25_OFF:
        config.expect(key, False)
    config.expect("linear_rope", True)
    config.expect("rope_interleave", True)
    config.ignore("moe_router_enable_routed_scaling", "moe_router_enable_shared_expert", "num_kv_heads_for_linear_attn")
    name_keys(config, "sigmoid")
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    kinds = hybrid_kinds(config, layers, 8)
    linear = [_lightning_attention(config, layer, layers) for layer in range(layers)]
    _ling25_keys_of_latent_attention(config)
    latent = latent_attention(config, interleaved=True, eps=norm.eps)
    mixers: list[Mixer] = [latent if kind == "full_attention" else linear[layer] for layer, kind in enumerate(kinds)]
    return pre_norm_decoder(config, mixers, leading_dense(config, lambda: bailing_moe(config), 0), norm)


def _lightning_attention(config: HfConfig, layer: int, layers: int) -> LightningAttention:
    heads = config.size("num_attention_heads")
    norm = rms_norm(config, 1e-6)
    head_dim = hf_config.head_dim(config, config.size("hidden_size"), heads)
    if "rotary_dim" in config:
        config.default("partial_rotary_factor", config.size("rotary_dim") / head_dim)
    depth = 1 - (layer - 1) / max(layers - 1, 1) + 1e-5  # The first layer's slopes are the steepest, beyond 1.
    return LightningAttention(
        head_dim=head_dim,
        slopes=tuple(slope * depth for slope in alibi_slopes(heads)),
        norm=norm,
        groups=config.opt_size("group_norm_size", 1),
        scale=head_dim**-0.5,
        silu=False,
        qk_norm=norm if config.opt("use_qk_norm", bool, False) else None,
        rope=hf_config.rope(config, head_dim, theta=6e5),
    )


def _ling25_keys_of_latent_attention(config: HfConfig) -> None:
    """Give keys that describe lightning attention the values of latent attention, all of whose RoPE part is rotated."""
    config.set("head_dim", config.size("qk_rope_head_dim"))
    config.set("num_key_value_heads", config.size("num_attention_heads"))
    config.set("partial_rotary_factor", 1.0)
    if "q_lora_rank" not in config:
        config.set("q_lora_rank", None)


LING25 = Family(
    _ling25,
    (
        *HYBRID_RULES,
        Split(f"{_SOURCE}.query_key_value.weight", tuple(f"{_TARGET}.{part}" for part in "qkv")),
        Rename(f"{_SOURCE}.query_layernorm.weight", f"{_TARGET}.q_norm"),
        Rename(f"{_SOURCE}.key_layernorm.weight", f"{_TARGET}.k_norm"),
        Rename(f"{_SOURCE}.g_norm.weight", f"{_TARGET}.norm"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "*.slope", "model.mtp.*"),
)


# LFM2.


def _lfm2(config: HfConfig) -> ModelSpec:
    config.alias("intermediate_size", "block_ff_dim")
    width = config.size("intermediate_size")
    if config.opt("block_auto_adjust_ff_dim", bool, True):
        multiple = config.opt_size("block_multiple_of", 256)
        width = int(config.opt("block_ffn_dim_multiplier", float, 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    config.ignore("block_multiple_of", "block_ffn_dim_multiplier")
    layers = config.size("num_hidden_layers")
    attending = config.opt("full_attn_idxs", list, list(range(layers)))
    default = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    return _lfm2_model(config, [Mlp(width, "silu", gated=True)] * layers, default)


def _lfm2_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    dense = Mlp(config.size("intermediate_size"), "silu", gated=True)
    router = Router(
        config.opt_size("num_experts_per_tok", 4),
        renormalise=config.opt("norm_topk_prob", bool, True),
        scores="sigmoid",
        correction=config.opt("use_expert_bias", bool, True),
        scale=config.opt("routed_scaling_factor", float, 1.0),
    )
    expert = replace(dense, width=config.opt_size("moe_intermediate_size", 1792))
    moe = Moe(config.opt_size("num_experts", 32), expert, router)
    leading = config.opt("num_dense_layers", int, 2)
    return _lfm2_model(
        config, [dense if layer < leading else moe for layer in range(layers)], ["full_attention"] * layers
    )


def _lfm2_model(config: HfConfig, ffns: list[Ffn], default: list[str]) -> ModelSpec:
    """`default`: the kind of mixer of each layer, unless `layer_types` states them."""
    width = config.size("hidden_size")
    norm = Norm(config.opt("norm_eps", float, 1e-5))
    config.alias("num_attention_heads", "num_heads")
    config.alias("tie_word_embeddings", "tie_embedding")
    config.alias("rope_theta", "theta")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        config.expect(key, width)
    for key in ("block_use_swiglu", "use_pos_enc"):
        config.expect(key, True)
    config.expect("block_norm_eps", norm.eps)
    config.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    kinds = config.layer_kinds("layer_types", len(ffns), default, ("full_attention", "conv"))
    attention = replace(rotary_attention(config, width, theta=1_000_000.0), qk_norm=norm)
    convolution = ShortConvolution(width, config.opt_size("conv_L_cache", 3), config.opt("conv_bias", bool, False))
    mixers: list[Mixer] = [attention if kind == "full_attention" else convolution for kind in kinds]
    return pre_norm_decoder(config, mixers, ffns, norm, tied=True)


LFM2_RULES = (
    Rename("[model.]embed_tokens.weight", "embed"),
    Rename("[model.]embedding_norm.weight", "final_norm"),
    Rename("lm_head.weight", "head"),
    Rename(f"{_LAYER}.operator_norm.weight", "layers.{l}.norms.before_mixer"),
    Rename(f"{_LAYER}.ffn_norm.weight", "layers.{l}.norms.before_ffn"),
    *(rule for part in "qkv" for rule in linear(f"{_LAYER}.self_attn.{part}_proj", f"{_TARGET}.{part}")),
    *linear(f"{_LAYER}.self_attn.out_proj", f"{_TARGET}.o"),
    Rename(f"{_LAYER}.self_attn.q_layernorm.weight", f"{_TARGET}.q_norm"),
    Rename(f"{_LAYER}.self_attn.k_layernorm.weight", f"{_TARGET}.k_norm"),
    *fused_linear(f"{_LAYER}.conv.in_proj", *(f"{_TARGET}.{part}" for part in "bcv")),
    *linear(f"{_LAYER}.conv.conv", f"{_TARGET}.conv"),
    *linear(f"{_LAYER}.conv.out_proj", f"{_TARGET}.o"),
    *linear(f"{_LAYER}.feed_forward.w1", f"{FFN}.gate"),
    *linear(f"{_LAYER}.feed_forward.w3", f"{FFN}.up"),
    *linear(f"{_LAYER}.feed_forward.w2", f"{FFN}.down"),
    Rename(f"{_LAYER}.feed_forward.gate.weight", f"{FFN}.router"),
    Rename(f"{_LAYER}.feed_forward.expert_bias", f"{FFN}.router_correction"),
    *expert_rules(f"{_LAYER}.feed_forward.experts", "w1", "w3", "w2"),
)

_LFM3_ROPES: Final[dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def _lfm3(config: HfConfig) -> ModelSpec:
    config.alias("norm_eps", "rms_norm_eps")
    config.default("head_dim", 128)
    config.default("rope_parameters", _LFM3_ROPES)
    config.expect("attention_bias", False)
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    norm = Norm(config.opt("norm_eps", float, 1e-5))
    attends = {0: "sliding_attention", 2: "full_attention"}  # By the remainder of the layer's number over 4.
    default = [attends.get(layer % 4, "conv") if layer else "conv" for layer in range(layers)]
    kinds = config.layer_kinds("layer_types", layers, default, (*attends.values(), "conv"))
    ropes = hf_config.rope_per_layer_type(config, config.size("head_dim"), full=1_000_000.0, sliding=10_000.0)
    gated = config.opt("use_attention_gate", bool, True)
    full = replace(
        grouped_attention(config, width, ropes["full_attention"]),
        qk_norm=norm,
        output_gate=gated,
        gate_per_head=gated,
    )
    mixers: dict[str, Mixer] = {
        "full_attention": full,
        "sliding_attention": replace(full, rope=ropes["sliding_attention"], window=config.window(256)),
        "conv": ShortConvolution(width, config.opt_size("conv_L_cache", 7), config.opt("conv_bias", bool, False)),
    }
    after = norm if config.opt("use_sandwich_norm", bool, True) else None
    norms = Norms(before_mixer=norm, after_mixer=after, before_ffn=norm, after_ffn=after)
    ffn = Mlp(config.size("intermediate_size"), "silu", gated=True)
    spec = decoder(config, (Layer((mixers[kind],), ffn, norms) for kind in kinds), norm, tied=True)
    return replace(spec, max_positions=config.size("max_position_embeddings"))


LFM3_RULES = (
    *LFM2_RULES,
    Rename(f"{_LAYER}.post_operator_norm.weight", "layers.{l}.norms.after_mixer"),
    Rename(f"{_LAYER}.post_ffn_norm.weight", "layers.{l}.norms.after_ffn"),
    Rename(f"{_ATTENTION}.o_proj.weight", f"{_TARGET}.o"),
    *(Rename(f"{_ATTENTION}.{part}_norm.weight", f"{_TARGET}.{part}_norm") for part in "qk"),
    *(Rename(f"{_ATTENTION}.{gate}_proj.weight", f"{_TARGET}.gate") for gate in ("gate", "g")),
)

LFM2 = Family(_lfm2, LFM2_RULES, answers=AnswerFormat(tools="lfm2"))
LFM2_MOE = Family(_lfm2_moe, LFM2_RULES, answers=AnswerFormat(tools="lfm2"))
LFM3 = Family(_lfm3, LFM3_RULES, answers=AnswerFormat(tools="lfm2"))
