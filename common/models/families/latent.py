"""Decoders with multi-head latent attention (MLA), and DeepSeek's first mixture.

The families, in the order of this file:

- `DeepseekForCausalLM`, `DeepseekV2ForCausalLM`, `DeepseekV32ForCausalLM`, `DeepseekV3ForCausalLM`,
  `Glm4MoeLiteForCausalLM`: DeepSeek 1 (MoE), V2, V3, R1, V3.1, V3.2, Kimi K2 and GLM-4.7-Flash: latent attention from
  V2 on, experts.
- `AXK1ForCausalLM`, `GlmMoeDsaForCausalLM`, `PanguUltraMoEForCausalLM`, `SarvamMLAForCausalLM`: DeepSeek-V3 with other
  details: A.X-K1, GLM-5 (sparse attention, from 5.2 on with shared selections), Sarvam 105B, openPangu Ultra.
- `LongcatFlashForCausalLM`: LongCat-Flash: layers of two halves, latent attention and an MLP in each, with a mixture
  beside them, some of whose experts return their input.
- `Mistral4ForCausalLM`, `MistralLarge3ForCausalLM`: Mistral Large 3 and Mistral 4: DeepSeek's latent attention with
  queries that grow, experts with softmax scores.
- `MiniCPM3ForCausalLM`: MiniCPM 3: latent attention, with MiniCPM's factors on embedding, updates and logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import (
    FUSED_EXPERT_RULES,
    MOE_RULES,
    corrected_sigmoid_router,
    expert_rules,
    leading_dense,
    routed_moe,
)
from pagoda.common.models.families.llama_block import scaled
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
    Rule,
    decoder,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Indexer, LatentAttention, QueryGrowth
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import ExpertGroups, Ffn, Layer, Mlp, ModelSpec, Moe, Norms, Router, SecondHalf

# DeepSeek.


def _deepseek_v2(config: HfConfig) -> ModelSpec:
    bias = config.opt("mlp_bias", bool, False)

    def moe() -> Moe:
        routed = routed_moe(config, _softmax_router(config), shared=2)
        return replace(routed, shared=None if routed.shared is None else replace(routed.shared, bias=bias))

    return _model(config, latent_attention(config, interleaved=True), leading_dense(config, moe, 0, bias=bias))


def _deepseek(config: HfConfig) -> ModelSpec:
    bias = config.opt("attention_bias", bool, False)
    width = config.size("hidden_size")
    attention = replace(rotary_attention(config, width), qkv_bias=bias, out_bias=bias)

    def moe() -> Moe:
        config.expect("scoring_func", "softmax")
        config.ignore("seq_aux", "aux_loss_alpha", "ep_size")
        router = Router(config.size("num_experts_per_tok"), config.opt("norm_topk_prob", bool, False))
        return routed_moe(config, router)

    ffns = leading_dense(config, moe, 0)
    return pre_norm_decoder(config, [attention] * len(ffns), ffns, rms_norm(config, 1e-6))


def deepseek_v3(config: HfConfig, default_dense: int = 3, eps: float = 1e-6) -> ModelSpec:
    """Return DeepSeek-V3's spec. `default_dense`, `eps`: the family's default leading layers and norm eps."""
    interleaved = config.opt("rope_interleave", bool, True)
    config.ignore("num_nextn_predict_layers")  # These layers only propose drafts.
    return _model(config, latent_attention(config, interleaved), sigmoid_ffns(config, default_dense), eps=eps)


def _glm4_moe_lite(config: HfConfig) -> ModelSpec:
    if "mlp_layer_types" not in config:
        config.expect("first_k_dense_replace", 1)  # transformers' class does not read it.
    return deepseek_v3(config, default_dense=1, eps=1e-5)


def deepseek_v32(config: HfConfig, *, interleaved: bool = False, eps: float = 1e-6) -> ModelSpec:
    """Return DeepSeek-V3.2's spec. `interleaved`: the channels that the indexer rotates."""
    layers = config.size("num_hidden_layers")
    config.expect("layer_types", ["indexed_attention"] * layers, ["deepseek_sparse_attention"] * layers)
    config.expect("rope_interleave", True)
    config.ignore("num_nextn_predict_layers")
    attention = latent_attention(config, interleaved=True)
    indexer = _indexer(config, attention, interleaved)
    return _model(config, replace(attention, indexer=indexer), sigmoid_ffns(config, 3), eps=eps)


