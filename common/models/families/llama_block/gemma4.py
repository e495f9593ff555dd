"""Gemma 3n and 4: embeddings per layer, caches shared by the last layers, several streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import fused_expert_rules
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    FOUR_NORM_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    Stack,
    decoder,
    linear,
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import (
    AltUp,
    Embedding,
    Layer,
    LowRankResidual,
    Mlp,
    ModelSpec,
    Moe,
    Norms,
    PerLayerEmbedding,
    Router,
    SideMoe,
)

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_ROPES: Final[dict[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _gemma3n(config: HfConfig) -> ModelSpec:
    config.ignore("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar", "hidden_act")
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    kinds = config.layer_types(layers, [_SLIDING if (layer + 1) % 5 else _FULL for layer in range(layers)])
    head_dim = config.opt_size("head_dim", 256)
    ropes = hf_config.rope_per_layer_type(config, head_dim, full=1_000_000.0, sliding=10_000.0)
    attention = _attention(config, head_dim, None)
    mixers = _shared(config, 15, [_of_kind(config, attention, kind, ropes) for kind in kinds], kinds)
    default = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)]
    sparsity = _per_layer(config, "activation_sparsity_pattern", float, default)
    widths = _per_layer(config, "intermediate_size", int, [16_384] * layers)
    ffns = [replace(_mlp(config, width), sparsity=quantile) for width, quantile in zip(widths, sparsity)]
    low_rank = LowRankResidual(config.opt_size("laurel_rank", 64), norm)
    spec = _model(
        config, (Layer((m,), f, Norms(norm, norm, norm, norm), low_rank=low_rank) for m, f in zip(mixers, ffns))
    )
    streams = config.opt_size("altup_num_inputs", 4)
    active = config.opt("altup_active_idx", int, 0)
    scaled = config.opt("altup_correct_scale", bool, True)
    return replace(
        spec,
        logit_softcap=config.nullable("final_logit_softcapping", float, 30.0),
        alt_up=AltUp(streams, active, norm, scaled),
    )


def _gemma4(config: HfConfig) -> ModelSpec:
    config.expect("use_bidirectional_attention", "vision")
    config.default("rope_parameters", _ROPES)
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    pattern = [_SLIDING if (layer + 1) % 6 and layer + 1 < layers else _FULL for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    head_dim = config.opt_size("head_dim", 256)
    same = config.opt("attention_k_eq_v", bool, False)
    full_head_dim, full_kv_heads = _full_heads(config, kinds, same)
    ropes = hf_config.rope_per_layer_type(
        config, head_dim, full=1_000_000.0, sliding=10_000.0, full_head_dim=full_head_dim
    )
    sliding = _attention(config, head_dim, None)
    full = replace(
        _attention(config, full_head_dim, None), kv_heads=full_kv_heads or sliding.kv_heads, values_are_keys=same
    )
    each = [_of_kind(config, full if kind == _FULL else sliding, kind, ropes) for kind in kinds]
    mixers = _shared(config, 0, each, kinds)
    width = config.size("intermediate_size")
    double = config.opt("use_double_wide_mlp", bool, False)
    side = _side_moe(config, norm) if config.opt("enable_moe_block", bool, False) else None
    config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    return _model(
        config,
        (
            Layer(
                (mixer,),
                _mlp(config, width * 2 if double and mixer.shares_cache_of is not None else width),
                Norms(norm, norm, norm, norm),
                side_moe=side,
                output_scale=True,
            )
            for mixer in mixers
        ),
    )


def _full_heads(config: HfConfig, kinds: Sequence[str], grouped: bool) -> tuple[int, int | None]:
    """Return head dim and KV heads of full layers (None: as in the others), from either form of the config."""
    head_dim = config.opt_size("global_head_dim", 512)
    kv_heads = config.nullable("num_global_key_value_heads", int)
    sections = config.section("per_layer_config")
    if sections is None:
        return head_dim, kv_heads if grouped else None
    values = set()
    for layer, kind in enumerate(kinds):
        section = sections.section(str(layer))
        if (section is None) == (kind == _FULL):
            raise config.error("per_layer_config", f"must have an entry for each full layer and no other; see {layer}")
        if section is not None:
            values.add((section.size("head_dim"), section.nullable("num_key_value_heads", int)))
            section.finish()
    sections.finish()
    if len(values) != 1:
        raise config.error("per_layer_config", "differs from full layer to full layer")
    return values.pop()


def _attention(config: HfConfig, head_dim: int, rope: Rope | None) -> Attention:
    heads = config.size("num_attention_heads")
    bias = config.opt("attention_bias", bool, False)
    norm = rms_norm(config, 1e-6)
    return Attention(
        heads=heads,
        kv_heads=hf_config.kv_heads(config, heads),
        head_dim=head_dim,
        scale=1.0,
        rope=rope,
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
        value_norm=replace(norm, scale=False),
    )


def _of_kind(config: HfConfig, attention: Attention, kind: str, ropes: dict[str, Rope]) -> Attention:
    window = config.window(512)
    return replace(attention, rope=ropes[kind], window=window if kind == _SLIDING else None)


def _shared(config: HfConfig, default: int, mixers: Sequence[Attention], kinds: Sequence[str]) -> list[Attention]:
    """Let the last `num_kv_shared_layers` read the cache of the last layer of their kind before these."""
    shared = config.opt("num_kv_shared_layers", int, default)
    first = len(mixers) - shared
    owners = {kind: layer for layer, kind in enumerate(kinds[:first])}
    if shared < 0 or set(kinds[first:]) - owners.keys():
        raise config.error(
            "num_kv_shared_layers", f"is {shared}, which leaves no layer of a kind to share the cache of"
        )
    return [
        replace(mixer, shares_cache_of=owners[kind], values_are_keys=False) if layer >= first else mixer
        for layer, (mixer, kind) in enumerate(zip(mixers, kinds))
    ]


def _per_layer(config: HfConfig, key: str, kind: type[Any], default: list[Any]) -> list[Any]:
    """Return a number for each layer, from a list or from one for all."""
    if config.is_number(key):
        return [config.need(key, kind)] * len(default)
    values = config.opt(key, list, default)
    if len(values) != len(default):
        raise config.error(key, f"has {len(values)} entries for {len(default)} layers")
    return [kind(value) for value in values]


def _mlp(config: HfConfig, width: int) -> Mlp:
    return Mlp(width, config.activation("hidden_activation", "gelu_pytorch_tanh"), gated=True)


def _side_moe(config: HfConfig, norm: Norm) -> SideMoe:
    router = Router(config.size("top_k_experts"), renormalise=True)
    return SideMoe(Moe(config.size("num_experts"), _mlp(config, config.size("moe_intermediate_size")), router), norm)


def _model(config: HfConfig, layers: Iterable[Layer]) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    width = config.opt("hidden_size_per_layer_input", int, 256)
    vocab = config.opt_size("vocab_size_per_layer_input", 262_144)
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    spec = decoder(config, layers, norm, tied=True)
    return replace(
        spec,
        embedding=Embedding(scale=spec.width**0.5),
        logit_softcap=config.nullable("final_logit_softcapping", float),
        max_positions=config.size("max_position_embeddings"),
        per_layer=PerLayerEmbedding(vocab, width, activation, norm) if width else None,
    )


_LAYER = "[model.]layers.{l}"

_RULES = (
    *(*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *FOUR_NORM_RULES, *QK_NORM_RULES),
    Rename("[model.]embed_tokens_per_layer.weight", "per_layer.table"),
    Rename("[model.]per_layer_model_projection.weight", "per_layer.projection"),
    *linear("[model.]per_layer_projection_norm", "per_layer.norm"),
    Rename(f"{_LAYER}.per_layer_input_gate.weight", "layers.{l}.per_layer.gate"),
    Rename(f"{_LAYER}.per_layer_projection.weight", "layers.{l}.per_layer.out"),
    Rename(f"{_LAYER}.post_per_layer_input_norm.weight", "layers.{l}.per_layer.norm"),
)
_UNUSED = tuple(f"*layers.*.self_attn.{name}" for name in ("k_proj.*", "v_proj.*", "k_norm.*", "v_norm.*"))
"""Tensors that some writers add to layers that share a cache."""

GEMMA3N = Family(
    _gemma3n,
    (
        *_RULES,
        Stack("[model.]altup_projections.{e}.weight", "alt_up.in"),
        Stack("[model.]altup_unembed_projections.{e}.weight", "alt_up.out"),
        Rename(f"{_LAYER}.altup.modality_router.weight", "layers.{l}.alt_up.router"),
        Rename(f"{_LAYER}.altup.router_norm.weight", "layers.{l}.alt_up.norm"),
        Rename(f"{_LAYER}.altup.prediction_coefs.weight", "layers.{l}.alt_up.prediction"),
        Rename(f"{_LAYER}.altup.correction_coefs.weight", "layers.{l}.alt_up.correction"),
        Rename(f"{_LAYER}.altup.correct_output_scale", "layers.{l}.alt_up.scale"),
        Rename(f"{_LAYER}.laurel.linear_left.weight", "layers.{l}.low_rank.left"),
        Rename(f"{_LAYER}.laurel.linear_right.weight", "layers.{l}.low_rank.right"),
        Rename(f"{_LAYER}.laurel.post_laurel_norm.weight", "layers.{l}.low_rank.norm"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", *_UNUSED),
)
GEMMA4 = Family(
    _gemma4,
    (
        *_RULES,
        Rename(f"{_LAYER}.layer_scalar", "layers.{l}.output_scale"),
        Rename(f"{_LAYER}.router.proj.weight", "layers.{l}.side.moe.router"),
        Rename(f"{_LAYER}.router.scale", "layers.{l}.side.router_norm"),
        Rename(f"{_LAYER}.router.per_expert_scale", "layers.{l}.side.expert_scale"),
        Rename(f"{_LAYER}.post_feedforward_layernorm_1.weight", "layers.{l}.side.ffn_norm"),
        Rename(f"{_LAYER}.pre_feedforward_layernorm_2.weight", "layers.{l}.side.input_norm"),
        Rename(f"{_LAYER}.post_feedforward_layernorm_2.weight", "layers.{l}.side.output_norm"),
        *fused_expert_rules(f"{_LAYER}.experts", "layers.{l}.side.moe"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", *_UNUSED),
)
