"""FlashAttention 3 (package flash_attn_interface, built from source): pages of any size, soft caps.

It has not run with pagoda on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import (
    AttentionRequirements,
    PrefillPart,
    by_token,
    check_flash_limits,
    unsupported_error,
)
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.shared import HeadTerms
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.common.models.mixers import Attention

NAME: Final = "FLASH_ATTN"
PACKAGE: Final = "flash_attn_interface"
HOPPER: Final = 9
MAX_HEAD_DIM: Final = 256


class FlashAttn:
    """Implements PrefillAttention, and DecodeAttention as `decode`, with the package's flash_attn_with_kvcache."""

    def __init__(self, with_kvcache: Callable[..., Tensor]) -> None:
        self.with_kvcache = with_kvcache

    def __call__(
        self,
        queries: Tensor,
        batch: CudaStepBatch,
        cache: CudaLayerCache,
        spec: Attention,
        terms: HeadTerms,
        out: Tensor,
    ) -> None:
        """See PrefillAttention. One split, so that a sequence's result does not depend on the others."""
        part = PrefillPart.of(queries, batch, cache)
        out[part.rows] = self.with_kvcache(
            part.queries,
            by_token(cache.keys),
            by_token(cache.values),
            cache_seqlens=part.kv_lens,
            page_table=part.tables,
            cu_seqlens_q=part.query_start,
            max_seqlen_q=len(part.queries),
            softmax_scale=spec.scale,
            causal=True,
            window_size=(-1, 0),
            softcap=spec.softcap or 0.0,
            num_splits=1,
        )

    def decode(self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, spec: Attention) -> Tensor:
        """See DecodeAttention. The package chooses the splits from what a captured graph fixes."""
        seqs = batch.num_decodes
        out: Tensor = self.with_kvcache(
            queries.unflatten(0, (seqs, batch.query_len)),
            by_token(cache.keys),
            by_token(cache.values),
            cache_seqlens=batch.kv_lens[:seqs].clamp_min(1),  # padding reads the null block
            page_table=batch.groups[cache.group].tables[:seqs],
            softmax_scale=spec.scale,
            causal=True,
            window_size=(-1, 0),
            softcap=spec.softcap or 0.0,
            num_splits=0,
        )
        return out.flatten(0, 1)


def create(needs: AttentionRequirements) -> FlashAttn:
    """Return the backend. Raise ConfigError if GPU, model or cache are unsupported or the package is missing."""
    check_flash_limits(NAME, needs, MAX_HEAD_DIM)
    if needs.device.chip.capability[0] != HOPPER:
        raise unsupported_error(NAME, f"is for Hopper GPUs, this is {needs.device.name}")
    try:
        function: Callable[..., Tensor] = importlib.import_module(PACKAGE).flash_attn_with_kvcache
    except ImportError:
        raise unsupported_error(
            NAME,
            f"needs the package {PACKAGE}: build it from the folder hopper of github.com/Dao-AILab/flash-attention",
        ) from None
    return FlashAttn(function)
