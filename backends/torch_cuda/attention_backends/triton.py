"""Our own Triton kernels: every model, cache type and page size."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionKernels, score_rules
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.latent_attention import latent_decode
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import PagedPrefill
from pagoda.backends.torch_cuda.kernels.attention.shared import HeadTerms
from pagoda.backends.torch_cuda.memory.cache import CudaArrayCache, CudaLayerCache
from pagoda.common.models.mixers import Attention, LatentAttention


class TritonAttn:
    """Implements PrefillAttention."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(
        self,
        queries: Tensor,
        batch: CudaStepBatch,
        cache: CudaLayerCache,
        spec: Attention,
        terms: HeadTerms,
        out: Tensor,
    ) -> None:
        """See PrefillAttention."""
        assert batch.tiles is not None, "a prefill or mixed step has tiles"
        attend = cache.prepared.get((terms, batch.tile))
        if attend is None:
            attend = cache.prepared[terms, batch.tile] = self._over(cache, spec, terms, queries, batch.tile)
        attend(queries, batch.groups[cache.group].tables, batch.query_start, batch.kv_lens, batch.tiles, out)

    def _over(
        self, cache: CudaLayerCache, spec: Attention, terms: HeadTerms, queries: Tensor, tile: int | None
    ) -> PagedPrefill:
        return PagedPrefill(
            cache.keys,
            cache.values,
            score_rules(spec, terms, cache),
            dtype=queries.dtype,
            group=queries.shape[1] // cache.keys.shape[1],
            tile=tile,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )


class TritonMla:
    """Implements LatentDecode."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(
        self, absorbed: Tensor, q: Tensor, batch: CudaStepBatch, cache: CudaArrayCache, spec: LatentAttention
    ) -> Tensor:
        """See LatentDecode. Rows of padding are zeros."""
        return latent_decode(
            absorbed,
            q,
            cache.array,
            batch.groups[cache.group].tables[: batch.num_decodes],
            batch.kv_lens[: batch.num_decodes],
            query_len=batch.query_len,
            scale=spec.scale,
            work=batch.work,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )


def own_kernels(device: Device) -> AttentionKernels:
    """Return both."""
    return AttentionKernels(TritonAttn(device), TritonMla(device))
