"""The parameters of a layer from its named weights."""

from __future__ import annotations

from typing import Any, Final

import torch

from pagoda.backends.reference.model.linear import InvariantLinear, Linear, PlainLinear
from pagoda.backends.reference.model.mixers.attention.projection import load_attention
from pagoda.backends.reference.model.mixers.registry import ops_of
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.common.models.spec import Ffn, InputBlock, Layer, Mlp, Moe

_TABLES: Final = ("embed", "per_layer.table")

_SMALL: Final = ("embed_norm", "final_norm", "positions", "token_types", "per_layer.", "alt_up.")
"""Beginnings of the names of parameters outside of the layers that are kept as they are, in the compute dtype."""


@torch.inference_mode()
def load_layer(weights: NamedWeights, prefix: str, layer: Layer, shares_block: bool = False) -> dict[str, Any]:
    """Return the parts of one layer; see `ModelParams`. Runs in a thread of the pool.

    `shares_block`: an earlier layer has its block's weights.
    """
    parts: dict[str, Any] = {}
    if layer.block is not None:
        parts |= _load_block(weights, prefix, layer, layer.block, shares_block)
    for index, mixer in list(enumerate(layer.mixers))[layer.block is not None :]:
        name = f"{prefix}.mixers.{index}"
        parts[name] = ops_of(mixer).load(weights, name, mixer)
    for name, ffn in layer.ffns.items():
        parts |= _load_ffn(weights, f"{prefix}.{name}", ffn)
    parts |= {name: weights.take_wide(name) for name in weights.names}
    return {name: part for name, part in parts.items() if part is not None}


def load_beside_layers(weights: NamedWeights) -> dict[str, Any]:
    """Return the parts outside of the layers, but for the head."""
    parts: dict[str, Any] = {name: weights.table(name) for name in _TABLES}
    parts |= {name: weights.linear(name) for name in ("embed_in", "embed_out") if name in weights.names}
    parts |= {name: weights.take(name).float() for name in weights.names if name.startswith("pooler.")}
    parts |= {name: weights.take_wide(name) for name in weights.names if name.startswith(_SMALL)}
    return {name: part for name, part in parts.items() if part is not None}


def _load_block(weights: NamedWeights, prefix: str, layer: Layer, block: InputBlock, shared: bool) -> dict[str, Any]:
    attention = f"{prefix}.mixers.0"
    name = f"{prefix}.block"
    parts: dict[str, Any] = {f"{name}.out": weights.linear(f"{name}.out")}
    if not shared:
        parts[attention] = load_attention(weights, attention, layer.attends_before)
        parts |= _load_ffn(weights, f"{name}.ffn", block.ffn)
    if layer.attends_before.adapter_rank is not None:
        pairs = [(f"{attention}.{part}_adapter", f"{attention}.{part}_adapter_out") for part in "qkv"]
        parts[f"{name}.qkv_adapter"] = _adapter(weights, *pairs)
    if block.adapter_rank is not None:
        outs = (f"{name}.ffn.{part}_adapter_out" for part in ("gate", "up"))
        parts[f"{name}.ffn_adapter"] = weights.linear(f"{name}.ffn_adapter")
        parts[f"{name}.ffn.inner_adapter_out"] = weights.linear(*outs)
    return parts


def _adapter(weights: NamedWeights, *pairs: tuple[str, str]) -> Linear:
    """Return low-rank layers side by side. `pairs`: names of the first and the second factor of each."""
    factors = [(weights.linear(first), weights.linear(second)) for first, second in pairs]
    return lambda x: torch.cat([second(first(x)) for first, second in factors], -1)


def _load_ffn(weights: NamedWeights, prefix: str, ffn: Ffn) -> dict[str, Any]:
    """Return the products of an MLP or a mixture. Their other parameters are loaded as those of any layer."""
    match ffn:
        case Mlp():
            return _load_mlp(weights, prefix, f"{prefix}.", ffn)
        case Moe():
            return _load_moe(weights, prefix, ffn)


def _load_mlp(weights: NamedWeights, prefix: str, stored: str, mlp: Mlp) -> dict[str, Any]:
    """`stored`: what the names of its weights begin with."""
    inner = ("gate", "up") if mlp.gated else ("up",)
    return {
        f"{prefix}.inner": weights.linear(*(f"{stored}{part}" for part in inner)),
        f"{prefix}.down": weights.linear(f"{stored}down"),
    }


def _load_moe(weights: NamedWeights, prefix: str, moe: Moe) -> dict[str, Any]:
    stored = f"{prefix}.experts."
    parts: dict[str, Any] = {}
    for number, of_expert in enumerate(weights.of_experts(stored, moe.experts)):
        parts |= _load_mlp(of_expert, f"{stored}{number}", stored, moe.expert)
    router = PlainLinear(weights.take_wide(f"{prefix}.router"), weights.wide(f"{prefix}.router_bias"))
    parts[f"{prefix}.router"] = InvariantLinear(router) if weights.numerics.batch_invariant else router
    parts[f"{prefix}.router_correction"] = weights.get(f"{prefix}.router_correction")
    for name in () if moe.latent is None else ("latent_in", "latent_out"):
        parts[f"{prefix}.{name}"] = weights.linear(f"{prefix}.{name}")
    if moe.shared is not None:
        parts |= _load_mlp(weights, f"{prefix}.shared", f"{prefix}.shared.", moe.shared)
    if moe.shared_gate:
        parts[f"{prefix}.shared_gate"] = weights.linear(f"{prefix}.shared_gate")
    return parts
