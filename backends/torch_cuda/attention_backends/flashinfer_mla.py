"""FlashInfer's latent decode attention (package flashinfer-python), TensorRT-LLM's kernel on Blackwell GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import (
    AttentionRequirements,
    LatentDecodePart,
    check_latent_limits,
    unsupported_error,
)
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.memory.cache import CudaArrayCache
from pagoda.common.models.mixers import LatentAttention

NAME: Final = "FLASHINFER_MLA"
MODULE: Final = "flashinfer.mla"
PAGES: Final = (32, 64)
"""Tokens per page."""
NOPE_DIM: Final = 128
TABLE_TOKENS: Final = 128
"""The rows of block tables cover a multiple of these tokens."""
BLACKWELL: Final = 10
WORKSPACE_BYTES: Final = 128 << 20
"""The recommended size; zero before the first use."""


class FlashInferMla:
    """Implements LatentDecode. `decode`: flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla; `workspace`: bytes."""

    def __init__(self, decode: Callable[..., Tensor], workspace: Tensor) -> None:
        self.decode = decode
        self.workspace = workspace

    def __call__(
        self, absorbed: Tensor, q: Tensor, batch: CudaStepBatch, cache: CudaArrayCache, spec: LatentAttention
    ) -> Tensor:
        """See LatentDecode."""
        part = LatentDecodePart.of(absorbed, q, batch, cache)
        page = cache.array.shape[1]
        missing = -part.tables.shape[1] % (TABLE_TOKENS // page)
        tables = F.pad(part.tables, (0, missing)) if missing else part.tables.contiguous()
        attended = self.decode(
            query=part.queries,
            kv_cache=cache.array[:, None],
            workspace_buffer=self.workspace,
            qk_nope_head_dim=spec.nope_dim,
            kv_lora_rank=spec.latent_dim,
            qk_rope_head_dim=spec.rope.dim,
            block_tables=tables,
            seq_lens=part.kv_lens,
            max_seq_len=tables.shape[1] * page,
            bmm1_scale=spec.scale,
        )
        return attended.view(absorbed.shape)


def create(needs: AttentionRequirements) -> FlashInferMla:
    """Return the backend. Raise ConfigError if GPU, model or cache are unsupported or the package is missing."""
    check_latent_limits(NAME, needs, PAGES)
    if needs.device.chip.capability[0] != BLACKWELL:
        raise unsupported_error(NAME, f"is for Blackwell GPUs, this is {needs.device.name}")
    if needs.dtype != torch.bfloat16:
        raise unsupported_error(NAME, f"computes in bfloat16, not in {str(needs.dtype).removeprefix('torch.')}")
    for spec in needs.latents:
        if spec.nope_dim != NOPE_DIM:
            raise unsupported_error(
                NAME, f"supports keys of {NOPE_DIM} channels without RoPE, this model's have {spec.nope_dim}"
            )
    try:
        decode: Callable[..., Tensor] = importlib.import_module(MODULE).trtllm_batch_decode_with_kv_cache_mla
    except (ImportError, AttributeError):
        raise unsupported_error(NAME, "needs the package flashinfer: pip install flashinfer-python") from None
    return FlashInferMla(decode, torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=needs.device.torch))
