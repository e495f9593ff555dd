"""The gated delta rule with a decay per channel (KDA, arXiv 2510.26692) over recurrent states."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.recurrent.channel_delta import kernel
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta.kernel import DeltaWeights
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_decoder.mixers.kimi_delta import KimiDeltaRule
from pagoda.backends.torch_decoder.mixers.recurrence import Convolution
from pagoda.common.models.mixers import KimiDelta

__all__ = ["channel_delta"]


def channel_delta(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    step: StateStep,
    *,
    spec: KimiDelta,
    weights: DeltaWeights,
    use_kernel: bool,
    chip: Chip = CHIPS["sm_80"],
) -> Tensor:
    """Return the heads [T, N*H] of the tokens, in qkv's type; replace the states by those after the step.

    qkv [T, 3*N*H], before the convolution, and beta [T, N], any row stride; decay [T, N*H], contiguous; both as
    projected. A sequence's state: the convolution's last inputs, then the states [N, H, H]. `spec`: of the rank's
    heads. Padding sequences get zeros; rows of no sequence are undefined. Raise ValueError for other shapes or types.
    """
    tokens = len(qkv)
    heads = spec.heads
    width = spec.width
    if qkv.shape[1] != 3 * width or qkv.stride(1) != 1 or beta.shape != (tokens, heads) or beta.stride(1) != 1:
        raise ValueError(f"qkv is {tuple(qkv.shape)}, beta {tuple(beta.shape)}, not of {heads} heads")
    if decay.shape != (tokens, width) or not decay.is_contiguous() or not weights.conv.is_contiguous():
        raise ValueError(f"decays are {tuple(decay.shape)}, not contiguous rows of {width}")
    (cache,) = spec.caches()
    step.check(cache.block_elements(1))
    if use_kernel:
        return kernel.launch(qkv, beta, decay, step, spec, weights, chip)
    convolve = Convolution.of(weights.conv, None)
    rule = KimiDeltaRule(spec, convolve, decay_rate=weights.decay_rate, decay_offset=weights.decay_offset)
    return step.update(rule.inputs(qkv, beta, decay), rule.mix, qkv.new_zeros(tokens, width))
