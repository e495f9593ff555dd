"""What each kind of mixer tells the other parts of the backend: `MixerOps`, which every room of this folder implements.

`registry.MIXERS` has those of all kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import jax
from flax import nnx

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, PoolShape
from pagoda.backends.jax_tpu.model.layers import Caches, Rotations
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext
from pagoda.backends.jax_tpu.model.slots import Stack, StateStack
from pagoda.backends.jax_tpu.weights.arrange import Placement
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.models.mixers import Mixer

MixerT = TypeVar("MixerT", bound=Mixer)


class MixerModule(nnx.Module):
    """A layer's mixer with its parameters."""

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacks of the mixer's caches, block table and layer of each (int32 [2 n]) -> [T, D], caches."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The attention work of a batch."""

    kv_tokens: int  # context tokens whose K and V are read
    pairs: int  # unmasked (query, key) pairs


@dataclass(frozen=True, slots=True)
class MixerCost:
    """Minimum HBM bytes and FLOP of a mixer beside its matrices, on one device."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class CostedStep:
    """A program whose mixers' costs are asked for, and the batch that it runs."""

    tensor: int  # devices each layer is sharded over
    kernel: KernelChoice
    itemsize: int  # bytes of a number of the activations
    shape: StepShape | PoolShape
    load: BatchLoad


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The sizes of the largest step, for which memory is planned."""

    tokens: int
    seqs: int
    max_pages: int  # of a sequence


class MixerOps(ABC, Generic[MixerT]):
    """What the backend knows of one kind of mixer. `tensor`: devices each layer is sharded over."""

    exchanges_pieces: ClassVar[bool] = False
    """Whether the module exchanges the tokens of a scattered step in pieces, see `decoder.exchanged_pieces`."""

    @abstractmethod
    def module(self, spec: MixerT, width: int, build: JaxBuildContext) -> MixerModule:
        """Create the module, on a residual stream of `width` channels."""

    @abstractmethod
    def placements(self, spec: MixerT, tensor: int) -> Iterator[tuple[str, Placement]]:
        """Yield where each canonical parameter lies in the module, and how it is arranged."""

    @abstractmethod
    def stacks(self, spec: MixerT, tensor: int) -> tuple[tuple[Stack, ...], ...]:
        """Return for each of the mixer's caches the arrays in which it is stored."""

    @abstractmethod
    def cost(self, spec: MixerT, step: CostedStep) -> MixerCost:
        """Return the cost of the mixer's kernels."""

    def cost_beside_xla(self, spec: MixerT, step: CostedStep) -> MixerCost:
        """Return the cost in a pooling model that also has bidirectional attention, which XLA computes."""
        return self.cost(spec, step)

    def without_layer_numbers(self, spec: MixerT) -> MixerT:
        """Return the same mixer for all layers that compute the same: they may differ in whose cache they read."""
        return spec

    def has_projection(self, spec: MixerT, name: str) -> bool:
        """Return whether the parameter `name` has an array of its own, which adapters change."""
        return True

    def cache_without_scale(self, spec: MixerT) -> str | None:
        """Return words for a cache that cannot be divided by a scale to be stored in 8 bits; None if it can be."""
        return None

    def scored_heads(self, spec: MixerT) -> int:
        """Return the query heads whose scores a pooling step holds for a tile of queries and keys."""
        return 0

    def scratch_bytes(self, spec: MixerT, kernel: KernelChoice, tensor: int, largest: LargestStep) -> int:
        """Return the bytes of a layer's scratch cache in the largest step, on one device."""
        return 0

    def untuned(self, spec: MixerT, kernel: KernelChoice, tensor: int) -> tuple[str, ...]:
        """Return the keys that tuning.json of the kernel lacks for heads of one device, and what is used instead."""
        return ()


class RecurrentOps(MixerOps[MixerT]):
    """What kinds with recurrent state in their single cache have in common."""

    state_flops: ClassVar[int] = 4
    """FLOP per token and element of the state: k v and q S."""

    @abstractmethod
    def state_stacks(self, spec: MixerT, tensor: int) -> tuple[Stack, ...]:
        """Return the arrays in which the state is stored."""

    def stacks(self, spec: MixerT, tensor: int) -> tuple[tuple[Stack, ...], ...]:
        """Return the arrays of the single cache."""
        return (self.state_stacks(spec, tensor),)

    def cost(self, spec: MixerT, step: CostedStep) -> MixerCost:
        """Return the cost of a recurrence in float32: states are read and written once.

        The convolution's tails and products are not counted.
        """
        moved = 0
        flops = 0
        for stack in self.state_stacks(spec, step.tensor):
            if isinstance(stack, StateStack):
                slots = stack.heads // step.tensor
                state = slots * stack.key_dim * stack.value_dim
                token = 2 * slots * (stack.key_dim + stack.value_dim)
                moved += 4 * (2 * step.shape.seqs * state + step.shape.tokens * token)
                flops += self.state_flops * step.shape.tokens * state
        return MixerCost(moved, flops)
