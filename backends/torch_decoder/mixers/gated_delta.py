"""The gated delta rule.

A decode step goes token by token. A prefill goes by chunks of tokens
(arXiv 2412.06464, section 3.3): within a chunk the rule is a triangular system, and only the state passes from chunk to
chunk.

Axis letters: S sequences, T tokens, N value heads, K channels of a key head, V of a value head, C channels of the
convolution, M chunks.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.functions import l2_norm
from pagoda.backends.torch_decoder.mixers.recurrence import Convolution, GateSpec, Inputs, StateMixerOps, StateRule
from pagoda.common.models.mixers import GatedDelta

CHUNK: Final = 64
"""Tokens whose updates of the state are solved for at once."""


class GatedDeltaMixer:
    """One layer's projections around the rule."""

    def __init__(self, spec: GatedDelta, ops: StateMixerOps, rule: StateRule) -> None:
        """`rule`: of q, k and v before the convolution [T, C], and of beta and decay as projected [T, 2*N]."""
        self.project = ops.project(("q", "k", "v"), ("gate",), ("beta", "decay"))
        self.rule = rule
        self.gate = ops.gate(GateSpec(spec.norm, spec.value_heads, rounded="heads"))
        self.out = ops.out()

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        qkv, gate, scalars = self.project(x)
        return self.out(self.gate(self.rule(qkv, scalars, step), gate))


class GatedDeltaRule:
    """The convolution and the rule in plain torch, all in float32: a PlainRule."""

    def __init__(self, spec: GatedDelta, convolve: Convolution, decay_rate: Tensor, decay_offset: Tensor) -> None:
        """decay_rate, decay_offset [N]; the rate is the exp of the parameter."""
        self.spec = spec
        self.convolve = convolve
        self.decay_rate = -decay_rate.float().exp()
        self.decay_offset = decay_offset.float()

    def inputs(self, *projections: Tensor) -> Inputs:
        """Return q, k and v before the convolution [T, C], beta and log decay [T, N]."""
        qkv, scalars = projections
        beta, decay = scalars.split(self.spec.value_heads, -1)
        log_decay = self.decay_rate * F.softplus(decay.float() + self.decay_offset)
        return qkv.float(), beta.float().sigmoid() * self.spec.beta_scale, log_decay

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
