"""Decoders whose feed-forward blocks are mixtures of experts with softmax scores.

The families, in the order of this file:

- `MixtralForCausalLM`: Mixtral: Mistral's block with a mixture of experts.
- `FlexOlmoForCausalLM`, `OlmoeForCausalLM`: OLMoE and FlexOlmo: norms on the whole projections of q and k, every layer
  a mixture of experts.
- `PhiMoEForCausalLM`, `PhimoeForCausalLM`: Phi-3.5-MoE: LayerNorm, biases, two experts chosen by a sparse mixer.
- `DbrxForCausalLM`: DBRX: LayerNorm without biases, clamped q, k and v, experts stored in one tensor per matrix.
- `ArcticForCausalLM`: Snowflake Arctic: a dense block, and around it a mixture of experts that reads the layer's input.
- `GraniteMoeForCausalLM`, `GraniteMoeSharedForCausalLM`: Granite 3 with experts, also shared ones: scaled embeddings,
  residuals and logits, fused gate and up matrices.
- `GraniteMoeSWAForCausalLM`, `GraniteSWAForCausalLM`: Granite with sliding windows, dense and with experts: attention
  sinks, a base of RoPE (or none) for each layer.
- `Ernie4_5_MoeForCausalLM`: ERNIE 4.5 with experts: RoPE on interleaved channels, softmax scores with a correction,
  shared experts.
- `HunYuanMoEV1ForCausalLM`: Hunyuan with experts (A13B): the dense model's attention, every layer a mixture with a
  shared Mlp.
- `Cohere2MoeForCausalLM`: Command with experts: Cohere 2's parallel block, a mixture as its ffn after leading dense
  layers.
- `GptOssForCausalLM`: gpt-oss: attention sinks, every second layer with a window, experts with biases and a clamped
  gate.
- `Llama4ForCausalLM`: Llama 4: attention in chunks with RoPE, every fourth layer over all tokens without, experts with
  weighted inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import (
    BLOCK_SPARSE_RULES,
    FFN,
    MOE_RULES,
    expert_rules,
    fused_or_single_expert_rules,
    shared_rules,
)
from pagoda.common.models.families.gpt_block import COHERE2
from pagoda.common.models.families.llama_block import (
    GRANITE,
    HUNYUAN_RULES,
    HUNYUAN_UNUSED,
    ernie_keys,
    hunyuan_attention,
)
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    FOUR_NORM_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    AnswerFormat,
    Family,
    Rename,
    Reshape,
    Rule,
    Split,
    Stack,
    decoder,
    fused_linear,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention, QueryGrowth
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import LongRopeScaling, YarnScaling
from pagoda.common.models.spec import (
    ClampedGlu,
    Embedding,
    Ffn,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    Norms,
    Router,
    Shortcut,
    SparseMixer,
)

# Mixtral.


def _mixtral(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"), theta=1_000_000.0)
    attention = replace(attention, window=config.window(None))
    router = Router(config.opt_size("num_experts_per_tok", 2), renormalise=True)
    moe = Moe(config.size("num_local_experts", "num_experts"), gated_mlp(config), router)
    return pre_norm_decoder(config, [attention] * layers, [moe] * layers, rms_norm(config, 1e-5))


MIXTRAL = Family(
    _mixtral,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        *BLOCK_SPARSE_RULES,
    ),
)


# OLMoE and FlexOlmo.


def _olmoe(config: HfConfig) -> ModelSpec:
    config.expect("clip_qkv", None)
    norm = rms_norm(config, 1e-5)
    return _olmoe_model(config, norm, Norms(before_mixer=norm, before_ffn=norm), top_k=8)


def _flex_olmo(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    return _olmoe_model(config, norm, Norms(after_mixer=norm, after_ffn=norm), top_k=5)


def _olmoe_model(config: HfConfig, norm: Norm, norms: Norms, *, top_k: int) -> ModelSpec:
    """`top_k`: the family's default."""
    bias = config.opt("attention_bias", bool, False)
    attention = replace(
        rotary_attention(config, config.size("hidden_size")),
        qk_norm=norm,
        qk_norm_over="full",
        qkv_bias=bias,
        out_bias=bias,
    )
    router = Router(config.opt_size("num_experts_per_tok", top_k), config.opt("norm_topk_prob", bool, False))
    moe = Moe(config.size("num_experts", "num_local_experts"), gated_mlp(config), router)
    return decoder(config, [Layer((attention,), moe, norms)] * config.size("num_hidden_layers"), norm)


