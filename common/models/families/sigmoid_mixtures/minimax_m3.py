"""MiniMax-M3: attention to blocks that an indexer selects, experts with a clamped gate after leading dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import BLOCK_SPARSE_RULES, shared_rules
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    grouped_attention,
    pre_norm_decoder,
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention, BlockIndexer
from pagoda.common.models.spec import ClampedGlu, Ffn, Mlp, ModelSpec, Moe, Router

_INDEXER: Final = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def _minimax_m3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    _flatten(config)
    config.expect("hidden_act", "silu", "swigluoai")  # either way the gate is clamped
    config.expect("scoring_func", "sigmoid")
    config.expect("use_routing_bias", True)
    config.expect("use_qk_norm", True)
    config.expect("use_gemma_norm", True)
    config.expect("qk_norm_type", "per_head")
    config.expect("attention_output_gate", False)
    config.ignore("num_nextn_predict_layers", "num_mtp_modules", "use_mtp", "mtp_transformer_layers")
    full, sparse = _attentions(config)
    kinds = config.opt("layer_types", list, ["full_attention"] * layers)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "minimax_m3_sparse"}:
        raise config.error("layer_types", f"is {kinds}; it must have {layers} of full_attention and minimax_m3_sparse")
    dense, moe = _ffns(config)
    named = config.opt("mlp_layer_types", list, ["sparse"] * layers)
    if len(named) != layers or not set(named) <= {"dense", "sparse"}:
        raise config.error("mlp_layer_types", f"is {named}; it must have {layers} entries, dense or sparse")
    mixers = [sparse if kind == "minimax_m3_sparse" else full for kind in kinds]
    ffns: list[Ffn] = [moe if kind == "sparse" else dense for kind in named]
    return pre_norm_decoder(config, mixers, ffns, rms_norm(config, 1e-6, unit_offset=True))


def _flatten(config: HfConfig) -> None:
    """Take the keys of released files under the names of transformers."""
    section = config.section("sparse_attention_config")
    if section is not None:
        for key, name in _INDEXER.items():
            if name in section:
                config.default(key, section.need(name, int))
        sparse = section.opt("sparse_attention_freq", list, [])
        if sparse:
            config.default("layer_types", ["minimax_m3_sparse" if each else "full_attention" for each in sparse])
        for key, supported in (("use_sparse_attention", True), ("sparse_score_type", "max"), ("sparse_init_block", 0)):
            section.expect(key, supported)
        disabled = section.opt("sparse_disable_index_value", list, [])
        if not all(disabled[index] for index, each in enumerate(sparse) if each and index < len(disabled)):
            raise config.error("sparse_disable_index_value", "enables values of the indexer, which are not supported")
        section.finish()
    if sparse_ffns := config.opt("moe_layer_freq", list, []):
        config.default("mlp_layer_types", ["sparse" if each else "dense" for each in sparse_ffns])
        config.set("moe_layer_freq", None)


def _attentions(config: HfConfig) -> tuple[Attention, Attention]:
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


def _ffns(config: HfConfig) -> tuple[Mlp, Moe]:
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


_LAYER = "[model.]layers.{l}"
_BLOCKS = "layers.{l}.mixers.0.blocks"
_INDEX_NAMES: Final = {"q_proj": "q", "k_proj": "k", "q_norm": "q_norm", "k_norm": "k_norm"}

MINIMAX_M3 = Family(
    _minimax_m3,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + PRE_NORM_RULES + MLP_RULES + BLOCK_SPARSE_RULES),
        *shared_rules(f"{_LAYER}.block_sparse_moe.shared_experts"),
        *(
            Rename(f"{_LAYER}.self_attn.index_{name}.weight", f"{_BLOCKS}.{part}")
            for name, part in _INDEX_NAMES.items()
        ),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "*.mtp.*"),
)
