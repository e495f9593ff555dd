"""FlashAttention 2 as torch ships it: torch.nn.attention.varlen, over pages since torch 2.12.

Its pages hold a multiple of 256 tokens. `num_splits` is 1 always: with several, paged results were wrong
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

from pagoda.backends.torch_cuda.attention_backends.protocol import Longer, Needs, by_token, refusal, refuse_common
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import Attention

NAME: Final = "TORCH_VARLEN"
PAGE: Final = 256
WIDEST: Final = 256


class TorchVarlen:
    """Implements protocol.Prefill. `varlen_attn`: torch's function."""

    def __init__(self, varlen_attn: Callable[..., Tensor]) -> None:
        self.varlen_attn = varlen_attn

    def __call__(
        self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, spec: Attention, out: Tensor
    ) -> None:
        """See protocol.Prefill. Lengths are stated as bounds, which costs programs that end at once, not a wait."""
        part = Longer.of(queries, batch, cache)
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


def create(needs: Needs) -> TorchVarlen:
    """Raises ConfigError for a torch, model or cache that it cannot work with."""
    refuse_common(NAME, needs, WIDEST)
    if any(mixer.softcap is not None for mixer in needs.mixers):
        raise refusal(NAME, "has no soft cap of scores, which this model needs")
    if needs.page % PAGE:
        raise ConfigError(
            "--block-size", f"{NAME} reads pages of {PAGE} tokens, not {needs.page}; use --block-size {PAGE}"
        )
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        function = None
    if function is None or not {"block_table", "num_splits"} <= inspect.signature(function).parameters.keys():
        raise refusal(NAME, f"needs torch 2.12 or later, this is {torch.__version__}")
    return TorchVarlen(function)
