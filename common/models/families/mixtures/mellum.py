"""Mellum 2: Qwen3-MoE's block with sliding windows in some layers and RoPE by layer type."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import leading_dense
from pagoda.common.models.families.llama_block.qwen import QWEN3_MOE
from pagoda.common.models.family import gated_mlp, grouped_attention, pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec, Moe, Router


def _mellum(config: HfConfig) -> ModelSpec:
    config.default("head_dim", 128)
    config.ignore("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")  # layers that only propose drafts
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    norm = rms_norm(config, 1e-6)
    ropes = hf_config.rope_per_layer_type(config, config.size("head_dim"), full=500_000.0, sliding=10_000.0)
    full = replace(grouped_attention(config, width, ropes["full_attention"]), qk_norm=norm)
    windowed = replace(full, rope=ropes["sliding_attention"], window=config.window(1024))
    kinds = config.layer_types(layers, ["full_attention"] * layers)
    mixers = [windowed if kind == "sliding_attention" else full for kind in kinds]

    def moe() -> Moe:
        router = Router(config.opt_size("num_experts_per_tok", 8), config.opt("norm_topk_prob", bool, True))
        expert = replace(gated_mlp(config), width=config.opt_size("moe_intermediate_size", 896))
        return Moe(config.size("num_experts", "num_local_experts"), expert, router)

    return pre_norm_decoder(config, mixers, leading_dense(config, moe, 0), norm)


MELLUM = replace(QWEN3_MOE, build=_mellum, ignored=(*QWEN3_MOE.ignored, "mtp.*"))
