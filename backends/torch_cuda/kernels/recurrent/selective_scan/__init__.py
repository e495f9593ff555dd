"""The selective scan of Mamba (arXiv 2312.00752) over recurrent states: a decay per channel and state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.selective_scan import kernel
from pagoda.backends.torch_cuda.kernels.recurrent.selective_scan.kernel import Selection, SelectiveWeights
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_decoder.mixers.mamba import selective_scan as scan

__all__ = ["Selection", "SelectiveWeights", "selective_scan"]


def selective_scan(
    v: Tensor, gate: Tensor, chosen: Selection, step: StateStep, *, weights: SelectiveWeights, use_kernel: bool
) -> Tensor:
    """Return the gated outputs [T, C] of the tokens, in v's type; replace the states.

    v [T, C], contiguous; gate [T, C], any row stride. For each token and channel

        size = softplus(size + offset)
        state = exp(-exp(rate) size) state + size v b;  output = (state c + skip v) silu(gate)

    Padding sequences get zeros; rows of no sequence are undefined. Raise ValueError for other shapes or types.
    """
    channels, states = weights.rate.shape
    tail = step.states.shape[1] - channels * states
    step.check(max(tail, 0) + channels * states)
    for name, x, width in (
        ("v", v, channels),
        ("gates", gate, channels),
        ("sizes", chosen.size, channels),
        ("b", chosen.b, states),
        ("c", chosen.c, states),
    ):
        if x.shape != (len(v), width) or x.stride(1) != 1:
            raise ValueError(f"{name} are {tuple(x.shape)}, not rows of {width}")
    if not v.is_contiguous() or not chosen.size.is_contiguous() or chosen.b.stride() != chosen.c.stride():
        raise ValueError("v and sizes must be contiguous, b and c have the same strides")
    if use_kernel:
        return kernel.launch(v, gate, chosen, step, weights)
    out = torch.zeros_like(v)
    for rows, block, before in step.sequences():
        wide = v[rows].float()
        sizes = F.softplus(chosen.size[rows].float() + weights.offset)
        b = chosen.b[rows].float()[None]
        c = chosen.c[rows].float()[None]
        rate = -weights.rate.exp()
        mixed, after = scan(wide[None], sizes[None], b, c, rate, before[tail:].view(1, channels, states))
        out[rows] = ((mixed[0] + weights.skip * wide) * F.silu(gate[rows].float())).to(v.dtype)
        step.write(block, tail, after.flatten())
    return out
