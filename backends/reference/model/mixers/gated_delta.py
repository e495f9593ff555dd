"""The gated delta rule.

A decode step goes token by token. A prefill goes by chunks of tokens
(arXiv 2412.06464, section 3.3): within a chunk the rule is a triangular system, and only the state passes from chunk to
chunk.

Axis letters: S sequences, T tokens, N value heads, K channels of a key head, V of a value head, C channels of the
convolution, M chunks.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.mixers.recurrence import Convolution, Inputs, recurrent_ops
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.functions import l2_norm, norm
from pagoda.common.models.mixers import GatedDelta

CHUNK: Final = 64
"""Tokens whose updates of the state are solved for at once."""


class DeltaLayer:
    """One layer's projections, convolution and rule, a RecurrentLayer.

    N value heads of V channels, C channels of the convolution. All but the linear layers and the norm in float32.
    """

    def __init__(self, weights: NamedWeights, prefix: str, spec: GatedDelta) -> None:
        self.spec = spec
        # [D] -> q, k and v [C], gate [N*V], beta [N], decay [N]
        self.inner = weights.linear(*(f"{prefix}.{part}" for part in ("q", "k", "v", "gate", "beta", "decay")))
        self.convolve = Convolution(weights.convolution(*(f"{prefix}.{part}_conv" for part in "qkv")))
        self.decay_rate = -weights.take(f"{prefix}.decay_rate").float().exp()  # [N] -exp of the parameter
        self.decay_offset = weights.take(f"{prefix}.decay_offset").float()  # [N]
        self.norm = weights.take_wide(f"{prefix}.norm")  # [V]
        self.project_out = weights.linear(f"{prefix}.o")  # [N*V] -> [D]
        (cache,) = spec.caches()
        self.elements = cache.block_elements(1)

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> (q, k and v before the convolution [T, C], beta and log decay [T, N]), output gates [T, N*V]."""
        spec = self.spec
        heads = spec.value_heads
        qkv, gate, beta, decay = self.inner(x).split([spec.channels, heads * spec.value_dim, heads, heads], -1)
        log_decay = self.decay_rate * F.softplus(decay.float() + self.decay_offset)
        return (qkv.float(), beta.float().sigmoid() * spec.beta_scale, log_decay), gate

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, ...] and the states before them [S, elements] -> heads [S, T, N*V], the states after them."""
        spec = self.spec
        before, beta, decay = inputs
        tail, state = states.tensor_split([self.convolve.elements], -1)
        qkv, tail = self.convolve(before, tail)
        keys = spec.key_heads * spec.key_dim
        q, k, v = F.silu(qkv).split([keys, keys, spec.value_heads * spec.value_dim], 1)
        rule = recurrent_rule if before.shape[1] == 1 else chunked_rule
        heads, state = rule(
            l2_norm(self._key_heads(q)) * spec.key_dim**-0.5,
            l2_norm(self._key_heads(k)),
            v.unflatten(1, (spec.value_heads, -1)).mT,
            beta.mT,
            decay.mT,
            state.view(-1, spec.value_heads, spec.key_dim, spec.value_dim),
        )
        return heads.transpose(1, 2).flatten(2), torch.cat((tail, state.flatten(1)), 1)

    def _key_heads(self, channels: Tensor) -> Tensor:
        """Channels [S, *, T] of q or k -> [S, N, T, K]: each key head for all its value heads."""
        heads = channels.unflatten(1, (self.spec.key_heads, -1)).mT
        return heads.repeat_interleave(self.spec.value_heads // self.spec.key_heads, 1)

    def out(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Heads float32 and gates [T, N*V] -> [T, D]."""
        normed = norm(heads.to(gate.dtype).unflatten(-1, (self.spec.value_heads, -1)), self.spec.norm, self.norm)
        return self.project_out((normed.flatten(-2) * F.silu(gate.float())).to(gate.dtype))


def recurrent_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the heads [S, N, 1, V] and the state after one token; see `chunked_rule`."""
    state = state * decay[..., None].exp()
    written = beta[..., None] * (v - k @ state)
    state = state + k.mT @ written
    return q @ state, state


def chunked_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads [S, N, T, V] and the state after T tokens, in float32.

    q, k [S, N, T, K]; v [S, N, T, V]; beta and log decay [S, N, T]; state [S, N, K, V].

    With G_i the log decay from the start of a chunk to its token i, and state the one before the chunk, token i adds
    k_i u_i to the state, where

        u_i = beta_i (v_i - exp(G_i) k_i state - sum over j < i of exp(G_i - G_j) (k_i k_j) u_j)

    That is a unit lower triangular system, solved for the parts with v and with the state in all chunks at once.
    """
    tokens = q.shape[2]
    size = min(CHUNK, tokens)
    padding = -tokens % size  # with beta, k and log decay 0, which changes nothing
    q, k, v = (F.pad(part, (0, 0, 0, padding)).unflatten(2, (-1, size)) for part in (q, k, v))  # [S, N, M, size, *]
    beta, decay = (F.pad(part, (0, padding)).unflatten(2, (-1, size)) for part in (beta, decay))
    between = decay_between(decay)
    since_start = decay.cumsum(-1)[..., None].exp()
    weighted = beta[..., None] * k
    system = (weighted @ k.mT * between).tril(-1)
    sides = torch.cat((beta[..., None] * v, weighted * since_start), -1)
    of_v, of_state = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    scores = q @ k.mT * between
    queries = q * since_start
    keys = k * between[..., -1, :, None]
    last = since_start[..., -1:, :]
    heads = []
    for chunk in range(q.shape[2]):
        written = of_v[:, :, chunk] - of_state[:, :, chunk] @ state
        heads.append(queries[:, :, chunk] @ state + scores[:, :, chunk] @ written)
        state = last[:, :, chunk] * state + keys[:, :, chunk].mT @ written
    return torch.cat(heads, 2)[:, :, :tokens], state


def decay_between(decay: Tensor) -> Tensor:
    """Return exp(G_i - G_j) for tokens j <= i of a chunk, else 0, [..., size, size], from the log decay [..., size].

    A sum per pair: the difference of two sums from the chunk's start would lose the digits of a small one.
    """
    size = decay.shape[-1]
    past = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril()
    after_j = past.tril(-1)  # row l, column j: l > j
    sums = (decay[..., :, None] * after_j).cumsum(-2)
    return sums.masked_fill(~past, float("-inf")).exp()


GATED_DELTA: Final = recurrent_ops(GatedDelta, DeltaLayer)
