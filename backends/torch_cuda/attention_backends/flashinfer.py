"""FlashInfer (package flashinfer-python), which compiles its kernels with nvcc during warm-up.

It plans each step on the host. Prefills are planned from device tensors, so a prefill or mixed step waits for the
previous one; decodes from what the host knows, without waiting, before their graph is replayed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import (
    AttentionRequirements,
    DecodeStep,
    PrefillPart,
    check_flash_limits,
    unsupported_error,
)
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.shared import HeadTerms
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache, to_device
from pagoda.common.engine.steps.contract import Int32
from pagoda.common.models.mixers import Attention

NAME: Final = "FLASHINFER"
PACKAGE: Final = "flashinfer"
DIMS: Final = (64, 128, 256)
WORKSPACE_BYTES: Final = 128 << 20
"""The recommended size; zero before the first use."""
INTEGER_WORKSPACE_BYTES: Final = 8 << 20
"""The size that FlashInfer gives it."""
LAYOUT: Final = "HND"
"""Pages [K, B, H]."""


class FlashInfer:
    """Implements PrefillAttention, and DecodeAttention as `decode`.

    `make_wrapper`: a new BatchPrefillWithPagedKVCacheWrapper for pages [K, B, H].
    """

    def __init__(self, make_wrapper: Callable[[], Any], decode: FlashInferDecode | None = None) -> None:
        self.make_wrapper = make_wrapper
        self.decode = decode
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
        self.make_wrapper = make_wrapper
        self.scale = scale
        self.softcap = softcap
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


class FlashInferDecode:
    """Implements DecodeAttention and PlannedDecode: a wrapper per number of sequences, KV group and spec.

    Wrappers of different sizes never run at once, so they share page indices and FlashInfer's integer workspace.
    """

    def __init__(self, make_wrapper: Callable[..., Any], workspace: Tensor, make_event: Callable[[], Any]) -> None:
        """`make_wrapper`: BatchDecodeWithPagedKVCacheWrapper; `workspace`: bytes; `make_event`: torch.cuda.Event."""
        self.make_wrapper = make_wrapper
        self.workspace = workspace
        self.make_event = make_event
        self._step: DecodeStep | None = None
        self._plans: dict[int, dict[DecodeKey, FlashInferDecodePlan]] = {}
        self._shared: dict[DecodeKey, tuple[Tensor, Tensor]] = {}

    def plan(self, step: DecodeStep) -> None:
        """See PlannedDecode. Plans what the step's layers have used before."""
        self._step = step
        for plan in self._plans.get(_size(step), {}).values():
            plan.make(step)

    def __call__(self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, spec: Attention) -> Tensor:
        """See DecodeAttention. Plans at the first call of a size, which is never captured."""
        step = self._step
        assert step is not None, "the step has been planned"
        assert (len(queries), batch.query_len) == (step.size, 1), "it is this step"
        plans = self._plans.setdefault(_size(step), {})
        key = (cache.group, spec)
        if key not in plans:
            tables = batch.groups[cache.group].tables
            wrapper = self._fixed(step.size, tables.shape[1], key) if step.fixed else self._any_size()
            event = self.make_event()
            plans[key] = FlashInferDecodePlan(wrapper, event, cache, spec, queries)
            plans[key].make(step)
        attended: Tensor = plans[key].wrapper.run(queries, (cache.keys, cache.values))
        return attended

    def _any_size(self) -> Any:
        return self.make_wrapper(self.workspace, LAYOUT, use_tensor_cores=True)

    def _fixed(self, size: int, width: int, key: DecodeKey) -> Any:
        """Return a wrapper whose launches may be captured, for tables of `width` blocks."""
        device = self.workspace.device

        def empty(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        if key not in self._shared or len(self._shared[key][0]) < size * width:
            self._shared[key] = empty(size * width), empty(INTEGER_WORKSPACE_BYTES, torch.uint8)
        indices, integers = self._shared[key]
        wrapper = self.make_wrapper(
            self.workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=empty(size + 1),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=empty(size),
        )
        wrapper.reset_workspace_buffer(self.workspace, integers)
        return wrapper


DecodeKey = tuple[int, Attention]
"""KV group and spec: layers that share a plan."""


def _size(step: DecodeStep) -> int:
    """Return the size that the step's wrappers have; 0: any."""
    return step.size if step.fixed else 0


class FlashInferDecodePlan:
    """A wrapper, and its plan of the newest step."""

    def __init__(self, wrapper: Any, planned: Any, cache: CudaLayerCache, spec: Attention, queries: Tensor) -> None:
        """`planned`: an event."""
        self.wrapper = wrapper
        self._planned = planned
        self._group = cache.group
        kv_heads, self._page, head_dim = cache.keys.shape[1:]
        self._shape = queries.shape[1], kv_heads, head_dim, self._page
        self._rules = {
            "sm_scale": spec.scale,
            "logits_soft_cap": spec.softcap,
            "q_data_type": queries.dtype,
            "kv_data_type": cache.keys.dtype,
        }
        self._device = cache.keys.device
        self._made = False

    def make(self, step: DecodeStep) -> None:
        """Plan the step. Its arrays reach the device in the order of the stream.

        FlashInfer copies from one pinned buffer without waiting, which is overwritten once the last copy is done.
        """
        if self._made:
            self._planned.synchronize()
        starts, indices, last = page_lists(step.kv_lens, step.tables, self._group, step.size, self._page)
        of_host = torch.from_numpy(starts), to_device(indices, self._device), torch.from_numpy(last)
        self.wrapper.plan(*of_host, *self._shape, **self._rules)
        self._planned.record()
        self._made = True


def page_lists(
    kv_lens: Int32, tables: tuple[Int32, ...], group: int, size: int, page: int
) -> tuple[Int32, Int32, Int32]:
    """Return where each of `size` sequences' pages start [size + 1], all pages, and the tokens in the last [size].

    Padding has one token, in the null block.
    """
    real = len(kv_lens)
    pages = np.ones(size, np.int32)
    last = np.ones(size, np.int32)
    pages[:real] = -(-kv_lens // page)
    last[:real] = kv_lens - (pages[:real] - 1) * page
    starts = np.zeros(size + 1, np.int32)
    np.cumsum(pages, out=starts[1:])
    indices = np.zeros(starts[-1], np.int32)
    if real:
        width = int(pages[:real].max())
        indices[: starts[real]] = tables[group][:, :width][np.arange(width) < pages[:real, None]]
    return starts, indices, last


def create(needs: AttentionRequirements) -> FlashInfer:
    """Return the backend. Raise ConfigError if model or cache are unsupported or the package is missing."""
    check_flash_limits(NAME, needs, max(DIMS))
    for dim in {mixer.head_dim for mixer in needs.mixers}.difference(DIMS):
        raise unsupported_error(
            NAME, f"supports heads of {', '.join(map(str, DIMS))} channels, this model's have {dim}"
        )
    try:
        package = importlib.import_module(PACKAGE)
        prefill, decode = (getattr(package, f"Batch{kind}WithPagedKVCacheWrapper") for kind in ("Prefill", "Decode"))
    except (ImportError, AttributeError):
        raise unsupported_error(NAME, "needs the package flashinfer: pip install flashinfer-python") from None
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=needs.device.torch)
    decodes = None if needs.drafts else FlashInferDecode(decode, workspace, torch.cuda.Event)
    return FlashInfer(lambda: prefill(workspace, LAYOUT), decodes)
