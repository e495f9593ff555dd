"""MiniMax-Text-01: seven layers of lightning attention to one of attention, experts, updates of normalised values."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import BLOCK_SPARSE_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
    Split,
    decoder,
    gated_mlp,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import LightningAttention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, ModelSpec, Moe, Norms, Router

_FACTORS = {"full_attention": "full_attn", "linear_attention": "linear_attn", "mlp": "mlp"}


def _minimax(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-5)
    width = config.size("hidden_size")
    config.expect("postnorm", True)
    config.expect("hidden_act", "silu")  # also that of queries, keys and values of lightning attention
    config.expect("shared_intermediate_size", 0)
    config.ignore("block_size", "shared_moe_mode")
    first, rest, update = *_norms(config, norm), _update(config)
    head_dim = config.opt_size("head_dim", width // config.size("num_attention_heads"))
    partial = config.opt_size("rotary_dim", head_dim) / head_dim
    attention = replace(rotary_attention(config, width, theta=1e6, partial=partial), window=config.window(None))
    router = Router(config.opt_size("num_experts_per_tok", 2), renormalise=True)
    moe = Moe(config.size("num_local_experts", "num_experts"), gated_mlp(config), router)

    def mixer(index: int, kind: str) -> Mixer:
        if kind == "full_attention":
            return attention
        depth = 1 - index / (layers - 1 + 1e-5) + 1e-5
        slopes = tuple(2 ** (-8 * head / attention.heads) * depth for head in range(1, attention.heads + 1))
        return LightningAttention(head_dim, slopes, Norm(1e-6))  # whatever rms_norm_eps is

    stack = (
        Layer(
            (mixer(index, kind),),
            moe,
            Norms(before_mixer=rest if index else first, before_ffn=rest),
            residual_scale=update,
            norm_residual=True,
        )
        for index, kind in enumerate(_kinds(config, layers))
    )
    return decoder(config, stack, rest)


def _kinds(config: HfConfig, layers: int) -> list[str]:
    """Return the kind of mixer of each layer; `attn_type_list` has 1 for attention."""
    listed = config.opt("attn_type_list", list, [1 - layer % 2 for layer in range(layers)])
    kinds = config.opt("layer_types", list, ["full_attention" if kind else "linear_attention" for kind in listed])
    if len(kinds) != layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise config.error("layer_types", f"is {kinds}; it must have {layers} of linear_attention and full_attention")
    return kinds


def _factors(config: HfConfig) -> tuple[float, float]:
    """Return the factors on the residual and on the update, which must be those of all sums."""
    pairs = set()
    for old, new in _FACTORS.items():
        alpha, beta = (config.opt(f"layernorm_{old}_{part}", float, 1.0) for part in ("alpha", "beta"))
        alpha, beta = (
            config.opt(f"{new}_{part}_factor", float, default) for part, default in (("alpha", alpha), ("beta", beta))
        )
        pairs.add((alpha, beta))
    if len(pairs) > 1:
        raise config.error("mlp_alpha_factor", "or mlp_beta_factor differs from that of a kind of attention")
    return pairs.pop()


def _update(config: HfConfig) -> float:
    """Return the factor on updates if that on the residual is 1: every sum is normalised before it is read."""
    alpha, beta = _factors(config)
    return beta / alpha


def _norms(config: HfConfig, norm: Norm) -> tuple[Norm, Norm]:
    """Return the norm of the embeddings, and that of sums which are divided by the factor on the residual."""
    return norm, replace(norm, eps=norm.eps / _factors(config)[0] ** 2)


_ATTENTION = "[model.]layers.{l}.self_attn"
_TARGET = "layers.{l}.mixers.0"

MINIMAX = Family(
    _minimax,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        *BLOCK_SPARSE_RULES,
        Split(f"{_ATTENTION}.qkv_proj.weight", tuple(f"{_TARGET}.{part}" for part in "qkv"), interleaved=True),
        Rename(f"{_ATTENTION}.output_gate.weight", f"{_TARGET}.gate"),
        Rename(f"{_ATTENTION}.norm.weight", f"{_TARGET}.norm"),
        Rename(f"{_ATTENTION}.out_proj.weight", f"{_TARGET}.o"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "*.slope_rate", "*.*_decay"),
)
