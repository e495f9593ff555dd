"""QK norm, rotation and the write of keys and values into the paged cache, in one pass over the projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.rope_cache import kernel
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import saturated
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_decoder.functions import apply_rope, norm
from pagoda.common.models.primitives import Norm

__all__ = ["NormWeights", "RopeCache", "rope_queries", "rotated"]


# QK norm, rotary embedding and cache write: the entry point, then its plain torch definition.


@dataclass(frozen=True, slots=True)
class NormWeights:
    """RMSNorm of each head."""

    weight: Tensor  # [H]
    eps: float
    unit_offset: bool = False  # multiply by 1 + weight


class RopeCache:
    """Writes keys and values of tokens to a cache; returns q [T, N, H], contiguous, normalised and rotated.

    keys [P, K, B, H], values [P, K, B, V], in qkv's dtype or float8_e4m3fn: stored = value / scale, with k_scale and
    v_scale float32 of one element (both None: 1). v_norm has no unit offset. cos_sin float32 [max_len, 2, R/2], R <= H:
    channels i and i + R/2 of a head are rotated together, channels from R on are copied; None: no rotation. `chip`:
    selects the float8 conversion. All tensors stay where they are. Raise ValueError for other shapes or types.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        *,
        heads: int,
        kv_heads: int,
        cos_sin: Tensor | None,
        q_norm: NormWeights | None,
        k_norm: NormWeights | None,
        v_norm: NormWeights | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        values_are_keys: bool = False,
        use_kernel: bool,
        chip: Chip = CHIPS["sm_80"],
    ) -> None:
        _check_caches(keys, values, kv_heads)
        _check_rotation(cos_sin, keys.shape[3])
        for head_norm, cache in ((q_norm, keys), (k_norm, keys), (v_norm, values)):
            if head_norm is not None and head_norm.weight.shape != cache.shape[3:]:
                shape = tuple(head_norm.weight.shape)
                wanted = tuple(cache.shape[3:])
                raise ValueError(f"a head's norm has {shape} weights, not {wanted}")
        if (k_scale is None) != (v_scale is None):
            raise ValueError("k_scale and v_scale must be given together")
        head_dim = keys.shape[3]
        value_dim = values.shape[3]
        own_values = 0 if values_are_keys and value_dim == head_dim else kv_heads * value_dim
        self._width = (heads + kv_heads) * head_dim + own_values
        self._dtype = keys.dtype
        bind: Callable[..., Callable[[Tensor, Tensor, Tensor], Tensor]] = partial(partial, rope_and_cache_reference)
        if use_kernel:
            bind = partial(kernel.RopeCacheLaunch, chip=chip)
        self._run = bind(
            keys=keys,
            values=values,
            heads=heads,
            kv_heads=kv_heads,
            cos_sin=cos_sin,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
            k_scale=k_scale,
            v_scale=v_scale,
            values_are_keys=values_are_keys,
        )

    def __call__(self, qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """qkv [T, (N+K)*H + K*V], any row stride: heads of q, then k, then v; with `values_are_keys` [T, (N+K)*H].

        Then v is k before its norm and rotation. positions, slots int32 [T]; a slot is block * B + offset, slot 0 is
        padding's. Raise ValueError for other shapes or types.
        """
        if qkv.ndim != 2 or qkv.shape[1] != self._width or qkv.stride(1) != 1:
            raise ValueError(f"qkv is {tuple(qkv.shape)}, not rows of {self._width} channels of heads")
        if self._dtype not in (qkv.dtype, torch.float8_e4m3fn):
            raise ValueError(f"keys and values are {self._dtype}, neither {qkv.dtype} nor float8_e4m3fn")
        _check_vector(qkv, "positions", positions)
        _check_vector(qkv, "slots", slots)
        return self._run(qkv, positions, slots)


def rope_queries(
    q: Tensor,
    positions: Tensor,
    *,
    heads: int,
    cos_sin: Tensor | None,
    q_norm: NormWeights | None = None,
    use_kernel: bool,
) -> Tensor:
    """Return q [T, N*H] as [T, N, H], contiguous, normalised and rotated as `RopeCache` does.

    Raise ValueError for other shapes or types.
    """
    if q.ndim != 2 or q.shape[1] % heads or q.stride(1) != 1:
        raise ValueError(f"q is {tuple(q.shape)}, not rows of {heads} heads")
    _check_vector(q, "positions", positions)
    _check_rotation(cos_sin, q.shape[1] // heads)
    if use_kernel:
        return kernel.rope_queries(q, positions, heads, cos_sin, q_norm)
    return rotated(_normed(q.view(len(q), heads, -1), q_norm), positions, cos_sin).contiguous()


def _check_caches(keys: Tensor, values: Tensor, kv_heads: int) -> None:
    for name, cache in (("keys", keys), ("values", values)):
        if cache.ndim != 4 or cache.shape[:3] != keys.shape[:3] or cache.shape[1] != kv_heads:
            raise ValueError(f"{name} are {tuple(cache.shape)}, not [P, {kv_heads}, B, channels]")
        if not cache.is_contiguous():
            raise ValueError(f"{name} have strides {cache.stride()}, are not contiguous")
        if cache.dtype != keys.dtype:
            raise ValueError(f"{name} are {cache.dtype}, not {keys.dtype} as the keys")


def _check_vector(rows: Tensor, name: str, vector: Tensor) -> None:
    if vector.shape != rows.shape[:1] or vector.dtype != torch.int32:
        raise ValueError(f"{name} are {vector.dtype} {tuple(vector.shape)}, not int32 {tuple(rows.shape[:1])}")


def _check_rotation(cos_sin: Tensor | None, head_dim: int) -> None:
    if cos_sin is not None and (
        cos_sin.ndim != 3
        or cos_sin.dtype != torch.float32
        or cos_sin.shape[1] != 2
        or 2 * cos_sin.shape[2] > head_dim
        or not cos_sin.is_contiguous()
    ):
        raise ValueError(f"cos_sin is {cos_sin.dtype} {tuple(cos_sin.shape)}, not float32 [max_len, 2, R/2]")


def rope_and_cache_reference(
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
    v_norm: NormWeights | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    values_are_keys: bool,
) -> Tensor:
    parts = qkv[:, : (heads + kv_heads) * keys.shape[-1]].unflatten(1, (heads + kv_heads, -1))
    last = qkv[:, -kv_heads * values.shape[-1] :].unflatten(1, (kv_heads, -1))
    q = parts[:, :heads]
    k = parts[:, heads:]
    v = _normed(last, v_norm)
    q = rotated(_normed(q, q_norm), positions, cos_sin)
    k = rotated(_normed(k, k_norm), positions, cos_sin)
    _write(keys, slots, k, k_scale)
    _write(values, slots, v, v_scale)
    return q.contiguous()


def _normed(x: Tensor, weights: NormWeights | None) -> Tensor:
    return x if weights is None else norm(x, Norm(weights.eps, "rms", weights.unit_offset), weights.weight)


def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor | None) -> Tensor:
    """Return x [T, n, H] rotated in float32 and rounded once; cos_sin as in `rope_and_cache`."""
    if cos_sin is None:
        return x
    cos, sin = cos_sin[positions].unbind(1)
    return apply_rope(x.float(), cos, sin, 2 * cos_sin.shape[2]).to(x.dtype)


def _write(cache: Tensor, slots: Tensor, x: Tensor, scale: Tensor | None) -> None:
    if cache.dtype == torch.float8_e4m3fn:
        wide = x.float() if scale is None else x.float() * (1 / scale)
        cache = cache.view(torch.uint8)
        x = saturated(wide).view(torch.uint8)
    size = cache.shape[2]
    cache[slots // size, :, slots % size] = x
