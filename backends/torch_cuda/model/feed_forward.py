"""The blocks of a rank's layers: feed-forward blocks and mixtures of experts, and the mixers of their rooms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any, assert_never

import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import sigmoid, sparse, xielu
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
from pagoda.common.models.spec import Activation, Ffn, Mlp, Moe


def paged_makers(build: CudaBuildContext, tables: RotaryTables) -> BlockMakers:
    """Return how the blocks of a decoder over paged caches are made."""
    return block_makers(
        build, lambda mixer, prefix, numbers: ops_of(mixer).paged(mixer, tables, build, prefix, numbers)
    )


def block_makers(build: CudaBuildContext, mixer: Callable[[Mixer, str, tuple[int, ...]], MixerStep]) -> BlockMakers:
    """Return how the blocks of layers are made. `mixer`: makes a mixer."""

    def routed(spec: Moe, prefix: str, expert_scale: Tensor | None) -> Routed:
        own = make_routed(spec, build, prefix, expert_scale)
        return lambda x, router_input: build.comm.all_reduce(own(x, router_input))

    return BlockMakers(
        mixer,
        ffn=lambda spec, prefix: make_ffn(spec, build, prefix),
        routed=routed,
        only_reader=lambda spec, prefix: ops_of(spec).only_reader(spec, build, prefix),
    )


def make_ffn(spec: Ffn, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the feed-forward block as a function of x [T, D]."""
    match spec:
        case Mlp():
            inner = build.linear(f"{prefix}.inner")
            inner = build.adapted(inner, f"{prefix}_adapter", f"{prefix}.inner_adapter_out")  # of an input block
            return _mlp(spec, build, prefix, build.summed(f"{prefix}.down"), inner)
        case Moe():
            return make_moe(spec, build, prefix)
        case _:
            assert_never(spec)


def _mlp(spec: Mlp, build: CudaBuildContext, prefix: str, down: Linear, inner: Linear | None = None) -> Linear:
    """`inner`: the map to gate and up where it has more than a matrix."""
    inner = inner or build.linear(f"{prefix}.inner")
    act = partial(activation.gated, clamped=spec.clamped, limit=spec.clip) if spec.gated else activation.plain
    name = spec.activation
    use_kernel = build.device.use_kernels
    if (learned := spec.learned) is not None:
        p = build.params[f"{prefix}.curvature_p"]
        n = build.params[f"{prefix}.curvature_n"]
        return lambda x: down(xielu(inner(x), learned, p, n))

    def mlp(x: Tensor) -> Tensor:
        return down(act(inner(x), name, use_kernel=use_kernel))

    if not spec.sparsity:
        plain = spec.gated and spec.clamped is None and spec.clip is None
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
        return down(QuantizedRows(*rounded(both, name), both.dtype))

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


def make_moe(spec: Moe, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the mixture as a function of x [T, D]. Each expert's width is sharded: tokens are not exchanged."""
    comm = build.comm
    routed = make_routed(spec, build, prefix)
    shared = None if spec.shared is None else make_shared(spec.shared, build, prefix)

    def mixture(x: Tensor) -> Tensor:
        mixed = routed(x, x)
        return comm.all_reduce(mixed if shared is None else mixed + shared(x))

    return mixture


def make_routed(spec: Moe, build: CudaBuildContext, prefix: str, expert_scale: Tensor | None = None) -> Routed:
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
            adapters=None if adapters is None else adapters.of_experts(*names, batch_invariant=build.batch_invariant),
            batch_invariant=build.batch_invariant,
            use_kernel=device.use_kernels,
            chip=device.chip,
        )

    return routed


def make_shared(spec: Mlp, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the rank's part of the mixture's shared Mlp, times its gate, as a function of x [T, D]."""
    mlp = _mlp(spec, build, f"{prefix}.shared", build.linear(f"{prefix}.shared.down"))
    if build.params.get(f"{prefix}.shared_gate") is None:
        return mlp
    gate = build.linear(f"{prefix}.shared_gate")
    sigmoid_of = sigmoid if build.batch_invariant else torch.sigmoid
    return lambda x: sigmoid_of(gate(x)) * mlp(x)