_OLMOE_RULES = (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MOE_RULES)

OLMOE = Family(_olmoe, (*_OLMOE_RULES, *PRE_NORM_RULES))
FLEX_OLMO = Family(_flex_olmo, (*_OLMOE_RULES, *FOUR_NORM_RULES))


# Phi-3.5-MoE.


def _phimoe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    config.expect("num_experts_per_tok", 2)
    config.ignore("input_jitter_noise")  # Only training reads this key.
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, qkv_bias=bias, out_bias=bias, window=config.window(None))
    mixer = SparseMixer(2, config.opt("router_jitter_noise", float, 0.01))
    moe = Moe(config.opt_size("num_local_experts", 16), gated_mlp(config), mixer)
    norm = Norm(config.opt("rms_norm_eps", float, 1e-5), kind="layer", bias=True)
    spec = pre_norm_decoder(config, [attention] * layers, [moe] * layers, norm)
    return replace(spec, head_bias=config.opt("lm_head_bias", bool, False))


PHIMOE = Family(
    _phimoe,
    (
        *EMBED_RULES,
        Rename("model.norm.bias", "final_norm_bias"),
        Rename("lm_head.bias", "head_bias"),
        *ATTENTION_RULES,
        *BLOCK_SPARSE_RULES,
        *linear("model.layers.{l}.input_layernorm", "layers.{l}.norms.before_mixer"),
        *linear("model.layers.{l}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
    ),
)


# DBRX.


def _dbrx(config: HfConfig) -> ModelSpec:
    config.alias("hidden_size", "d_model")
    config.alias("max_position_embeddings", "max_seq_len")
    layers = config.size("n_layers", "num_hidden_layers")
    return pre_norm_decoder(
        config, [_dbrx_attention(config)] * layers, [_dbrx_moe(config)] * layers, Norm(1e-5, kind="layer")
    )


def _dbrx_attention(config: HfConfig) -> Attention:
    width = config.size("hidden_size")
    heads = config.size("n_heads", "num_attention_heads")
    section = config.section("attn_config") or HfConfig({})
    head_dim = hf_config.head_dim(config, width, heads)
    kv_heads = section.opt_size("kv_n_heads", 1)
    if heads % kv_heads:
        raise section.error("kv_n_heads", f"{kv_heads} does not divide n_heads {heads}")
    config.expect("num_key_value_heads", kv_heads)
    rope = hf_config.rope(config, head_dim, theta=section.opt("rope_theta", float, 10_000.0))
    clip = section.nullable("clip_qkv", float)
    section.finish()
    return Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope, qkv_clip=clip)


def _dbrx_moe(config: HfConfig) -> Moe:
    section = config.section("ffn_config") or HfConfig({})
    section.expect("hidden_size", config.size("hidden_size"))
    section.ignore("moe_jitter_eps", "moe_loss_weight")  # Only training reads these keys.
    section.expect("moe_normalize_expert_weights", 1)  # The weights are divided by their sum.
    renormalise = section.nullable("moe_normalize_expert_weights", float, 1.0) is not None
    activation = section.section("ffn_act_fn") or HfConfig({})
    expert = Mlp(section.opt_size("ffn_hidden_size", 3584), activation.activation("name", "silu"), gated=True)
    router = Router(section.opt_size("moe_top_k", 1), renormalise)
    moe = Moe(section.opt_size("moe_num_experts", 4), expert, router)
    activation.finish()
    section.finish()
    return moe


