"""Decoders with mixtures of experts, most of them chosen by sigmoid scores with a learned correction.

The families, in the order of this file:

- `Glm4MoeForCausalLM`: GLM-4.5 to 4.7: experts with sigmoid scores after leading dense layers, RoPE on half of each
  head.
- `SolarOpenForCausalLM`: Solar Open: Llama's attention, every layer a mixture with sigmoid scores and a shared expert.
- `Dots1ForCausalLM`: dots.llm1: norms on q and k, sliding windows in some layers, experts with sigmoid scores.
- `ExaoneMoEForCausalLM`, `ExaoneMoeForCausalLM`: K-EXAONE: EXAONE 4's attention in a pre-norm block, experts with
  sigmoid scores after leading dense layers.
- `BailingMoeForCausalLM`, `BailingMoeV2ForCausalLM`, `Param2MoEForCausalLM`, `SarvamMoEForCausalLM`: Ling and Ring 1
  and 2 (Bailing), Sarvam 30B, Param 2: experts with softmax or sigmoid scores, q-k-v fused.
- `AfmoeForCausalLM`: AFMoE (Arcee Trinity): gated attention with RoPE in windowed layers only, four norms, experts with
  sigmoid scores.
- `HYV3ForCausalLM`: Hunyuan 3 (Hy3): norms on q and k before RoPE, experts with sigmoid scores after a dense layer.
- `MiniMaxM2ForCausalLM`: MiniMax-M2: norms on the whole projections of q and k, experts with sigmoid scores and a score
  correction.
- `MiniMaxM3SparseForCausalLM`, `MiniMaxM3ForCausalLM`: MiniMax-M3: attention to blocks that an indexer selects, experts
  with a clamped gate after leading dense layers.
- `MiMoV2FlashForCausalLM`, `MiMoV2ForCausalLM`: MiMo-V2: value heads narrower than keys; windowed layers have sinks, KV
  heads and RoPE of their own; experts.
- `Step3p5ForCausalLM`: Step 3.5: windows with more heads in most layers, an output gate per head, experts whose gates
  are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import (
    BLOCK_SPARSE_RULES,
    FFN,
    MOE_RULES,
    corrected_sigmoid_router,
    expert_rules,
    leading_dense,
    routed_moe,
    shared_rules,
)
from pagoda.common.models.families.llama_block import exaone4_attentions
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    AnswerFormat,
    Family,
    Normalise,
    Rename,
    Rule,
    Split,
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
from pagoda.common.models.mixers import Attention, BlockIndexer
from pagoda.common.models.spec import ClampedGlu, Embedding, Ffn, Layer, Mlp, ModelSpec, Moe, Norms, Router

# GLM-4.5 to 4.7.


def _glm4_moe(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-5)
    config.ignore("num_nextn_predict_layers")  # These layers only propose drafts.
    attention = replace(
        rotary_attention(config, config.size("hidden_size"), partial=0.5),
        qk_norm=norm if config.opt("use_qk_norm", bool, False) else None,
        qkv_bias=config.opt("attention_bias", bool, False),
    )
    ffns = leading_dense(config, lambda: routed_moe(config, corrected_sigmoid_router(config), shared=1), 1)
    return pre_norm_decoder(config, [attention] * len(ffns), ffns, norm)


GLM4_MOE = Family(
    _glm4_moe,
    (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *MOE_RULES, *PRE_NORM_RULES),
    # The layers after the last one of GLM-4.5-Air and GLM-4.5 to 4.7 only propose drafts.
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.46.*", "model.layers.92.*"),
)


# Solar Open.


def _solar_open(config: HfConfig) -> ModelSpec:
    config.expect("first_k_dense_replace", 0)  # transformers' class has no dense layers, whatever the file states.
    config.expect("use_qk_norm", False)
    config.set("intermediate_size", config.size("moe_intermediate_size"))  # The file states one that no layer has.
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"), theta=1_000_000.0)
    attention = replace(attention, qkv_bias=config.opt("attention_bias", bool, False))
    mixture = routed_moe(config, corrected_sigmoid_router(config), shared=1)
    return pre_norm_decoder(config, [attention] * layers, [mixture] * layers, rms_norm(config, 1e-5))


SOLAR_OPEN = Family(_solar_open, (*EMBED_RULES, *ATTENTION_RULES, *MOE_RULES, *PRE_NORM_RULES))


# The model dots.llm1.


def _dots1(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, qk_norm=norm, qkv_bias=bias, out_bias=bias)
    ffns = leading_dense(config, lambda: routed_moe(config, corrected_sigmoid_router(config, renormalise=False)), 0)
    layers = len(ffns)
    window = config.window(4096)
    first = config.opt("max_window_layers", int, 62)
    default = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    mixers = [
        replace(attention, window=window) if kind == "sliding_attention" else attention
        for kind in config.layer_types(layers, default)
    ]
    return pre_norm_decoder(config, mixers, ffns, norm)


DOTS1 = Family(_dots1, (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *MOE_RULES, *PRE_NORM_RULES))


# K-EXAONE.


def _exaone_moe(config: HfConfig) -> ModelSpec:
    config.alias("n_routed_experts", "num_experts")
    config.alias("n_shared_experts", "num_shared_experts")
    # These keys are of layers that only propose drafts.
    config.ignore("num_nextn_predict_layers", "mtp_loss_factor", "mtp_share_layers")
    # Released files state in these keys what those of transformers do in `mlp_layer_types`.
    sparse = config.opt("is_moe_layer", list, [])
    config.ignore("first_last_k_dense_replace")
    if sparse and "mlp_layer_types" not in config:
        config.set("mlp_layer_types", ["sparse" if is_moe else "dense" for is_moe in sparse])
    config.default("routed_scaling_factor", 2.5)
    config.default("num_experts_per_tok", 8)
    config.default("moe_intermediate_size", 1024)
    ffns = leading_dense(config, lambda: routed_moe(config, corrected_sigmoid_router(config), shared=1), 1)
    return pre_norm_decoder(config, exaone4_attentions(config), ffns, rms_norm(config, 1e-5))


EXAONE_MOE = Family(
    _exaone_moe,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES + MOE_RULES + PRE_NORM_RULES),
        Rename("[model.]layers.{l}.mlp.e_score_correction_bias", "layers.{l}.ffn.router_correction"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "mtp.*"),
)


# Bailing.

# Training, the dtype of scores that are float32 here, layers that propose drafts.
_BAILING_UNUSED = (
    *("router_dtype", "multi_gate", "moe_aux_loss_lambda", "mtp_loss_scaling_factor", "num_nextn_predict_layers"),
    *("use_rmsnorm", "norm_softmax", "router_type", "rotary_type"),
)


def _bailing(config: HfConfig, *, scores: str, shared_width_is_whole: bool = False) -> ModelSpec:
    name_keys(config, scores)
    config.expect("use_sliding_window", False)
    if "rotary_dim" in config and "head_dim" in config:
        config.default("partial_rotary_factor", config.size("rotary_dim") / config.size("head_dim"))
    bias = config.opt("use_bias", bool, False)
    ffns = leading_dense(config, partial(bailing_moe, config, shared_width_is_whole), 0, bias=bias)
    return pre_norm_decoder(config, [_bailing_attention(config, bias)] * len(ffns), ffns, rms_norm(config, 1e-5))


def name_keys(config: HfConfig, scores: str) -> None:
    """Give the keys of the experts the names that shared readers know. `scores`: the family's default."""
    config.alias("n_routed_experts", "num_experts", "num_local_experts")
    config.alias("n_shared_experts", "num_shared_experts")
    config.alias("scoring_func", "score_function")
    config.default("scoring_func", scores)
    config.ignore(*_BAILING_UNUSED)


