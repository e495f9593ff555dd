"""What all mixers with recurrent state share: the convolution, and the order of sequences over their states.

A decode step updates the states of all its sequences at once. A prefill goes sequence by sequence.

Axis letters: S sequences, T tokens, C channels of the convolution, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from pagoda.backends.reference.execution import PackedPrompts, StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.mixers.interface import MixerBuild, MixerOps, SpecT
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.model.params import ConvolutionParams
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.ops import MixerStep

Inputs = tuple[Tensor, ...]
"""What a recurrence reads of some tokens, each [..., T, channels], in float32."""


class RecurrentLayer(Protocol):
    """One layer's projections and recurrence, whatever holds the states."""

    elements: int
    """Of the state of a sequence."""

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> inputs of the recurrence, what gates its output [T, channels]."""
        ...

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, ...] and the states before them [S, elements] -> [S, T, channels], the states after them."""
        ...

    def out(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Float32 output of the recurrence and its gates [T, channels] -> [T, D]."""
        ...


class PagedRecurrence:
    """One layer over the sequences' states."""

    def __init__(self, layer: RecurrentLayer, number: int) -> None:
        """`number`: of its cache."""
        self.layer = layer
        self.number = number

    def __call__(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, D]."""
        (states,) = caches[self.number].arrays
        view = batch.states[caches[self.number].view]
        inputs, gate = self.layer.project(x, rotations)
        before = states[view.blocks].masked_fill_(view.is_first[:, None], 0)
        parts = []
        count = batch.num_decodes
        if count:
            mixed, after = self.layer.mix(tuple(part[:count, None] for part in inputs), before[:count])
            parts.append(mixed[:, 0])
            states[view.blocks[:count]] = after
        for index, sequence in enumerate(batch.sequences[count:], start=count):
            taken = tuple(part[None, sequence.begin : sequence.end] for part in inputs)
            mixed, after = self.layer.mix(taken, before[index : index + 1])
            parts.append(mixed[0])
            states[view.blocks[index]] = after[0]
        return self.layer.out(parts[0] if len(parts) == 1 else torch.cat(parts), gate)


class PackedRecurrence:
    """One layer within each prompt."""

    def __init__(self, layer: RecurrentLayer) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, batch: PackedPrompts, rotations: Rotations, *others: object) -> Tensor:
        """X [T, D] -> [T, D]."""
        inputs, gate = self.layer.project(x, rotations)
        out: Tensor | None = None
        for group in batch.groups:
            single = isinstance(group.rows, slice)
            taken = tuple(part[group.rows].unsqueeze(0) if single else part[group.rows] for part in inputs)
            states = taken[0].new_zeros(len(taken[0]), self.layer.elements)
            mixed, _ = self.layer.mix(taken, states)
            if out is None:
                out = mixed.new_empty(len(x), mixed.shape[-1])
            out[group.rows] = mixed[0] if single else mixed
        assert out is not None, "a step has a prompt"
        return self.layer.out(out, gate)


def recurrent_ops(
    kind: type[SpecT], load: Callable[[NamedWeights, str, SpecT], RecurrentLayer]
) -> MixerOps[SpecT, RecurrentLayer]:
    """Return what the backend knows of a kind with recurrent state. `load`: returns its projections and recurrence."""

    def paged(spec: SpecT, layer: RecurrentLayer, caches: tuple[int, ...], build: MixerBuild) -> MixerStep:
        return PagedRecurrence(layer, *caches)

    return MixerOps(kind, load, paged, packed=lambda spec, layer, shared: PackedRecurrence(layer))


class Convolution:
    """Causal convolution of each channel by itself; its state is the last inputs of each channel."""

    def __init__(self, params: ConvolutionParams) -> None:
        self.params = params
        self.past = len(params.taps) - 1
        self.channels = params.taps.shape[1]
        self.elements = self.past * self.channels

    def __call__(self, inputs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, C] and the tail before them [S, elements] -> [S, C, T], the tail after them.

        A third of the time of torch's conv1d.
        """
        tokens = inputs.shape[1]
        first, *others = self.params.taps
        seen = torch.cat((tail.unflatten(1, (self.channels, self.past)), inputs.mT), -1)  # [S, C, taps - 1 + T]
        mixed = seen[..., :tokens] * first
        for at, factor in enumerate(others, start=1):
            mixed.addcmul_(seen[..., at : at + tokens], factor)
        if self.params.bias is not None:
            mixed.add_(self.params.bias)
        return mixed, seen[..., tokens:].flatten(1)
