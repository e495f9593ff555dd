"""Grouped-query attention within each prompt of a step, without a KV cache; causal or not, as the spec says."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import rotated
from pagoda.backends.torch_cuda.model.mixers.attention.block_sparse import block_index
from pagoda.backends.torch_cuda.model.mixers.attention.paged import CudaProjection
from pagoda.backends.torch_cuda.model.mixers.interface import RotaryTables
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_decoder.functions import query_growth
from pagoda.backends.torch_decoder.mixers.packed_attention import SharedCaches, attend
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.models.mixers import Attention

PAGE = 16
"""Tokens per page of the temporary K and V; slot 0 is unused."""


class CudaPackedAttention:
    """Attention within each prompt of a step. Head n reads KV head n // (N/K).

    K and V are normalised and rotated by the kernel that fills the KV cache, here into temporary pages.
    """

    def __init__(
        self,
        spec: Attention,
        tables: RotaryTables,
        build: CudaBuildContext,
        prefix: str,
        shared: int | None,
    ) -> None:
        """`shared`: the number of its cache if several layers read it."""
        self.spec = spec
        self.shared = shared
        self.project = CudaProjection(spec, tables[spec.rope], build, prefix)
        self.sinks = build.params.get(f"{prefix}.sinks")
        self.varlen = VarlenAttention.of(spec, build.params["embed"].dtype, build.device)
        self.index = None if spec.blocks is None else block_index(spec.blocks, spec, build, prefix)
        self.index_cos_sin = None if spec.blocks is None else tables[spec.blocks.rope]

    def __call__(self, x: Tensor, batch: PackedPrompts, kept: SharedCaches) -> Tensor:
        """Return [T, D] of x [T, D]."""
        spec = self.spec
        positions = batch.positions.int()
        projected = self.project(x, positions)
        if spec.shares_cache_of is None:
            queries, keys, values = self._rotated(projected, positions)
            if self.shared is not None:
                kept[self.shared] = keys, values
        else:
            assert self.shared is not None, "two layers read the cache"
            keys, values = kept[self.shared]
            queries = self.project.queries(projected, positions)
        if spec.query_growth is not None:
            queries = queries * query_growth(spec.query_growth, positions).to(queries.dtype)
        if self.varlen is not None:
            heads = self.varlen(queries, keys, values, batch)
        else:
            masks = {}
            if self.index is not None:
                rotate = partial(rotated, positions=batch.positions, cos_sin=self.index_cos_sin)
                masks = self.index.packed_masks(x, rotate, batch, spec.heads // spec.kv_heads)
            heads = attend(queries, keys, values, batch, spec, masks, sinks=self.sinks)
        return self.project.out(heads.unflatten(1, (spec.heads, -1)), x)

    def _rotated(self, projected: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, N, H], keys [T, K, H] and values [T, K, V], normalised and rotated."""
        spec = self.spec
        tokens = len(projected)
        keys, values = (
            projected.new_empty(tokens // PAGE + 1, spec.kv_heads, PAGE, dim)
            for dim in (spec.head_dim, spec.value_width)
        )
        slots = torch.arange(1, tokens + 1, dtype=torch.int32, device=projected.device)
        queries = self.project.writer(keys, values)(projected, positions, slots)
        keys, values = (pages.transpose(1, 2).flatten(0, 1)[1 : tokens + 1] for pages in (keys, values))
        return queries, keys, values


# Attention within each prompt in one launch: torch's varlen_attn, a FlashAttention kernel.

MAX_HEAD_DIM: Final = 256
HEAD_DIM_MULTIPLE: Final = 8


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Attention of one layer's projected heads within each prompt."""

    spec: Attention
    function: Callable[..., Tensor]  # torch.nn.attention.varlen.varlen_attn
    windows: bool  # it has `window_size`, since torch 2.12, in place of `is_causal`
    groups: bool  # it has `enable_gqa`

    @classmethod
    def of(cls, spec: Attention, dtype: torch.dtype, device: Device) -> VarlenAttention | None:
        """Return it; None on a CPU, for types and score rules that it lacks, and without it in torch."""
        lacks = (spec.sinks, spec.softcap, spec.alibi_slopes, spec.chunk, spec.blocks)
        plain = spec.value_width == spec.head_dim and not any(each not in (None, False) for each in lacks)
        fits = spec.head_dim <= MAX_HEAD_DIM and spec.head_dim % HEAD_DIM_MULTIPLE == 0
        if not (device.use_kernels and plain and fits and dtype in (torch.bfloat16, torch.float16)):
            return None
        return cls.with_function(spec, find_varlen_attn())

    @classmethod
    def with_function(cls, spec: Attention, function: Callable[..., Tensor] | None) -> VarlenAttention | None:
        """Return it; None if there is no function, or one without the windows of the layer."""
        if function is None:
            return None
        names = inspect.signature(function).parameters.keys()
        windows = "window_size" in names
        if spec.window is not None and not windows:
            return None
        return cls(spec, function, windows, "enable_gqa" in names)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, batch: PackedPrompts) -> Tensor:
        """Return [T, N*H] of queries [T, N, H], keys and values [T, K, H]."""
        spec = self.spec
        how = dict[str, Any](scale=self.spec.scale)
        if self.windows:
            seen = -1 if spec.window is None else spec.window - 1
            how["window_size"] = (seen, 0 if spec.causal else seen)
        else:
            how["is_causal"] = spec.causal
        if spec.heads != spec.kv_heads:
            if self.groups:
                how["enable_gqa"] = True
            else:
                keys, values = (each.repeat_interleave(spec.heads // spec.kv_heads, 1) for each in (keys, values))
        starts = batch.query_start
        longest = batch.longest
        return self.function(queries, keys, values, starts, starts, longest, longest, **how).flatten(1)


def find_varlen_attn() -> Callable[..., Tensor] | None:
    """Return torch's function; None if this torch has none."""
    try:
        function: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return function
