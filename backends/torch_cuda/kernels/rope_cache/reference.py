"""What the kernel computes, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.reference.ops import apply_rope, norm
from pagoda.backends.torch_cuda.kernels.float8 import saturated
from pagoda.common.models.spec import Norm


@dataclass(frozen=True, slots=True)
class NormWeights:
    """RMSNorm of each head: weight [H]; `unit_offset`: multiply by 1 + weight."""

    weight: Tensor
    eps: float
    unit_offset: bool = False


def reference(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    kv_heads: int,
    cos_sin: Tensor | None,
    q_norm: NormWeights | None,
    k_norm: NormWeights | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """As api.rope_and_cache."""
    q, k, v = qkv.view(len(qkv), -1, keys.shape[-1]).split([heads, kv_heads, kv_heads], 1)
    q, k = _turned(_normed(q, q_norm), positions, cos_sin), _turned(_normed(k, k_norm), positions, cos_sin)
    _write(keys, slots, k, k_scale)
    _write(values, slots, v, v_scale)
    return q.contiguous()


def _normed(x: Tensor, weights: NormWeights | None) -> Tensor:
    return x if weights is None else norm(x, Norm(weights.eps, "rms", weights.unit_offset), weights.weight)


def _turned(x: Tensor, positions: Tensor, cos_sin: Tensor | None) -> Tensor:
    """Rotated in float32, rounded once."""
    if cos_sin is None:
        return x
    cos, sin = cos_sin[positions].unbind(1)
    return apply_rope(x.float(), cos, sin, 2 * cos_sin.shape[2]).to(x.dtype)


def _write(cache: Tensor, slots: Tensor, x: Tensor, scale: Tensor | None) -> None:
    if cache.dtype == torch.float8_e4m3fn:
        wide = x.float() if scale is None else x.float() * (1 / scale)
        cache, x = cache.view(torch.uint8), saturated(wide).view(torch.uint8)
    size = cache.shape[2]
    cache[slots // size, :, slots % size] = x
