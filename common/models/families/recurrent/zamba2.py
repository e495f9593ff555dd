"""Zamba 2: Mamba-2 layers; in front of some a transformer block whose weights take turns, with low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pagoda.common.models.families.recurrent.mamba2 import TRAINING_KEYS, groups, mamba2_rules
from pagoda.common.models.family import EMBED_RULES, Family, Rename, Rule, Split, decoder, gated_mlp, linear, rms_norm
from pagoda.common.models.hf_config import HfConfig, kv_heads, rope
from pagoda.common.models.mixers import Attention, Mamba2
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import InputBlock, Layer, ModelSpec, Norms

_KINDS = ("mamba", "linear_attention", "hybrid")
_DERIVED = ("attention_hidden_size", "ffn_hidden_size", "kv_channels", "num_query_groups", "hybrid_layer_ids")
"""Keys that follow from others."""


def _zamba2(config: HfConfig) -> ModelSpec:
    config.expect("use_long_context", False)
    config.expect("tie_word_embeddings", True)  # transformers shares the blocks' weights with those of the head
    config.expect("use_shared_mlp_adapter", True)
    config.ignore("use_mem_eff_path", "gated_linear_unit", *_DERIVED, *TRAINING_KEYS)
    norm = rms_norm(config, 1e-5)
    bias = config.opt("add_bias_linear", bool, False)
    mamba = _mamba(config, bias)
    attention = _attention(config)
    mlp = gated_mlp(config, bias=bias)
    rank = config.opt_size("adapter_rank", 128)
    hybrids = _hybrids(config)
    owners = _owners(config)
    layers = []
    for index in range(config.size("num_hidden_layers")):
        if index in hybrids:
            block = InputBlock(mlp, norm, owners[index], rank)
            layers.append(Layer((attention, mamba), None, Norms(before_mixer=norm), block=block))
        else:
            layers.append(Layer((mamba,), None, Norms(before_mixer=norm)))
    return decoder(config, layers, norm, tied=True)


def _hybrids(config: HfConfig) -> list[int]:
    """Return the layers with a transformer block."""
    kinds = config.need("layers_block_type", list)
    layers = config.size("num_hidden_layers")
    if len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise config.error("layers_block_type", f"is {kinds}; it must have {layers} entries of {', '.join(_KINDS)}")
    return [index for index, kind in enumerate(kinds) if kind == "hybrid"]


def _owners(config: HfConfig) -> dict[int, int]:
    """Return, by layer with a block, the first one with the same weights: they take turns."""
    hybrids = _hybrids(config)
    blocks = config.opt_size("num_mem_blocks", 1)
    return {layer: hybrids[turn % blocks] for turn, layer in enumerate(hybrids)}


def _attention(config: HfConfig) -> Attention:
    heads = config.size("num_attention_heads")
    adapted = config.opt("use_shared_attention_adapter", bool, False)
    head_dim = 2 * config.size("hidden_size") // heads
    config.expect("attention_head_dim", head_dim)
    rotary = config.opt("use_mem_rope", bool, False)
    if not rotary:
        config.ignore("rope_theta", "rope_scaling", "rope_parameters")
    return Attention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=rope(config, head_dim) if rotary else None,
        beside_embedding=True,
        adapter_rank=config.opt_size("adapter_rank", 128) if adapted else None,
    )


def _mamba(config: HfConfig, bias: bool) -> Mamba2:
    heads = config.opt_size("n_mamba_heads", 8)
    width = config.opt_size("mamba_expand", 2) * config.size("hidden_size")
    if width % heads:
        raise config.error("n_mamba_heads", f"{heads} does not divide the {width} channels of the mixer")
    config.expect("mamba_headdim", width // heads)
    config.expect("time_step_limit", None)  # the steps have no upper limit
    config.ignore("use_conv_bias")  # the convolution has a bias whatever it says
    return Mamba2(
        heads=heads,
        head_dim=width // heads,
        groups=groups(config, "mamba_ngroups", heads, 1),
        state_dim=config.opt_size("mamba_d_state", 64),
        taps=config.opt_size("mamba_d_conv", 4),
        norm=Norm(1e-5),
        bias=bias,
        step_limit=(config.opt("time_step_min", float, 0.001), math.inf),
    )


_SOURCE = "[model.]layers.{l}"
_TARGET = "layers.{l}"


def _config_rules(config: HfConfig) -> tuple[Rule, ...]:
    owners = _owners(config)
    return tuple(rule for use, layer in enumerate(owners) for rule in _adapters(use, layer, owners[layer]))


def _adapters(use: int, layer: int, owner: int) -> Iterator[Rule]:
    """Yield the rules of a layer's mixer and adapters. A file has those of all uses of a block in its first layer."""
    yield from mamba2_rules(f"[model.]layers.{layer}.mamba_decoder.mamba", f"layers.{layer}.mixers.1")
    source = f"[model.]layers.{owner}.shared_transformer"
    for part in "qkv":
        adapter = f"{source}.self_attn.linear_{part}_adapter_list.{use}"
        target = f"layers.{layer}.mixers.0.{part}_adapter"
        yield Rename(f"{adapter}.0.weight", target)
        yield Rename(f"{adapter}.1.weight", f"{target}_out")
    adapter = f"{source}.feed_forward.gate_up_proj_adapter_list.{use}"
    target = f"layers.{layer}.block"
    yield Rename(f"{adapter}.0.weight", f"{target}.ffn_adapter")
    yield Split(f"{adapter}.1.weight", tuple(f"{target}.ffn.{part}_adapter_out" for part in ("gate", "up")))


_BLOCK = f"{_SOURCE}.shared_transformer"

ZAMBA2 = Family(
    _zamba2,
    (
        *EMBED_RULES,
        Rename("[model.]final_layernorm.weight", "final_norm"),
        Rename(f"{_SOURCE}.input_layernorm.weight", f"{_TARGET}.norms.before_mixer"),
        Rename(f"{_SOURCE}.mamba_decoder.input_layernorm.weight", f"{_TARGET}.norms.before_mixer"),
        *mamba2_rules(f"{_SOURCE}.mamba"),
        *(Rename(f"{_BLOCK}.self_attn.{part}_proj.weight", f"{_TARGET}.mixers.0.{part}") for part in "qkvo"),
        Rename(f"{_BLOCK}.input_layernorm.weight", f"{_TARGET}.block.norm"),
        Rename(f"{_BLOCK}.pre_ff_layernorm.weight", f"{_TARGET}.block.ffn_norm"),
        *(
            Split(f"{_BLOCK}.feed_forward.gate_up_proj.{kind}", tuple(f"{_TARGET}.block.ffn.{part}" for part in parts))
            for kind, parts in (("weight", ("gate", "up")), ("bias", ("gate_bias", "up_bias")))
        ),
        *linear(f"{_BLOCK}.feed_forward.down_proj", f"{_TARGET}.block.ffn.down"),
        Rename(f"{_SOURCE}.linear.weight", f"{_TARGET}.block.out"),
    ),
    # copies of shared weights in the layers that share them
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.*.shared_transformer.*"),
    config_rules=_config_rules,
)
