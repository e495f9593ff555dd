"""The state space model of Mamba-2.

A decode step goes token by token. A prefill goes by chunks of tokens (SSD, arXiv 2405.21060, section 6): within a chunk
the outputs are a masked product of c, b and the inputs, as in attention, and only the state passes from chunk to chunk.

Axis letters: S sequences, T tokens, N heads, G groups, H head dim, K state dim, M chunks, C channels of the
convolution.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.mixers.gated_delta import decay_between
from pagoda.backends.torch_decoder.mixers.recurrence import Convolution, GateSpec, Inputs, StateMixerOps, StateRule
from pagoda.common.models.mixers import Mamba2

SSD_CHUNK: Final = 64
"""Tokens whose outputs are computed at once."""


class Mamba2Mixer:
    """One layer's projections around the convolution and the scan."""

    def __init__(self, spec: Mamba2, ops: StateMixerOps, rule: StateRule) -> None:
        """`rule`: of v, b and c before the convolution [T, C], and of the steps as projected [T, N]."""
        self.project = ops.project(("v", "b", "c"), ("gate",), ("step",))
        self.rule = rule
        self.gate = ops.gate(GateSpec(spec.norm, spec.groups, gate_first=not spec.norm_before_gate))
        self.out = ops.out()

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        vbc, gate, sizes = self.project(x)
        return self.out(self.gate(self.rule(vbc, sizes, step), gate))


class Mamba2Rule:
    """The convolution and the scan in plain torch, all in float32: a PlainRule."""

    def __init__(
        self, spec: Mamba2, convolve: Convolution, *, decay_rate: Tensor, step_offset: Tensor, skip: Tensor
    ) -> None:
        """decay_rate, step_offset, skip [N]; the rate is the exp of the parameter."""
        self.spec = spec
        self.convolve = convolve
        self.decay_rate = -decay_rate.exp()
        self.step_offset = step_offset
        self.skip = skip

    def inputs(self, *projections: Tensor) -> Inputs:
        """Return v, b and c before the convolution [T, C], and the steps [T, N]."""
        vbc, sizes = projections
        smallest, largest = self.spec.step_limit
        return vbc.float(), F.softplus(sizes.float() + self.step_offset).clamp(min=smallest, max=largest)

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, ...] and the states before them [S, elements] -> heads [S, T, N*H], the states after them."""
        spec = self.spec
        before, step = inputs
        tail, state = states.tensor_split([self.convolve.elements], -1)
        vbc, tail = self.convolve(before, tail)
        v, b, c = F.silu(vbc).split([spec.width, *(spec.groups * spec.state_dim,) * 2], 1)
        v = v.unflatten(1, (spec.heads, -1)).mT
        step = step.mT  # [S, N, T]
        scan = recurrent_scan if before.shape[1] == 1 else chunked_scan
        heads, state = scan(
            step[..., None] * v,
            b.unflatten(1, (spec.groups, -1)).mT,
            c.unflatten(1, (spec.groups, -1)).mT,
            self.decay_rate[:, None] * step,
            state.view(-1, spec.heads, spec.state_dim, spec.head_dim),
        )
        heads = torch.addcmul(heads, v, self.skip[:, None, None])
        return heads.transpose(1, 2).flatten(2), torch.cat((tail, state.flatten(1)), 1)


def recurrent_scan(v: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads [S, N, 1, H] and the state after one token; see `chunked_scan`."""
    b, c = (part.repeat_interleave(v.shape[1] // part.shape[1], 1) for part in (b, c))
    state = torch.addcmul(state * decay[..., None].exp(), b.mT, v)
    return c @ state, state


def chunked_scan(v: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads [S, N, T, H] and the state after T tokens, in float32.

    v [S, N, T, H]; b, c [S, G, T, K]; log decay [S, N, T]; state [S, N, K, H]. For each token and head

        state = exp(decay) state + b v;  head = c state

    With G_i the log decay from the start of a chunk to its token i, and state the one before the chunk

        head_i = exp(G_i) c_i state + sum over j <= i of exp(G_i - G_j) (c_i b_j) v_j
    """
    tokens = v.shape[2]
    repeats = v.shape[1] // b.shape[1]
    size = min(SSD_CHUNK, tokens)
    padding = -tokens % size  # with v, b and log decay 0, which changes nothing
    v, b, c = (F.pad(part, (0, 0, 0, padding)).unflatten(2, (-1, size)) for part in (v, b, c))  # [S, *, M, size, *]
    decay = F.pad(decay, (0, padding)).unflatten(2, (-1, size))
    between = decay_between(decay)
    since_start = decay.cumsum(-1)[..., None].exp()
    inside = ((c @ b.mT).repeat_interleave(repeats, 1) * between) @ v
    b, c = (part.repeat_interleave(repeats, 1) for part in (b, c))
    added = (b * between[..., -1, :, None]).mT @ v  # [S, N, M, K, H]
    last = since_start[..., -1:, :]
    before = []
    for chunk in range(v.shape[2]):
        before.append(state)
        state = torch.addcmul(added[:, :, chunk], last[:, :, chunk], state)
    heads = inside + since_start * (c @ torch.stack(before, 2))
    return heads.flatten(2, 3)[:, :, :tokens], state
