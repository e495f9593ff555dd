"""What mixers with recurrent state share: where the states of a step lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from pagoda.backends.reference.execution import PackedPrompts
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.recurrent.gated_norm import GatedNorm, activated, gated_norm
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep
from pagoda.backends.torch_cuda.memory.cache import CudaArrayCache, CudaCache
from pagoda.backends.torch_cuda.model.mixers.interface import CudaMixerOps, RotaryTables
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_decoder.ops import MixerStep
from pagoda.common.models.mixers import Recurrent
from pagoda.common.models.primitives import Norm

SpecT = TypeVar("SpecT", bound=Recurrent)


class Recurrence(Protocol):
    """One layer's projections and recurrence on a rank, whatever holds the states."""

    def __call__(self, x: Tensor, step: StateStep) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        ...


class CudaPagedRecurrence:
    """One layer over the sequences' states."""

    def __init__(self, layer: Recurrence, number: int) -> None:
        """`number`: of its cache."""
        self.layer = layer
        self.number = number

    def __call__(self, x: Tensor, batch: CudaStepBatch, caches: Mapping[int, CudaCache]) -> Tensor:
        """Return [T, D] of x [T, D]."""
        cache = caches[self.number]
        assert isinstance(cache, CudaArrayCache), "a recurrence keeps states"
        tables = batch.groups[cache.group].tables
        lengths = batch.query_start, batch.kv_lens
        step = StateStep(cache.array, tables, *lengths, batch.chunks, batch.num_decodes, batch.positions)
        return self.layer(x, step)


class CudaPackedRecurrence:
    """One layer within each prompt of a step, over states that are dropped after it."""

    def __init__(self, layer: Recurrence, elements: int) -> None:
        """`elements`: of the state of a sequence."""
        self.layer = layer
        self.elements = elements

    def __call__(self, x: Tensor, batch: PackedPrompts, *_: object) -> Tensor:
        """Return [T, D] of x [T, D]."""
        out = torch.empty_like(x)
        for group in batch.groups:
            tokens = x[group.rows].reshape(-1, x.shape[1])
            out[group.rows] = self._prompts(tokens, group.length).view(out[group.rows].shape)
        return out

    def _prompts(self, x: Tensor, length: int) -> Tensor:
        """Return [T, D] of x [T, D], prompts of one length."""

        def int32(values: Tensor) -> Tensor:
            return values.to(x.device, torch.int32)

        count = len(x) // length
        per_prompt = -(-length // CHUNK)
        sequences = torch.arange(count).repeat_interleave(per_prompt)
        firsts = torch.arange(0, length, CHUNK).repeat(count)
        step = StateStep(
            torch.empty(count, self.elements, dtype=torch.float32, device=x.device),
            int32(torch.arange(count)[:, None]),
            int32(torch.arange(0, len(x) + 1, length)),
            int32(torch.full((count,), length)),
            int32(torch.stack((sequences, firsts), 1)),
            num_decodes=0,
            positions=int32(torch.arange(length).repeat(count)),
        )
        return self.layer(x, step)


def recurrent_ops(
    kind: type[SpecT],
    layer: Callable[[SpecT, RotaryTables, CudaBuildContext, str], Recurrence],
    *,
    fused: Mapping[str, str],
    matrices: frozenset[str],
    small_matrices: frozenset[str] = frozenset(),
    key_heads: Callable[[SpecT], int] = lambda spec: 1,
) -> CudaMixerOps[SpecT]:
    """Return what the backend knows of a kind with recurrent state. `layer`: returns its projections and recurrence."""

    def paged(
        spec: SpecT, tables: RotaryTables, build: CudaBuildContext, prefix: str, numbers: tuple[int, ...]
    ) -> MixerStep:
        return CudaPagedRecurrence(layer(spec, tables, build, prefix), numbers[0])

    def packed(
        spec: SpecT, tables: RotaryTables, build: CudaBuildContext, prefix: str, shared: int | None
    ) -> MixerStep:
        (cache,) = spec.caches()
        return CudaPackedRecurrence(layer(spec, tables, build, prefix), cache.block_elements(1))

    return CudaMixerOps(
        kind,
        paged,
        packed,
        fused=fused,
        matrices=matrices,
        small_matrices=small_matrices,
        key_heads=key_heads,
    )


class RankNorm:
    """The gated norm of a rank's channels; a group may lie on several ranks."""

    def __init__(
        self,
        norm: Norm | None,
        build: CudaBuildContext,
        name: str,
        groups: int,
        activation: Literal["silu", "sigmoid"] = "silu",
        *,
        gate_first: bool = False,
    ) -> None:
        """`groups`: of the channels of all ranks, each normalised by itself."""
        comm = build.comm
        self.comm = comm
        self.use_kernel = build.device.use_kernels
        self.groups = groups
        self.split = norm is not None and groups % comm.size != 0
        own = max(groups // comm.size, 1)
        if norm is None:
            self.spec = GatedNorm(None, own, activation=activation)
            return
        assert norm.kind == "rms", "the kernel computes an RMSNorm"
        assert norm.scale, "the kernel multiplies by a weight"
        self.spec = GatedNorm(build.params[name], own, norm.eps, norm.unit_offset, activation, gate_first)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return norm(x) * activation(gate) [T, W], or norm(x * activation(gate)); see `GatedNorm`."""
        mean_square = self._mean_square(x, gate) if self.split else None
        return gated_norm(x, gate, self.spec, mean_square=mean_square, use_kernel=self.use_kernel)

    def _mean_square(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return float32 [T, 1], over all channels of the group that this rank has a part of."""
        comm = self.comm
        mixed = x.float()
        if self.spec.gate_first:
            mixed = mixed * activated(gate, self.spec)
        ranks = comm.size // self.groups  # of a group
        group = comm.rank // ranks
        means = mixed.new_zeros(len(x), self.groups)
        means[:, group] = mixed.square().mean(1) / ranks
        return comm.all_reduce(means)[:, group : group + 1].contiguous()
