"""What mixers with recurrent state share on a rank: the states of a step, and the functions of `StateMixerOps`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights, rope_queries
from pagoda.backends.torch_cuda.kernels.pointwise import activation
from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import ConvolutionWeights
from pagoda.backends.torch_cuda.kernels.recurrent.gated_norm import GatedNorm, activated, gated_norm
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep
from pagoda.backends.torch_cuda.memory.cache import CudaArrayCache, CudaCache
from pagoda.backends.torch_cuda.model.mixers.interface import CudaMixerOps, RotaryTables
from pagoda.backends.torch_cuda.model.mixers.replay import ReplayedRule, ReplayStep
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_decoder.mixers.recurrence import (
    Gate,
    GateSpec,
    RecurrentMixer,
    StateMixerOps,
    StateRule,
)
from pagoda.backends.torch_decoder.ops import Linear, MixerStep
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.models.mixers import Recurrent
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

SpecT = TypeVar("SpecT", bound=Recurrent)


class CudaPagedRecurrence:
    """One layer over the sequences' states."""

    def __init__(self, layer: RecurrentMixer, number: int, elements: int) -> None:
        """`number`: of its cache; `elements`: of the state of a sequence."""
        self.layer = layer
        self.number = number
        self.elements = elements

    def __call__(self, x: Tensor, batch: CudaStepBatch, caches: Mapping[int, CudaCache]) -> Tensor:
        """Return [T, D] of x [T, D]."""
        cache = caches[self.number]
        assert isinstance(cache, CudaArrayCache), "a recurrence keeps states"
        if batch.replay is not None:
            return self.layer(x, ReplayStep(cache.array, self.elements, cache.group, batch.replay, batch.positions))
        tables = batch.groups[cache.group].tables
        has_inputs = cache.array.shape[1] > self.elements  # of drafts
        step = StateStep(
            cache.array[:, : self.elements] if has_inputs else cache.array,
            tables,
            batch.query_start,
            batch.kv_lens,
            batch.chunks,
            num_decodes=batch.num_decodes,
            positions=batch.positions,
        )
        return self.layer(x, step)


class CudaPackedRecurrence:
    """One layer within each prompt of a step, over states that are dropped after it."""

    def __init__(self, layer: RecurrentMixer, elements: int) -> None:
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


class RankLayer(Generic[SpecT]):
    """Implements StateMixerOps over a rank's parameters of one mixer."""

    def __init__(
        self, spec: SpecT, ops: CudaMixerOps[SpecT], tables: RotaryTables, build: CudaBuildContext, prefix: str
    ) -> None:
        self.spec = spec
        self.build = build
        self.prefix = prefix
        self._ops = ops
        self._tables = tables

    def project(self, *groups: tuple[str, ...]) -> Callable[[Tensor], Sequence[Tensor]]:
        columns = self._columns()
        parts = []
        for group in groups:
            tensor, first = columns[group[0]]
            parts.append((tensor, first.start, columns[group[-1]][1].stop))
        ends = {tensor: columns_of.stop for tensor, columns_of in columns.values()}
        maps = {tensor: self.build.linear(f"{self.prefix}.{tensor}") for tensor, _, _ in parts}

        def project(x: Tensor) -> list[Tensor]:
            projected = {tensor: linear(x) for tensor, linear in maps.items()}
            return [
                projected[tensor] if (start, stop) == (0, ends[tensor]) else projected[tensor][:, start:stop]
                for tensor, start, stop in parts
            ]

        return project

    def _columns(self) -> dict[str, tuple[str, slice]]:
        """Return for each parameter the tensor that it is stored in, and which of its rows."""
        columns: dict[str, tuple[str, slice]] = {}
        ends: Counter[str] = Counter()
        kv_heads = self._ops.key_heads(self.spec)
        for param in self.spec.parameters(self.build.width):
            tensor = self._ops.fused.get(param.name, param.name)
            cut = self.build.shard.cut(param.axes[0], param.shape[0], kv_heads)
            first = ends[tensor]
            ends[tensor] += cut.stop - cut.start
            columns[param.name] = tensor, slice(first, ends[tensor])
        return columns

    def linear(self, name: str) -> Linear:
        return self.build.linear(f"{self.prefix}.{name}")

    def out(self) -> Linear:
        return self.build.summed(f"{self.prefix}.out")

    def silu(self, x: Tensor) -> Tensor:
        return activation.plain(x, "silu", use_kernel=self.build.device.use_kernels)

    def gate(self, spec: GateSpec) -> Gate:
        return RankNorm(spec, self.build, f"{self.prefix}.norm")

    def rotation(self, norm: Norm | None, name: str, rope: Rope | None, head_dim: int) -> Callable[..., Tensor]:
        cos_sin = self._tables[rope]
        weights = None if norm is None else NormWeights(self.tensor(name), norm.eps, norm.unit_offset)
        use_kernel = self.build.device.use_kernels

        def rotated(x: Tensor, step: StateStep | ReplayStep) -> Tensor:
            assert step.positions is not None, "the step has positions"
            heads = x.shape[1] // head_dim
            return rope_queries(
                x, step.positions, heads=heads, cos_sin=cos_sin, q_norm=weights, use_kernel=use_kernel
            ).flatten(1)

        return rotated

    def tensor(self, name: str) -> Tensor:
        """Return a small parameter."""
        return self.build.params[f"{self.prefix}.{name}"]

    def convolution(self) -> ConvolutionWeights:
        """Return the weights of the convolution."""
        return ConvolutionWeights(self.tensor("conv"), self.build.params.get(f"{self.prefix}.conv_bias"))

    def share(self, total: int) -> int:
        """Return how many of the heads or groups the rank has."""
        return self.build.shard.share(total)


