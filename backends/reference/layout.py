"""Logical parameters -> physical ones: q, k, v in one product, gate and up in one, everything prepacked.

Streams: a layer is packed as soon as its last parameter has come, so the plain weights of one layer at a time are held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.reference.linear import Linear, PlainLinear, linear
from pagoda.backends.reference.numerics import Numerics
from pagoda.backends.reference.ops import to_torch
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Attention, Layer, Mlp, ModelSpec, Moe


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """`qkv`: [D] -> [(N+2K)*H]; `out`: [N*H] -> [D]."""

    qkv: Linear
    out: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class MlpParams:
    """`inner`: [D] -> [2F] (gate then up) when gated, else [F]; `down`: [F] -> [D]."""

    inner: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class MoeParams:
    """`router` [E, D] in float32, and one MLP per expert."""

    router: Linear
    experts: tuple[MlpParams, ...]


@dataclass(frozen=True, slots=True)
class NormParams:
    """Weight and bias [D]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParams:
    """One layer, ready to run. `norms`: by place."""

    mixer: AttentionParams
    ffn: MlpParams | MoeParams
    norms: dict[str, NormParams]


@dataclass(frozen=True, slots=True)
class ModelParams:
    """The whole model, ready to run. `embed` [V, D'] in the weights' dtype."""

    embed: Tensor
    positions: Tensor | None
    embed_in: Linear | None
    embed_out: Linear | None
    layers: tuple[LayerParams, ...]
    final_norm: NormParams | None
    head: Linear
    num_bytes: int


class Packer:
    """Takes the stream of canonical weights and builds ModelParams."""

    def __init__(self, spec: ModelSpec, numerics: Numerics) -> None:
        self.spec, self.numerics = spec, numerics
        self._waiting = params(spec)
        self._held: dict[str, Tensor] = {}
        self._layers: dict[int, LayerParams] = {}
        self._missing = [0] * len(spec.layers)
        self._bytes = 0
        for name in self._waiting:
            if name.startswith("layers."):
                self._missing[int(name.split(".")[1])] += 1

    def pack(self, weights: Iterable[Weight]) -> ModelParams:
        """Consume the stream. Raises WeightError naming a parameter that is unknown, repeated, misshapen or missing."""
        for name, array in weights:
            param = self._waiting.pop(name, None)
            if param is None:
                raise WeightError(f"parameter {name} is unknown or came twice")
            if array.shape != param.shape:
                raise WeightError(f"parameter {name} has shape {array.shape}, the model needs {param.shape}")
            self._held[name] = to_torch(array).to(self.numerics.weights)
            self._bytes += param.size * self.numerics.weights.itemsize
            if name.startswith("layers."):
                index = int(name.split(".")[1])
                self._missing[index] -= 1
                if self._missing[index] == 0:
                    self._layers[index] = self._layer(f"layers.{index}", self.spec.layers[index])
        if self._waiting:
            raise WeightError(
                f"the checkpoint lacks {len(self._waiting)} parameters, first {next(iter(self._waiting))}"
            )
        return self._model()

    def _take(self, name: str) -> Tensor:
        return self._held.pop(name)

    def _wide(self, name: str) -> Tensor | None:
        """A small parameter in the compute dtype, or None when the model has none of that name."""
        held = self._held.pop(name, None)
        return None if held is None else held.to(self.numerics.compute)

    def _linear(self, *names: str) -> Linear:
        """One product for several parameters with the same input, outputs one after another."""
        weights = [self._take(name) for name in names]
        biases = [self._held.pop(f"{name}_bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        return linear(
            torch.cat(weights) if len(weights) > 1 else weights[0].clone(),
            torch.cat(present) if present else None,
            self.numerics,
        )

    def _norm(self, name: str) -> NormParams | None:
        weight = self._wide(name)
        return None if weight is None else NormParams(weight, self._wide(f"{name}_bias"))

    def _layer(self, prefix: str, layer: Layer) -> LayerParams:
        places = {place: self._norm(f"{prefix}.norms.{place}") for place in NORM_PLACES}
        return LayerParams(
            mixer=self._attention(f"{prefix}.mixer", layer.mixer),
            ffn=self._moe(f"{prefix}.ffn", layer.ffn)
            if isinstance(layer.ffn, Moe)
            else self._mlp(f"{prefix}.ffn", layer.ffn),
            norms={place: held for place, held in places.items() if held is not None},
        )

    def _attention(self, prefix: str, mixer: Attention) -> AttentionParams:
        return AttentionParams(
            qkv=self._linear(f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"),
            out=self._linear(f"{prefix}.o"),
            q_norm=self._wide(f"{prefix}.q_norm"),
            k_norm=self._wide(f"{prefix}.k_norm"),
        )

    def _mlp(self, prefix: str, mlp: Mlp) -> MlpParams:
        inner = (f"{prefix}.gate", f"{prefix}.up") if mlp.gated else (f"{prefix}.up",)
        return MlpParams(self._linear(*inner), self._linear(f"{prefix}.down"))

    def _moe(self, prefix: str, moe: Moe) -> MoeParams:
        stacked = {name: self._take(name) for name in list(self._held) if name.startswith(f"{prefix}.experts.")}
        experts = []
        for index in range(moe.experts):
            self._held.update({name: tensor[index] for name, tensor in stacked.items()})
            experts.append(self._mlp(f"{prefix}.experts", moe.expert))
        router = PlainLinear(self._take(f"{prefix}.router").to(self.numerics.compute), None)
        return MoeParams(router, tuple(experts))

    def _model(self) -> ModelParams:
        embed = self._take("embed")
        head = embed if self.spec.tied else self._take("head")
        has_projection = "embed_in" in self._held
        return ModelParams(
            embed=embed,
            positions=self._wide("positions"),
            embed_in=self._linear("embed_in") if has_projection else None,
            embed_out=self._linear("embed_out") if has_projection else None,
            layers=tuple(self._layers[index] for index in range(len(self.spec.layers))),
            final_norm=self._norm("final_norm"),
            head=linear(head, self._held.pop("head_bias", None), self.numerics),
            num_bytes=self._bytes,
        )


NORM_PLACES = ("before_mixer", "after_mixer", "before_ffn", "after_ffn")