def _bailing_attention(config: HfConfig, bias: bool) -> Attention:
    attention = rotary_attention(config, config.size("hidden_size"))
    return replace(
        attention,
        qk_norm=rms_norm(config, 1e-5) if config.opt("use_qk_norm", bool, False) else None,
        qkv_bias=config.opt("use_qkv_bias", bool, False) or bias,
        out_bias=bias,
    )


def bailing_moe(config: HfConfig, shared_width_is_whole: bool = False) -> Moe:
    """Return a mixture. `shared_width_is_whole`: the stated width of shared experts is that of all together."""
    moe = routed_moe(config, _bailing_router(config), shared=1)
    width = config.opt("moe_shared_expert_intermediate_size", int, 0)
    if moe.shared is None or not width:
        return moe
    count = 1 if shared_width_is_whole else config.size("n_shared_experts")
    return replace(moe, shared=replace(moe.shared, width=count * width))


def _bailing_router(config: HfConfig) -> Router:
    corrected = config.opt("moe_router_enable_expert_bias", bool, config.opt("scoring_func", str, "") == "sigmoid")
    if corrected:
        return corrected_sigmoid_router(config)
    config.expect("scoring_func", "softmax")
    config.expect("n_group", 1)
    config.expect("topk_group", 1)
    config.expect("routed_scaling_factor", 1.0)
    return Router(config.size("num_experts_per_tok"), config.opt("norm_topk_prob", bool, True))


