"""The parameters of a layer from its named weights."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pagoda.backends.reference.model.linear import InvariantLinear, Linear, PlainLinear
from pagoda.backends.reference.model.mixers.attention.projection import load_attention
from pagoda.backends.reference.model.mixers.registry import ops_of
from pagoda.backends.reference.model.params import MlpParams, MoeParams
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.common.models.spec import Ffn, InputBlock, Layer, Mlp, Moe

NORM_FIELDS: Final = ("before_mixer", "after_mixer", "before_ffn", "after_ffn")
_TABLES: Final = ("embed", "per_layer.table")


@torch.inference_mode()
def load_layer(weights: NamedWeights, prefix: str, layer: Layer, shares_block: bool = False) -> dict[str, Any]:
    """Return the parts of one layer; see `ModelParams`. Runs in a thread of the pool.

    `shares_block`: an earlier layer has its block's weights.
    """
    parts: dict[str, Any] = {name: weights.norm(name) for name in (f"{prefix}.norms.{field}" for field in NORM_FIELDS)}
    if layer.block is not None:
        parts |= _load_block(weights, prefix, layer, layer.block, shares_block)
    for index, mixer in list(enumerate(layer.mixers))[layer.block is not None :]:
        name = f"{prefix}.mixers.{index}"
        parts[name] = ops_of(mixer).load(weights, name, mixer)
    beside = {"side": layer.side_moe, "shortcut": layer.shortcut}
    ffns: dict[str, Ffn | None] = {f"{name}.moe": None if spec is None else spec.moe for name, spec in beside.items()}
    for name, ffn in {"ffn": layer.ffn, **ffns}.items():
        parts[f"{prefix}.{name}"] = _ffn(weights, f"{prefix}.{name}", ffn)
    parts |= {name: weights.take_wide(name) for name in weights.names}
    return {name: part for name, part in parts.items() if part is not None}


def load_beside_layers(weights: NamedWeights) -> dict[str, Any]:
    """Return the parts outside of the layers, but for the head."""
    parts: dict[str, Any] = {name: weights.table(name) for name in _TABLES}
    parts |= {name: weights.norm(name) for name in ("embed_norm", "final_norm")}
    parts |= {name: weights.linear(name) for name in ("embed_in", "embed_out") if name in weights.names}
    parts |= {name: weights.take(name).float() for name in weights.names if name.startswith("pooler.")}
    parts |= {name: weights.wide(name) for name in ("positions", "token_types")}
    parts |= {name: weights.take_wide(name) for name in weights.names if name.startswith(("per_layer.", "alt_up."))}
    return {name: part for name, part in parts.items() if part is not None}


def _load_block(weights: NamedWeights, prefix: str, layer: Layer, block: InputBlock, shared: bool) -> dict[str, Any]:
    attention = f"{prefix}.mixers.0"
    name = f"{prefix}.block"
    parts: dict[str, Any] = {f"{name}.{norm}": weights.norm(f"{name}.{norm}") for norm in ("norm", "ffn_norm")}
    parts[f"{name}.out"] = weights.linear(f"{name}.out")
    if not shared:
        parts[attention] = load_attention(weights, attention, layer.attends_before)
        parts[f"{name}.ffn"] = _mlp(weights, f"{name}.ffn", block.ffn)
    if layer.attends_before.adapter_rank is not None:
        pairs = [(f"{attention}.{part}_adapter", f"{attention}.{part}_adapter_out") for part in "qkv"]
        parts[f"{name}.qkv_adapter"] = _adapter(weights, *pairs)
    if block.adapter_rank is not None:
        seconds = (f"{name}.ffn.{part}_adapter_out" for part in ("gate", "up"))
        parts[f"{name}.inner_adapter"] = _adapter(weights, (f"{name}.ffn_adapter", *seconds))
    return parts


def _adapter(weights: NamedWeights, *parts: tuple[str, ...]) -> Linear:
    """Return low-rank layers side by side. `parts`: of each the first factor, and second ones of its outputs."""
    pairs = [(weights.linear(first), weights.linear(*seconds)) for first, *seconds in parts]
    return lambda x: torch.cat([second(first(x)) for first, second in pairs], -1)


def _ffn(weights: NamedWeights, prefix: str, ffn: Ffn | None) -> MlpParams | MoeParams | None:
    match ffn:
        case None:
            return None
        case Mlp():
            return _mlp(weights, prefix, ffn)
        case Moe():
            return _moe(weights, prefix, ffn)


def _mlp(weights: NamedWeights, prefix: str, mlp: Mlp) -> MlpParams:
    inner = (f"{prefix}.gate", f"{prefix}.up") if mlp.gated else (f"{prefix}.up",)
    curvatures: tuple[Tensor, Tensor] | None = None
    if mlp.learned is not None:
        curvatures = weights.take(f"{prefix}.curvature_p"), weights.take(f"{prefix}.curvature_n")
    return MlpParams(weights.linear(*inner), weights.linear(f"{prefix}.down"), curvatures)


def _moe(weights: NamedWeights, prefix: str, moe: Moe) -> MoeParams:
    name = f"{prefix}.experts"
    experts = tuple(_mlp(own, name, moe.expert) for own in weights.of_experts(f"{name}.", moe.experts))
    router = PlainLinear(weights.take_wide(f"{prefix}.router"), weights.wide(f"{prefix}.router_bias"))
    return MoeParams(
        InvariantLinear(router) if weights.numerics.batch_invariant else router,
        correction=weights.get(f"{prefix}.router_correction"),
        experts=experts,
        shared=None if moe.shared is None else _mlp(weights, f"{prefix}.shared", moe.shared),
        shared_gate=weights.linear(f"{prefix}.shared_gate") if moe.shared_gate else None,
    )
