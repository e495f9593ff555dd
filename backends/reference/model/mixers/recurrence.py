"""The mixers with recurrent state on a CPU: their states, the functions of `StateMixerOps`, and the plain rules.

A decode step updates the states of all its sequences at once. A prefill goes sequence by sequence.

Axis letters: S sequences, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.linear import Linear, PlainLinear
from pagoda.backends.reference.model.mixers.interface import MixerBuild, MixerOps
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.functions import norm as normalised
from pagoda.backends.torch_decoder.mixers.gated_delta import GatedDeltaMixer, GatedDeltaRule
from pagoda.backends.torch_decoder.mixers.kimi_delta import KimiDeltaMixer, KimiDeltaRule
from pagoda.backends.torch_decoder.mixers.lightning_attention import LightningMixer, LightningRule
from pagoda.backends.torch_decoder.mixers.mamba import MambaMixer, MambaRule, MambaWeights
from pagoda.backends.torch_decoder.mixers.mamba2 import Mamba2Mixer, Mamba2Rule
from pagoda.backends.torch_decoder.mixers.recurrence import (
    Convolution,
    Gate,
    GateSpec,
    Inputs,
    Mix,
    PlainRule,
    RecurrentMixer,
    StateMixerOps,
    StateRule,
)
from pagoda.backends.torch_decoder.mixers.short_convolution import ShortConvolutionMixer, ShortConvolutionRule
from pagoda.backends.torch_decoder.ops import MixerStep
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.models.mixers import (
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Recurrent,
    ShortConvolution,
)
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

SpecT = TypeVar("SpecT", bound=Recurrent)


@dataclass(frozen=True, slots=True)
class PagedStates:
    """States in the blocks of a cache."""

    array: Tensor  # float32 [P, elements and kept inputs]
    cache: StateCache
    batch: StepBatch
    view: int
    rotations: Rotations

    def update(self, inputs: Inputs, mix: Mix) -> Tensor:
        """Return the outputs [T, channels] of inputs [T, ...]; replace the states."""
        states = self.array[:, : self.cache.elements]
        view = self.batch.states[self.view]
        before = states[view.blocks].masked_fill_(view.is_first[:, None], 0)
        if view.replay is not None:
            kept = self.array[view.blocks, self.cache.elements :].unflatten(1, (-1, self.cache.inputs))
            out, states[view.blocks] = view.replay.update(inputs, mix, before, kept)
            self.array[view.blocks, self.cache.elements :] = kept.flatten(1)
            return out
        parts = []
        count = self.batch.num_decodes
        if count:
            mixed, after = mix(tuple(part[:count, None] for part in inputs), before[:count])
            parts.append(mixed[:, 0])
            states[view.blocks[:count]] = after
        for index, sequence in enumerate(self.batch.sequences[count:], start=count):
            taken = tuple(part[None, sequence.begin : sequence.end] for part in inputs)
            mixed, after = mix(taken, before[index : index + 1])
            parts.append(mixed[0])
            states[view.blocks[index]] = after[0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class PackedStates:
    """States of prompts, zero before each and dropped after it."""

    elements: int  # of the state of a sequence
    batch: PackedPrompts
    rotations: Rotations

    def update(self, inputs: Inputs, mix: Mix) -> Tensor:
        """Return the outputs [T, channels] of inputs [T, ...]."""
        out: Tensor | None = None
        for group in self.batch.groups:
            single = isinstance(group.rows, slice)
            taken = tuple(part[group.rows].unsqueeze(0) if single else part[group.rows] for part in inputs)
            mixed, _ = mix(taken, taken[0].new_zeros(len(taken[0]), self.elements))
            if out is None:
                out = mixed.new_empty(len(inputs[0]), mixed.shape[-1])
            out[group.rows] = mixed[0] if single else mixed
        assert out is not None, "a step has a prompt"
        return out


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Implements StateMixerOps over the named weights of one mixer, each of which is taken once."""

    weights: NamedWeights
    prefix: str

    def _names(self, names: Sequence[str]) -> list[str]:
        return [f"{self.prefix}.{name}" for name in names]

    def project(self, *groups: tuple[str, ...]) -> Callable[[Tensor], Sequence[Tensor]]:
        sizes = [self.weights.outputs(*self._names(group)) for group in groups]
        inner = self.weights.linear(*self._names([name for group in groups for name in group]))
        return lambda x: inner(x).split(sizes, -1)

    def linear(self, name: str) -> Linear:
        return self.weights.linear(f"{self.prefix}.{name}")

    def out(self) -> Linear:
        return self.linear("o")

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def gate(self, spec: GateSpec) -> Gate:
        norm = spec.norm
        rounded = spec.rounded
        activate = F.silu if spec.activation == "silu" else torch.sigmoid
        weight = None if norm is None else self.weights.take_wide(f"{self.prefix}.norm")
        if weight is not None and rounded == "nothing":
            weight = weight.float()

        def normed(heads: Tensor) -> Tensor:
            if norm is None or weight is None:
                return heads
            grouped = heads.unflatten(-1, (spec.groups, -1))
            per_channel = len(weight) != grouped.shape[-1]
            return normalised(grouped, norm, weight.view(spec.groups, -1) if per_channel else weight).flatten(-2)

        def step(heads: Tensor, gate: Tensor) -> Tensor:
            heads = heads if rounded == "nothing" else heads.to(gate.dtype)
            factor = activate(gate if rounded == "heads and gates" else gate.float())
            mixed = normed(heads * factor) if spec.gate_first else normed(heads) * factor
            return mixed.to(gate.dtype)

        return step

    def rotation(self, norm: Norm | None, name: str, rope: Rope | None, head_dim: int) -> Callable[..., Tensor]:
        weight = None if norm is None else self.weights.take_wide(f"{self.prefix}.{name}")

        def rotated(x: Tensor, states: PagedStates | PackedStates) -> Tensor:
            heads = x.unflatten(-1, (-1, head_dim))
            heads = heads if norm is None else normalised(heads, norm, weight)
            rotate = states.rotations[rope]
            return (heads if rotate is None else rotate(heads)).flatten(1)

        return rotated

    def convolution(self, *names: str) -> Convolution:
        """Return one convolution of the channels of several."""
        return self.weights.convolution(*self._names(names))

    def take(self, name: str) -> Tensor:
        """Return a small parameter."""
        return self.weights.take(f"{self.prefix}.{name}")


