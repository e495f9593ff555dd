"""What a CPU adds to the torch decoder's blocks: MLPs in its kernels, experts one by one, the mixers of their rooms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import NormalDist
from typing import Any, Final

import torch
from torch import Tensor

from pagoda.backends.reference.model.adapters import ActiveAdapters
from pagoda.backends.reference.model.mixers.interface import MixerBuild
from pagoda.backends.reference.model.mixers.registry import ops_of
from pagoda.backends.reference.model.named_ops import ReferenceOps
from pagoda.backends.reference.model.ops import activation, clamped_glu, clipped, mix_experts, route, sparse
from pagoda.backends.torch_decoder.decoder import packed_mixers
from pagoda.backends.torch_decoder.feed_forward import make_mlp
from pagoda.backends.torch_decoder.ops import BlockMakers, Linear, MixerStep, Routed
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import Mlp, ModelSpec, Moe

CHUNK: Final = 512
"""Tokens that an MLP runs on at a time."""


def _mlp(spec: Mlp, ops: ReferenceOps, inner: Linear, down: Linear) -> Linear:
    """Return the MLP of its two products as a function of x [T, D]."""
    act = activation(spec.activation, batch_invariant=ops.numerics.batch_invariant)
    if not spec.gated:
        return lambda x: down(act(inner(x)))
    plain = not spec.sparsity and spec.clip is None and spec.clamped is None
    if plain and ops.native is not None:
        active = None if ops.adapters is None else ops.adapters.active
        if (fed := ops.native.gated(inner, spec.activation)) is not None:
            return in_chunks(lambda x: down(fed(x)), active)
        if (gate_up := ops.native.gate(spec.width, spec.activation)) is not None:
            return in_chunks(lambda x: down(gate_up(inner(x))), active)
    gated = _gate(spec, act)
    return lambda x: down(gated(inner(x)))


def _gate(spec: Mlp, act: Linear) -> Linear:
    """Return the hidden values [T, F] as a function of gate and up side by side [T, 2F]. `act`: the activation."""
    width = spec.width
    if (clamped := spec.clamped) is not None:
        return lambda both: clamped_glu(both[:, :width], both[:, width:], clamped)
    activated = act
    if spec.sparsity:
        quantile = NormalDist().inv_cdf(spec.sparsity)
        activated = partial(_sparsely, act, quantile)
    if (clip := spec.clip) is not None:
        return lambda both: clipped(activated(both[:, :width]), both[:, width:], clip)
    return lambda both: activated(both[:, :width]).mul_(both[:, width:])


def _sparsely(act: Linear, quantile: float, gate: Tensor) -> Tensor:
    return act(sparse(gate, quantile))


def in_chunks(feed: Linear, active: ActiveAdapters | None = None) -> Linear:
    """Return the MLP, run on CHUNK tokens at a time: what is in between then stays in the processor's cache."""

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


def _routed(spec: Moe, ops: ReferenceOps, makers: BlockMakers, prefix: str, expert_scale: Tensor | None) -> Routed:
    """Return the output of the routed experts as a function of x and the router's input, both [T, D]."""
    router = ops.linear(f"{prefix}.router")
    correction = ops.get(f"{prefix}.router_correction")
    names = [f"{prefix}.experts.{number}" for number in range(spec.experts)]
    experts = [make_mlp(spec.expert, ops, makers, name, ops.linear(f"{name}.down")) for name in names]
    experts += [lambda rows: rows] * spec.identity
    adapters_of: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext
    if ops.adapters is not None:
        adapters_of = ops.adapters.active.at

    def routed(x: Tensor, router_input: Tensor) -> Tensor:
        weights, chosen = route(router(router_input), spec.router, correction)
        if expert_scale is not None:
            weights = weights * expert_scale[chosen]
        if spec.weighs_input:
            x = x * weights.to(x.dtype)
            weights = torch.ones_like(weights)
        return mix_experts(x, weights, chosen, lambda expert, rows: experts[expert](rows), adapters_of)

    return routed


def paged_makers(ops: ReferenceOps) -> BlockMakers:
    """Return how the blocks of a decoder over paged caches are made."""
    build = MixerBuild(ops.numerics.batch_invariant, ops.native)

    def make(spec: Mixer, prefix: str, numbers: tuple[int, ...]) -> MixerStep:
        return ops_of(spec).paged(spec, ops.parts[prefix], numbers, build)

    return _block_makers(ops, make)


def packed_makers(spec: ModelSpec, ops: ReferenceOps) -> BlockMakers:
    """Return how the blocks of an encoder are made."""

    def make(mixer: Mixer, prefix: str, number: int | None) -> MixerStep:
        return ops_of(mixer).packed(mixer, ops.parts[prefix], number)

    return _block_makers(ops, packed_mixers(spec, make))


def _block_makers(ops: ReferenceOps, mixer: Callable[[Mixer, str, tuple[int, ...]], MixerStep]) -> BlockMakers:
    """Return how the blocks of layers are made. `mixer`: makes a mixer."""

    def routed(spec: Moe, prefix: str, expert_scale: Tensor | None) -> Routed:
        return _routed(spec, ops, makers, prefix, expert_scale)

    makers = BlockMakers(
        mixer,
        mlp=lambda spec, prefix, inner, down: _mlp(spec, ops, inner, down),
        routed=routed,
        only_reader=lambda spec, prefix: None,
    )
    return makers
