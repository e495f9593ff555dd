"""Hunyuan with experts (A13B): the dense model's attention, every layer a mixture with a shared Mlp."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FFN, expert_rules, shared_rules
from pagoda.common.models.families.llama_block.hunyuan import RULES, UNUSED, hunyuan_attention
from pagoda.common.models.family import Family, Rename, gated_mlp, pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec, Moe, Router

# Keys of mechanisms that the file turns off: latent attention, groups of experts.
_OFF = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group")
_TRAINING = ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "routed_scaling_factor")


def _hunyuan_moe(config: HfConfig) -> ModelSpec:
    for key, supported in (
        ("group_limited_greedy", False),
        ("moe_layer_num_skipped", 0),
        ("norm_topk_prob", True),
        ("use_mla", False),
    ):
        config.expect(key, supported)
    config.ignore(*UNUSED, *_OFF, *_TRAINING)
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


_SOURCE = "[model.]layers.{l}.mlp"

HUNYUAN_MOE = Family(
    _hunyuan_moe,
    (
        *RULES,
        Rename(f"{_SOURCE}.gate.wg.weight", f"{FFN}.router"),
        *expert_rules(f"{_SOURCE}.experts"),
        *shared_rules(f"{_SOURCE}.shared_mlp"),
    ),
)
