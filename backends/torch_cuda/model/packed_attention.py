"""Attention within each prompt of a step, without a cache.

Normalising and rotating is the kernel's that otherwise fills the cache; here it fills pages of the step's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.execution import PackedPrompts, attend
from pagoda.backends.torch_cuda.kernels.rope_cache import rope_and_cache
from pagoda.backends.torch_cuda.model.attention import make_full_norm, per_head_norm
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.common.models.spec import Attention

PAGE = 16
"""Tokens of a page of the step's own; slot 0 is nobody's."""


class CudaPackedAttention:
    """One layer's attention. Head n reads KV head n // (N/K)."""

    def __init__(self, spec: Attention, cos_sin: Tensor | None, build: CudaBuildContext, prefix: str) -> None:
        self.spec, self.cos_sin, self.device = spec, cos_sin, build.device
        self.qkv, self.out = build.linear(f"{prefix}.qkv"), build.linear(f"{prefix}.out")
        self.q_norm = per_head_norm(spec, build, f"{prefix}.q_norm")
        self.k_norm = per_head_norm(spec, build, f"{prefix}.k_norm")
        full = spec.qk_norm if spec.qk_norm_over == "full" else None
        self.full_norm = None if full is None else make_full_norm(spec, full, build, prefix)

    def __call__(self, x: Tensor, batch: PackedPrompts) -> Tensor:
        """X [T, D] -> [T, D]."""
        qkv, tokens = self.qkv(x), len(x)
        if self.full_norm is not None:
            qkv = self.full_norm(qkv)
        spec = self.spec
        pages = qkv.new_empty(2, tokens // PAGE + 1, spec.kv_heads, PAGE, spec.head_dim)
        queries = rope_and_cache(
            qkv,
            batch.positions.int(),
            torch.arange(1, tokens + 1, dtype=torch.int32, device=x.device),
            pages[0],
            pages[1],
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            cos_sin=self.cos_sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )
        keys, values = pages.transpose(2, 3).flatten(1, 2)[:, 1 : tokens + 1]
        return self.out(attend(queries, keys, values, batch, spec))
