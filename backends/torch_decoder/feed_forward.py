"""Feed-forward blocks and mixtures of experts, over the products and kernels of a backend. T tokens, D width, F hidden.

Each rank has a part of the hidden values: of an MLP, of every expert and of the shared MLP. Tokens are not exchanged.
"""

from __future__ import annotations

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.ops import BlockMakers, DecoderOps, Linear
from pagoda.common.models.spec import Ffn, Mlp, Moe, Xielu


def make_ffn(spec: Ffn, ops: DecoderOps, makers: BlockMakers, prefix: str) -> Linear:
    """Return the MLP or mixture of experts as a function of x [T, D]."""
    match spec:
        case Mlp():
            return make_mlp(spec, ops, makers, prefix, ops.summed(f"{prefix}.down"))
        case Moe():
            mixture = _mixture(spec, ops, makers, prefix)
            return lambda x: ops.sum_over_ranks(mixture(x))
        case _:
            assert_never(spec)


def make_mlp(spec: Mlp, ops: DecoderOps, makers: BlockMakers, prefix: str, down: Linear) -> Linear:
    """Return the MLP as a function of x [T, D]; `down`: its second product, or the rank's part of it."""
    inner = _inner(ops, prefix)
    if spec.inner_norm is not None:
        down = _after(ops.split_norm(spec.inner_norm, f"{prefix}.inner_norm", spec.width), down)
    if (learned := spec.learned) is None:
        return makers.mlp(spec, prefix, inner, down)
    p, n = (ops.tensor(f"{prefix}.curvature_{sign}") for sign in "pn")
    return lambda x: down(xielu(inner(x), learned, curvature_p=p, curvature_n=n))


def _after(first: Linear, second: Linear) -> Linear:
    return lambda x: second(first(x))


def _inner(ops: DecoderOps, prefix: str) -> Linear:
    """Return the first product, with the low-rank adapter that it has in the layers of a shared input block."""
    inner = ops.linear(f"{prefix}.inner")
    if not ops.has(f"{prefix}_adapter"):
        return inner
    first = ops.linear(f"{prefix}_adapter")
    second = ops.linear(f"{prefix}.inner_adapter_out")
    return lambda x: inner(x) + second(first(x))


def _mixture(spec: Moe, ops: DecoderOps, makers: BlockMakers, prefix: str) -> Linear:
    """Return the rank's part of the mixture as a function of x [T, D]."""
    routed = _routed(spec, ops, makers, prefix)
    if spec.shared is None:
        return routed
    shared = make_mlp(spec.shared, ops, makers, f"{prefix}.shared", ops.linear(f"{prefix}.shared.down"))
    if not spec.shared_gate:
        return lambda x: routed(x) + shared(x)
    gate = ops.linear(f"{prefix}.shared_gate")
    return lambda x: routed(x) + ops.sigmoid(gate(x)) * shared(x)


def _routed(spec: Moe, ops: DecoderOps, makers: BlockMakers, prefix: str) -> Linear:
    """Return the rank's part of the routed experts' output as a function of x [T, D]."""
    experts = makers.routed(spec, prefix, None)
    if spec.latent is None:
        return lambda x: experts(x, x)
    first = ops.linear(f"{prefix}.latent_in")
    last = ops.linear(f"{prefix}.latent_out")  # It is linear, so ranks may add its outputs as they add the experts'.
    return lambda x: last(experts(first(x), x))


def xielu(x: Tensor, spec: Xielu, curvature_p: Tensor, curvature_n: Tensor) -> Tensor:
    """Return xIELU of x [T, F], computed in float32; curvatures [1], before their softplus. Keeps x's dtype."""
    wide = x.float()
    above = F.softplus(curvature_p.float()) * wide.square()
    below = (spec.beta + F.softplus(curvature_n.float())) * (torch.expm1(wide.clamp(max=spec.eps)) - wide)
    return (torch.where(wide > 0, above, below) + spec.beta * wide).to(x.dtype)
