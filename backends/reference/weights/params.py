"""A model's parameters as the decoder computes with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from pagoda.backends.reference.model.linear import Linear
from pagoda.backends.reference.model.mixers.attention.projection import AttentionParams
from pagoda.backends.reference.model.params import NormParams
from pagoda.backends.reference.model.quantized.blocks import Table

NORM_FIELDS: Final = ("before_mixer", "after_mixer", "before_ffn", "after_ffn")


@dataclass(frozen=True, slots=True)
class MlpParams:
    """`inner`: [D] -> [2F] (gate then up) when gated, else [F]; `down`: [F] -> [D]."""

    inner: Linear
    down: Linear
    curvatures: tuple[Tensor, Tensor] | None = None  # of a learned activation


@dataclass(frozen=True, slots=True)
class MoeParams:
    """`router` [D] -> [E] and `correction` [E] in float32, one MLP per expert, and the MLP that runs on every token."""

    router: Linear
    correction: Tensor | None
    experts: tuple[MlpParams, ...]
    shared: MlpParams | None
    shared_gate: Linear | None


@dataclass(frozen=True, slots=True)
class InputBlockParams:
    """A layer's input block. Attention, ffn and norms of a block that has an earlier layer's weights are that layer's.

    Adapters: [D] or [2D] -> what they add to the output of `qkv` or `inner`; None without.
    """

    attention: AttentionParams | None
    ffn: MlpParams | None
    norms: dict[str, NormParams]  # norm, ffn_norm
    qkv_adapter: Linear | None
    inner_adapter: Linear | None
    out: Linear  # [D] -> [D]

    def adapted(self, first: InputBlockParams) -> tuple[AttentionParams, MlpParams]:
        """Return attention and ffn with the adapters. `first`: the block with the weights, itself or an earlier one."""
        assert first.attention is not None
        assert first.ffn is not None
        qkv = _sum(first.attention.qkv, self.qkv_adapter)
        inner = _sum(first.ffn.inner, self.inner_adapter)
        return replace(first.attention, qkv=qkv), replace(first.ffn, inner=inner)


def _sum(layer: Linear, adapter: Linear | None) -> Linear:
    return layer if adapter is None else lambda x: layer(x) + adapter(x)


@dataclass(frozen=True, slots=True)
class LayerParams:
    """One layer. `mixers`: all but that of an input block. `norms`: by their field in Norms."""

    mixers: tuple[Any, ...]  # each of the class that its kind loads
    ffn: MlpParams | MoeParams | None
    norms: dict[str, NormParams]
    side_moe: MoeParams | None
    shortcut: MoeParams | None
    block: InputBlockParams | None
    extras: dict[str, Tensor]  # what few models have, by name, in the compute dtype


@dataclass(frozen=True, slots=True)
class ModelParams:
    """The whole model."""

    embed: Table  # [V, D'], rows in the weights' dtype
    layer_table: Table | None  # of per-layer embeddings, as `embed`
    positions: Tensor | None
    token_types: Tensor | None
    embed_norm: NormParams | None
    embed_in: Linear | None
    embed_out: Linear | None
    layers: tuple[LayerParams, ...]
    final_norm: NormParams | None
    head: Linear | None  # None for pooling models
    pooler: dict[str, Tensor]  # by canonical name, float32
    extras: dict[str, Tensor]  # what few models have, by canonical name
    num_bytes: int
