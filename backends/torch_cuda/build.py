"""What the parts of a decoder are made from, and the parts that several of them have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import Prefill
from pagoda.backends.torch_cuda.comm import Comm
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.kernels.norm import norm
from pagoda.backends.torch_cuda.linear import Linear, linear
from pagoda.backends.torch_cuda.parameters import ModelParams
from pagoda.backends.torch_cuda.sharding import Shard
from pagoda.common.models.spec import Norm

NormStep = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(update [T, D], residual [T, D] or None) -> their sum normalised, and their sum."""


@dataclass(frozen=True, slots=True)
class Build:
    """A rank's parameters, the device they are on, the line to the other ranks, and who attends to long queries."""

    params: ModelParams
    device: Device
    comm: Comm
    prefill: Prefill

    @property
    def shard(self) -> Shard:
        """Which part of the model this rank holds."""
        return Shard(self.comm.rank, self.comm.size)

    def linear(self, name: str) -> Linear:
        """The product of that name; where ranks share its outputs, this rank's."""
        return linear(self.params.matrix(name), self.params.get(f"{name}_bias"), self.device)

    def summed(self, name: str) -> Linear:
        """The product of that name whose inputs the ranks share: summed over them."""
        mine, comm = self.linear(name), self.comm
        return mine if comm.size == 1 else lambda x: comm.all_reduce(mine(x))

    def norm(self, spec: Norm | None, name: str) -> NormStep:
        """The norm of that name; without one only the sum."""
        if spec is None:
            return _add
        normalise = partial(
            norm,
            weight=self.params[name],
            bias=self.params.get(f"{name}_bias"),
            eps=spec.eps,
            kind=spec.kind,
            unit_offset=spec.unit_offset,
            use_kernel=self.device.use_kernels,
        )
        return lambda update, residual: normalise(update, residual=residual)


def _add(update: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    total = update if residual is None else update + residual
    return total, total
