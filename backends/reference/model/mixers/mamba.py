"""The state space model of Mamba.

Every channel and state has a decay of its own, so a chunk of tokens is no product of matrices. Only what depends on the
token before goes token by token, one operation for each; the rest of a chunk is computed at once.

Axis letters: S sequences, T tokens, C channels, K states of a channel.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.linear import PlainLinear
from pagoda.backends.reference.model.mixers.recurrence import Convolution, Inputs, recurrent_ops
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.functions import norm
from pagoda.common.models.mixers import Mamba

SCAN_CHUNK: Final = 32
"""Tokens whose states [C, K] are in memory at a time."""


class MambaLayer:
    """One layer's projections, convolution and scan, a RecurrentLayer.

    C channels of K states. All but `inner` and `project_out` in float32.
    """

    def __init__(self, weights: NamedWeights, prefix: str, spec: Mamba) -> None:
        self.spec = spec
        parts = ("step_a", "b", "c")
        step, b, c = (weights.get(f"{prefix}.{part}_norm") for part in parts)
        self.inner = weights.linear(f"{prefix}.v", f"{prefix}.gate")  # [D] -> v [C], gate [C]
        self.convolve = Convolution(weights.convolution(f"{prefix}.v_conv"))
        # [C] -> low-rank step, b [K], c [K]
        self.selection = PlainLinear(torch.cat([weights.take(f"{prefix}.{part}").float() for part in parts]), None)
        self.step = PlainLinear(weights.take(f"{prefix}.step").float(), None)  # low-rank -> [C]
        self.norms = (_wide(step), _wide(b), _wide(c))  # of the low-rank step, b and c
        self.step_offset = weights.take(f"{prefix}.step_offset")  # [C]
        self.decay_rate = -weights.take(f"{prefix}.decay_rate").exp()  # [C, K] -exp of the parameter
        self.skip = weights.take(f"{prefix}.skip")  # [C]
        self.project_out = weights.linear(f"{prefix}.o")  # [C] -> [D]
        (cache,) = spec.caches()
        self.elements = cache.block_elements(1)

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> (v before the convolution [T, C],), output gates [T, C]."""
        v, gate = self.inner(x).chunk(2, -1)
        return (v.float(),), gate

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, C] and the states before them [S, elements] -> [S, T, C], the states after them."""
        spec = self.spec
        tail, state = states.tensor_split([self.convolve.elements], -1)
        mixed, tail = self.convolve(inputs[0], tail)
        v = F.silu(mixed).mT
        parts = self.selection(v).split([spec.step_rank, spec.state_dim, spec.state_dim], -1)
        if spec.part_norm is not None:
            parts = tuple(norm(part, spec.part_norm, weight) for part, weight in zip(parts, self.norms))
        low_rank, b, c = parts
        step = F.softplus(self.step(low_rank) + self.step_offset)
        output, state = selective_scan(v, step, b, c, self.decay_rate, state.view(-1, spec.channels, spec.state_dim))
        return torch.addcmul(output, self.skip, v), torch.cat((tail, state.flatten(1)), 1)

    def out(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Float32 outputs and gates [T, C] -> [T, D]."""
        return self.project_out((mixed * F.silu(gate.float())).to(gate.dtype))


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


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


MAMBA: Final = recurrent_ops(Mamba, MambaLayer)
