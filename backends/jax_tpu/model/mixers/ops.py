"""What each kind of mixer tells the rest of the backend: `JaxMixerOps`, which every room of this folder implements.

`registry.MIXERS` has those of all kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.execution.replay import StateRun, States
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, PoolShape
from pagoda.backends.jax_tpu.model.layers import Caches, Rotations
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext
from pagoda.backends.jax_tpu.model.slots import DraftStack, Stack, StateStack, TailStack
from pagoda.backends.jax_tpu.weights.arrange import Placement
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.mixers.work import MixerWork
from pagoda.kernels_pallas.recurrent_state import Arrays

MixerT = TypeVar("MixerT", bound=Mixer)


class MixerModule(nnx.Module):
    """A layer's mixer with its parameters."""

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacks of the mixer's caches, block table and layer of each (int32 [2 n]) -> [T, D], caches."""
        raise NotImplementedError


class RecurrentModule(MixerModule):
    """A mixer with recurrent state. What it computes from a token alone is computed once, the rule perhaps twice."""

    def rule(self, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]:
        """Return the outputs of tokens [T, ...], and the states after them, see `replay.RecurrentRule`."""
        raise NotImplementedError

    def apply_rule(
        self, inputs: Arrays, caches: Caches, cache_index: jax.Array, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """Apply the rule to the tokens of a step, inputs [T, K, n] each -> outputs [T, ...], and the caches.

        `caches` and `cache_index` as of `__call__`. Recurrent state gets no drafts, see `execution.replay`.
        """
        run = StateRun(
            batch=step.states(cache_index),
            layer=step.cache_layer(cache_index, caches[0]),
            seq_ids=step.seq_ids,
            options={"decode_only": step.decode_only, **step.kernel.options},
        )
        if step.replay is not None:
            return step.replay.apply(self.rule, inputs, caches, run)
        outputs, states = self.rule(inputs, caches, run)
        return outputs, (*states, *caches[len(states) :])


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


class JaxMixerOps(ABC, Generic[MixerT]):
    """What the backend knows of one kind of mixer. `tensor`: devices each layer is sharded over."""

    matrices: ClassVar[frozenset[str]]
    """Names of the module's matrices that may be quantised, see `JaxBuildContext.matrix`."""

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

    def draft_stacks(self, spec: MixerT, tensor: int, drafts: int) -> tuple[Stack, ...]:
        """Return further arrays of the only cache of an engine with at most so many drafts of a sequence in a step."""
        return ()

    def cost(self, spec: MixerT, step: CostedStep) -> MixerCost:
        """Return the cost of the mixer's kernels: the work that the spec states, over the arrays of its caches."""
        stacks = [stack for cache in self.stacks(spec, step.tensor) for stack in cache]
        attended = _attended(spec.work(), stacks, step)
        recurrent = _recurrent(spec.work(), stacks, step)
        return MixerCost(attended.bytes + recurrent.bytes, attended.flops + recurrent.flops)

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


class RecurrentOps(JaxMixerOps[MixerT]):
    """What kinds with recurrent state in their single cache have in common."""

    matrices = frozenset({"inner", "out"})

    @abstractmethod
    def state_stacks(self, spec: MixerT, tensor: int) -> tuple[Stack, ...]:
        """Return the arrays in which the state is stored."""

    def stacks(self, spec: MixerT, tensor: int) -> tuple[tuple[Stack, ...], ...]:
        """Return the arrays of the single cache."""
        return (self.state_stacks(spec, tensor),)

    @abstractmethod
    def rule_inputs(self, spec: MixerT, tensor: int) -> tuple[int, int]:
        """Return the slots of all devices, and how many channels of a token and slot the module's rule reads."""

    def draft_stacks(self, spec: MixerT, tensor: int, drafts: int) -> tuple[Stack, ...]:
        """Return the array of what the rule reads of drafts."""
        slots, width = self.rule_inputs(spec, tensor)
        return (DraftStack(slots=slots, drafts=drafts, width=width),) if drafts else ()


def _attended(work: MixerWork, stacks: Sequence[Stack], step: CostedStep) -> MixerCost:
    """Return the cost of attention: what is read of the cache, q, the outputs, the new entries; and the pairs.

    A mixer without a cache of its own reads another layer's.
    """
    if not work.read_elements:
        return MixerCost(0, 0)
    tokens = step.shape.tokens
    load = step.load
    element = jnp.dtype(step.kernel.cache_dtype).itemsize
    read = load.kv_tokens if work.span is None else min(load.kv_tokens, step.shape.seqs * work.span + tokens)
    pairs = load.pairs if work.span is None else min(load.pairs, tokens * work.span)
    token_bytes = work.read_elements // min(step.tensor, work.kv_heads) * element
    written = 0
    if stacks:
        token_bytes = step.kernel.token_bytes(stacks[0], step.tensor)
        written = tokens * token_bytes
    channels = work.pair_flops // 2 // step.tensor
    scanned = load.kv_tokens * work.scan_elements * element
    decodes = isinstance(step.shape, StepShape) and step.shape.decode_only
    pair_flops = work.pair_flops if decodes or not work.prefill_pair_flops else work.prefill_pair_flops
    moved = read * token_bytes + written + scanned + tokens * channels * step.itemsize
    return MixerCost(moved, pairs * pair_flops // step.tensor + load.pairs * work.scan_flops)


def _recurrent(work: MixerWork, stacks: Sequence[Stack], step: CostedStep) -> MixerCost:
    """Return the cost of a recurrence in float32: states are read and written once; its inputs read, outputs written.

    The convolution's tails and products are not counted: no kernel computes them.
    """
    states = [stack for stack in stacks if isinstance(stack, StateStack)]
    if not states:
        return MixerCost(0, 0)
    (state,) = states
    convolved = sum(stack.slots * stack.width for stack in stacks if isinstance(stack, TailStack))
    inputs = convolved or state.heads * (2 * state.key_dim + state.value_dim)
    token = inputs + state.heads * state.value_dim
    elements = 2 * step.shape.seqs * state.heads * state.key_dim * state.value_dim + step.shape.tokens * token
    return MixerCost(4 * elements // step.tensor, step.shape.tokens * work.token_flops // step.tensor)
