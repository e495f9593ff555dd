"""The state space model of Mamba-2.

A decode step goes token by token. A prefill goes by chunks of tokens (SSD, arXiv 2405.21060, section 6): within a chunk
the outputs are a masked product of c, b and the inputs, as in attention, and only the state passes from chunk to chunk.

Axis letters: S sequences, T tokens, N heads, G groups, H head dim, K state dim, M chunks, C channels of the
convolution.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.mixers.gated_delta import decay_between
from pagoda.backends.reference.model.mixers.recurrence import Convolution, Inputs, recurrent_ops
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.functions import norm
from pagoda.common.models.mixers import Mamba2

SSD_CHUNK: Final = 64
"""Tokens whose outputs are computed at once."""


class Mamba2Layer:
    """One layer's projections, convolution and scan, a RecurrentLayer.

    N heads of H channels, C channels of the convolution. All but the linear layers and the norm in float32.
    """

    def __init__(self, weights: NamedWeights, prefix: str, spec: Mamba2) -> None:
        self.spec = spec
        # [D] -> v, b and c [C], gate [N*H], step [N]
        self.inner = weights.linear(*(f"{prefix}.{part}" for part in ("v", "b", "c", "gate", "step")))
        self.convolve = Convolution(weights.convolution(*(f"{prefix}.{part}_conv" for part in "vbc")))
        self.decay_rate = -weights.take(f"{prefix}.decay_rate").exp()  # [N] -exp of the parameter
        self.step_offset = weights.take(f"{prefix}.step_offset")  # [N]
        self.skip = weights.take(f"{prefix}.skip")  # [N]
        self.norm = weights.wide(f"{prefix}.norm")  # [N*H]
        self.project_out = weights.linear(f"{prefix}.o")  # [N*H] -> [D]
        (cache,) = spec.caches()
        self.elements = cache.block_elements(1)

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> (v, b and c before the convolution [T, C], step [T, N]), output gates [T, N*H]."""
        spec = self.spec
        vbc, gate, step = self.inner(x).split([spec.channels, spec.width, spec.heads], -1)
        return (
            vbc.float(),
            F.softplus(step.float() + self.step_offset).clamp(min=spec.step_limit[0], max=spec.step_limit[1]),
        ), gate

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

    def out(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Heads float32 and gates [T, N*H] -> [T, D]."""
        spec = self.spec
        factor = F.silu(gate.float())
        if spec.norm is None:
            mixed = heads * factor
        elif spec.norm_before_gate:
            mixed = self._norm(heads) * factor
        else:
            mixed = self._norm(heads * factor)
        return self.project_out(mixed.to(gate.dtype))

    def _norm(self, heads: Tensor) -> Tensor:
        """Normalise the channels of each group by itself, [T, N*H]."""
        spec = self.spec
        weight = self.norm
        assert spec.norm is not None
        assert weight is not None
        weight = weight.float().view(spec.groups, -1)
        return norm(heads.unflatten(-1, (spec.groups, -1)), spec.norm, weight).flatten(-2)


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


MAMBA2: Final = recurrent_ops(Mamba2, Mamba2Layer)
