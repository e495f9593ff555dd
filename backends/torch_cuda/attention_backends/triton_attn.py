"""Our own Triton kernel: every model, cache type and page size."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionRequirements
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.prefill_attention import prefill_attention
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.common.models.mixers import Attention


class TritonAttn:
    """Implements PrefillAttention."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(
        self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, spec: Attention, out: Tensor
    ) -> None:
        """See PrefillAttention."""
        assert batch.tiles is not None, "a prefill or mixed step has tiles"
        prefill_attention(
            queries,
            cache.keys,
            cache.values,
            batch.groups[cache.group].tables,
            batch.query_start,
            batch.kv_lens,
            batch.tiles,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            out=out,
            tile=batch.tile,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )


def create(needs: AttentionRequirements) -> TritonAttn:
    return TritonAttn(needs.device)
