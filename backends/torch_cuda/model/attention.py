"""Grouped-query attention over the paged cache.

Order within a layer: project, normalise, rotate, write K and V of *all* sequences, then attend: a sequence may read
blocks that another one fills in the same step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.decode_attention import decode_attention
from pagoda.backends.torch_cuda.kernels.rope_cache import NormWeights, rope_and_cache
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, Linear
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm

Pair = tuple[Tensor, Tensor]
Normalise = Callable[[Tensor, Tensor], Pair]
"""(q, k) -> both normalised."""


class CudaAttention:
    """One layer's attention over a rank's share of the heads. Head n reads KV head n // (N/K)."""

    def __init__(self, spec: Attention, cos_sin: Tensor | None, build: CudaBuildContext, prefix: str) -> None:
        self.spec, self.cos_sin, self.device, self.prefill = spec, cos_sin, build.device, build.prefill
        self.heads, self.kv_heads = build.shard.share(spec.heads), build.shard.share(spec.kv_heads)
        self.qkv, self.out = build.linear(f"{prefix}.qkv"), build.summed(f"{prefix}.out")
        self.q_norm = per_head_norm(spec, build, f"{prefix}.q_norm")
        self.k_norm = per_head_norm(spec, build, f"{prefix}.k_norm")
        full = spec.qk_norm if spec.qk_norm_over == "full" else None
        self.full_norm = None if full is None else make_projection_norm(spec, full, build, prefix)

    def __call__(self, x: Tensor, batch: CudaStepBatch, cache: CudaLayerCache) -> Tensor:
        """Return [T, D] of x [T, D]."""
        qkv = self.qkv(x)
        if self.full_norm is not None:
            qkv = self.full_norm(qkv)
        queries = rope_and_cache(
            qkv,
            batch.positions,
            batch.groups[cache.group].slots,
            cache.keys,
            cache.values,
            heads=self.heads,
            kv_heads=self.kv_heads,
            cos_sin=self.cos_sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )
        return self.out(self._attend(queries, batch, cache).flatten(1))

    def _attend(self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache) -> Tensor:
        """Return [T, N, H] of queries [T, N, H]."""
        if batch.tiles is None:
            return self._decode(queries, batch, cache)
        out, decodes = torch.empty_like(queries), batch.num_decodes * batch.query_len
        if decodes:
            out[:decodes] = self._decode(queries[:decodes], batch, cache)
        self.prefill(queries, batch, cache, self.spec, out)
        return out

    def _decode(self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache) -> Tensor:
        return decode_attention(
            queries,
            cache.keys,
            cache.values,
            batch.groups[cache.group].tables[: batch.num_decodes],
            batch.kv_lens[: batch.num_decodes],
            query_len=batch.query_len,
            query_counts=batch.query_counts,
            scale=self.spec.scale,
            window=self.spec.window,
            softcap=self.spec.softcap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            splits=batch.splits,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )


def per_head_norm(spec: Attention, build: CudaBuildContext, name: str) -> NormWeights | None:
    """Return the weights of a per-head norm, if the layer has one."""
    if spec.qk_norm is None or spec.qk_norm_over != "per_head":
        return None
    return NormWeights(build.params[name], spec.qk_norm.eps, spec.qk_norm.unit_offset)


def make_projection_norm(spec: Attention, norm: Norm, build: CudaBuildContext, prefix: str) -> Linear:
    """Return a function of qkv [T, (N+2K)*H] that normalises q and k, each over its whole projection."""
    shard = build.shard
    sizes = [shard.share(heads) * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    on_one = shard.size == 1
    normalise = _norm_on_one_rank(norm, build, prefix) if on_one else _norm_over_ranks(spec, norm, build, prefix)

    def full_norm(qkv: Tensor) -> Tensor:
        q, k, v = qkv.split(sizes, dim=1)
        return torch.cat([*normalise(q, k), v], dim=1)

    return full_norm


def _norm_on_one_rank(norm: Norm, build: CudaBuildContext, prefix: str) -> Normalise:
    q_norm, k_norm = build.norm(norm, f"{prefix}.q_norm"), build.norm(norm, f"{prefix}.k_norm")
    return lambda q, k: (q_norm(q, None)[0], k_norm(k, None)[0])


def _norm_over_ranks(spec: Attention, norm: Norm, build: CudaBuildContext, prefix: str) -> Normalise:
    """Sum squares over all ranks; a KV head replicated on several ranks counts once."""
    comm, copies = build.comm, build.shard.copies(spec.kv_heads)
    weights = [build.params[f"{prefix}.{name}"] for name in ("q_norm", "k_norm")]
    counts = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim * copies

    def normalise(q: Tensor, k: Tensor) -> Pair:
        wide = q.float(), k.float()
        means = [part.square().sum(1, keepdim=True) / count for part, count in zip(wide, counts)]
        length = torch.rsqrt(comm.all_reduce(torch.cat(means, dim=1)) + norm.eps)
        new_q, new_k = (
            _scaled(part * length[:, index : index + 1], weight, norm)
            for index, (part, weight) in enumerate(zip(wide, weights))
        )
        return new_q, new_k

    return normalise


def _scaled(wide: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Round as `backends.reference.ops.norm` does."""
    if norm.unit_offset:
        return (wide * (1 + weight.float())).to(weight.dtype)
    return wide.to(weight.dtype) * weight