_DBRX_LAYER = "transformer.blocks.{l}"

DBRX = Family(
    _dbrx,
    (
        Rename("transformer.wte.weight", "embed"),
        Rename("transformer.norm_f.weight", "final_norm"),
        Rename("lm_head.weight", "head"),
        *fused_linear(f"{_DBRX_LAYER}.norm_attn_norm.attn.Wqkv", *(f"layers.{{l}}.mixers.0.{part}" for part in "qkv")),
        Rename(f"{_DBRX_LAYER}.norm_attn_norm.attn.out_proj.weight", "layers.{l}.mixers.0.o"),
        Rename(f"{_DBRX_LAYER}.norm_attn_norm.norm_1.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_DBRX_LAYER}.norm_attn_norm.norm_2.weight", "layers.{l}.norms.before_ffn"),
        Rename(f"{_DBRX_LAYER}.ffn.router.layer.weight", f"{FFN}.router"),
        Reshape(f"{_DBRX_LAYER}.ffn.experts.mlp.w1", f"{FFN}.experts.gate"),
        Reshape(f"{_DBRX_LAYER}.ffn.experts.mlp.v1", f"{FFN}.experts.up"),
        Reshape(f"{_DBRX_LAYER}.ffn.experts.mlp.w2", f"{FFN}.experts.down", transpose=True),
        *expert_rules(f"{_DBRX_LAYER}.ffn.experts.mlp", "w1", "v1", "w2"),
    ),
)


# Arctic.


def _arctic(config: HfConfig) -> ModelSpec:

    config.expect("use_residual", True)
    config.ignore("moe_token_dropping", "moe_min_capacity", "moe_train_capacity_factor", "moe_eval_capacity_factor")
    config.ignore("enable_expert_tensor_parallelism", "parallel_attn_mlp_res", "quantization", "enc_index")
    norm = rms_norm(config, 1e-5)
    norms = Norms(rms_norm(config, 1e-5), None, rms_norm(config, 1e-5))
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=1_000_000.0)
    attention = replace(attention, window=config.window(None), qkv_bias=bias, out_bias=bias)
    ffn = gated_mlp(config)
    top_k = config.opt_size("num_experts_per_tok", 1)
    moe = Moe(config.size("num_local_experts", "num_experts"), ffn, Router(top_k, renormalise=top_k > 1))
    dense = Layer((attention,), ffn, norms)
    sparse = Layer((attention,), replace(ffn, width=config.size("hidden_size")), norms, shortcut=Shortcut(moe, norm))
    layers = range(config.size("num_hidden_layers"))
    return decoder(config, (dense if (layer + 1) % _arctic_every(config) else sparse for layer in layers), norm)


def _arctic_every(config: HfConfig) -> int:
    """Return how many layers there are to one with experts."""
    return config.opt_size("moe_layer_frequency", 2)


_ARCTIC_LAYER = "[model.]layers.{l}"
_ARCTIC_MOE = "layers.{l}.shortcut.moe"


def _arctic_mlp(source: str, target: str) -> tuple[Rule, ...]:
    return tuple(Rename(f"{source}.{name}.weight", f"{target}.{part}") for name, part in _ARCTIC_PARTS.items())


_ARCTIC_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}

ARCTIC = Family(
    _arctic,
    (
        *(EMBED_RULES + ATTENTION_RULES),
        Rename(f"{_ARCTIC_LAYER}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_ARCTIC_LAYER}.residual_layernorm.weight", "layers.{l}.norms.before_ffn"),
        Rename(f"{_ARCTIC_LAYER}.post_attention_layernorm.weight", "layers.{l}.shortcut.norm"),
        Rename(f"{_ARCTIC_LAYER}.post_attention_layernorm.weight", "layers.{l}.norms.before_ffn"),
        *_arctic_mlp(f"{_ARCTIC_LAYER}.residual_mlp", "layers.{l}.ffn"),
        *_arctic_mlp(f"{_ARCTIC_LAYER}.block_sparse_moe.mlp", "layers.{l}.ffn"),
        Rename(f"{_ARCTIC_LAYER}.block_sparse_moe.gate.weight", f"{_ARCTIC_MOE}.router"),
        *(
            Stack(f"{_ARCTIC_LAYER}.block_sparse_moe.experts.{{e}}.{name}.weight", f"{_ARCTIC_MOE}.experts.{part}")
            for name, part in _ARCTIC_PARTS.items()
        ),
    ),
)


