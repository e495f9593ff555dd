"""A routed mixture of experts. Every rank holds a share of each expert's width, so that no token has to travel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.build import Build
from pagoda.backends.torch_cuda.kernels.moe import moe
from pagoda.backends.torch_cuda.linear import Linear
from pagoda.common.models.spec import Moe


def make_moe(spec: Moe, build: Build, prefix: str) -> Linear:
    """The mixture as a function of x [T, D]."""
    params, device, comm = build.params, build.device, build.comm
    router = params[f"{prefix}.router"]
    inner, down = params.matrix(f"{prefix}.experts.inner"), params.matrix(f"{prefix}.experts.down")
    inner_bias, down_bias = params.get(f"{prefix}.experts.inner_bias"), params.get(f"{prefix}.experts.down_bias")

    def mixture(x: Tensor) -> Tensor:
        mixed = moe(
            x,
            F.linear(x, router).float(),
            inner,
            down,
            router=spec.router,
            expert=spec.expert,
            inner_bias=inner_bias,
            down_bias=down_bias,
            use_kernel=device.use_kernels,
            chip=device.chip,
        )
        return comm.all_reduce(mixed)

    return mixture