def recurrent_ops(
    kind: type[SpecT],
    mixer: Callable[[SpecT, StateMixerOps, StateRule], RecurrentMixer],
    rule: Callable[[SpecT, RankLayer[SpecT]], StateRule],
    *,
    fused: Mapping[str, str],
    matrices: frozenset[str],
    small_matrices: frozenset[str] = frozenset(),
    key_heads: Callable[[SpecT], int] = lambda spec: 1,
    dropped: frozenset[int] = frozenset(),
) -> CudaMixerOps[SpecT]:
    """Return what the backend knows of a kind with recurrent state. `mixer`: its projections; `rule`: its kernels.

    `dropped`: numbers of the rule's projections that no state follows from. No linear map of the rule has adapters.
    """

    def make(spec: SpecT, tables: RotaryTables, build: CudaBuildContext, prefix: str) -> RecurrentMixer:
        own = RankLayer(spec, ops, tables, build, prefix)
        return mixer(spec, own, ReplayedRule(rule(spec, own), dropped))

    def paged(
        spec: SpecT, tables: RotaryTables, build: CudaBuildContext, prefix: str, numbers: tuple[int, ...]
    ) -> MixerStep:
        (cache,) = spec.caches()
        layer = make(spec, tables, build, prefix)
        return CudaPagedRecurrence(layer, numbers[0], cache.elements_of_rank(build.comm.size))

    def packed(
        spec: SpecT, tables: RotaryTables, build: CudaBuildContext, prefix: str, shared: int | None
    ) -> MixerStep:
        (cache,) = spec.caches()
        return CudaPackedRecurrence(make(spec, tables, build, prefix), cache.block_elements(1))

    ops = CudaMixerOps(
        kind,
        paged,
        packed,
        fused=fused,
        matrices=matrices,
        small_matrices=small_matrices,
        key_heads=key_heads,
    )
    return ops


class RankNorm:
    """The gated norm of a rank's channels; a group may lie on several ranks."""

    def __init__(self, spec: GateSpec, build: CudaBuildContext, name: str) -> None:
        """`name`: of its weights. `spec.groups`: of the channels of all ranks."""
        comm = build.comm
        norm = spec.norm
        self.comm = comm
        self.use_kernel = build.device.use_kernels
        self.groups = spec.groups
        self.split = norm is not None and spec.groups % comm.size != 0
        own = max(spec.groups // comm.size, 1)
        if norm is None:
            self.spec = GatedNorm(None, own, activation=spec.activation)
            return
        assert norm.kind == "rms", "the kernel computes an RMSNorm"
        assert norm.scale, "the kernel multiplies by a weight"
        weight = build.params[name]
        self.spec = GatedNorm(weight, own, norm.eps, norm.unit_offset, spec.activation, spec.gate_first)

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
