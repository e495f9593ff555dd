"""The state space model of Mamba.

Every channel and state has a decay of its own, so a chunk of tokens is no product of matrices. Only what depends on the
token before goes token by token, one operation for each; the rest of a chunk is computed at once.

Axis letters: S sequences, T tokens, C channels, K states of a channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.linear import Linear, PlainLinear
from pagoda.backends.reference.model.mixers.recurrence import Convolution, Inputs, recurrent_ops
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.model.ops import norm
from pagoda.backends.reference.model.params import ConvolutionParams
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.common.models.mixers import Mamba

SCAN_CHUNK: Final = 32
"""Tokens whose states [C, K] are in memory at a time."""


@dataclass(frozen=True, slots=True)
class MambaParams:
    """C channels of K states. All but `inner` and `out` in float32."""

    inner: Linear  # [D] -> v [C], gate [C]
    conv: ConvolutionParams
    selection: Linear  # [C] -> low-rank step, b [K], c [K]
    step: Linear  # low-rank -> [C]
    norms: tuple[Tensor | None, Tensor | None, Tensor | None]  # of the low-rank step, b and c
    step_offset: Tensor  # [C]
    decay_rate: Tensor  # [C, K] -exp of the parameter
    skip: Tensor  # [C]
    out: Linear  # [C] -> [D]


class MambaLayer:
    """One layer's projections, convolution and scan, a RecurrentLayer."""

    def __init__(self, spec: Mamba, params: MambaParams) -> None:
        self.spec = spec
        self.params = params
        self.convolve = Convolution(params.conv)
        (cache,) = spec.caches()
        self.elements = cache.block_elements(1)

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> (v before the convolution [T, C],), output gates [T, C]."""
        v, gate = self.params.inner(x).chunk(2, -1)
        return (v.float(),), gate

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, C] and the states before them [S, elements] -> [S, T, C], the states after them."""
        spec = self.spec
        params = self.params
        tail, state = states.tensor_split([self.convolve.elements], -1)
        mixed, tail = self.convolve(inputs[0], tail)
        v = F.silu(mixed).mT
        parts = params.selection(v).split([spec.step_rank, spec.state_dim, spec.state_dim], -1)
        if spec.part_norm is not None:
            parts = tuple(norm(part, spec.part_norm, weight) for part, weight in zip(parts, params.norms))
        low_rank, b, c = parts
        step = F.softplus(params.step(low_rank) + params.step_offset)
        output, state = selective_scan(v, step, b, c, params.decay_rate, state.view(-1, spec.channels, spec.state_dim))
        return torch.addcmul(output, params.skip, v), torch.cat((tail, state.flatten(1)), 1)

    def out(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Float32 outputs and gates [T, C] -> [T, D]."""
        return self.params.out((mixed * F.silu(gate.float())).to(gate.dtype))


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


def _load(weights: NamedWeights, prefix: str, mixer: Mamba) -> MambaParams:
    parts = ("step_a", "b", "c")
    step, b, c = (weights.get(f"{prefix}.{part}_norm") for part in parts)
    return MambaParams(
        inner=weights.linear(f"{prefix}.v", f"{prefix}.gate"),
        conv=weights.convolution(f"{prefix}.v_conv"),
        selection=PlainLinear(torch.cat([weights.take(f"{prefix}.{part}").float() for part in parts]), None),
        step=PlainLinear(weights.take(f"{prefix}.step").float(), None),
        norms=(_wide(step), _wide(b), _wide(c)),
        step_offset=weights.take(f"{prefix}.step_offset"),
        decay_rate=-weights.take(f"{prefix}.decay_rate").exp(),
        skip=weights.take(f"{prefix}.skip"),
        out=weights.linear(f"{prefix}.o"),
    )


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


MAMBA: Final = recurrent_ops(Mamba, _load, MambaLayer)
