"""The gated delta rule over recurrent states (arXiv 2412.06464): convolution, decodes, prefills."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import kernel
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta.kernel import DeltaWeights
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_decoder.mixers.gated_delta import GatedDeltaRule
from pagoda.backends.torch_decoder.mixers.recurrence import Convolution
from pagoda.common.models.mixers import GatedDelta

__all__ = ["DeltaWeights", "gated_delta"]


def gated_delta(
    qkv: Tensor,
    scalars: Tensor,
    step: StateStep,
    *,
    spec: GatedDelta,
    weights: DeltaWeights,
    use_kernel: bool,
    chip: Chip = CHIPS["sm_80"],
) -> Tensor:
    """Return the heads [T, N*V] of the tokens, in qkv's type; replace the states by those after the step.

    qkv [T, C], any row stride: before the convolution. scalars [T, 2N]: beta, then decay, as projected. A sequence's
    state: the convolution's last inputs [C, taps - 1], then the states [N, K, V]. `spec`: of the rank's heads. Padding
    sequences get zeros; rows of no sequence are undefined. Raise ValueError for other shapes or types.
    """
    tokens = len(qkv)
    heads = spec.value_heads
    if qkv.shape[1] != spec.channels or qkv.stride(1) != 1 or scalars.shape != (tokens, 2 * heads):
        raise ValueError(f"qkv is {tuple(qkv.shape)}, scalars {tuple(scalars.shape)}, not {spec.channels} and {heads}")
    (cache,) = spec.caches()
    step.check(cache.block_elements(1))
    if not scalars.is_contiguous() or not weights.conv.is_contiguous():
        raise ValueError("scalars and the convolution's weights must be contiguous")
    if use_kernel:
        return kernel.launch(qkv, scalars, step, spec, weights, chip)
    convolve = Convolution.of(weights.conv, None)
    rule = GatedDeltaRule(spec, convolve, decay_rate=weights.decay_rate, decay_offset=weights.decay_offset)
    return step.update(rule.inputs(qkv, scalars), rule.mix, qkv.new_zeros(tokens, heads * spec.value_dim))
