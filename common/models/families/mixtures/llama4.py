"""Llama 4: attention in chunks with RoPE, every fourth layer over all tokens without, experts with weighted inputs."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FFN, fused_expert_rules, shared_rules
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
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
from pagoda.common.models.spec import Ffn, ModelSpec, Moe, Router


def _llama4(config: HfConfig) -> ModelSpec:
    config.ignore("for_llm_compressor")
    norm = rms_norm(config, 1e-5)
    return replace(
        pre_norm_decoder(config, _mixers(config), _ffns(config), norm),
        max_positions=config.size("max_position_embeddings"),
    )


def _mixers(config: HfConfig) -> list[Attention]:
    layers = config.size("num_hidden_layers")
    every = config.opt_size("no_rope_layer_interval", 4)
    bias = config.opt("attention_bias", bool, False)
    with_rope = config.opt("no_rope_layers", list, []) or [(layer + 1) % every != 0 for layer in range(layers)]
    chunk = config.nullable("attention_chunk_size", int, 8192)
    growth = QueryGrowth(config.opt("attn_scale", float, 0.1), config.opt_size("floor_scale", 8192), offset=1)
    tuned = config.opt("attn_temperature_tuning", bool, True)
    kinds = config.opt("layer_types", list, ["chunked_attention" if rope else "full_attention" for rope in with_rope])
    if not len(kinds) == len(with_rope) == layers or not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise config.error("layer_types", "or no_rope_layers: one of chunked_attention, full_attention for each layer")
    base = replace(
        rotary_attention(config, config.size("hidden_size"), theta=500_000.0, interleaved=True),
        qkv_bias=bias,
        out_bias=bias,
    )
    rotary = _with_norms(base, rms_norm(config, 1e-5)) if config.opt("use_qk_norm", bool, True) else base
    plain = replace(base, rope=None, query_growth=growth if tuned else None)
    return [
        replace(rotary if rope else plain, chunk=chunk if kind == "chunked_attention" else None)
        for rope, kind in zip(with_rope, kinds)
    ]


def _with_norms(base: Attention, norm: Norm) -> Attention:
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


def _ffns(config: HfConfig) -> list[Ffn]:
    layers = config.size("num_hidden_layers")
    step = config.opt_size("interleave_moe_layer_step", 1)
    sparse = config.opt("moe_layers", list, list(range(step - 1, layers, step)))
    expert = gated_mlp(config)
    dense = replace(expert, width=config.opt_size("intermediate_size_mlp", 16384))
    router = Router(config.opt_size("num_experts_per_tok", 1), renormalise=False, scores="sigmoid")
    moe = Moe(config.opt_size("num_local_experts", 16), expert, router, shared=expert, weighs_input=True)
    return [moe if layer in sparse else dense for layer in range(layers)]


_SOURCE = "[model.]layers.{l}.feed_forward"

LLAMA4 = Family(
    _llama4,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        *linear(f"{_SOURCE}.gate_proj", f"{FFN}.gate"),
        *linear(f"{_SOURCE}.up_proj", f"{FFN}.up"),
        *linear(f"{_SOURCE}.down_proj", f"{FFN}.down"),
        Rename(f"{_SOURCE}.router.weight", f"{FFN}.router"),
        *fused_expert_rules(f"{_SOURCE}.experts"),
        *shared_rules(f"{_SOURCE}.shared_expert"),
    ),
)
