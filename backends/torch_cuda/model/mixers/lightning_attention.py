"""Linear attention with a constant decay per head on a rank: a kernel over the states."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan import DecayWeights, lightning_shape, linear_scan
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.interface import PROJECTIONS
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankLayer, recurrent_ops
from pagoda.backends.torch_decoder.mixers.lightning_attention import LightningMixer
from pagoda.backends.torch_decoder.mixers.recurrence import StateRule
from pagoda.common.models.mixers import LightningAttention


def _rule(spec: LightningAttention, own: RankLayer[LightningAttention]) -> StateRule:
    device = own.build.device
    slopes = spec.slopes[own.build.shard.cut("N", spec.heads)]
    decay = DecayWeights(torch.tensor(slopes, dtype=torch.float32, device=device.torch))
    shape = lightning_shape(len(slopes), spec.head_dim)

    def scan(qkv: Tensor, step: StateStep) -> Tensor:
        use_kernel = device.use_kernels
        return linear_scan(qkv, None, step, shape=shape, weights=decay, use_kernel=use_kernel, chip=device.chip)

    return scan


LIGHTNING_ATTENTION: Final = recurrent_ops(
    LightningAttention, LightningMixer, _rule, fused=PROJECTIONS, matrices=frozenset({"qkv", "gate", "out"})
)
