"""FlashAttention 2 as shipped with torch: torch.nn.attention.varlen, paged since torch 2.12.

Its pages have a multiple of 256 tokens. `num_splits` is always 1: with more, paged results were wrong
(github.com/pytorch/pytorch/issues/194167).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
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
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention

NAME: Final = "TORCH_VARLEN"
PAGE: Final = 256
MAX_HEAD_DIM: Final = 256


class TorchVarlen:
    """Implements PrefillAttention with torch's varlen_attn."""

    def __init__(self, varlen_attn: Callable[..., Tensor]) -> None:
        self.varlen_attn = varlen_attn

    def __call__(
        self,
        queries: Tensor,
        batch: CudaStepBatch,
        cache: CudaLayerCache,
        spec: Attention,
        terms: HeadTerms,
        out: Tensor,
    ) -> None:
        """See PrefillAttention. Maximum lengths are upper bounds: surplus programs end at once."""
        part = PrefillPart.of(queries, batch, cache)
        out[part.rows] = self.varlen_attn(
            part.queries,
            by_token(cache.keys),
            by_token(cache.values),
            part.query_start,
            F.pad(part.kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            len(part.queries),
            part.tables.shape[1] * cache.keys.shape[2],
            scale=spec.scale,
            window_size=(-1, 0),
            enable_gqa=queries.shape[1] != cache.keys.shape[1],
            seqused_k=part.kv_lens,
            block_table=part.tables,
            num_splits=1,
        )


def create(needs: AttentionRequirements) -> TorchVarlen:
    """Return the backend. Raise ConfigError if torch, model or cache are unsupported."""
    check_flash_limits(NAME, needs, MAX_HEAD_DIM)
    if any(mixer.softcap is not None for mixer in needs.mixers):
        raise unsupported_error(NAME, "does not support the logit soft cap of this model")
    if needs.page % PAGE:
        raise ConfigError(
            "--block-size", f"{NAME} reads pages of {PAGE} tokens, not {needs.page}; use --block-size {PAGE}"
        )
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        function = None
    if function is None or not {"block_table", "num_splits"} <= inspect.signature(function).parameters.keys():
        raise unsupported_error(NAME, f"needs torch 2.12 or later, this is {torch.__version__}")
    return TorchVarlen(function)
