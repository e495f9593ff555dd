"""The functions that a decoder is assembled from on a CPU, over packed parameters by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.adapters import AdapterMatrices
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.ops import activation, sigmoid
from pagoda.backends.reference.model.params import ModelParams
from pagoda.backends.reference.model.quantized.blocks import look_up
from pagoda.backends.reference.programs.operators import Operators
from pagoda.backends.torch_decoder.functions import norm
from pagoda.backends.torch_decoder.layers import with_shared_blocks
from pagoda.backends.torch_decoder.ops import Linear, NormStep, Stream
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Activation, ModelSpec


@dataclass(frozen=True, slots=True)
class ReferenceOps:
    """Implements torch_decoder.ops.DecoderOps."""

    parts: Mapping[str, Any]  # as `named_parts` returns them
    numerics: Numerics
    native: Operators | None = None  # compiled kernels, in place of torch's operators
    adapters: AdapterMatrices | None = None  # those whose slots the layers have

    @property
    def table_dtype(self) -> torch.dtype:
        return self.numerics.weights

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.numerics.compute

    def has(self, name: str) -> bool:
        return name in self.parts

    def get(self, name: str) -> Tensor | None:
        return self.parts.get(name)

    def tensor(self, name: str) -> Tensor:
        tensor = self.parts[name]
        assert isinstance(tensor, Tensor), f"{name} is packed"
        return tensor

    def linear(self, name: str) -> Linear:
        part = self.parts[name]
        return partial(F.linear, weight=part) if isinstance(part, Tensor) else part

    def rows(self, name: str, token_ids: Tensor) -> Tensor:
        x = look_up(token_ids, self.parts[name])
        return x if name != "embed" or self.adapters is None else self.adapters.add_to_embeddings(token_ids, x)

    def activation(self, name: Activation) -> Linear:
        return activation(name)

    def add(self, residual: Tensor | None, update: Tensor) -> Tensor:
        if residual is None:
            return update
        return residual + update if self.native is None else self.native.add(residual, update)

    def add_both(self, residual: Tensor | None, first: Tensor, second: Tensor) -> Stream:
        return self.add(residual, first), second

    def sigmoid(self, x: Tensor) -> Tensor:
        return sigmoid(x)

    def summed(self, name: str) -> Linear:
        return self.linear(name)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return x

    def norm(self, spec: Norm | None, name: str) -> NormStep:
        normalise = self._normalise(spec, name)

        def step(update: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            total = self.add(residual, update)
            return normalise(total), total

        return step

    def split_norm(self, spec: Norm, name: str, channels: int) -> Linear:
        return self._normalise(spec, name)

    def rounding_norm(self, spec: Norm | None, name: str, reader: str | None) -> NormStep:
        return self.norm(spec, name)

    def _normalise(self, spec: Norm | None, name: str) -> Linear:
        """Return the norm as a function of x [T, D]; the identity if there is no norm."""
        if spec is None:
            return lambda x: x
        weight = self.get(name)
        bias = self.get(f"{name}_bias")
        if weight is None or weight.ndim > 1 or spec.kind == "layer":
            assert weight is not None or not spec.scale, "the weights are complete"
            return lambda x: norm(x, spec, weight, bias)
        if self.native is not None:
            compiled = self.native.norm(weight, spec.eps, unit_offset=spec.unit_offset)
            if compiled is not None:
                return compiled
        if weight.dtype == torch.float32:
            return _rms(weight + 1 if spec.unit_offset else weight, spec.eps)
        return lambda x: norm(x, spec, weight)


def _rms(weight: Tensor, eps: float) -> Linear:
    """RMSNorm in float32 with half as many operations as torch's."""
    epsilon = torch.tensor(eps)
    per_element = 1.0 / weight.shape[0]

    def rms(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(epsilon, length, length, value=per_element).rsqrt_()).mul_(weight)

    return rms


def named_parts(spec: ModelSpec, params: ModelParams) -> dict[str, Any]:
    """Return the parts of a model with those of each input block under the names of the layer that uses them."""
    parts = with_shared_blocks(params.parts, spec.shared_blocks)
    for index, layer in enumerate(spec.layers):
        adapter = parts.get(f"layers.{index}.block.qkv_adapter")
        if layer.block is not None and adapter is not None:
            attention = parts[f"layers.{index}.mixers.0"]
            parts[f"layers.{index}.mixers.0"] = replace(attention, qkv=_sum(attention.qkv, adapter))
    return parts


def _sum(layer: Linear, adapter: Linear) -> Linear:
    return lambda x: layer(x) + adapter(x)
