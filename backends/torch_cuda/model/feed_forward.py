"""What kernels add to the torch decoder's blocks: MLPs, experts and the mixers of their rooms, on a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import sparse
from pagoda.backends.torch_cuda.kernels.experts.moe import moe
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import QuantizedRows
from pagoda.backends.torch_cuda.kernels.linear.weight_only import FEW
from pagoda.backends.torch_cuda.kernels.pointwise import activation
from pagoda.backends.torch_cuda.model.mixers.interface import RotaryTables
from pagoda.backends.torch_cuda.model.mixers.registry import ops_of
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, Rows
from pagoda.backends.torch_cuda.parallel.tensor_parallel import Comm
from pagoda.backends.torch_decoder.ops import BlockMakers, Linear, MixerStep, Routed
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import Activation, Mlp, Moe


def paged_makers(build: CudaBuildContext, tables: RotaryTables) -> BlockMakers:
    """Return how the blocks of a decoder over paged caches are made."""
    return block_makers(
        build, lambda mixer, prefix, numbers: ops_of(mixer).paged(mixer, tables, build, prefix, numbers)
    )


def block_makers(build: CudaBuildContext, mixer: Callable[[Mixer, str, tuple[int, ...]], MixerStep]) -> BlockMakers:
    """Return how the blocks of layers are made. `mixer`: makes a mixer."""
    return BlockMakers(
        mixer,
        mlp=lambda spec, prefix, inner, down: _mlp(spec, build, prefix, inner, down),
        routed=lambda spec, prefix, expert_scale: _routed(spec, build, prefix, expert_scale),
        only_reader=lambda spec, prefix: ops_of(spec).only_reader(spec, build, prefix),
    )


def _mlp(spec: Mlp, build: CudaBuildContext, prefix: str, inner: Linear, down: Linear) -> Linear:
    """Return the MLP of its two products as a function of x [T, D]."""
    act = partial(activation.gated, clamped=spec.clamped, limit=spec.clip) if spec.gated else activation.plain
    name = spec.activation
    use_kernel = build.device.use_kernels

    def mlp(x: Tensor) -> Tensor:
        return down(act(inner(x), name, use_kernel=use_kernel))

    if not spec.sparsity:
        plain = spec.gated and spec.clamped is None and spec.clip is None and spec.inner_norm is None
        return _rounding_mlp(name, inner, down, mlp, build) if plain and build.rounds(f"{prefix}.down") else mlp
    cut = make_sparse(NormalDist().inv_cdf(spec.sparsity), build.comm)

    def sparse_mlp(x: Tensor) -> Tensor:
        both = inner(x)
        gate = both[:, : both.shape[1] // 2]
        gate.copy_(cut(gate))
        return down(act(both, name, use_kernel=use_kernel))

    return sparse_mlp


def _rounding_mlp(
    name: Activation,
    inner: Callable[[Any], Tensor],
    down: Callable[[Any], Tensor],
    few: Linear,
    build: CudaBuildContext,
) -> Linear:
    """Return the Mlp whose activation rounds its result if there are more than FEW rows; `few`: for no more."""
    rounded = partial(activation.gated_quantised, use_kernel=build.device.use_kernels, chip=build.device.chip)

    def mlp(x: Rows) -> Tensor:
        if isinstance(x, Tensor) and len(x) <= FEW:
            return few(x)
        both = inner(x)
        data, scales = rounded(both, name)
        return down(QuantizedRows(data, scales, both.dtype))

    return mlp


def make_sparse(quantile: float, comm: Comm) -> Linear:
    """Return `ops.sparse` of gates [T, F], of which each rank has its columns."""
    if comm.size == 1:
        return lambda gate: sparse(gate, quantile)

    def mean(x: Tensor) -> Tensor:
        return comm.all_reduce(x.mean(-1, keepdim=True)) / comm.size

    def cut(gate: Tensor) -> Tensor:
        wide = gate.float()
        middle = mean(wide)
        deviation = mean((wide - middle).square()).sqrt()
        return torch.relu(wide - (middle + deviation * quantile)).to(gate.dtype)

    return cut


def _routed(spec: Moe, build: CudaBuildContext, prefix: str, expert_scale: Tensor | None) -> Routed:
    """Return the rank's part of the routed experts' output, as a function of x and the router's input, both [T, D]."""
    params = build.params
    device = build.device
    router = build.linear(f"{prefix}.router")
    correction = params.get(f"{prefix}.router_correction")
    inner = params.matrix(f"{prefix}.experts.inner")
    down = params.matrix(f"{prefix}.experts.down")
    inner_bias = params.get(f"{prefix}.experts.inner_bias")
    down_bias = params.get(f"{prefix}.experts.down_bias")
    adapters = build.adapters
    names = (f"{prefix}.experts.inner", f"{prefix}.experts.down")

    def routed(x: Tensor, router_input: Tensor) -> Tensor:
        return moe(
            x,
            router(router_input).float(),
            inner,
            down,
            router=spec.router,
            expert=spec.expert,
            inner_bias=inner_bias,
            down_bias=down_bias,
            correction=correction,
            expert_scale=expert_scale,
            weighs_input=spec.weighs_input,
            identity=spec.identity,
            adds_identity=build.comm.rank == 0,
            adapters=None if adapters is None else adapters.of_experts(*names, batch_invariant=build.batch_invariant),
            batch_invariant=build.batch_invariant,
            use_kernel=device.use_kernels,
            chip=device.chip,
        )

    return routed