# Granite with experts.


def _granite_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = replace(
        rotary_attention(config, config.size("hidden_size")),
        scale=config.opt("attention_multiplier", float, 1.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    expert = gated_mlp(config)
    shared = config.opt("shared_intermediate_size", int, 0)
    router = Router(config.opt_size("num_experts_per_tok", 2), renormalise=True)
    moe = Moe(
        config.opt_size("num_local_experts", 8), expert, router, replace(expert, width=shared) if shared else None
    )
    spec = pre_norm_decoder(config, [attention] * layers, [moe] * layers, rms_norm(config, 1e-6))
    scale = config.opt("residual_multiplier", float, 1.0)
    return replace(
        spec,
        layers=tuple(replace(layer, residual_scale=scale) for layer in spec.layers),
        embedding=Embedding(scale=config.opt("embedding_multiplier", float, 1.0)),
        logit_scale=1 / config.opt("logits_scaling", float, 1.0),
    )


_GRANITE_MOE = "[model.]layers.{l}.block_sparse_moe"
_GRANITE_SHARED = "[model.]layers.{l}.shared_mlp"

GRANITE_MOE_RULES = (
    *EMBED_RULES,
    *ATTENTION_RULES,
    *PRE_NORM_RULES,
    Rename(f"{_GRANITE_MOE}.router.layer.weight", f"{FFN}.router"),
    Split(f"{_GRANITE_MOE}.input_linear.weight", (f"{FFN}.experts.gate", f"{FFN}.experts.up"), axis=1),
    Rename(f"{_GRANITE_MOE}.output_linear.weight", f"{FFN}.experts.down"),
    *expert_rules(f"{_GRANITE_MOE}.experts"),
    Split(f"{_GRANITE_SHARED}.input_linear.weight", (f"{FFN}.shared.gate", f"{FFN}.shared.up")),
    Rename(f"{_GRANITE_SHARED}.output_linear.weight", f"{FFN}.shared.down"),
)

GRANITE_MOE = Family(_granite_moe, GRANITE_MOE_RULES)


# Granite with sliding windows.


def _granite_windowed(build: Callable[[HfConfig], ModelSpec], config: HfConfig) -> ModelSpec:
    spec = build(config)
    window = config.window(128)
    layers = len(spec.layers)
    kinds = config.layer_types(layers, ["sliding_attention" if n % 4 else "full_attention" for n in range(layers)])
    thetas = config.opt("layer_rope_theta", list, [None] * layers)
    if len(thetas) != layers:
        raise config.error("layer_rope_theta", f"has {len(thetas)} entries for {layers} layers")

    def mixer(attention: Attention, kind: str, theta: float | None) -> Attention:
        rope = attention.rope
        if theta is not None and rope is not None:
            rope = replace(rope, theta=float(theta)) if theta else None  # A base of 0 means no positions.
        return replace(attention, rope=rope, sinks=True, window=window if kind == "sliding_attention" else None)

    stack = (
        replace(layer, mixers=(mixer(layer.attention, kind, theta),))
        for layer, kind, theta in zip(spec.layers, kinds, thetas)
    )
    return replace(spec, layers=tuple(stack))


_GRANITE_SINKS = Rename("[model.]layers.{l}.self_attn.sinks", "layers.{l}.mixers.0.sinks")
_GRANITE_SWA_MOE = "[model.]layers.{l}.block_sparse_moe"
_GRANITE_EXPERTS = (
    Rename(f"{_GRANITE_SWA_MOE}.router.weight", f"{FFN}.router"),
    Split(f"{_GRANITE_SWA_MOE}.experts.gate_up_proj", (f"{FFN}.experts.gate", f"{FFN}.experts.up"), axis=1),
    Rename(f"{_GRANITE_SWA_MOE}.experts.down_proj", f"{FFN}.experts.down"),
)

GRANITE_SWA = replace(GRANITE, build=partial(_granite_windowed, GRANITE.build), rules=(*GRANITE.rules, _GRANITE_SINKS))
GRANITE_MOE_SWA = replace(
    GRANITE_MOE,
    build=partial(_granite_windowed, GRANITE_MOE.build),
    rules=(*GRANITE_MOE.rules, _GRANITE_SINKS, *_GRANITE_EXPERTS),
)


# ERNIE 4.5 with experts.


def _ernie_moe(config: HfConfig) -> ModelSpec:
    ernie_keys(config)
    layers = config.size("num_hidden_layers")
    bias = config.opt("use_bias", bool, False)
    config.expect("moe_norm_min", 1e-12)  # No sum of softmax scores is less.
    config.expect("moe_gate", "topk")
    config.expect("moe_use_aux_free", True)
    # The first key is of training, and the layers of the second only propose drafts.
    config.ignore("moe_capacity", "num_nextn_predict_layers")
    attention = rotary_attention(config, config.size("hidden_size"), theta=500_000.0, interleaved=True)
    attention = replace(attention, qkv_bias=bias, out_bias=bias)
    first = config.opt("moe_layer_start_index", int, 1)
    step = config.opt_size("moe_layer_interval", 1)
    end = config.opt("moe_layer_end_index", int, -1)
    last = layers - 1 if end == -1 else end
    dense = gated_mlp(config, bias=bias)
    moe = _ernie_mixture(config)
    ffns: list[Ffn] = [moe if first <= n <= last and not (n + 1) % step else dense for n in range(layers)]
    spec = pre_norm_decoder(config, [attention] * layers, ffns, rms_norm(config, 1e-5), tied=True)
    return replace(spec, head_bias=bias)


def _ernie_mixture(config: HfConfig) -> Moe:
    width = config.size("moe_intermediate_size")
    shared = config.opt("moe_num_shared_experts", int, 2)
    expert = replace(gated_mlp(config), width=width)
    router = Router(config.opt_size("moe_k", 6), renormalise=True, correction=True)
    bias = config.opt("use_bias", bool, False)
    return Moe(
        config.opt_size("moe_num_experts", 64),
        expert,
        router,
        replace(expert, width=shared * width, bias=bias) if shared else None,
    )


_ERNIE_CORRECTION = "[model.]layers.{l}.mlp.moe_statics.e_score_correction_bias"  # The tensor has shape [1, E].

ERNIE_MOE = Family(
    _ernie_moe,
    (
        *(EMBED_RULES + ATTENTION_RULES + MLP_RULES + MOE_RULES + PRE_NORM_RULES),
        Rename("lm_head.bias", "head_bias"),
        Reshape(_ERNIE_CORRECTION, f"{FFN}.router_correction"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.mtp_*"),
)


# Hunyuan with experts.

# Keys of mechanisms that the file turns off: latent attention, groups of experts.
_HUNYUAN_OFF = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_group",
    "topk_group",
)
_HUNYUAN_TRAINING = ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "routed_scaling_factor")


def _hunyuan_moe(config: HfConfig) -> ModelSpec:
    for key, supported in (
        ("group_limited_greedy", False),
        ("moe_layer_num_skipped", 0),
        ("norm_topk_prob", True),
        ("use_mla", False),
    ):
        config.expect(key, supported)
    config.ignore(*HUNYUAN_UNUSED, *_HUNYUAN_OFF, *_HUNYUAN_TRAINING)
    layers = config.size("num_hidden_layers")
    dense = gated_mlp(config)
    widths = config.per_layer("moe_intermediate_size", layers, dense.width)
    experts = config.per_layer("num_experts", layers)
    chosen = config.per_layer("moe_topk", layers, 1)
    shared = config.per_layer("num_shared_expert", layers, 1)
    if not config.opt("use_mixed_mlp_moe", bool, True):
        shared = [0] * layers
    moes = (
        Moe(
            experts[n],
            replace(dense, width=widths[n]),
            Router(chosen[n], renormalise=True),
            replace(dense, width=shared[n] * dense.width) if shared[n] else None,
        )
        for n in range(layers)
    )
    return pre_norm_decoder(config, [hunyuan_attention(config)] * layers, moes, rms_norm(config, 1e-5))


_HUNYUAN_SOURCE = "[model.]layers.{l}.mlp"

HUNYUAN_MOE = Family(
    _hunyuan_moe,
    (
        *HUNYUAN_RULES,
        Rename(f"{_HUNYUAN_SOURCE}.gate.wg.weight", f"{FFN}.router"),
        *expert_rules(f"{_HUNYUAN_SOURCE}.experts"),
        *shared_rules(f"{_HUNYUAN_SOURCE}.shared_mlp"),
    ),
    answers=AnswerFormat(tools="hunyuan_a13b", reasoning="hunyuan_a13b"),
)


# Cohere with experts.


def _cohere2_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    first = config.opt("first_k_dense_replace", int, 0)
    dense_kinds = config.ffn_kinds(layers, ["dense"] * first + ["sparse"] * (layers - first))
    prefix = config.opt_size("prefix_dense_sliding_window_pattern", 1)
    every = config.opt_size("sliding_window_pattern", 4)
    cycles = [(n + 1) % prefix for n in range(first)] + [(n + 1) % every for n in range(layers - first)]
    kinds = config.layer_types(layers, ["sliding_attention" if cycle else "full_attention" for cycle in cycles])
    bias = config.opt("attention_bias", bool, False)
    config.default("head_dim", 128)
    rotary = replace(
        rotary_attention(config, config.size("hidden_size"), interleaved=True), qkv_bias=bias, out_bias=bias
    )
    windowed = replace(rotary, window=config.window(4096))
    mixers = [
        windowed
        if kind == "sliding_attention"
        else rotary
        if dense == "dense" and prefix == 1
        else replace(rotary, rope=None)
        for kind, dense in zip(kinds, dense_kinds)
    ]
    norm = Norm(config.opt("layer_norm_eps", float, 1e-5), kind="layer")
    if "rms_norm_eps" in config:
        norm = Norm(config.need("rms_norm_eps", float))
    moe = _cohere2_mixture(config)
    dense = gated_mlp(config)
    if "dense" in dense_kinds:
        dense = replace(dense, width=config.size("prefix_dense_intermediate_size"))
    config.ignore("prefix_dense_intermediate_size")
    ffns: list[Ffn] = [dense if kind == "dense" else moe for kind in dense_kinds]
    stack = (Layer((mixer,), ffn, Norms(norm), parallel=True) for mixer, ffn in zip(mixers, ffns))
    spec = replace(decoder(config, stack, norm, tied=True), logit_scale=config.opt("logit_scale", float, 0.0625))
    averaged = _cohere2_averages(config) and moe.shared is not None
    return replace(spec, weight_scales=(("layers.*.ffn.shared.down", 0.5),)) if averaged else spec


def _cohere2_mixture(config: HfConfig) -> Moe:
    config.expect("expert_selection_fn", "softmax", "sigmoid")
    softmax = config.opt("expert_selection_fn", str, "softmax") == "softmax"
    renormalise = config.opt("norm_topk_prob", bool, True) or softmax  # The softmax is over the chosen experts.
    router = Router(config.opt_size("num_experts_per_tok", 2), renormalise, "softmax" if softmax else "sigmoid")
    expert = gated_mlp(config)
    shared = config.opt("num_shared_experts", int, 0)
    if _cohere2_averages(config) and shared:
        router = replace(router, scale=0.5)  # The output of the shared Mlp is halved as well.
    width = shared * expert.width
    return Moe(config.opt_size("num_experts", 8), expert, router, replace(expert, width=width) if shared else None)


def _cohere2_averages(config: HfConfig) -> bool:
    """Return whether the outputs of routed experts and shared Mlp are averaged instead of added."""
    config.expect("shared_expert_combination_strategy", "average", "sum")
    return config.opt("shared_expert_combination_strategy", str, "average") == "average"


COHERE2_MOE = replace(COHERE2, build=_cohere2_moe, rules=(*COHERE2.rules, *MOE_RULES))


# The model gpt-oss.


def _gpt_oss(config: HfConfig) -> ModelSpec:
    config.ignore("initial_context_length")  # The section of the rope states it as well.
    config.expect("hidden_act", "silu")
    config.alias("num_experts_per_tok", "experts_per_token")
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, True)
    attention = rotary_attention(config, config.size("hidden_size"), theta=150_000.0)
    full = replace(attention, sinks=True, qkv_bias=bias, out_bias=bias)
    windowed = replace(full, window=config.window(128))
    pattern = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    gate = ClampedGlu(config.opt("swiglu_limit", float, 7.0), config.opt("swiglu_alpha", float, 1.702))
    expert = Mlp(config.size("intermediate_size"), "silu", gated=True, bias=True, clamped=gate)
    router = Router(config.opt_size("num_experts_per_tok", 4), renormalise=True, bias=True)
    moe = Moe(config.size("num_local_experts", "num_experts"), expert, router)
    mixers = [windowed if kind == "sliding_attention" else full for kind in kinds]
    return pre_norm_decoder(config, mixers, [moe] * layers, rms_norm(config, 1e-5))


_GPT_OSS_SOURCE: Final = "[model.]layers.{l}.mlp.experts"
_GPT_OSS_GATE_UP: Final = f"{FFN}.experts.gate", f"{FFN}.experts.up"
_GPT_OSS_GATE_UP_BIAS: Final = f"{FFN}.experts.gate_bias", f"{FFN}.experts.up_bias"

GPT_OSS = Family(
    _gpt_oss,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        Rename("[model.]layers.{l}.self_attn.sinks", "layers.{l}.mixers.0.sinks"),
        *linear("[model.]layers.{l}.mlp.router", f"{FFN}.router"),
        Split(f"{_GPT_OSS_SOURCE}.gate_up_proj", _GPT_OSS_GATE_UP, transpose=True, axis=1, alternating=True),
        Split(f"{_GPT_OSS_SOURCE}.gate_up_proj_blocks", _GPT_OSS_GATE_UP, axis=1, alternating=True),
        Split(f"{_GPT_OSS_SOURCE}.gate_up_proj_bias", _GPT_OSS_GATE_UP_BIAS, axis=1, alternating=True),
        Rename(f"{_GPT_OSS_SOURCE}.down_proj", f"{FFN}.experts.down", transpose=True),
        Rename(f"{_GPT_OSS_SOURCE}.down_proj_blocks", f"{FFN}.experts.down"),
        Rename(f"{_GPT_OSS_SOURCE}.down_proj_bias", f"{FFN}.experts.down_bias"),
        *expert_rules(_GPT_OSS_SOURCE),
        *(
            Stack(f"{_GPT_OSS_SOURCE}.{{e}}.{part}_proj.bias", f"{FFN}.experts.{part}_bias")
            for part in ("gate", "up", "down")
        ),
    ),
    answers=AnswerFormat(reasoning="openai_gptoss", tools="openai", fixed=True, ends=("<|return|>", "<|call|>")),
)