def _bailing_head(config: HfConfig) -> tuple[Rule, ...]:
    normalised = config.opt("norm_head", bool, False)
    return (Normalise("lm_head.weight", "head", axis=0),) if normalised else ()


_BAILING_SOURCE = "[model.]layers.{l}.attention"
_BAILING_TARGET = "layers.{l}.mixers.0"

BAILING_RULES = (
    *(EMBED_RULES + MLP_RULES + MOE_RULES + PRE_NORM_RULES),
    Rename("[model.]word_embeddings.weight", "embed"),
    *fused_linear(f"{_BAILING_SOURCE}.query_key_value", *(f"{_BAILING_TARGET}.{part}" for part in "qkv")),
    *linear(f"{_BAILING_SOURCE}.dense", f"{_BAILING_TARGET}.o"),
    Rename(f"{_BAILING_SOURCE}.query_layernorm.weight", f"{_BAILING_TARGET}.q_norm"),
    Rename(f"{_BAILING_SOURCE}.key_layernorm.weight", f"{_BAILING_TARGET}.k_norm"),
    Rename("[model.]layers.{l}.mlp.gate.expert_bias", f"{FFN}.router_correction"),
)

BAILING = Family(partial(_bailing, scores="softmax"), BAILING_RULES, config_rules=_bailing_head)
BAILING_V2 = Family(partial(_bailing, scores="sigmoid"), BAILING_RULES, config_rules=_bailing_head)
PARAM2 = replace(BAILING_V2, build=partial(_bailing, scores="sigmoid", shared_width_is_whole=True))


# AFMoE.


def _afmoe(config: HfConfig) -> ModelSpec:
    for key, supported in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        config.expect(key, supported)
    config.ignore("load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm")
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    norm = rms_norm(config, 1e-5)
    config.default("head_dim", 128)
    windowed = replace(rotary_attention(config, width), qk_norm=norm, output_gate=True, window=config.window(1024))
    full = replace(windowed, rope=None, window=None)
    every = config.opt_size("global_attn_every_n_layers", 4)
    pattern = ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]
    kinds = config.layer_types(layers, pattern)
    dense = gated_mlp(config)
    moe = _afmoe_mixture(config)
    first = config.opt("num_dense_layers", int, 1)
    ffns: list[Ffn] = [dense if n < first else moe for n in range(layers)]
    norms = Norms(norm, norm, norm, norm)
    stack = (Layer((windowed if kind == "sliding_attention" else full,), ffn, norms) for kind, ffn in zip(kinds, ffns))
    scale = width**0.5 if config.opt("mup_enabled", bool, False) else 1.0
    return replace(decoder(config, stack, norm), embedding=Embedding(scale=scale))


def _afmoe_mixture(config: HfConfig) -> Moe:
    scale = config.opt("route_scale", float, 1.0)
    top_k = config.opt_size("num_experts_per_tok", 6)
    router = Router(top_k, renormalise=True, scores="sigmoid", correction=True, scale=scale)
    expert = replace(gated_mlp(config), width=config.opt_size("moe_intermediate_size", 1408))
    shared = replace(expert, width=expert.width * config.opt_size("num_shared_experts", 2))
    return Moe(config.opt_size("num_experts", 64), expert, router, shared)


_LAYER = "[model.]layers.{l}"
_AFMOE_NORMS = "layers.{l}.norms"

AFMOE = Family(
    _afmoe,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES),
        Rename(f"{_LAYER}.self_attn.gate_proj.weight", "layers.{l}.mixers.0.gate"),
        Rename(f"{_LAYER}.input_layernorm.weight", f"{_AFMOE_NORMS}.before_mixer"),
        Rename(f"{_LAYER}.post_attention_layernorm.weight", f"{_AFMOE_NORMS}.after_mixer"),
        Rename(f"{_LAYER}.pre_mlp_layernorm.weight", f"{_AFMOE_NORMS}.before_ffn"),
        Rename(f"{_LAYER}.post_mlp_layernorm.weight", f"{_AFMOE_NORMS}.after_ffn"),
        Rename(f"{_LAYER}.mlp.router.gate.weight", f"{FFN}.router"),
        Rename(f"{_LAYER}.mlp.expert_bias", f"{FFN}.router_correction"),
        *expert_rules(f"{_LAYER}.mlp.experts"),
        *shared_rules(f"{_LAYER}.mlp.shared_experts"),
    ),
)


