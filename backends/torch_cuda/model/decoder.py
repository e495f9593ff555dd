"""The decoder of a rank: the torch decoder over kernels, with adapters, and logits on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionKernels
from pagoda.backends.torch_cuda.attention_backends.triton import own_kernels
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import span_tokens
from pagoda.backends.torch_cuda.memory.cache import CudaCache
from pagoda.backends.torch_cuda.memory.offload import Offload
from pagoda.backends.torch_cuda.model.adapters import CudaAdapters
from pagoda.backends.torch_cuda.model.feed_forward import paged_makers
from pagoda.backends.torch_cuda.model.parameters import RankParams
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, linear, rotary_tables
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, Comm
from pagoda.backends.torch_decoder.decoder import TorchModel
from pagoda.backends.torch_decoder.media_rows import MediaRows
from pagoda.common.models.spec import ModelSpec


class CudaDecoder(TorchModel):
    """Tokens in, hidden states and logits out, without synchronizing with the host."""

    def __init__(
        self,
        spec: ModelSpec,
        params: RankParams,
        device: Device,
        max_len: int,
        comm: Comm = SINGLE_RANK,
        attention: AttentionKernels | None = None,
        offload: Offload | None = None,
        *,
        batch_invariant: bool = False,
        adapters: CudaAdapters | None = None,
    ) -> None:
        build = CudaBuildContext(
            (params if offload is None else offload.staged(params)).with_shared_blocks(spec.shared_blocks),
            device,
            comm,
            attention or own_kernels(device),
            spec.width,
            span_tokens(max_len) if batch_invariant else None,
            adapters,
        )
        tables = rotary_tables(spec.ropes, max_len, device.torch)
        super().__init__(spec, build, paged_makers(build, tables), tuple if offload is None else offload.wrap)
        self.build = build
        self.head_bias = params.get("head_bias")
        self.head = linear(
            params["embed" if spec.tied else "head"],
            self.head_bias,
            device,
            batch_invariant=batch_invariant,
            dtype=torch.float32,
        )

    @property
    def embedding_dtype(self) -> torch.dtype:
        """Dtype of the embedding table, and of rows of media."""
        return self.build.table_dtype

    @torch.inference_mode()
    def hidden(self, batch: CudaStepBatch, caches: Mapping[int, CudaCache], media: MediaRows | None = None) -> Tensor:
        """Return hidden states [T, D] after the final norm; the caches, by number, are written.

        `media`: rows that token ids may name; None: none does.
        """
        self._begin(batch)
        x = self.embed(batch.token_ids, batch.positions, media=media)
        return self.stack(batch.token_ids, x, batch, caches)

    @torch.inference_mode()
    def hidden_and_captured(
        self,
        batch: CudaStepBatch,
        caches: Mapping[int, CudaCache],
        captured: tuple[int, ...],
        media: MediaRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the same, and the inputs of the `captured` layers side by side, [T, C*D]."""
        self._begin(batch)
        x = self.embed(batch.token_ids, batch.positions, media=media)
        return self.stack.captured(captured, x, batch, caches)

    def _begin(self, batch: CudaStepBatch) -> None:
        """Let the layers add the adapters of the step's tokens."""
        if self.build.adapters is not None:
            self.build.adapters.begin(batch.adapter_slots, batch_invariant=self.build.batch_invariant)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None, adapter_slots: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, V] of hidden [R, D], contiguous, on every rank; in `out` if given.

        adapter_slots int32 [R]: of the rows' adapters, as in `CudaStepBatch`; None: no row has one.
        """
        adapters = self.build.adapters
        hidden = self.head_input(hidden)
        of_rank = self.head(hidden)
        if adapters is not None and adapter_slots is not None:
            invariant = self.build.batch_invariant
            of_rank = adapters.add_to_logits(of_rank, hidden, adapter_slots, self.head_bias, batch_invariant=invariant)
        gathered = self.build.comm.gather_last(of_rank)[:, : self.spec.vocab]
        return self.scaled(gathered.contiguous() if out is None else out.copy_(gathered))
