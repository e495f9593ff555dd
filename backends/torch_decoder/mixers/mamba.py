"""The state space model of Mamba.

Every channel and state has a decay of its own, so a chunk of tokens is no product of matrices. Only what depends on the
token before goes token by token, one operation for each; the rest of a chunk is computed at once.

Axis letters: S sequences, T tokens, C channels, K states of a channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.functions import norm
from pagoda.backends.torch_decoder.mixers.recurrence import Convolution, Inputs, StateMixerOps, StateRule
from pagoda.backends.torch_decoder.ops import Linear
from pagoda.common.models.mixers import Mamba

SCAN_CHUNK: Final = 32
"""Tokens whose states [C, K] are in memory at a time."""


class MambaMixer:
    """One layer's projections around the convolution and the scan."""

    def __init__(self, spec: Mamba, ops: StateMixerOps, rule: StateRule) -> None:
        """`rule`: of v before the convolution and the gates, both [T, C], which it applies."""
        self.project = ops.project(("v",), ("gate",))
        self.rule = rule
        self.out = ops.out()

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        v, gate = self.project(x)
        return self.out(self.rule(v, gate, step))


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """What the plain rule computes with, all in float32: R channels of the low-rank step, K states of a channel."""

    selection: Linear  # [C] -> low-rank step [R], b [K], c [K]
    step: Linear  # [R] -> [C]
    norms: tuple[Tensor | None, Tensor | None, Tensor | None]  # of the low-rank step, b and c
    step_offset: Tensor  # [C]
    decay_rate: Tensor  # [C, K] -exp of the parameter
    skip: Tensor  # [C]


class MambaRule:
    """The convolution, the selection and the scan in plain torch, all in float32: a PlainRule."""

    def __init__(self, spec: Mamba, convolve: Convolution, weights: MambaWeights) -> None:
        self.spec = spec
        self.convolve = convolve
        self.weights = weights

    def inputs(self, *projections: Tensor) -> Inputs:
        """Return v before the convolution, [T, C]."""
        (v,) = projections
        return (v.float(),)

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, C] and the states before them [S, elements] -> [S, T, C], the states after them."""
        spec = self.spec
        weights = self.weights
        tail, state = states.tensor_split([self.convolve.elements], -1)
        mixed, tail = self.convolve(inputs[0], tail)
        v = F.silu(mixed).mT
        parts = weights.selection(v).split([spec.step_rank, spec.state_dim, spec.state_dim], -1)
        if spec.part_norm is not None:
            parts = tuple(norm(part, spec.part_norm, weight) for part, weight in zip(parts, weights.norms))
        low_rank, b, c = parts
        step = F.softplus(weights.step(low_rank) + weights.step_offset)
        output, state = selective_scan(v, step, b, c, weights.decay_rate, state.view(-1, spec.channels, spec.state_dim))
        return torch.addcmul(output, weights.skip, v), torch.cat((tail, state.flatten(1)), 1)


def selective_scan(v: Tensor, step: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [S, T, C] and the state after T tokens, in float32.

    v, step [S, T, C]; b, c [S, T, K]; rate [C, K]; state [S, C, K]. For each token

        state = exp(rate step) state + step v b;  output = state c
    """
    outputs = []
    for begin in range(0, v.shape[1], SCAN_CHUNK):
        chunk = slice(begin, begin + SCAN_CHUNK)
        steps = step[:, chunk, :, None]
        decay = (steps * rate).exp_()
        seen = (steps * v[:, chunk, :, None]) * b[:, chunk, None]  # [S, T, C, K]: what is added, then the states
        for token in range(seen.shape[1]):
            state = seen[:, token].addcmul_(decay[:, token], state)
        outputs.append((seen @ c[:, chunk, :, None])[..., 0])
    return torch.cat(outputs, 1), state
