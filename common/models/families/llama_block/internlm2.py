"""InternLM 2 and 2.5: Llama's block, q-k-v fused by KV head."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    Family,
    PoolUse,
    Rename,
    fused_linear,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Classifier, ModelSpec, Pooler


def _internlm2(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("bias", bool, True)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, qkv_bias=bias, out_bias=bias)
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


_SOURCE = "[model.]layers.{l}"
_QKV = tuple("layers.{l}.mixers.0." + name for name in "qkv")

INTERNLM2 = Family(
    _internlm2,
    (
        Rename("[model.]tok_embeddings.weight", "embed"),
        Rename("output.weight", "head"),
        Rename("[model.]norm.weight", "final_norm"),
        Rename(f"{_SOURCE}.attention_norm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_SOURCE}.ffn_norm.weight", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_SOURCE}.attention.wqkv", *_QKV, interleaved=True),
        *linear(f"{_SOURCE}.attention.wo", "layers.{l}.mixers.0.o"),
        Rename(f"{_SOURCE}.feed_forward.w1.weight", "layers.{l}.ffn.gate"),
        Rename(f"{_SOURCE}.feed_forward.w3.weight", "layers.{l}.ffn.up"),
        Rename(f"{_SOURCE}.feed_forward.w2.weight", "layers.{l}.ffn.down"),
    ),
    ignored=("*.rotary_emb.inv_freq", "output.weight"),
    heads=("score.*", "v_head.*", "output.*"),
)


def _reward(config: HfConfig, use: PoolUse) -> Pooler:
    """Return the pooler of a reward model, which rates every token."""
    return Pooler("all", classifier=Classifier(1, bias=False))


INTERNLM2_REWARD = replace(INTERNLM2, pooler=_reward, pooler_rules=linear("v_head", "pooler.classifier"))
