"""A rank's decoder whose layers are transformers' code (--model-impl transformers): attention by our kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from pagoda.backends.fallback.model import TransformersModel
from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.torch_cuda.attention_backends.protocol import PrefillAttention
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import RopeCache
from pagoda.backends.torch_cuda.kernels.attention.shared import HeadTerms
from pagoda.backends.torch_cuda.memory.cache import CudaCache, CudaLayerCache
from pagoda.backends.torch_cuda.model.mixers.attention.paged import CudaPagedHeads
from pagoda.backends.torch_cuda.model.parts import linear
from pagoda.backends.torch_decoder.media_rows import MediaRows, without_rows
from pagoda.common.backend import Weight
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.quantization.tensors import dequantized


class CudaTransformersDecoder:
    """Tokens in, hidden states and logits out, as of `CudaDecoder`. Its steps are not captured."""

    def __init__(
        self,
        spec: TransformersSpec,
        weights: Iterable[Weight],
        dtype: torch.dtype,
        max_len: int,
        device: Device,
        prefill: PrefillAttention,
    ) -> None:
        """Load the model in host memory; `place` moves it. `max_len`: served context. Raise WeightError."""
        self.spec = spec
        self.device = device
        self.prefill = prefill
        arrays = dequantized(weights, "torch_cuda")
        tensors = ((name, to_torch(array)) for name, array in arrays)
        self.model = TransformersModel.load(spec, tensors, dtype, max_len)
        self.num_bytes = self.model.num_bytes

    def place(self) -> None:
        """Move the weights to the device. Raise ModelError, see TransformersModel."""
        self.model.place(self.device.torch)
        self.model.set_head(lambda head: linear(head.weight, head.bias, self.device, dtype=torch.float32))

    @property
    def embedding_dtype(self) -> torch.dtype:
        """Dtype of the embedding table, and of rows of media."""
        return self.model.dtype

    @torch.inference_mode()
    def hidden(self, batch: CudaStepBatch, caches: Mapping[int, CudaCache], media: MediaRows | None = None) -> Tensor:
        """Return hidden states [T, D] after the final norm; K and V are written to the caches.

        `media`: rows that token ids may name; None: none does.
        """
        ids = batch.token_ids.long()
        positions = batch.positions.long()
        attend = partial(self._attend, batch, caches)
        if media is None:
            return self.model.hidden(ids, positions, attend)
        return self.model.hidden(without_rows(ids), positions, attend, lambda rows: media.insert(rows, ids))

    def _attend(
        self,
        batch: CudaStepBatch,
        caches: Mapping[int, CudaCache],
        number: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        _: object,
    ) -> Tensor:
        cache = caches[number]
        assert isinstance(cache, CudaLayerCache), "attention keeps K and V"
        if self not in cache.prepared:
            heads = CudaPagedHeads(self.spec.attention[number], self.device, self.prefill, HeadTerms(sinks))
            cache.prepared[self] = self._writer(cache, q.shape[1], k.shape[1]), heads
        write, paged = cache.prepared[self]
        qkv = torch.cat((q, k, v), 1).flatten(1)
        slots = batch.groups[cache.group].slots
        attended: Tensor = paged.attend(write(qkv, batch.positions, slots), batch, cache)
        return attended

    def _writer(self, cache: CudaLayerCache, heads: int, kv_heads: int) -> RopeCache:
        return RopeCache(
            cache.keys,
            cache.values,
            heads=heads,
            kv_heads=kv_heads,
            cos_sin=None,
            q_norm=None,
            k_norm=None,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, V] of hidden [R, D]; in `out` if given."""
        logits = self.model.logits(hidden)
        return logits.contiguous() if out is None else out.copy_(logits)
