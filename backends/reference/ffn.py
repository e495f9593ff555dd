"""Feed-forward blocks: one MLP, or a routed mixture of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from torch import Tensor

from pagoda.backends.reference.layout import MlpParams, MoeParams
from pagoda.backends.reference.ops import activation, mix_experts, route
from pagoda.common.models.spec import Ffn, Mlp, Moe

FfnStep = Callable[[Tensor], Tensor]


def make_ffn(spec: Ffn, params: MlpParams | MoeParams) -> FfnStep:
    """The block as a function of x [T, D]."""
    match spec:
        case Mlp():
            assert isinstance(params, MlpParams)
            return _mlp(spec, params)
        case Moe():
            assert isinstance(params, MoeParams)
            return _moe(spec, params)
        case _:
            assert_never(spec)


def _mlp(spec: Mlp, params: MlpParams) -> FfnStep:
    act, width = activation(spec.activation), spec.width
    inner, down = params.inner, params.down
    if not spec.gated:
        return lambda x: down(act(inner(x)))

    def gated(x: Tensor) -> Tensor:
        both = inner(x)
        return down(act(both[:, :width]).mul_(both[:, width:]))

    return gated


def _moe(spec: Moe, params: MoeParams) -> FfnStep:
    experts = [_mlp(spec.expert, expert) for expert in params.experts]

    def mixture(x: Tensor) -> Tensor:
        weights, chosen = route(params.router(x), spec.router)
        return mix_experts(x, weights, chosen, lambda expert, rows: experts[expert](rows))

    return mixture
