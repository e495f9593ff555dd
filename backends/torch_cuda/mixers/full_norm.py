"""RMS norm of q and of k, each over its whole projection, of which the ranks hold shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.build import Build
from pagoda.backends.torch_cuda.linear import Linear
from pagoda.common.models.spec import Attention, Norm

Pair = tuple[Tensor, Tensor]
Normalise = Callable[[Tensor, Tensor], Pair]


def make_full_norm(spec: Attention, norm: Norm, build: Build, prefix: str) -> Linear:
    """A function of qkv [T, (N+2K)*H] that normalises q and k."""
    shard = build.shard
    sizes = [shard.share(heads) * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    normalise = _alone(norm, build, prefix) if shard.size == 1 else _shared(spec, norm, build, prefix)

    def full_norm(qkv: Tensor) -> Tensor:
        q, k, v = qkv.split(sizes, dim=1)
        return torch.cat([*normalise(q, k), v], dim=1)

    return full_norm


def _alone(norm: Norm, build: Build, prefix: str) -> Normalise:
    q_norm, k_norm = build.norm(norm, f"{prefix}.q_norm"), build.norm(norm, f"{prefix}.k_norm")
    return lambda q, k: (q_norm(q, None)[0], k_norm(k, None)[0])


def _shared(spec: Attention, norm: Norm, build: Build, prefix: str) -> Normalise:
    """Sums of squares over all ranks. A KV head that several ranks hold counts once."""
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
    """Rounded where `backends.reference.ops.norm` rounds."""
    if norm.unit_offset:
        return (wide * (1 + weight.float())).to(weight.dtype)
    return wide.to(weight.dtype) * weight
