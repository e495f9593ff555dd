"""Named weights, arranged as layers compute with them: fused matrices, convolutions, norms, embedding tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagoda.backends.reference.model.adapters import AdapterMatrices
from pagoda.backends.reference.model.linear import Linear, Weight, linear
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.params import NormParams
from pagoda.backends.reference.model.quantized.blocks import BlockMatrix, BlockTable, Table
from pagoda.backends.torch_decoder.mixers.recurrence import Convolution
from pagoda.common.weights.quantization.tensors import QuantizedTensor, take_matrix


class NamedWeights:
    """Named tensors, taken one by one and prepared."""

    def __init__(
        self,
        tensors: dict[str, Weight],
        numerics: Numerics,
        adapters: AdapterMatrices | None = None,
        expert: int | None = None,
    ) -> None:
        """`adapters`: slots of LoRA adapters for the layers. `expert`: whose layers are made, of a mixture's."""
        self.numerics = numerics
        self._tensors = tensors
        self._adapters = adapters
        self._expert = expert

    @property
    def names(self) -> list[str]:
        """The names of what is not taken."""
        return list(self._tensors)

    def share(self, name: str, other: str) -> None:
        """Let a parameter that there is be taken under another name, too."""
        if (weight := self._tensors.get(name)) is not None:
            self._tensors[other] = weight

    def of_experts(self, prefix: str, count: int) -> Iterator[NamedWeights]:
        """Remove the parameters of all experts, and yield each expert's."""
        stacked = {name: self._tensors.pop(name) for name in self.names if name.startswith(prefix)}
        for index in range(count):
            of_expert = {name: _matrix(weight, index) for name, weight in stacked.items()}
            yield NamedWeights(of_expert, self.numerics, self._adapters, index)

    def take(self, name: str) -> Tensor:
        """Remove and return a parameter."""
        return self._values(self._tensors.pop(name))

    def get(self, name: str) -> Tensor | None:
        """Remove and return a parameter, or None."""
        return self.take(name) if name in self._tensors else None

    def outputs(self, *names: str) -> int:
        """Return the outputs of matrices that are not taken yet, side by side."""
        return sum(self._tensors[name].shape[0] for name in names)

    def values(self, name: str) -> Tensor:
        """Return a matrix in the weights' dtype, and keep it."""
        return self._values(self._tensors[name])

    def _values(self, weight: Weight) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        return torch.from_numpy(weight.dequantize()).to(self.numerics.weights)

    def wide(self, name: str) -> Tensor | None:
        """Remove and return a small parameter in the compute dtype, or None."""
        tensor = self.get(name)
        return None if tensor is None else tensor.to(self.numerics.compute)

    def table(self, name: str) -> Table | None:
        """Remove and return an embedding table, or None."""
        weight = self._tensors.pop(name, None)
        if isinstance(weight, QuantizedTensor):
            return BlockTable(BlockMatrix.of(weight), self.numerics.weights)
        return weight

    def take_wide(self, name: str) -> Tensor:
        """Remove and return a small parameter in the compute dtype."""
        return self.take(name).to(self.numerics.compute)

    def linear(self, *names: str, precise: bool = False) -> Linear:
        """Return one fused layer of several parameters with the same input. `precise`: as of `linear`."""
        weights = [self._tensors.pop(name) for name in names]
        if len(weights) == 1 and isinstance(weights[0], Tensor):
            weights = [weights[0].clone()]
        biases = [self.get(f"{name}_bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        bias = torch.cat(present) if present else None
        layer = linear(weights, bias, self.numerics, precise=precise)
        if self._adapters is None:
            return layer
        outputs, width = sizes(weights)
        return self._adapters.adapted(layer, names, outputs, width, bias=bias, expert=self._expert)

    def convolution(self, *names: str) -> Convolution:
        """Return one convolution of the channels of several."""
        taps = torch.cat([self.take(name).float() for name in names])
        biases = [self.get(f"{name}_bias") for name in names]
        present = [bias.float() for bias in biases if bias is not None]
        bias = torch.cat(present)[:, None] if present else None
        return Convolution(taps.permute(2, 0, 1).contiguous(), bias)

    def norm(self, name: str) -> NormParams | None:
        """Return a norm's parameters, or None."""
        weight = self.wide(name)
        return None if weight is None else NormParams(weight, self.wide(f"{name}_bias"))


def _matrix(weight: Weight, index: int) -> Weight:
    return take_matrix(weight, index) if isinstance(weight, QuantizedTensor) else weight[index]


def sizes(weights: Sequence[Weight]) -> tuple[list[int], int]:
    """Return the outputs of each matrix [F, D], and D."""
    return [weight.shape[0] for weight in weights], weights[0].shape[-1]