# Llama 4.


def _llama4(config: HfConfig) -> ModelSpec:
    config.ignore("for_llm_compressor")
    norm = rms_norm(config, 1e-5)
    return replace(
        pre_norm_decoder(config, _llama4_mixers(config), _llama4_ffns(config), norm),
        max_positions=config.size("max_position_embeddings"),
    )


def _llama4_mixers(config: HfConfig) -> list[Attention]:
    layers = config.size("num_hidden_layers")
    every = config.opt_size("no_rope_layer_interval", 4)
    bias = config.opt("attention_bias", bool, False)
    with_rope = config.opt("no_rope_layers", list, []) or [(layer + 1) % every != 0 for layer in range(layers)]
    chunk = config.nullable("attention_chunk_size", int, 8192)
    growth = QueryGrowth(config.opt("attn_scale", float, 0.1), config.opt_size("floor_scale", 8192), offset=1)
    tuned = config.opt("attn_temperature_tuning", bool, True)
    if len(with_rope) != layers:
        raise config.error("no_rope_layers", f"has {len(with_rope)} entries for {layers} layers")
    default = ["chunked_attention" if rope else "full_attention" for rope in with_rope]
    kinds = config.layer_kinds("layer_types", layers, default, ("chunked_attention", "full_attention"))
    base = replace(
        rotary_attention(config, config.size("hidden_size"), theta=500_000.0, interleaved=True),
        qkv_bias=bias,
        out_bias=bias,
    )
    rotary = _llama4_with_norms(base, rms_norm(config, 1e-5)) if config.opt("use_qk_norm", bool, True) else base
    plain = replace(base, rope=None, query_growth=growth if tuned else None)
    return [
        replace(rotary if rope else plain, chunk=chunk if kind == "chunked_attention" else None)
        for rope, kind in zip(with_rope, kinds)
    ]


