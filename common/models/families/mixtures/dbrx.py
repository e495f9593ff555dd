"""DBRX: LayerNorm without biases, clamped q, k and v, experts stored in one tensor per matrix."""

from __future__ import annotations

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import FFN
from pagoda.common.models.family import Family, Rename, Reshape, fused_linear, pre_norm_decoder
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Mlp, ModelSpec, Moe, Router


def _dbrx(config: HfConfig) -> ModelSpec:
    config.alias("hidden_size", "d_model")
    config.alias("max_position_embeddings", "max_seq_len")
    layers = config.size("n_layers", "num_hidden_layers")
    return pre_norm_decoder(config, [_attention(config)] * layers, [_moe(config)] * layers, Norm(1e-5, kind="layer"))


def _attention(config: HfConfig) -> Attention:
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


def _moe(config: HfConfig) -> Moe:
    section = config.section("ffn_config") or HfConfig({})
    section.expect("hidden_size", config.size("hidden_size"))
    section.ignore("moe_jitter_eps", "moe_loss_weight")  # training
    section.expect("moe_normalize_expert_weights", 1)  # by the sum
    renormalise = section.nullable("moe_normalize_expert_weights", float, 1.0) is not None
    activation = section.section("ffn_act_fn") or HfConfig({})
    expert = Mlp(section.opt_size("ffn_hidden_size", 3584), activation.activation("name", "silu"), gated=True)
    router = Router(section.opt_size("moe_top_k", 1), renormalise)
    moe = Moe(section.opt_size("moe_num_experts", 4), expert, router)
    activation.finish()
    section.finish()
    return moe


_LAYER = "transformer.blocks.{l}"

DBRX = Family(
    _dbrx,
    (
        Rename("transformer.wte.weight", "embed"),
        Rename("transformer.norm_f.weight", "final_norm"),
        Rename("lm_head.weight", "head"),
        *fused_linear(f"{_LAYER}.norm_attn_norm.attn.Wqkv", *(f"layers.{{l}}.mixers.0.{part}" for part in "qkv")),
        Rename(f"{_LAYER}.norm_attn_norm.attn.out_proj.weight", "layers.{l}.mixers.0.o"),
        Rename(f"{_LAYER}.norm_attn_norm.norm_1.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_LAYER}.norm_attn_norm.norm_2.weight", "layers.{l}.norms.before_ffn"),
        Rename(f"{_LAYER}.ffn.router.layer.weight", f"{FFN}.router"),
        Reshape(f"{_LAYER}.ffn.experts.mlp.w1", f"{FFN}.experts.gate"),
        Reshape(f"{_LAYER}.ffn.experts.mlp.v1", f"{FFN}.experts.up"),
        Reshape(f"{_LAYER}.ffn.experts.mlp.w2", f"{FFN}.experts.down", transpose=True),
    ),
)
