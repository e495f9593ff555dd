"""The causal convolution of each channel by itself; its state is the last inputs of each channel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import kernel
from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution.kernel import ConvolutionWeights
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_decoder.mixers.recurrence import Convolution

__all__ = ["ConvolutionWeights", "causal_convolution"]


def causal_convolution(
    x: Tensor,
    step: StateStep,
    weights: ConvolutionWeights,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
    use_kernel: bool,
) -> Tensor:
    """Return silu(convolution(x)), or gates[1] * convolution(gates[0] * x), [T, C] in x's type; replace the tails.

    x and the gates [T, C], any row stride, the same of all. The tail, the last inputs [C, taps - 1], is the first part
    of a sequence's state. Padding sequences get zeros; rows of no sequence are undefined. Raise ValueError for other
    shapes or types.
    """
    channels, _, taps = weights.conv.shape
    size = channels * (taps - 1)
    step.check(max(size, step.states.shape[1]))
    every = (x,) if gates is None else (x, *gates)
    if any(each.shape != (len(x), channels) or each.stride() != x.stride() or each.stride(1) != 1 for each in every):
        raise ValueError(f"inputs are {[tuple(each.shape) for each in every]}, not rows of {channels} channels")
    if not weights.conv.is_contiguous():
        raise ValueError("the convolution's weights must be contiguous")
    if use_kernel:
        return kernel.causal_convolution(x, step, weights, gates)
    convolve = Convolution.of(weights.conv, weights.bias)
    out = x.new_zeros(x.shape)
    for rows, block, before in step.sequences():
        inputs = x[rows].float() if gates is None else gates[0][rows].float() * x[rows].float()
        mixed, tail = convolve(inputs[None], before[None, :size])
        out[rows] = F.silu(mixed[0].T) if gates is None else gates[1][rows].float() * mixed[0].T
        step.write(block, 0, tail[0])
    return out
