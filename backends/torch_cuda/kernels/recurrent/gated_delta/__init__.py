"""The gated delta rule over recurrent states (arXiv 2412.06464): convolution, decodes, prefills."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.mixers.gated_delta import chunked_rule, recurrent_rule
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import kernel
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta.kernel import DeltaWeights
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_decoder.functions import l2_norm
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
    out = qkv.new_zeros(tokens, heads * spec.value_dim)
    for rows, block, before in step.sequences():
        out[rows], step.states[block] = _sequence(qkv[rows].float(), scalars[rows].float(), before, spec, weights)
    return out


def _sequence(
    qkv: Tensor, scalars: Tensor, before: Tensor, spec: GatedDelta, weights: DeltaWeights
) -> tuple[Tensor, Tensor]:
    """Return the heads [T, N*V] of one sequence and its state after qkv [T, C] and scalars [T, 2N], in float32."""
    tail, state = before.split([spec.tail_elements, len(before) - spec.tail_elements])
    seen = torch.cat((tail.view(spec.channels, -1), qkv.T), 1)  # [C, taps - 1 + T]
    mixed = F.silu((seen.unfold(1, spec.taps, 1) * weights.conv[:, 0, None].float()).sum(-1))
    keys = spec.key_heads * spec.key_dim
    q, k, v = mixed.split([keys, keys, spec.value_heads * spec.value_dim])
    repeats = spec.value_heads // spec.key_heads
    q, k = (l2_norm(part.unflatten(0, (spec.key_heads, -1)).mT).repeat_interleave(repeats, 0) for part in (q, k))
    beta, decay = scalars.T.split(spec.value_heads)
    log_decay = -weights.decay_rate.float().exp()[:, None] * F.softplus(decay + weights.decay_offset.float()[:, None])
    rule = recurrent_rule if len(qkv) == 1 else chunked_rule
    heads, after = rule(
        q[None] * spec.key_dim**-0.5,
        k[None],
        v.unflatten(0, (spec.value_heads, -1)).mT[None],
        (beta.sigmoid() * spec.beta_scale)[None],
        log_decay[None],
        state.view(1, spec.value_heads, spec.key_dim, spec.value_dim),
    )
    return heads[0].transpose(0, 1).flatten(1), torch.cat((seen[:, len(qkv) :].flatten(), after.flatten()))