def sigmoid_ffns(config: HfConfig, default_dense: int) -> list[Ffn]:
    """Return the ffn of each layer: mixtures with sigmoid scores after the dense ones."""

    def moe() -> Moe:
        return routed_moe(config, corrected_sigmoid_router(config), shared=1)

    return leading_dense(config, moe, default_dense)


def _model(config: HfConfig, attention: LatentAttention, ffns: list[Ffn], *, eps: float = 1e-6) -> ModelSpec:
    return pre_norm_decoder(config, [attention] * len(ffns), ffns, rms_norm(config, eps))


def _softmax_router(config: HfConfig) -> Router:
    config.expect("scoring_func", "softmax")
    config.expect("topk_method", "greedy", "group_limited_greedy")
    config.expect("norm_topk_prob", False)
    config.ignore("ep_size", "seq_aux", "aux_loss_alpha")
    groups = ExpertGroups(config.opt_size("n_group", 1), config.opt_size("topk_group", 1), "best")
    limited = config.opt("topk_method", str, "greedy") == "group_limited_greedy"
    return Router(
        config.size("num_experts_per_tok"),
        renormalise=False,
        groups=groups if limited else None,
        scale=config.opt("routed_scaling_factor", float, 1.0),
    )


def latent_attention(config: HfConfig, interleaved: bool, eps: float = 1e-6) -> LatentAttention:
    """Return multi-head latent attention without an indexer.

    `interleaved`: the channels that RoPE rotates. `eps`: of the norms of latent and queries.
    """
    heads = config.size("num_attention_heads")
    nope_dim = config.size("qk_nope_head_dim")
    rope_dim = config.size("qk_rope_head_dim")
    query_rank = config.nullable("q_lora_rank", int, 1536)
    config.expect("num_key_value_heads", heads)
    config.expect("head_dim", rope_dim)
    config.expect("qk_head_dim", nope_dim + rope_dim)
    return LatentAttention(
        heads=heads,
        query_rank=query_rank,
        latent_dim=config.size("kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=config.size("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * hf_config.yarn_scale(config),
        rope=replace(hf_config.rope(config, rope_dim), interleaved=interleaved),
        norm=Norm(eps),
        bias=config.opt("attention_bias", bool, False),
    )


def _indexer(config: HfConfig, attention: LatentAttention, interleaved: bool) -> Indexer:
    head_dim = config.size("index_head_dim")
    rope_dim = attention.rope.dim
    if attention.query_rank is None:
        raise config.error("q_lora_rank", "is null; the indexer needs low-rank queries")
    if head_dim < rope_dim:
        raise config.error("index_head_dim", f"is {head_dim}; it must be at least qk_rope_head_dim, {rope_dim}")
    return Indexer(
        heads=config.size("index_n_heads"),
        head_dim=head_dim,
        top_k=config.size("index_topk"),
        rope=replace(attention.rope, interleaved=interleaved),
        norm=Norm(1e-6, kind="layer", bias=True),
    )


_SOURCE = "[model.]layers.{l}.self_attn"
_TARGET = "layers.{l}.mixers.0"


def _latent_rules(source: str, target: str) -> tuple[Rule, ...]:
    """Rules of a mixer of latent attention."""
    return (
        *linear(f"{source}.q_proj", f"{target}.q"),
        *linear(f"{source}.q_a_proj", f"{target}.q_a"),
        Rename(f"{source}.q_a_layernorm.weight", f"{target}.q_a_norm"),
        *linear(f"{source}.q_b_proj", f"{target}.q_b"),
        *linear(f"{source}.kv_a_proj_with_mqa", f"{target}.kv_a"),
        Rename(f"{source}.kv_a_layernorm.weight", f"{target}.kv_a_norm"),
        *linear(f"{source}.kv_b_proj", f"{target}.kv_b"),
        *linear(f"{source}.o_proj", f"{target}.o"),
    )


DEEPSEEK_RULES = (*EMBED_RULES, *MLP_RULES, *MOE_RULES, *PRE_NORM_RULES, *_latent_rules(_SOURCE, _TARGET))
INDEXER_RULES = (
    Rename(f"{_SOURCE}.indexer.wq_b.weight", f"{_TARGET}.indexer.q"),
    Rename(f"{_SOURCE}.indexer.wk.weight", f"{_TARGET}.indexer.k"),
    Rename(f"{_SOURCE}.indexer.k_norm.weight", f"{_TARGET}.indexer.k_norm"),
    Rename(f"{_SOURCE}.indexer.k_norm.bias", f"{_TARGET}.indexer.k_norm_bias"),
    Rename(f"{_SOURCE}.indexer.weights_proj.weight", f"{_TARGET}.indexer.weights"),
)

DEEPSEEK = Family(_deepseek, (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *MOE_RULES, *PRE_NORM_RULES))
DEEPSEEK_V2 = Family(_deepseek_v2, DEEPSEEK_RULES)
# The layers after V3's last one, from layers.61 on, only propose drafts.
_IGNORED = ("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.61.*")

DEEPSEEK_V3 = Family(deepseek_v3, DEEPSEEK_RULES, ignored=_IGNORED)
DEEPSEEK_V32 = Family(deepseek_v32, (*DEEPSEEK_RULES, *INDEXER_RULES), ignored=_IGNORED)
GLM4_MOE_LITE = Family(
    _glm4_moe_lite,
    DEEPSEEK_RULES,
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.47.*"),
)


# DeepSeek-V3 with other details.


def _axk1(config: HfConfig) -> ModelSpec:
    spec = deepseek_v3(config, default_dense=1)

    def normed(layer: Layer) -> Layer:
        return replace(layer, norms=replace(layer.norms, after_ffn=spec.final_norm))

    layers = (normed(layer) if isinstance(layer.ffn, Moe) else layer for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _glm5(config: HfConfig) -> ModelSpec:
    config.expect("num_experts", config.size("n_routed_experts"))
    config.expect("indexer_rope_interleave", True)
    config.ignore("index_share_for_mtp_iteration")  # This concerns layers that only propose drafts.
    config.expect("moe_router_dtype", "float32")
    # GLM-5.2 states the channels without RoPE; the class of transformers takes `qk_rope_head_dim`, whatever the key.
    config.expect("head_dim", config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim"))
    config.set("head_dim", None)
    kinds = _glm5_indexers(config)
    spec = deepseek_v32(config, interleaved=True, eps=1e-5)

    def sharing(layer: Layer) -> Layer:
        (mixer,) = layer.mixers
        assert isinstance(mixer, LatentAttention), "all layers have latent attention"
        return replace(layer, mixers=(replace(mixer, indexer=None, shared_top_k=mixer.selected_tokens),))

    layers = (sharing(layer) if kind == "shared" else layer for layer, kind in zip(spec.layers, kinds))
    return replace(spec, layers=tuple(layers))


def _glm5_indexers(config: HfConfig) -> tuple[str, ...]:
    """Return "full" or "shared" for each layer: with an indexer, or with the selection of the last one before it.

    Stated as a list, as a pattern of F and S, or by a period and the layer from which it counts.
    """
    layers = config.size("num_hidden_layers")
    period = max(config.opt("index_topk_freq", int, 1), 1)
    offset = config.opt("index_skip_topk_offset", int, 2)
    default = ["shared" if max(layer - offset + 1, 0) % period else "full" for layer in range(layers)]
    pattern = config.opt("index_topk_pattern", str, "")
    default = [_GLM5_LETTERS.get(letter, letter) for letter in pattern] or default
    return config.layer_kinds("indexer_types", layers, default, ("full", "shared"))


_GLM5_LETTERS = {"F": "full", "S": "shared"}


def _sarvam(config: HfConfig) -> ModelSpec:
    config.alias("n_routed_experts", "num_experts")
    config.alias("n_shared_experts", "num_shared_experts")
    config.alias("scoring_func", "score_function")
    config.expect("moe_router_enable_expert_bias", True)
    config.expect("moe_shared_expert_intermediate_size", config.size("moe_intermediate_size"))
    config.default("routed_scaling_factor", 2.5)
    if "q_lora_rank" not in config:
        config.set("q_lora_rank", None)
    config.ignore("router_dtype", "q_head_dim", "num_nextn_predict_layers")
    return _own_eps(config, sigmoid_ffns(config, 1))


def _pangu_ultra(config: HfConfig) -> ModelSpec:
    for key, name in (
        *(("qk_nope_head_dim", "attention_qk_dim"), ("qk_rope_head_dim", "attention_qk_rope_dim")),
        *(("q_lora_rank", "attention_q_lora_dim"), ("kv_lora_rank", "attention_kv_lora_dim")),
        *(("v_head_dim", "attention_v_dim"), ("first_k_dense_replace", "num_dense_layers")),
        *(("n_routed_experts", "num_routed_experts"), ("n_shared_experts", "num_shared_experts")),
    ):
        config.alias(key, name)
    config.ignore("num_mtp_layers", "num_nextn_predict_layers")
    corrected = config.opt("router_enable_expert_bias", bool, False)
    sandwich = config.opt("sandwich_norm", bool, False)

    def moe() -> Moe:
        return routed_moe(config, replace(corrected_sigmoid_router(config), correction=corrected), shared=1)

    spec = _own_eps(config, leading_dense(config, moe, 3), eps=1e-5)
    if not sandwich:
        return spec
    norm = spec.final_norm
    return replace(spec, layers=tuple(replace(layer, norms=Norms(norm, norm, norm, norm)) for layer in spec.layers))


def _own_eps(config: HfConfig, ffns: list[Ffn], eps: float = 1e-6) -> ModelSpec:
    """Return a model whose latent norms have the eps of the others."""
    norm = rms_norm(config, eps)
    interleaved = config.opt("rope_interleave", bool, True)
    return pre_norm_decoder(config, [latent_attention(config, interleaved, norm.eps)] * len(ffns), ffns, norm)


_DRAFTS = ("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.{}.*")

AXK1 = Family(
    _axk1,
    (*DEEPSEEK_RULES, Rename("[model.]layers.{l}.post_mlp_layernorm.weight", "layers.{l}.norms.after_ffn")),
    ignored=tuple(name.format(61) for name in _DRAFTS),
)
GLM5 = Family(_glm5, (*DEEPSEEK_RULES, *INDEXER_RULES), ignored=tuple(name.format(78) for name in _DRAFTS))
SARVAM_MLA = Family(_sarvam, DEEPSEEK_RULES)
PANGU_ULTRA = Family(
    _pangu_ultra,
    (
        # The norm exists only in some checkpoints.
        Rename("[model.]layers.{l}.post_attention_layernorm.weight", "layers.{l}.norms.after_mixer"),
        Rename("[model.]layers.{l}.pre_mlp_layernorm.weight", "layers.{l}.norms.before_ffn"),
        Rename("[model.]layers.{l}.post_mlp_layernorm.weight", "layers.{l}.norms.after_ffn"),
        *DEEPSEEK_RULES,
    ),
    ignored=tuple(name.format(61) for name in _DRAFTS),
)


# LongCat-Flash.


def _longcat_flash(config: HfConfig) -> ModelSpec:
    layers = config.size("num_layers")
    config.expect("num_hidden_layers", layers, 2 * layers)  # The class of transformers counts halves.
    config.expect("attention_method", "MLA")
    config.alias("intermediate_size", "ffn_hidden_size")
    norm = rms_norm(config, 1e-5)
    config.default("rope_theta", 1e7)
    attention = latent_attention(config, interleaved=True)
    dense = gated_mlp(config)
    second = SecondHalf(dense, _longcat_mixture(config, dense), norm)
    norms = Norms(before_mixer=norm, before_ffn=norm)
    spec = decoder(config, [Layer((attention, attention), dense, norms, second=second)] * layers, norm)
    return replace(spec, weight_scales=tuple(_longcat_scales(config, spec.width)))


def _longcat_mixture(config: HfConfig, dense: Mlp) -> Moe:
    config.expect("router_bias", False)
    config.expect("router_dtype", "float32")
    config.expect("norm_topk_prob", False)
    config.expect("topk_method", "noaux_tc")
    config.expect("zero_expert_type", "identity")
    config.alias("moe_intermediate_size", "expert_ffn_hidden_size")
    config.alias("num_experts_per_tok", "moe_topk")
    scale = config.opt("routed_scaling_factor", float, 6.0)
    return Moe(
        config.size("n_routed_experts"),
        replace(dense, width=config.size("moe_intermediate_size")),
        Router(config.size("num_experts_per_tok"), renormalise=False, correction=True, scale=scale),
        identity=config.nullable("zero_expert_num", int, 256) or 0,
    )


def _longcat_scales(config: HfConfig, width: int) -> Iterator[tuple[str, float]]:
    """Yield the factors on low-rank queries and latents, as factors on the weights of their norms."""
    for key, rank, part in (
        ("mla_scale_q_lora", "q_lora_rank", "q_a_norm"),
        ("mla_scale_kv_lora", "kv_lora_rank", "kv_a_norm"),
    ):
        if config.opt(key, bool, True):
            yield f"layers.*.mixers.*.{part}", (width / config.size(rank)) ** 0.5


_LONGCAT = "[model.]layers.{l}"
_LONGCAT_LAYER = "layers.{l}"


def _longcat_half(number: int, *, mixer_norm: str, ffn_norm: str, ffn: str) -> tuple[Rule, ...]:
    """Rules of a half of a layer."""
    return (
        *_latent_rules(f"{_SOURCE}.{number}", f"{_LONGCAT_LAYER}.mixers.{number}"),
        Rename(f"{_LONGCAT}.input_layernorm.{number}.weight", f"{_LONGCAT_LAYER}.{mixer_norm}"),
        Rename(f"{_LONGCAT}.post_attention_layernorm.{number}.weight", f"{_LONGCAT_LAYER}.{ffn_norm}"),
        *(
            rule
            for part in ("gate", "up", "down")
            for rule in linear(f"{_LONGCAT}.mlps.{number}.{part}_proj", f"{_LONGCAT_LAYER}.{ffn}.{part}")
        ),
    )


LONGCAT_FLASH = Family(
    _longcat_flash,
    (
        *EMBED_RULES,
        *_longcat_half(0, mixer_norm="norms.before_mixer", ffn_norm="norms.before_ffn", ffn="ffn"),
        *_longcat_half(1, mixer_norm="second.mixer_norm", ffn_norm="second.ffn_norm", ffn="second.ffn"),
        Rename(f"{_LONGCAT}.mlp.router.classifier.weight", f"{_LONGCAT_LAYER}.second.moe.router"),
        Rename(f"{_LONGCAT}.mlp.router.e_score_correction_bias", f"{_LONGCAT_LAYER}.second.moe.router_correction"),
        # transformers writes matrices of the experts that return their input, too.
        *expert_rules(f"{_LONGCAT}.mlp.experts", moe=f"{_LONGCAT_LAYER}.second.moe", surplus=True),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.mtp.*"),  # The latter only propose drafts.
)


# Mistral Large 3.


def _mistral_large3(config: HfConfig) -> ModelSpec:
    config.expect("scoring_func", "softmax")
    config.expect("num_nextn_predict_layers", 0)
    config.ignore("topk_method", "routing_method_type", "ep_size", "seq_aux", "aux_loss_alpha")
    attention = _mistral_attention(config)
    groups = ExpertGroups(config.opt_size("n_group", 1), config.opt_size("topk_group", 1), "best_two")

    def moe() -> Moe:
        router = Router(
            config.opt_size("num_experts_per_tok", 4),
            config.opt("norm_topk_prob", bool, True),
            groups=None if groups.count == groups.used else groups,
            scale=config.opt("routed_scaling_factor", float, 1.0),
        )
        return routed_moe(config, router, shared=1)

    ffns = leading_dense(config, moe, 0)
    return pre_norm_decoder(config, [attention] * len(ffns), ffns, rms_norm(config, 1e-6))


def _mistral_attention(config: HfConfig) -> LatentAttention:
    rope_dim = config.size("qk_rope_head_dim")
    growth = None
    head_dim = config.size("qk_nope_head_dim") + rope_dim
    config.expect("head_dim", head_dim)
    config.set("head_dim", rope_dim)
    rope = dict(config.opt("rope_parameters", dict, config.opt("rope_scaling", dict, {})))
    if abs(rope.pop("partial_rotary_factor", rope_dim / head_dim) * head_dim - rope_dim) > 1e-3:
        raise config.error("partial_rotary_factor", f"does not make {rope_dim} of {head_dim} channels rotate")
    rope.pop("max_position_embeddings", None)  # The file's own key applies.
    if (rate := rope.pop("llama_4_scaling_beta", None)) is not None:
        growth = QueryGrowth(rate, config.opt_size(_MISTRAL_ORIGINAL, rope.get(_MISTRAL_ORIGINAL, 8192)))
    if (section := config.section("llama_4_scaling")) is not None:
        growth = QueryGrowth(section.need("beta", float), section.size(_MISTRAL_ORIGINAL))
        section.finish()
    config.set("rope_parameters", rope)
    attention = latent_attention(config, config.opt("rope_interleave", bool, True))
    return replace(attention, query_growth=growth)


_MISTRAL_ORIGINAL = "original_max_position_embeddings"

MISTRAL_LARGE3 = replace(DEEPSEEK_V2, build=_mistral_large3, rules=(*DEEPSEEK_V2.rules, *FUSED_EXPERT_RULES))


# MiniCPM 3.


def _minicpm3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    config.default("q_lora_rank", 768)
    config.default("kv_lora_rank", 256)
    config.default("v_head_dim", width // config.size("num_attention_heads"))
    mixers = [latent_attention(config, interleaved=False)] * layers
    spec = pre_norm_decoder(config, mixers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5), tied=True)
    return scaled(config, spec, embedding=12.0, depth=1.4, base=256)


MINICPM3 = Family(_minicpm3, DEEPSEEK_RULES)
