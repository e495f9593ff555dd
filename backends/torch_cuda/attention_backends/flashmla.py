"""FlashMLA (package flash_mla): latent decode attention on Hopper GPUs, over pages of 64 tokens.

The first layer of a step computes the step's schedule on the device, and the other layers share it. A captured step
computes it again at each replay.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, Protocol

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

NAME: Final = "FLASHMLA"
PACKAGE: Final = "flash_mla"
PAGES: Final = (64,)
"""Tokens per page."""
HOPPER: Final = 9


class FlashMlaPackage(Protocol):
    """What is used of the package."""

    def get_mla_metadata(self) -> tuple[Any, None]:
        """Return an empty schedule, which the first call of the kernel fills."""
        ...

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        *,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the attended latents [S, Q, N, R] of q [S, Q, N, R+D], and their log-sum-exp."""
        ...


class FlashMla:
    """Implements LatentDecode."""

    def __init__(self, package: FlashMlaPackage) -> None:
        self.package = package
        self._step: CudaStepBatch | None = None
        self._schedules: dict[int, Any] = {}  # heads of a rank -> schedule of the step

    def __call__(
        self, absorbed: Tensor, q: Tensor, batch: CudaStepBatch, cache: CudaArrayCache, spec: LatentAttention
    ) -> Tensor:
        """See LatentDecode."""
        part = LatentDecodePart.of(absorbed, q, batch, cache)
        attended, _ = self.package.flash_mla_with_kvcache(
            part.queries,
            cache.array[:, :, None],
            part.tables,
            part.kv_lens,
            spec.latent_dim,
            self._schedule(batch, absorbed.shape[1]),
            softmax_scale=spec.scale,
            causal=True,
        )
        return attended.flatten(0, 1)

    def _schedule(self, batch: CudaStepBatch, heads: int) -> Any:
        if self._step is not batch:
            self._step = batch
            self._schedules.clear()
        if heads not in self._schedules:
            self._schedules[heads] = self.package.get_mla_metadata()[0]
        return self._schedules[heads]


def create(needs: AttentionRequirements) -> FlashMla:
    """Return the backend. Raise ConfigError if GPU, model or cache are unsupported or the package is missing."""
    check_latent_limits(NAME, needs, PAGES)
    if needs.device.chip.capability[0] != HOPPER:
        raise unsupported_error(NAME, f"is for Hopper GPUs, this is {needs.device.name}")
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError:
        raise unsupported_error(
            NAME, f"needs the package {PACKAGE}: build it from github.com/deepseek-ai/FlashMLA"
        ) from None
    return FlashMla(package)