# Hunyuan 3.

# Training, the dtype of a sum that is float32 here, and layers that only propose drafts.
_HY3_UNUSED = (
    "enable_moe_fp32_combine",
    "enable_attention_fp32_softmax",
    "enable_lm_head_fp32",
    "num_nextn_predict_layers",
)


def _hy3(config: HfConfig) -> ModelSpec:
    config.alias("n_routed_experts", "num_experts", "num_local_experts")
    config.alias("n_shared_experts", "num_shared_experts")
    config.alias("moe_intermediate_size", "expert_hidden_dim")
    config.alias("routed_scaling_factor", "router_scaling_factor")
    for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        config.expect(key, True)
    config.ignore(*_HY3_UNUSED)

    def moe() -> Moe:
        scale = config.opt("routed_scaling_factor", float, 2.826)
        top_k = config.opt_size("num_experts_per_tok", 8)
        router = Router(top_k, renormalise=True, scores="sigmoid", correction=True, scale=scale)
        return routed_moe(config, router, shared=1)

    norm = rms_norm(config, 1e-5)
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=11_158_840.0)
    attention = replace(attention, qk_norm=norm, qkv_bias=bias, out_bias=bias)
    ffns = leading_dense(config, moe, 1)
    return pre_norm_decoder(config, [attention] * len(ffns), ffns, norm)


_HY3_MLP = "[model.]layers.{l}.mlp"

HY3 = Family(
    _hy3,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES + MOE_RULES + PRE_NORM_RULES),
        Rename(f"{_HY3_MLP}.e_score_correction_bias", f"{FFN}.router_correction"),
        Rename(f"{_HY3_MLP}.expert_bias", f"{FFN}.router_correction"),
        Rename(f"{_HY3_MLP}.router.gate.weight", f"{FFN}.router"),
        *shared_rules(f"{_HY3_MLP}.shared_mlp"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.80.*"),  # Layer 80 only proposes drafts.
)


# MiniMax-M2.

# Keys of published files about layers of other kinds, which M2 does not have, and about layers that propose drafts.
_M2_UNUSED = ("mlp_intermediate_size", "shared_moe_mode", "mtp_transformer_layers", "num_mtp_modules", "use_mtp")


