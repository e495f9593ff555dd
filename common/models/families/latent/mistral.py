"""Mistral Large 3 and Mistral 4: DeepSeek's latent attention with queries that grow, experts with softmax scores."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FUSED_EXPERT_RULES, leading_dense, routed_moe
from pagoda.common.models.families.latent.deepseek import DEEPSEEK_V2, latent_attention
from pagoda.common.models.family import pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import LatentAttention, QueryGrowth
from pagoda.common.models.spec import ExpertGroups, ModelSpec, Moe, Router


def _mistral_large3(config: HfConfig) -> ModelSpec:
    config.expect("scoring_func", "softmax")
    config.ignore("topk_method", "routing_method_type", "ep_size", "seq_aux", "aux_loss_alpha")
    attention = _attention(config)
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


def _attention(config: HfConfig) -> LatentAttention:
    rope_dim = config.size("qk_rope_head_dim")
    growth = None
    head_dim = config.size("qk_nope_head_dim") + rope_dim
    config.expect("head_dim", head_dim)
    config.set("head_dim", rope_dim)
    rope = dict(config.opt("rope_parameters", dict, config.opt("rope_scaling", dict, {})))
    if abs(rope.pop("partial_rotary_factor", rope_dim / head_dim) * head_dim - rope_dim) > 1e-3:
        raise config.error("partial_rotary_factor", f"does not make {rope_dim} of {head_dim} channels rotate")
    rope.pop("max_position_embeddings", None)  # that of the file
    if (rate := rope.pop("llama_4_scaling_beta", None)) is not None:
        growth = QueryGrowth(rate, config.opt_size(_ORIGINAL, rope.get(_ORIGINAL, 8192)))
    if (section := config.section("llama_4_scaling")) is not None:
        growth = QueryGrowth(section.need("beta", float), section.size(_ORIGINAL))
        section.finish()
    config.set("rope_parameters", rope)
    attention = latent_attention(config, config.opt("rope_interleave", bool, True))
    return replace(attention, query_growth=growth)


_ORIGINAL = "original_max_position_embeddings"

MISTRAL_LARGE3 = replace(DEEPSEEK_V2, build=_mistral_large3, rules=(*DEEPSEEK_V2.rules, *FUSED_EXPERT_RULES))
