"""FlashInfer (package flashinfer-python), which compiles its kernels with nvcc during warm-up.

It plans each step on the host from device tensors, so a prefill or mixed step waits for the previous one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import (
    AttentionRequirements,
    PrefillPart,
    check_flash_limits,
    unsupported_error,
)
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention import HeadTerms
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.common.models.mixers import Attention

NAME: Final = "FLASHINFER"
PACKAGE: Final = "flashinfer"
DIMS: Final = (64, 128, 256)
WORKSPACE_BYTES: Final = 128 << 20
"""The recommended size."""


class FlashInfer:
    """Implements PrefillAttention. `make_wrapper`: a new BatchPrefillWithPagedKVCacheWrapper for pages [K, B, H]."""

    def __init__(self, make_wrapper: Callable[[], Any]) -> None:
        self.make_wrapper = make_wrapper
        self._plans: dict[tuple[int, Attention], FlashInferPlan] = {}

    def __call__(
        self,
        queries: Tensor,
        batch: CudaStepBatch,
        cache: CudaLayerCache,
        spec: Attention,
        terms: HeadTerms,
        out: Tensor,
    ) -> None:
        """See PrefillAttention. Layers of one group and spec share a plan."""
        part = PrefillPart.of(queries, batch, cache)
        plan = self._plans.setdefault((cache.group, spec), FlashInferPlan(self.make_wrapper, spec.scale, spec.softcap))
        plan.make(batch, part, cache)
        end = part.rows.start + plan.tokens
        out[part.rows.start : end] = plan.wrapper.run(part.queries[: plan.tokens], (cache.keys, cache.values))


class FlashInferPlan:
    """FlashInfer's plan of a step, made once per step and shared by layers."""

    def __init__(self, make_wrapper: Callable[[], Any], scale: float, softcap: float | None) -> None:
        self.make_wrapper, self.scale, self.softcap = make_wrapper, scale, softcap
        self.wrapper: Any = None
        self.tokens = 0
        self._step: CudaStepBatch | None = None

    def make(self, batch: CudaStepBatch, part: PrefillPart, cache: CudaLayerCache) -> None:
        """Plan the step unless that is done."""
        if self._step is batch:
            return
        if self.wrapper is None:
            self.wrapper = self.make_wrapper()
        kv_heads, page, head_dim = cache.keys.shape[1:]
        pages = (part.kv_lens + page - 1) // page
        used = torch.arange(part.tables.shape[1], device=pages.device) < pages[:, None]
        self.wrapper.plan(
            part.query_start,
            F.pad(pages.cumsum(0, dtype=torch.int32), (1, 0)),
            part.tables[used],
            part.kv_lens - (pages - 1).clamp_min(0) * page,
            part.queries.shape[1],
            kv_heads,
            head_dim,
            page,
            causal=True,
            sm_scale=self.scale,
            logits_soft_cap=self.softcap,
            q_data_type=part.queries.dtype,
            kv_data_type=cache.keys.dtype,
        )
        self.tokens = int(part.query_start[-1])
        self._step = batch


def create(needs: AttentionRequirements) -> FlashInfer:
    """Return the backend. Raise ConfigError if model or cache are unsupported or the package is missing."""
    check_flash_limits(NAME, needs, max(DIMS))
    for dim in {mixer.head_dim for mixer in needs.mixers}.difference(DIMS):
        raise unsupported_error(
            NAME, f"supports heads of {', '.join(map(str, DIMS))} channels, this model's have {dim}"
        )
    try:
        wrapper: Callable[..., Any] = importlib.import_module(PACKAGE).BatchPrefillWithPagedKVCacheWrapper
    except ImportError:
        raise unsupported_error(NAME, "needs the package flashinfer: pip install flashinfer-python") from None
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=needs.device.torch)
    return FlashInfer(lambda: wrapper(workspace, "HND"))