def _minimax_m2(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    width = config.size("hidden_size")
    config.expect("attn_type_list", [1] * layers)
    for key, supported in (
        ("qk_norm_type", "per_layer"),
        ("use_qk_norm", True),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("shared_intermediate_size", 0),
        *((f"layernorm_{part}_beta", 1.0) for part in ("full_attention", "linear_attention", "mlp")),
    ):
        config.expect(key, supported)
    config.ignore(*_M2_UNUSED)
    head_dim = config.opt_size("head_dim", 128)
    partial = config.opt_size("rotary_dim", head_dim) / head_dim
    attention = replace(
        rotary_attention(config, width, theta=5_000_000.0, partial=partial),
        qk_norm=norm,
        qk_norm_over="full",
        window=config.window(None),
    )
    router = Router(config.size("num_experts_per_tok"), renormalise=True, scores="sigmoid", correction=True)
    moe = Moe(config.size("num_local_experts", "num_experts"), gated_mlp(config), router)
    return pre_norm_decoder(config, [attention] * layers, [moe] * layers, norm)


MINIMAX_M2_RULES = (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *BLOCK_SPARSE_RULES, *PRE_NORM_RULES)

MINIMAX_M2 = Family(_minimax_m2, MINIMAX_M2_RULES)


# MiniMax-M3.

_M3_INDEXER: Final = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def _minimax_m3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    _m3_flatten(config)
    config.expect("hidden_act", "silu", "swigluoai")  # With both values the gate is clamped.
    config.expect("scoring_func", "sigmoid")
    config.expect("use_routing_bias", True)
    config.expect("use_qk_norm", True)
    config.expect("use_gemma_norm", True)
    config.expect("qk_norm_type", "per_head")
    config.expect("attention_output_gate", False)
    config.ignore("num_nextn_predict_layers", "num_mtp_modules", "use_mtp", "mtp_transformer_layers")
    full, sparse = _m3_attentions(config)
    attention_kinds = ("full_attention", "minimax_m3_sparse")
    kinds = config.layer_kinds("layer_types", layers, ["full_attention"] * layers, attention_kinds)
    dense, moe = _m3_ffns(config)
    mixers = [sparse if kind == "minimax_m3_sparse" else full for kind in kinds]
    ffns: list[Ffn] = [moe if kind == "sparse" else dense for kind in config.ffn_kinds(layers, ["sparse"] * layers)]
    config.expect("first_k_dense_replace", next((layer for layer, ffn in enumerate(ffns) if ffn is moe), layers))
    config.expect("moe_intermediate_size", config.size("intermediate_size"))
    return pre_norm_decoder(config, mixers, ffns, rms_norm(config, 1e-6, unit_offset=True))


def _m3_flatten(config: HfConfig) -> None:
    """Take the keys of released files under the names of transformers."""
    section = config.section("sparse_attention_config")
    if section is not None:
        for key, name in _M3_INDEXER.items():
            if name in section:
                config.default(key, section.need(name, int))
        sparse = section.opt("sparse_attention_freq", list, [])
        if sparse:
            config.default("layer_types", ["minimax_m3_sparse" if indexed else "full_attention" for indexed in sparse])
        for key, supported in (("use_sparse_attention", True), ("sparse_score_type", "max"), ("sparse_init_block", 0)):
            section.expect(key, supported)
        disabled = section.opt("sparse_disable_index_value", list, [])
        if not all(disabled[index] for index, indexed in enumerate(sparse) if indexed and index < len(disabled)):
            raise config.error("sparse_disable_index_value", "enables values of the indexer, which are not supported")
        section.finish()
    if sparse_ffns := config.opt("moe_layer_freq", list, []):
        config.default("mlp_layer_types", ["sparse" if mixture else "dense" for mixture in sparse_ffns])
        config.set("moe_layer_freq", None)


def _m3_attentions(config: HfConfig) -> tuple[Attention, Attention]:
    """Return the attention of layers without and with an indexer."""
    norm = rms_norm(config, 1e-6, unit_offset=True)
    width = config.size("hidden_size")
    config.default("head_dim", 128)
    head_dim = config.size("head_dim")
    partial = config.opt_size("rotary_dim", min(64, head_dim)) / head_dim
    rope = hf_config.rope(config, head_dim, theta=5_000_000.0, partial=partial)
    full = replace(grouped_attention(config, width, rope), qk_norm=norm)
    config.expect("index_n_heads", full.kv_heads)
    blocks = BlockIndexer(
        head_dim=config.opt_size("index_head_dim", 128),
        tokens=config.opt_size("index_block_size", 128),
        top_k=config.opt_size("index_topk_blocks", 16),
        local=config.opt_size("index_local_blocks", 1),
        rope=rope,
        norm=norm,
    )
    if blocks.local > blocks.top_k:
        words = f"is {blocks.local}; only up to index_topk_blocks {blocks.top_k} are supported"
        raise config.error("index_local_blocks", words)
    return full, replace(full, blocks=blocks)


def _m3_ffns(config: HfConfig) -> tuple[Mlp, Moe]:
    gate = ClampedGlu(config.opt("swiglu_limit", float, 7.0), config.opt("swiglu_alpha", float, 1.702))
    expert = Mlp(config.size("intermediate_size"), "silu", gated=True, clamped=gate)
    router = Router(
        config.opt_size("num_experts_per_tok", 4),
        renormalise=True,
        scores="sigmoid",
        correction=True,
        scale=config.opt("routed_scaling_factor", float, 2.0),
    )
    config.expect("n_shared_experts", 1)
    shared = replace(expert, width=config.opt_size("shared_intermediate_size", 3072))
    dense = replace(expert, width=config.opt_size("dense_intermediate_size", 12288))
    return dense, Moe(config.size("num_local_experts", "num_experts"), expert, router, shared)


_M3_BLOCKS = "layers.{l}.mixers.0.blocks"
_M3_INDEX_NAMES: Final = {"q_proj": "q", "k_proj": "k", "q_norm": "q_norm", "k_norm": "k_norm"}

MINIMAX_M3 = Family(
    _minimax_m3,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + PRE_NORM_RULES + MLP_RULES + BLOCK_SPARSE_RULES),
        *shared_rules(f"{_LAYER}.block_sparse_moe.shared_experts"),
        *(
            Rename(f"{_LAYER}.self_attn.index_{name}.weight", f"{_M3_BLOCKS}.{part}")
            for name, part in _M3_INDEX_NAMES.items()
        ),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "*.mtp.*"),
)


