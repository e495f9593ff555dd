"""Qwen 2 and 3 and models of their block, dense and with experts.

The families, in the order of this file:

- `DotsOCRForCausalLM`, `MiMoForCausalLM`, `Qwen2ForCausalLM`, `Qwen2ForProcessRewardModel`, `Qwen2ForRewardModel`,
  `Qwen2MoeForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`: Qwen2 and 2.5 (biases on q, k, v), MiMo and dots.ocr
  (the same), Qwen3 (norms on q and k), mixtures of Qwen2, 3.
- `MellumForCausalLM`: Mellum 2: Qwen3-MoE's block with sliding windows in some layers and RoPE by layer type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import MOE_RULES, leading_dense, shared_rules, sparse_steps
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    PoolUse,
    Rename,
    gated_mlp,
    grouped_attention,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Classifier, Dense, Mlp, ModelSpec, Moe, Pooler, Router, TokenSelection

# Qwen 2 and 3.


def _qwen2(config: HfConfig) -> ModelSpec:
    config.expect("qkv_bias", True)
    config.ignore("attention_bias")  # The projections q, k and v always have biases, and o never has.
    attention = replace(rotary_attention(config, config.size("hidden_size")), qkv_bias=True)
    return _dense(config, attention)


def _mimo(config: HfConfig) -> ModelSpec:
    config.expect("use_mrope", False)
    config.ignore("num_nextn_predict_layers")  # These layers only propose drafts.
    return _qwen2(config)


def _dots_ocr(config: HfConfig) -> ModelSpec:
    config.ignore("vision_config", "image_token_id", "video_token_id")  # Only text prompts are accepted.
    return _qwen2(config)


def _qwen3(config: HfConfig) -> ModelSpec:
    return _dense(config, _qk_norm_attention(config))


def _qwen3_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.ignore("max_window_layers")  # The window, if used, applies to every layer.
    attention = replace(_qk_norm_attention(config), window=_window(config))
    return pre_norm_decoder(config, [attention] * layers, sparse_steps(config, _moe(config)), rms_norm(config, 1e-6))


def _qwen2_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    window = _window(config)
    first = config.opt("max_window_layers", int, 28)
    default = ["full_attention" if layer % 2 or layer >= first else "sliding_attention" for layer in range(layers)]
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, qkv_bias=config.opt("qkv_bias", bool, True))
    mixers = [
        replace(attention, window=window) if kind == "sliding_attention" else attention
        for kind in config.layer_types(layers, default)
    ]
    shared = replace(gated_mlp(config), width=config.size("shared_expert_intermediate_size"))
    moe = replace(_moe(config), shared=shared, shared_gate=True)
    return pre_norm_decoder(config, mixers, sparse_steps(config, moe), rms_norm(config, 1e-6))


def _dense(config: HfConfig, attention: Attention) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    window = _window(config)
    first = config.opt("max_window_layers", int, 28)
    default = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    mixers = [
        replace(attention, window=window) if kind == "sliding_attention" else attention
        for kind in config.layer_types(layers, default)
    ]
    return pre_norm_decoder(config, mixers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


def _qk_norm_attention(config: HfConfig) -> Attention:
    config.expect("use_qk_norm", True)
    bias = config.opt("attention_bias", bool, False)
    return replace(
        rotary_attention(config, config.size("hidden_size")),
        qk_norm=rms_norm(config, 1e-6),
        qkv_bias=bias,
        out_bias=bias,
    )


def _window(config: HfConfig) -> int | None:
    if config.opt("use_sliding_window", bool, False):
        return config.window(4096)
    config.ignore("sliding_window")  # transformers 5 writes 0 there.
    return None


def _moe(config: HfConfig) -> Moe:
    expert = Mlp(config.size("moe_intermediate_size"), config.activation("hidden_act", "silu"), gated=True)
    router = Router(config.size("num_experts_per_tok"), config.opt("norm_topk_prob", bool, False))
    return Moe(config.size("num_experts", "num_local_experts"), expert, router)


_COMMON_RULES = (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *PRE_NORM_RULES)
SHARED_RULES = (
    *shared_rules("[model.]layers.{l}.mlp.shared_expert"),
    Rename("[model.]layers.{l}.mlp.shared_expert_gate.weight", "layers.{l}.ffn.shared_gate"),
)

QWEN2 = Family(_qwen2, _COMMON_RULES)


def _reward(
    labels: int, activation: Literal["softmax"] | None, step_tag: int | None = None
) -> Callable[[HfConfig, PoolUse], Pooler]:
    """Return the pooler of a reward model, two linear layers. `step_tag`: the tokens it rates; None: every token."""

    def pooler(config: HfConfig, use: PoolUse) -> Pooler:
        dense = Dense(config.size("hidden_size"), "relu")
        return Pooler("all", (dense,), Classifier(labels, activation), selection=TokenSelection(tag=step_tag))

    return pooler


_REWARD_RULES = (  # The tensors are score.0 and, of the last layer, score.2.
    *linear("score.{l}", "pooler.dense.{l}"),
    *linear("score.{e}", "pooler.classifier"),
)

QWEN2_REWARD = replace(QWEN2, pooler=_reward(1, None), pooler_rules=_REWARD_RULES)
_STEP: Final = 151651  # The token <extra_0>, which ends a step.
QWEN2_PROCESS_REWARD = replace(QWEN2, pooler=_reward(2, "softmax", _STEP), pooler_rules=_REWARD_RULES)
MIMO = replace(QWEN2, build=_mimo, ignored=(*QWEN2.ignored, "model.mtp_layers.*"))
DOTS_OCR = replace(QWEN2, build=_dots_ocr, ignored=(*QWEN2.ignored, "vision_tower.*"))
QWEN3 = Family(_qwen3, (*_COMMON_RULES, *QK_NORM_RULES))
QWEN3_MOE = Family(_qwen3_moe, (*_COMMON_RULES, *QK_NORM_RULES, *MOE_RULES))
QWEN2_MOE = Family(_qwen2_moe, (*_COMMON_RULES, *MOE_RULES, *SHARED_RULES))


# Mellum 2.


def _mellum(config: HfConfig) -> ModelSpec:
    config.default("head_dim", 128)
    config.ignore("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")  # These layers only propose drafts.
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
