"""Linear recurrences over recurrent states whose decay is a number per head: Mamba-2, lightning attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan import kernel
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan.kernel import (
    DecayWeights,
    ScanShape,
    lightning_shape,
    mamba2_shape,
)
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_decoder.mixers.mamba2 import chunked_scan, recurrent_scan

__all__ = ["DecayWeights", "ScanShape", "lightning_shape", "linear_scan", "mamba2_shape"]


def linear_scan(
    qkv: Tensor,
    scalars: Tensor | None,
    step: StateStep,
    *,
    shape: ScanShape,
    weights: DecayWeights,
    use_kernel: bool,
    chip: Chip = CHIPS["sm_80"],
) -> Tensor:
    """Return the heads [T, N*V] of the tokens, in qkv's type; replace the states.

    qkv [T, C] and scalars [T, N], any row stride; see `ScanShape` and `DecayWeights`. For each token and head

        state = exp(log decay) state + size k v;  head = q state + skip v

    where size = clamp(softplus(scalar + offset)), log decay = -exp(rate) size; without scalars size = 1, log decay =
    -rate. Padding sequences get zeros; rows of no sequence are undefined. Raise ValueError for other shapes or types.
    """
    step.check(shape.elements)
    if qkv.ndim != 2 or qkv.shape[1] != shape.channels or qkv.stride(1) != 1:
        raise ValueError(f"q, k and v are {tuple(qkv.shape)}, not rows of {shape.channels}")
    if (scalars is None) != (weights.offset is None):
        raise ValueError("scalars and their offsets come together")
    if scalars is not None and (scalars.shape != (len(qkv), shape.heads) or scalars.stride(1) != 1):
        raise ValueError(f"scalars are {tuple(scalars.shape)}, not of {shape.heads} heads")
    if use_kernel:
        return kernel.launch(qkv, scalars, step, shape, weights, chip)
    out = qkv.new_zeros(len(qkv), shape.heads * shape.value_dim)
    for rows, block, before in step.sequences():
        numbers = None if scalars is None else scalars[rows].float()
        heads, after = _sequence(qkv[rows].float(), numbers, before[shape.tail :], shape, weights)
        out[rows] = heads
        step.write(block, shape.tail, after)
    return out


def _sequence(
    qkv: Tensor, scalars: Tensor | None, before: Tensor, shape: ScanShape, weights: DecayWeights
) -> tuple[Tensor, Tensor]:
    """Return the heads [T, N*V] of one sequence and its state after qkv [T, C] and scalars [T, N], in float32."""

    def part(begin: int, heads: int, dim: int) -> Tensor:
        """Return [1, heads, T, dim]."""
        return qkv[None, :, begin : begin + heads * dim].unflatten(2, (heads, dim)).transpose(1, 2)

    v = part(shape.v_at, shape.heads, shape.value_dim)
    q, k = (part(begin, shape.groups, shape.key_dim) for begin in (shape.q_at, shape.k_at))
    written = v
    decay = -weights.rate.float()[None, :, None].expand(1, -1, len(qkv))
    if scalars is not None:
        assert weights.offset is not None, "checked"
        size = F.softplus(scalars + weights.offset.float()).clamp(*weights.limit).T[None]  # [1, N, T]
        written = size[..., None] * v
        decay = -weights.rate.float().exp()[:, None] * size
    scan = recurrent_scan if len(qkv) == 1 else chunked_scan
    heads, after = scan(written, k, q, decay, before.view(1, shape.heads, shape.key_dim, shape.value_dim))
    if weights.skip is not None:
        heads = heads + weights.skip.float()[:, None, None] * v
    return heads[0].transpose(0, 1).flatten(1), after.flatten()