# MiMo-V2.


def _mimo_v2(config: HfConfig) -> ModelSpec:
    config.alias("rms_norm_eps", "layernorm_epsilon")
    for key in ("swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim"):
        config.expect(key, config.size(key.removeprefix("swa_")))
    config.expect("add_full_attention_sink_bias", False)
    config.expect("add_swa_attention_sink_bias", True)
    config.ignore("attention_chunk_size", "hybrid_block_size", "moe_router_dtype", "num_nextn_predict_layers")
    config.expect("attention_projection_layout", "separate", "split", "fused_qkv")
    layers = config.size("num_hidden_layers")
    _mimo_named_kinds(config, "hybrid_layer_pattern", "layer_types", _MIMO_ATTENTION)
    _mimo_named_kinds(config, "moe_layer_freq", "mlp_layer_types", _MIMO_FFN)
    config.default("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1))
    pattern = ["full_attention" if n == 0 or not (n + 1) % 6 else "sliding_attention" for n in range(layers)]
    mixers = _mimo_mixers(config)
    kinds = config.layer_types(layers, pattern)
    ffns = leading_dense(config, lambda: routed_moe(config, corrected_sigmoid_router(config)), 1)
    spec = pre_norm_decoder(config, [mixers[kind] for kind in kinds], ffns, rms_norm(config, 1e-5))
    scale = config.opt("attention_value_scale", float, 1.0)
    return replace(spec, weight_scales=(("layers.*.mixers.0.v", scale), ("layers.*.mixers.0.v_bias", scale)))


def _mimo_fused(config: HfConfig) -> tuple[Rule, ...]:
    """Return the rule of q, k and v in one tensor.

    Published float8 checkpoints have it in as many parts as full-attention layers have KV heads, quantised one by one;
    others, which transformers wrote, have all of q, then k, then v.
    """
    source = "[model.]layers.{l}.self_attn.qkv_proj"
    parts = tuple(f"layers.{{l}}.mixers.0.{part}" for part in "qkv")
    return (Split(f"{source}.weight", parts, quantised_pieces=config.size("num_key_value_heads")),)


_MIMO_ATTENTION: Final = {0: "full_attention", 1: "sliding_attention"}
_MIMO_FFN: Final = {0: "dense", 1: "sparse"}


def _mimo_named_kinds(config: HfConfig, key: str, target_key: str, names: dict[int, str]) -> None:
    """Take the kinds of the layers from a list of numbers, where the file has that instead of their names."""
    numbers: list[Any] = config.opt(key, list, [])
    if not set(numbers) <= set(names):
        raise config.error(key, f"is {numbers}; it must be a list of {sorted(names)}")
    if numbers:
        config.default(target_key, [names[number] for number in numbers])
        config.set(key, None)


def _mimo_mixers(config: HfConfig) -> dict[str, Attention]:
    """Return the attention of each kind of layer."""
    if (before := config.opt("sliding_window_size", int, 0)) > 0:
        config.set("sliding_window", before + 1)  # The file counts the tokens before the query.
    if "rope_parameters" not in config:
        partial = config.opt("partial_rotary_factor", float, 0.334)
        thetas = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
        defaults = {"rope_theta": 5e6, "swa_rope_theta": 1e4}
        sections = {
            kind: {"rope_theta": config.opt(key, float, defaults[key]), "partial_rotary_factor": partial}
            for kind, key in thetas.items()
        }
        config.set("rope_parameters", sections)
    config.default("head_dim", 192)
    ropes = hf_config.rope_per_layer_type(config, config.size("head_dim"), full=5e6, sliding=1e4)
    full = replace(
        grouped_attention(config, config.size("hidden_size"), ropes["full_attention"]),
        value_dim=config.opt_size("v_head_dim", 128),
        qkv_bias=config.opt("attention_bias", bool, False),
    )
    kv_heads = config.opt_size("swa_num_key_value_heads", 2 * full.kv_heads)
    if full.heads % kv_heads:
        raise config.error("swa_num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {full.heads}")
    rope = ropes["sliding_attention"]
    window = config.window(129)
    return {
        "full_attention": full,
        "sliding_attention": replace(full, kv_heads=kv_heads, rope=rope, window=window, sinks=True),
    }


_MIMO_SINKS: Final = ("sinks", "attention_sink_bias")

MIMO_V2 = replace(
    GLM4_MOE,
    build=_mimo_v2,
    config_rules=_mimo_fused,
    rules=(
        *GLM4_MOE.rules,
        *(Rename(f"[model.]layers.{{l}}.self_attn.{name}", "layers.{l}.mixers.0.sinks") for name in _MIMO_SINKS),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.mtp.*"),
)


# Step 3.5.


def _step3p5(config: HfConfig) -> ModelSpec:
    for key, *names in (
        ("num_key_value_heads", "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
        ("share_expert_dim", "share_expert_dims"),
        ("max_position_embeddings", "max_seq_len"),
    ):
        config.alias(key, *names)
    for key, supported in (
        *(("use_moe", True), ("use_head_wise_attn_gate", True), ("gating", True), ("zero_centered", True)),
        *(("use_moe_router_bias", True), ("need_fp32_gate", True), ("moe_router_activation", "sigmoid")),
        *(
            ("att_impl_type", "GQA"),
            ("use_rope_layers", []),
            ("moe_every_n_layer", 1),
            ("use_bidirectional_attention", False),
        ),
    ):
        config.expect(key, supported)
    config.ignore(
        "moe_layer_offset", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types", "use_qk_norm"
    )
    layers = config.size("num_hidden_layers")
    # Layers that propose drafts follow in the list.
    kinds = config.opt("layer_types", list, ["full_attention"] * layers)[:layers]
    config.set("layer_types", kinds)
    mixers = _step35_mixers(config, config.layer_types(layers, kinds))
    ffns = [_step35_ffn(config, layer, kind) for layer, kind in enumerate(_step35_ffn_kinds(config, layers))]
    return pre_norm_decoder(config, mixers, ffns, rms_norm(config, 1e-5, unit_offset=True))


def _step35_mixers(config: HfConfig, kinds: tuple[str, ...]) -> list[Attention]:
    config.default("head_dim", 128)
    ropes = _step35_ropes(config, kinds)
    bias = config.opt("attention_bias", bool, False)
    scalar = config.opt("query_pre_attn_scalar", float, 0.0)
    full = replace(
        grouped_attention(config, config.size("hidden_size"), ropes.get("full_attention")),
        qk_norm=rms_norm(config, 1e-5, unit_offset=True),
        qkv_bias=bias,
        out_bias=bias,
        output_gate=True,
        gate_per_head=True,
    )
    full = replace(full, scale=scalar**-0.5) if scalar else full
    heads = _step35_sliding_heads(config, kinds, config.opt_size("num_sliding_attention_heads", full.heads))
    other = config.section("attention_other_setting")
    if other is not None:
        other.expect("attention_type", "sliding_attention")
        other.expect("head_dim", full.head_dim)
        other.expect("num_attention_groups", full.kv_heads)
        other.ignore("true_head_dim")
        heads = other.opt_size("num_attention_heads", heads)
        other.finish()
    if heads % full.kv_heads:
        raise config.error("num_sliding_attention_heads", f"is {heads}; there are {full.kv_heads} KV heads")
    windowed = replace(full, heads=heads, window=config.window(None), rope=ropes.get("sliding_attention"))
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


def _step35_sliding_heads(config: HfConfig, kinds: tuple[str, ...], default: int) -> int:
    """Return the query heads of windowed layers, which transformers 5 writes layer by layer."""
    sections = config.layer_sections("per_layer_config", len(kinds))
    if sections is None:
        return default
    counts = set()
    for layer, kind in enumerate(kinds):
        section = sections.get(layer)
        if (section is None) != (kind == "full_attention"):
            raise config.error("per_layer_config", f"must have an entry for each windowed layer, no other; see {layer}")
        if section is not None:
            counts.add(section.size("num_attention_heads"))
            section.finish()
    if len(counts) > 1:
        raise config.error("per_layer_config", "differs from windowed layer to windowed layer")
    return counts.pop() if counts else default


def _step35_ropes(config: HfConfig, kinds: tuple[str, ...]) -> Mapping[str, Any]:
    """Return RoPE by layer type; old files state base and rotated part layer by layer."""
    if not isinstance(config.opt("rope_parameters", dict, {}).get(kinds[0]), dict):
        count = len(kinds)
        scaled = config.opt("yarn_only_types", list, ["full_attention"])
        default = [config.need("rope_theta", float)] if config.is_number("rope_theta") else [1e4]
        thetas = default * count if config.is_number("rope_theta") else config.opt("rope_theta", list, default * count)
        partials = config.opt("partial_rotary_factors", list, [1.0] * count)
        scaling = config.opt("rope_scaling", dict, {})
        sections = {
            kind: {
                "rope_theta": thetas[kinds.index(kind)],
                "partial_rotary_factor": partials[kinds.index(kind)],
                **(scaling if kind in scaled else {}),
            }
            for kind in set(kinds)
        }
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factors"):
            config.set(key, None)
        config.set("rope_parameters", sections)
    return hf_config.rope_per_layer_type(config, config.size("head_dim"), full=1e4, sliding=1e4)


def _step35_ffn_kinds(config: HfConfig, layers: int) -> tuple[str, ...]:
    """Return "sparse" or "dense" for each layer."""
    sparse = [str(layer) for layer in range(3, layers)]
    if config.is_text("moe_layers_enum"):
        sparse = config.need("moe_layers_enum", str).replace(" ", "").split(",")
    else:
        sparse = [str(layer) for layer in config.opt("moe_layers_enum", list, sparse)]
    kinds = ["sparse" if str(layer) in sparse else "dense" for layer in range(layers)]
    config.set("mlp_layer_types", config.opt("mlp_layer_types", list, kinds)[:layers])
    return config.ffn_kinds(layers, kinds)


def _step35_ffn(config: HfConfig, layer: int, kind: str) -> Ffn:
    dense = _step35_clipped(
        config, gated_mlp(config, bias=config.opt("mlp_bias", bool, False)), "swiglu_limits_shared", layer
    )
    if kind == "dense":
        return dense
    expert = replace(gated_mlp(config), width=config.opt_size("moe_intermediate_size", 1280))
    router = Router(
        config.opt_size("num_experts_per_tok", 8),
        config.opt("norm_expert_weight", bool, True),
        scores="sigmoid",
        correction=True,
        scale=config.opt("moe_router_scaling_factor", float, 1.0),
    )
    shared = replace(dense, width=config.opt_size("share_expert_dim", 1280))
    count = config.opt_size("n_routed_experts", 288)
    return Moe(count, _step35_clipped(config, expert, "swiglu_limits", layer), router, shared)


def _step35_clipped(config: HfConfig, mlp: Mlp, key: str, layer: int) -> Mlp:
    """Return the Mlp with the limit of its layer, 0 or null for none."""
    limits = config.opt(key, list, [])
    if limits and len(limits) <= layer:
        raise config.error(key, f"has {len(limits)} entries, fewer than there are layers")
    limit = limits[layer] if limits else None
    return replace(mlp, clip=float(limit)) if limit else mlp


_STEP35_SOURCE: Final = "[model.]layers.{l}"
_STEP35_PARTS: Final = ("gate", "up", "down")

STEP3P5 = Family(
    _step3p5,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES + PRE_NORM_RULES + MOE_RULES),
        Rename(f"{_STEP35_SOURCE}.self_attn.g_proj.weight", "layers.{l}.mixers.0.gate"),
        Rename(f"{_STEP35_SOURCE}.moe.gate.weight", f"{FFN}.router"),
        Rename(f"{_STEP35_SOURCE}.moe.router_bias", f"{FFN}.router_correction"),
        *(Rename(f"{_STEP35_SOURCE}.moe.{part}_proj.weight", f"{FFN}.experts.{part}") for part in _STEP35_PARTS),
        *expert_rules(f"{_STEP35_SOURCE}.moe.experts"),
        *(
            Rename(f"{_STEP35_SOURCE}.share_expert.{part}_proj.weight", f"{FFN}.shared.{part}")
            for part in _STEP35_PARTS
        ),
    ),
    # The layers after Step-3.5-Flash's last one only propose drafts.
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", *(f"model.layers.{layer}.*" for layer in (45, 46, 47))),
    answers=AnswerFormat(tools="step3p5", reasoning="step3p5"),
)