def _llama4_with_norms(base: Attention, norm: Norm) -> Attention:
    """Return the attention with norms of queries and keys after RoPE, stated as norms before it.

    They have no weights, so that they commute with RoPE's rotation. They undo its factor on cos and sin but for `eps`:
    f x / sqrt(f^2 mean(x^2) + eps) = x / sqrt(mean(x^2) + eps / f^2).
    """
    assert base.rope is not None
    rope = base.rope
    factor = 1.0
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        factor = rope.scaling.attention_factor
        rope = replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    return replace(base, rope=rope, qk_norm=replace(norm, eps=norm.eps / factor**2, scale=False))


def _llama4_ffns(config: HfConfig) -> list[Ffn]:
    layers = config.size("num_hidden_layers")
    step = config.opt_size("interleave_moe_layer_step", 1)
    sparse = config.opt("moe_layers", list, list(range(step - 1, layers, step)))
    expert = gated_mlp(config)
    dense = replace(expert, width=config.opt_size("intermediate_size_mlp", 16384))
    router = Router(config.opt_size("num_experts_per_tok", 1), renormalise=False, scores="sigmoid")
    moe = Moe(config.opt_size("num_local_experts", 16), expert, router, shared=expert, weighs_input=True)
    return [moe if layer in sparse else dense for layer in range(layers)]


_LLAMA4_SOURCE = "[model.]layers.{l}.feed_forward"

LLAMA4 = Family(
    _llama4,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        *linear(f"{_LLAMA4_SOURCE}.gate_proj", f"{FFN}.gate"),
        *linear(f"{_LLAMA4_SOURCE}.up_proj", f"{FFN}.up"),
        *linear(f"{_LLAMA4_SOURCE}.down_proj", f"{FFN}.down"),
        Rename(f"{_LLAMA4_SOURCE}.router.weight", f"{FFN}.router"),
        *fused_or_single_expert_rules(f"{_LLAMA4_SOURCE}.experts"),
        *shared_rules(f"{_LLAMA4_SOURCE}.shared_expert"),
    ),
    answers=AnswerFormat(tools="llama4_pythonic"),
)
