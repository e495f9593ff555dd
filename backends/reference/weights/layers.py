"""The parameters of a layer from its named weights."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.model.linear import InvariantLinear, Linear, PlainLinear
from pagoda.backends.reference.model.mixers.attention.projection import load_attention
from pagoda.backends.reference.model.mixers.registry import ops_of
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.reference.weights.params import NORM_FIELDS, InputBlockParams, LayerParams, MlpParams, MoeParams
from pagoda.common.models.spec import Ffn, InputBlock, Layer, Mlp, Moe


@torch.inference_mode()
def load_layer(weights: NamedWeights, prefix: str, layer: Layer, shares_block: bool = False) -> LayerParams:
    """Return one layer. Runs in a thread of the pool. `shares_block`: an earlier layer has its block's weights."""
    norms = {field: weights.norm(f"{prefix}.norms.{field}") for field in NORM_FIELDS}
    block = None if layer.block is None else _block(weights, prefix, layer, layer.block, shares_block)
    mixers = [(mixer, f"{prefix}.mixers.{index}") for index, mixer in enumerate(layer.mixers)]
    side = layer.side_moe
    shortcut = layer.shortcut
    return LayerParams(
        block=block,
        mixers=tuple(ops_of(mixer).load(weights, name, mixer) for mixer, name in mixers[layer.block is not None :]),
        ffn=_ffn(weights, f"{prefix}.ffn", layer.ffn),
        norms={field: norm for field, norm in norms.items() if norm is not None},
        side_moe=None if side is None else _moe(weights, f"{prefix}.side.moe", side.moe),
        shortcut=None if shortcut is None else _moe(weights, f"{prefix}.shortcut.moe", shortcut.moe),
        extras={name.removeprefix(f"{prefix}."): weights.take_wide(name) for name in weights.names},
    )


def _block(weights: NamedWeights, prefix: str, layer: Layer, block: InputBlock, shared: bool) -> InputBlockParams:
    attention = f"{prefix}.mixers.0"
    name = f"{prefix}.block"
    norms = {part: weights.norm(f"{name}.{part}") for part in ("norm", "ffn_norm")}
    qkv = [(f"{attention}.{part}_adapter", f"{attention}.{part}_adapter_out") for part in "qkv"]
    inner = (f"{name}.ffn_adapter", f"{name}.ffn.gate_adapter_out", f"{name}.ffn.up_adapter_out")
    return InputBlockParams(
        attention=None if shared else load_attention(weights, attention, layer.attends_before),
        ffn=None if shared else _mlp(weights, f"{name}.ffn", block.ffn),
        norms={part: norm for part, norm in norms.items() if norm is not None},
        qkv_adapter=None if layer.attends_before.adapter_rank is None else _adapter(weights, *qkv),
        inner_adapter=None if block.adapter_rank is None else _adapter(weights, inner),
        out=weights.linear(f"{name}.out"),
    )


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