RuleMaker = Callable[[SpecT, LayerWeights], StateRule]


def update_states(rule: PlainRule) -> StateRule:
    """Return a plain rule as a function of projections [T, channels] and a step's states, with results in float32."""

    def run(*projections_and_states: Any) -> Tensor:
        *projections, states = projections_and_states
        return states.update(rule.inputs(*projections), rule.mix)

    return run


def _delta(rule: Callable[[SpecT, Convolution, Tensor, Tensor], PlainRule]) -> RuleMaker[SpecT]:
    def make(spec: SpecT, own: LayerWeights) -> StateRule:
        convolve = own.convolution("q_conv", "k_conv", "v_conv")
        return update_states(rule(spec, convolve, own.take("decay_rate"), own.take("decay_offset")))

    return make


def _mamba2(spec: Mamba2, own: LayerWeights) -> StateRule:
    convolve = own.convolution("v_conv", "b_conv", "c_conv")
    decay_rate, step_offset, skip = (own.take(name) for name in ("decay_rate", "step_offset", "skip"))
    return update_states(Mamba2Rule(spec, convolve, decay_rate=decay_rate, step_offset=step_offset, skip=skip))


def _mamba(spec: Mamba, own: LayerWeights) -> StateRule:
    parts = ("step_a", "b", "c")
    step, b, c = (own.weights.get(f"{own.prefix}.{part}_norm") for part in parts)
    weights = MambaWeights(
        selection=PlainLinear(torch.cat([own.take(part).float() for part in parts]), None),
        step=PlainLinear(own.take("step").float(), None),
        norms=(_wide(step), _wide(b), _wide(c)),
        step_offset=own.take("step_offset"),
        decay_rate=-own.take("decay_rate").exp(),
        skip=own.take("skip"),
    )
    scan = update_states(MambaRule(spec, own.convolution("v_conv"), weights))
    return lambda v, gate, states: (scan(v, states) * F.silu(gate.float())).to(gate.dtype)


def _short_convolution(spec: ShortConvolution, own: LayerWeights) -> StateRule:
    convolve = update_states(ShortConvolutionRule(own.convolution("conv")))
    return lambda b, c, v, states: torch.mul(convolve(b, v, states), c).to(c.dtype)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _recurrent_ops(
    kind: type[SpecT],
    mixer: Callable[[SpecT, StateMixerOps, StateRule], RecurrentMixer],
    rule: RuleMaker[SpecT],
) -> MixerOps[SpecT, RecurrentMixer]:
    """Return what the backend knows of a kind. `mixer`: its projections; `rule`: its recurrence."""

    def load(weights: NamedWeights, prefix: str, spec: SpecT) -> RecurrentMixer:
        own = LayerWeights(weights, prefix)
        return mixer(spec, own, rule(spec, own))

    def paged(spec: SpecT, layer: RecurrentMixer, caches: tuple[int, ...], build: MixerBuild) -> MixerStep:
        (number,) = caches
        (cache,) = spec.caches()

        def step(x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
            (states,) = caches[number].arrays
            return layer(x, PagedStates(states, cache, batch, caches[number].view, rotations))

        return step

    def packed(spec: SpecT, layer: RecurrentMixer, shared: int | None) -> MixerStep:
        (cache,) = spec.caches()
        elements = cache.block_elements(1)
        return lambda x, batch, rotations, *others: layer(x, PackedStates(elements, batch, rotations))

    return MixerOps(kind, load, paged, packed)


RECURRENT: Final = (
    _recurrent_ops(GatedDelta, GatedDeltaMixer, _delta(GatedDeltaRule)),
    _recurrent_ops(KimiDelta, KimiDeltaMixer, _delta(KimiDeltaRule)),
    _recurrent_ops(LightningAttention, LightningMixer, lambda spec, own: update_states(LightningRule(spec))),
    _recurrent_ops(Mamba, MambaMixer, _mamba),
    _recurrent_ops(Mamba2, Mamba2Mixer, _mamba2),
    _recurrent_ops(ShortConvolution, ShortConvolutionMixer, _short_convolution),
)
"""The kinds with recurrent state."""
