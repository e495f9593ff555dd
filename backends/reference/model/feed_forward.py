"""The blocks of the layers on a CPU: feed-forward blocks and mixtures of experts, and the mixers of their rooms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import NormalDist
from typing import Any, Final, assert_never

import torch
from torch import Tensor

from pagoda.backends.reference.model.adapters import ActiveAdapters
from pagoda.backends.reference.model.mixers.interface import MixerBuild
from pagoda.backends.reference.model.mixers.registry import ops_of
from pagoda.backends.reference.model.named_ops import ReferenceOps
from pagoda.backends.reference.model.ops import (
    activation,
    clamped_glu,
    clipped,
    mix_experts,
    route,
    sigmoid,
    sparse,
    xielu,
)
from pagoda.backends.reference.model.params import MlpParams, MoeParams
from pagoda.backends.reference.programs.operators import Operators
from pagoda.backends.torch_decoder.ops import BlockMakers, Linear, MixerStep, Routed
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import Ffn, Mlp, Moe

CHUNK: Final = 512
"""Tokens that an MLP runs on at a time."""


def make_ffn(
    spec: Ffn,
    params: MlpParams | MoeParams,
    *,
    batch_invariant: bool = False,
    native: Operators | None = None,
    active: ActiveAdapters | None = None,
) -> Linear:
    """Return the MLP or mixture of experts as a function of x [T, D]. `active`: adapters of the tokens."""
    match spec:
        case Mlp():
            assert isinstance(params, MlpParams)
            return _mlp(spec, params, batch_invariant, native, active)
        case Moe():
            assert isinstance(params, MoeParams)
            return _moe(spec, params, batch_invariant, native, active)
        case _:
            assert_never(spec)


def _mlp(
    spec: Mlp,
    params: MlpParams,
    batch_invariant: bool,
    native: Operators | None = None,
    active: ActiveAdapters | None = None,
) -> Linear:
    act = activation(spec.activation, batch_invariant=batch_invariant)
    width = spec.width
    inner = params.inner
    down = params.down
    if (learned := spec.learned) is not None and (curvatures := params.curvatures) is not None:
        curvature_p, curvature_n = curvatures
        return lambda x: down(xielu(inner(x), learned, curvature_p=curvature_p, curvature_n=curvature_n))
    if not spec.gated:
        return lambda x: down(act(inner(x)))
    plain = not spec.sparsity and spec.clip is None and spec.clamped is None
    if plain and native is not None and (fed := native.gated(inner, spec.activation)) is not None:
        return in_chunks(lambda x: down(fed(x)))
    if plain and native is not None and (gate_up := native.gate(width, spec.activation)) is not None:
        return in_chunks(lambda x: down(gate_up(inner(x))), active)

    quantile = NormalDist().inv_cdf(spec.sparsity) if spec.sparsity else None

    def gated(x: Tensor) -> Tensor:
        both = inner(x)
        gate = both[:, :width] if quantile is None else sparse(both[:, :width], quantile)
        if spec.clip is not None:
            return down(clipped(act(gate), both[:, width:], spec.clip))
        return down(act(gate).mul_(both[:, width:]))

    if (clamped := spec.clamped) is None:
        return gated

    def clamped_gate(x: Tensor) -> Tensor:
        gate, up = inner(x).split(width, -1)
        return down(clamped_glu(gate, up, clamped))

    return clamped_gate


def in_chunks(feed: Linear, active: ActiveAdapters | None = None) -> Linear:
    """Return the ffn, run on CHUNK tokens at a time: what is in between then stays in the processor's cache."""

    def chunked(x: Tensor) -> Tensor:
        if x.shape[0] <= CHUNK:
            return feed(x)
        if active is None or active.tokens is None:
            return torch.cat([feed(part) for part in x.split(CHUNK)])
        parts = []
        for begin in range(0, x.shape[0], CHUNK):
            with active.at(slice(begin, begin + CHUNK)):
                parts.append(feed(x[begin : begin + CHUNK]))
        return torch.cat(parts)

    return chunked


def _moe(
    spec: Moe,
    params: MoeParams,
    batch_invariant: bool,
    native: Operators | None = None,
    active: ActiveAdapters | None = None,
) -> Linear:
    routed = make_routed(spec, params, batch_invariant=batch_invariant, native=native, active=active)
    if spec.shared is None or params.shared is None:
        return lambda x: routed(x, x)
    shared = _mlp(spec.shared, params.shared, batch_invariant, native, active)
    gate = params.shared_gate
    if gate is None:
        return lambda x: routed(x, x) + shared(x)
    return lambda x: routed(x, x) + sigmoid(gate(x)) * shared(x)


def make_routed(
    spec: Moe,
    params: MoeParams,
    expert_scale: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    native: Operators | None = None,
    active: ActiveAdapters | None = None,
) -> Routed:
    """Return the output of the routed experts as a function of x and the router's input, both [T, D]."""
    experts = [_mlp(spec.expert, expert, batch_invariant, native, active) for expert in params.experts]
    at: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext if active is None else active.at

    def routed(x: Tensor, router_input: Tensor) -> Tensor:
        weights, chosen = route(params.router(router_input), spec.router, params.correction)
        if expert_scale is not None:
            weights = weights * expert_scale[chosen]
        if spec.weighs_input:
            x = x * weights.to(x.dtype)
            weights = torch.ones_like(weights)
        return mix_experts(x, weights, chosen, lambda expert, rows: experts[expert](rows), at)

    return routed


_ALONE: Final = (".block.ffn", ".side.moe", ".shortcut.moe")
"""Ends of the names of blocks that torch's operators compute."""


def paged_makers(ops: ReferenceOps) -> BlockMakers:
    """Return how the blocks of a decoder over paged caches are made."""
    build = MixerBuild(ops.numerics.batch_invariant, ops.native)

    def make(spec: Mixer, prefix: str, numbers: tuple[int, ...]) -> MixerStep:
        return ops_of(spec).paged(spec, ops.parts[prefix], numbers, build)

    return block_makers(ops, make, batch_invariant=ops.numerics.batch_invariant)


def packed_makers(ops: ReferenceOps, shared: frozenset[int]) -> BlockMakers:
    """Return how the blocks of an encoder are made. `shared`: the caches that several mixers read."""

    def make(spec: Mixer, prefix: str, numbers: tuple[int, ...]) -> MixerStep:
        number = numbers[0] if numbers and numbers[0] in shared else None
        return ops_of(spec).packed(spec, ops.parts[prefix], number)

    return block_makers(ops, make)


def block_makers(
    ops: ReferenceOps, mixer: Callable[[Mixer, str, tuple[int, ...]], MixerStep], *, batch_invariant: bool = False
) -> BlockMakers:
    """Return how the blocks of layers are made. `mixer`: makes a mixer."""
    active = None if ops.adapters is None else ops.adapters.active

    def ffn(spec: Ffn, prefix: str) -> Linear:
        if prefix.endswith(_ALONE):
            return make_ffn(spec, ops.parts[prefix], batch_invariant=batch_invariant)
        return make_ffn(spec, ops.parts[prefix], batch_invariant=batch_invariant, native=ops.native, active=active)

    def routed(spec: Moe, prefix: str, expert_scale: Tensor | None) -> Routed:
        return make_routed(spec, ops.parts[prefix], expert_scale, batch_invariant=batch_invariant)

    return BlockMakers(mixer, ffn, routed, only_reader=lambda spec, prefix: None)
