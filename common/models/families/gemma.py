"""Gemma: scaled embeddings, windows in turns, and from Gemma 3n on embeddings per layer and shared caches.

The families, in the order of this file:

- `Gemma2ForCausalLM`, `Gemma3ForCausalLM`, `GemmaForCausalLM`, `Rnj1ForCausalLM`, `VaultGemmaForCausalLM`: Gemma 1, 2,
  VaultGemma, Gemma 3's text models, Rnj-1: scaled embeddings; from 2 on windows in turns, four norms.
- `Gemma3nForCausalLM`, `Gemma4ForCausalLM`: Gemma 3n and 4: embeddings per layer, caches shared by the last layers,
  several streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import fused_or_single_expert_rules
from pagoda.common.models.families.llama_block import LLAMA_RULES
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
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
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

# Gemma 1 to 3.


def _gemma(config: HfConfig) -> ModelSpec:
    config.expect("use_bidirectional_attention", False)
    config.expect("hidden_act", "gelu", "gelu_pytorch_tanh")  # Both values mean the latter.
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6, unit_offset=True)
    config.default("head_dim", 256)
    bias = config.opt("attention_bias", bool, False)
    attention = replace(rotary_attention(config, config.size("hidden_size")), qkv_bias=bias, out_bias=bias)
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_activation", "gelu_pytorch_tanh"), gated=True)
    spec = pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm, tied=True)
    return replace(spec, embedding=Embedding(scale=spec.width**0.5))


def _vaultgemma(config: HfConfig) -> ModelSpec:
    spec = _gemma2(config)
    norms = Norms(before_mixer=spec.final_norm, before_ffn=spec.final_norm)
    return replace(spec, layers=tuple(replace(layer, norms=norms) for layer in spec.layers))


def _gemma2(config: HfConfig) -> ModelSpec:
    config.expect("use_bidirectional_attention", False)
    layers = config.size("num_hidden_layers")
    head_dim = config.opt_size("head_dim", 256)
    attention = _gemma_attention(config, head_dim, hf_config.rope(config, head_dim))
    attention = replace(attention, softcap=config.nullable("attn_logit_softcapping", float, 50.0))
    window = config.window(4096)
    config.expect("sliding_window_size", window)  # This is an older name of the same key.
    windowed = replace(attention, window=window)
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, alternating)
    mixers = [windowed if kind == "sliding_attention" else attention for kind in kinds]
    return _gemma_model(config, mixers, final_softcap=30.0)


def _rnj1(config: HfConfig) -> ModelSpec:
    """Gemma 3 whose local layers attend in chunks, to their own and the one before: together the window."""
    kinds = config.opt("layer_types", list, [])
    config.set("layer_types", [_GEMMA_CHUNKED.get(kind, kind) for kind in kinds])
    ropes = config.opt("rope_parameters", dict, {})
    if all(isinstance(section, dict) for section in ropes.values()):
        ropes = {_GEMMA_CHUNKED.get(kind, kind): section for kind, section in ropes.items()}
    else:
        ropes = {"full_attention": ropes, "sliding_attention": ropes}
    config.set("rope_parameters", ropes or None)
    spec = _gemma3(config)

    def chunked(layer: Layer) -> Layer:
        attention = layer.attention
        window = layer.attention.window
        if window is None:
            return layer
        if window % 2:
            raise config.error("sliding_window", f"is {window}; it must be two chunks")
        return replace(layer, mixers=(replace(attention, window=None, chunk=window // 2, chunk_lookback=1),))

    return replace(spec, layers=tuple(chunked(layer) for layer in spec.layers))


_GEMMA_CHUNKED = {"chunked_attention": "sliding_attention"}


def _gemma3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    head_dim = config.opt_size("head_dim", 256)
    ropes = hf_config.rope_per_layer_type(config, head_dim, full=1_000_000.0, sliding=10_000.0)
    attention = _gemma_attention(config, head_dim, ropes["full_attention"])
    attention = replace(
        attention,
        softcap=config.nullable("attn_logit_softcapping", float),
        qk_norm=rms_norm(config, 1e-6, unit_offset=True),
    )
    window = config.window(4096)
    if config.opt("use_bidirectional_attention", bool, False):
        attention = replace(attention, causal=False)
        window = None if window is None else window // 2 + 1  # The config counts both sides.
    windowed = replace(attention, window=window, rope=ropes["sliding_attention"])
    every = config.opt_size("sliding_window_pattern", config.opt_size("_sliding_window_pattern", 6))
    pattern = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    mixers = [windowed if kind == "sliding_attention" else attention for kind in kinds]
    # The key max_position_embeddings already includes the RoPE scaling of the full layers.
    return replace(
        _gemma_model(config, mixers, final_softcap=None), max_positions=config.size("max_position_embeddings")
    )


def _gemma_attention(config: HfConfig, head_dim: int, rope: Rope) -> Attention:
    heads = config.size("num_attention_heads")
    bias = config.opt("attention_bias", bool, False)
    return Attention(
        heads=heads,
        kv_heads=hf_config.kv_heads(config, heads),
        head_dim=head_dim,
        scale=config.opt("query_pre_attn_scalar", float, 256.0) ** -0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
    )


def _gemma_model(config: HfConfig, mixers: Iterable[Attention], *, final_softcap: float | None) -> ModelSpec:
    config.ignore("hidden_act")  # The key hidden_activation supersedes it.
    norm = rms_norm(config, 1e-6, unit_offset=True)
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_activation", "gelu_pytorch_tanh"), gated=True)
    norms = Norms(norm, norm, norm, norm)
    spec = decoder(config, (Layer((mixer,), ffn, norms) for mixer in mixers), norm, tied=True)
    return replace(
        spec,
        embedding=Embedding(scale=spec.width**0.5),
        logit_softcap=config.nullable("final_logit_softcapping", float, final_softcap),
    )


_GEMMA_RULES = (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *FOUR_NORM_RULES)

GEMMA = Family(_gemma, LLAMA_RULES)
VAULTGEMMA = Family(_vaultgemma, _GEMMA_RULES)
GEMMA2 = Family(_gemma2, _GEMMA_RULES)
GEMMA3 = Family(_gemma3, (*_GEMMA_RULES, *QK_NORM_RULES))
RNJ1 = replace(GEMMA3, build=_rnj1)


# Gemma 3n and 4.

_GEMMA4_FULL = "full_attention"
_GEMMA4_SLIDING = "sliding_attention"
_GEMMA4_ROPES: Final[dict[str, Any]] = {
    _GEMMA4_SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _GEMMA4_FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _gemma3n(config: HfConfig) -> ModelSpec:
    config.ignore("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar", "hidden_act")
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    kinds = config.layer_types(
        layers, [_GEMMA4_SLIDING if (layer + 1) % 5 else _GEMMA4_FULL for layer in range(layers)]
    )
    head_dim = config.opt_size("head_dim", 256)
    ropes = hf_config.rope_per_layer_type(config, head_dim, full=1_000_000.0, sliding=10_000.0)
    attention = _gemma4_attention(config, head_dim, None)
    mixers = _gemma4_shared(config, 15, [_gemma4_of_kind(config, attention, kind, ropes) for kind in kinds], kinds)
    default = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)]
    sparsity = _gemma4_per_layer(config, "activation_sparsity_pattern", float, default)
    widths = _gemma4_per_layer(config, "intermediate_size", int, [16_384] * layers)
    ffns = [replace(_gemma4_mlp(config, width), sparsity=quantile) for width, quantile in zip(widths, sparsity)]
    low_rank = LowRankResidual(config.opt_size("laurel_rank", 64), norm)
    spec = _gemma4_model(
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
    config.default("rope_parameters", _GEMMA4_ROPES)
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    pattern = [_GEMMA4_SLIDING if (layer + 1) % 6 and layer + 1 < layers else _GEMMA4_FULL for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    head_dim = config.opt_size("head_dim", 256)
    same = config.opt("attention_k_eq_v", bool, False)
    full_head_dim, full_kv_heads = _gemma4_full_heads(config, kinds, same)
    ropes = hf_config.rope_per_layer_type(
        config, head_dim, full=1_000_000.0, sliding=10_000.0, full_head_dim=full_head_dim
    )
    sliding = _gemma4_attention(config, head_dim, None)
    full = replace(
        _gemma4_attention(config, full_head_dim, None), kv_heads=full_kv_heads or sliding.kv_heads, values_are_keys=same
    )
    unshared = [_gemma4_of_kind(config, full if kind == _GEMMA4_FULL else sliding, kind, ropes) for kind in kinds]
    mixers = _gemma4_shared(config, 0, unshared, kinds)
    width = config.size("intermediate_size")
    double = config.opt("use_double_wide_mlp", bool, False)
    side = _gemma4_side_moe(config, norm) if config.opt("enable_moe_block", bool, False) else None
    config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    return _gemma4_model(
        config,
        (
            Layer(
                (mixer,),
                _gemma4_mlp(config, width * 2 if double and mixer.shares_cache_of is not None else width),
                Norms(norm, norm, norm, norm),
                side_moe=side,
                output_scale=True,
            )
            for mixer in mixers
        ),
    )


def _gemma4_full_heads(config: HfConfig, kinds: Sequence[str], grouped: bool) -> tuple[int, int | None]:
    """Return head dim and KV heads of full layers (None: as in the others), from either form of the config."""
    head_dim = config.opt_size("global_head_dim", 512)
    kv_heads = config.nullable("num_global_key_value_heads", int)
    sections = config.layer_sections("per_layer_config", len(kinds))
    if sections is None:
        return head_dim, kv_heads if grouped else None
    values = set()
    for layer, kind in enumerate(kinds):
        section = sections.get(layer)
        if (section is None) == (kind == _GEMMA4_FULL):
            raise config.error("per_layer_config", f"must have an entry for each full layer and no other; see {layer}")
        if section is not None:
            values.add((section.size("head_dim"), section.nullable("num_key_value_heads", int)))
            section.finish()
    if len(values) != 1:
        raise config.error("per_layer_config", "differs from full layer to full layer")
    return values.pop()


def _gemma4_attention(config: HfConfig, head_dim: int, rope: Rope | None) -> Attention:
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


def _gemma4_of_kind(config: HfConfig, attention: Attention, kind: str, ropes: dict[str, Rope]) -> Attention:
    window = config.window(512)
    return replace(attention, rope=ropes[kind], window=window if kind == _GEMMA4_SLIDING else None)


def _gemma4_shared(
    config: HfConfig, default: int, mixers: Sequence[Attention], kinds: Sequence[str]
) -> list[Attention]:
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


def _gemma4_per_layer(config: HfConfig, key: str, kind: type[Any], default: list[Any]) -> list[Any]:
    """Return a number for each layer, from a list or from one for all."""
    if config.is_number(key):
        return [config.need(key, kind)] * len(default)
    values = config.opt(key, list, default)
    if len(values) != len(default):
        raise config.error(key, f"has {len(values)} entries for {len(default)} layers")
    return [kind(value) for value in values]


def _gemma4_mlp(config: HfConfig, width: int) -> Mlp:
    return Mlp(width, config.activation("hidden_activation", "gelu_pytorch_tanh"), gated=True)


def _gemma4_side_moe(config: HfConfig, norm: Norm) -> SideMoe:
    router = Router(config.size("top_k_experts"), renormalise=True)
    return SideMoe(
        Moe(config.size("num_experts"), _gemma4_mlp(config, config.size("moe_intermediate_size")), router), norm
    )


def _gemma4_model(config: HfConfig, layers: Iterable[Layer]) -> ModelSpec:
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


_GEMMA4_LAYER = "[model.]layers.{l}"

_GEMMA4_RULES = (
    *(*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *FOUR_NORM_RULES, *QK_NORM_RULES),
    Rename("[model.]embed_tokens_per_layer.weight", "per_layer.table"),
    Rename("[model.]per_layer_model_projection.weight", "per_layer.projection"),
    *linear("[model.]per_layer_projection_norm", "per_layer.norm"),
    Rename(f"{_GEMMA4_LAYER}.per_layer_input_gate.weight", "layers.{l}.per_layer.gate"),
    Rename(f"{_GEMMA4_LAYER}.per_layer_projection.weight", "layers.{l}.per_layer.out"),
    Rename(f"{_GEMMA4_LAYER}.post_per_layer_input_norm.weight", "layers.{l}.per_layer.norm"),
)
_GEMMA4_UNUSED = tuple(f"*layers.*.self_attn.{name}" for name in ("k_proj.*", "v_proj.*", "k_norm.*", "v_norm.*"))
"""Tensors that some writers add to layers that share a cache."""

GEMMA3N = Family(
    _gemma3n,
    (
        *_GEMMA4_RULES,
        Stack("[model.]altup_projections.{e}.weight", "alt_up.in"),
        Stack("[model.]altup_unembed_projections.{e}.weight", "alt_up.out"),
        Rename(f"{_GEMMA4_LAYER}.altup.modality_router.weight", "layers.{l}.alt_up.router"),
        Rename(f"{_GEMMA4_LAYER}.altup.router_norm.weight", "layers.{l}.alt_up.norm"),
        Rename(f"{_GEMMA4_LAYER}.altup.prediction_coefs.weight", "layers.{l}.alt_up.prediction"),
        Rename(f"{_GEMMA4_LAYER}.altup.correction_coefs.weight", "layers.{l}.alt_up.correction"),
        Rename(f"{_GEMMA4_LAYER}.altup.correct_output_scale", "layers.{l}.alt_up.scale"),
        Rename(f"{_GEMMA4_LAYER}.laurel.linear_left.weight", "layers.{l}.low_rank.left"),
        Rename(f"{_GEMMA4_LAYER}.laurel.linear_right.weight", "layers.{l}.low_rank.right"),
        Rename(f"{_GEMMA4_LAYER}.laurel.post_laurel_norm.weight", "layers.{l}.low_rank.norm"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", *_GEMMA4_UNUSED),
)
GEMMA4 = Family(
    _gemma4,
    (
        *_GEMMA4_RULES,
        Rename(f"{_GEMMA4_LAYER}.layer_scalar", "layers.{l}.output_scale"),
        Rename(f"{_GEMMA4_LAYER}.router.proj.weight", "layers.{l}.side.moe.router"),
        Rename(f"{_GEMMA4_LAYER}.router.scale", "layers.{l}.side.router_norm"),
        Rename(f"{_GEMMA4_LAYER}.router.per_expert_scale", "layers.{l}.side.expert_scale"),
        Rename(f"{_GEMMA4_LAYER}.post_feedforward_layernorm_1.weight", "layers.{l}.side.ffn_norm"),
        Rename(f"{_GEMMA4_LAYER}.pre_feedforward_layernorm_2.weight", "layers.{l}.side.input_norm"),
        Rename(f"{_GEMMA4_LAYER}.post_feedforward_layernorm_2.weight", "layers.{l}.side.output_norm"),
        *fused_or_single_expert_rules(f"{_GEMMA4_LAYER}.experts", "layers.{l}.side.moe"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", *_GEMMA4_UNUSED),
)
