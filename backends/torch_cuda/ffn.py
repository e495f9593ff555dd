"""Feed-forward blocks: one MLP, or a routed mixture of them."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from pagoda.backends.torch_cuda.build import Build
from pagoda.backends.torch_cuda.kernels import activation
from pagoda.backends.torch_cuda.linear import Linear
from pagoda.backends.torch_cuda.moe import make_moe
from pagoda.common.models.spec import Ffn, Mlp, Moe


def make_ffn(spec: Ffn, build: Build, prefix: str) -> Linear:
    """The block as a function of x [T, D]. `prefix`: of the names of its parameters."""
    match spec:
        case Mlp():
            return _mlp(spec, build, prefix)
        case Moe():
            return make_moe(spec, build, prefix)
        case _:
            assert_never(spec)


def _mlp(spec: Mlp, build: Build, prefix: str) -> Linear:
    inner, down = build.linear(f"{prefix}.inner"), build.summed(f"{prefix}.down")
    act = activation.gated if spec.gated else activation.plain
    name, use_kernel = spec.activation, build.device.use_kernels

    def mlp(x: Tensor) -> Tensor:
        return down(act(inner(x), name, use_kernel=use_kernel))

    return mlp
