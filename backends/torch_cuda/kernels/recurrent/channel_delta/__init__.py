"""The gated delta rule with a decay per channel (KDA, arXiv 2510.26692) over recurrent states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.mixers.kimi_delta import channel_rule
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.recurrent.channel_delta import kernel
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta.kernel import DeltaWeights
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_decoder.functions import l2_norm
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
    out = qkv.new_zeros(tokens, width)
    for rows, block, before in step.sequences():
        inputs = qkv[rows].float(), beta[rows].float(), decay[rows].float()
        out[rows], step.states[block] = _sequence(*inputs, before, spec, weights)
    return out


def _sequence(
    qkv: Tensor, beta: Tensor, decay: Tensor, before: Tensor, spec: KimiDelta, weights: DeltaWeights
) -> tuple[Tensor, Tensor]:
    """Return the heads [T, N*H] of one sequence and its state after the tokens, in float32."""
    tail, state = before.split([spec.tail_elements, len(before) - spec.tail_elements])
    seen = torch.cat((tail.view(3 * spec.width, -1), qkv.T), 1)  # [C, taps - 1 + T]
    mixed = F.silu((seen.unfold(1, spec.taps, 1) * weights.conv[:, 0, None].float()).sum(-1))
    q, k, v = (part.unflatten(0, (spec.heads, -1)).mT[None] for part in mixed.chunk(3))
    shifted = (decay + weights.decay_offset).unflatten(1, (spec.heads, -1)).transpose(0, 1)
    rate = weights.decay_rate.exp()[:, None, None]
    bound = spec.decay_bound
    log_decay = -rate * F.softplus(shifted) if bound is None else bound * (rate * shifted).sigmoid()
    heads, after = channel_rule(
        l2_norm(q) * spec.head_dim**-0.5,
        l2_norm(k),
        v,
        beta.T.sigmoid()[None],
        log_decay[None],
        state.view(1, spec.heads, spec.head_dim, spec.head_dim),
    )
    return heads[0].transpose(0, 1).flatten(1), torch.cat((seen[:, len(qkv) :].flatten(), after.flatten()))
