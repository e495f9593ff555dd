"""The gated delta rule with a decay per channel (KDA).

A decode step goes token by token. A prefill goes by chunks of tokens (arXiv 2510.26692, section 3): within a chunk the
rule is a triangular system, as without channels; the decay between two tokens enters the products of their channels.

Axis letters: S sequences, T tokens, N heads, K channels of a key head, V of a value head, C of the convolution.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.functions import l2_norm
from pagoda.backends.torch_decoder.mixers.recurrence import Convolution, GateSpec, Inputs, StateMixerOps, StateRule
from pagoda.common.models.mixers import KimiDelta

KDA_CHUNK: Final = 32
"""Tokens whose updates of the state are solved for at once."""


class KimiDeltaMixer:
    """One layer's projections around the rule."""

    def __init__(self, spec: KimiDelta, ops: StateMixerOps, rule: StateRule) -> None:
        """`rule`: of q, k and v before the convolution [T, C], beta [T, N] and decay [T, N*H], as projected."""
        low_rank = spec.rank is not None
        decay, gate = ("decay_a", "gate_a") if low_rank else ("decay", "gate")
        self.project = ops.project(("q", "k", "v"), ("beta",), (decay,), (gate,))
        self.widen = (ops.linear("decay_b"), ops.linear("gate_b")) if low_rank else None
        self.rule = rule
        self.gate = ops.gate(GateSpec(spec.norm, spec.heads, "sigmoid"))
        self.out = ops.out()

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        qkv, beta, decay, gate = self.project(x)
        if self.widen is not None:
            decay_of, gate_of = self.widen
            decay = decay_of(decay)
            gate = gate_of(gate)
        return self.out(self.gate(self.rule(qkv, beta, decay, step), gate))


class KimiDeltaRule:
    """The convolution and the rule in plain torch, all in float32: a PlainRule."""

    def __init__(self, spec: KimiDelta, convolve: Convolution, decay_rate: Tensor, decay_offset: Tensor) -> None:
        """decay_rate [N], the exp of the parameter is the rate; decay_offset [N*H]."""
        self.spec = spec
        self.convolve = convolve
        self.decay_rate = -decay_rate.exp()
        self.decay_offset = decay_offset

    def inputs(self, *projections: Tensor) -> Inputs:
        """Return q, k and v before the convolution [T, C], beta [T, N] and log decay [T, N*H]."""
        spec = self.spec
        qkv, beta, decay = projections
        shifted = (decay.float() + self.decay_offset).unflatten(-1, (spec.heads, -1))
        rate = self.decay_rate[:, None]
        if spec.decay_bound is None:
            log_decay = rate * F.softplus(shifted)
        else:
            log_decay = spec.decay_bound * (-rate * shifted).sigmoid()
        return qkv.float(), beta.float().sigmoid(), log_decay.flatten(1)

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, ...] and the states before them [S, elements] -> heads [S, T, N*V], the states after them."""
        spec = self.spec
        before, beta, decay = inputs
        tail, state = states.tensor_split([self.convolve.elements], -1)
        qkv, tail = self.convolve(before, tail)
        q, k, v = (part.unflatten(1, (spec.heads, -1)).mT for part in F.silu(qkv).chunk(3, 1))
        heads, state = channel_rule(
            l2_norm(q) * spec.head_dim**-0.5,
            l2_norm(k),
            v,
            beta.mT,
            decay.unflatten(-1, (spec.heads, -1)).transpose(1, 2),
            state.view(-1, spec.heads, spec.head_dim, spec.head_dim),
        )
        return heads.transpose(1, 2).flatten(2), torch.cat((tail, state.flatten(1)), 1)


def channel_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads [S, N, T, V] and the state after T tokens, in float32.

    q, k and log decay [S, N, T, K]; v [S, N, T, V]; beta [S, N, T]; state [S, N, K, V]. See
    `gated_delta.chunked_rule`, of which the factors exp(G_i - G_j) belong to channels here.
    """
    if q.shape[2] == 1:
        state = state * decay.mT.exp()
        state = state + k.mT @ (beta[..., None] * (v - k @ state))
        return q @ state, state
    tokens = q.shape[2]
    size = min(KDA_CHUNK, tokens)
    padding = -tokens % size  # with beta, k and log decay 0, which changes nothing
    q, k, v, decay = (F.pad(part, (0, 0, 0, padding)).unflatten(2, (-1, size)) for part in (q, k, v, decay))
    beta = F.pad(beta, (0, padding)).unflatten(2, (-1, size))[..., None]
    scores, system, until_end = _products(q, k, decay.exp())
    since_start = decay.cumsum(-2).exp()
    sides = beta * torch.cat((v, k * since_start), -1)
    of_v, of_state = torch.linalg.solve_triangular(beta * system, sides, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    queries = q * since_start
    last = since_start[..., -1, :, None]
    heads = []
    for chunk in range(q.shape[2]):
        written = of_v[:, :, chunk] - of_state[:, :, chunk] @ state
        heads.append(queries[:, :, chunk] @ state + scores[:, :, chunk] @ written)
        state = last[:, :, chunk] * state + until_end[:, :, chunk].mT @ written
    return torch.cat(heads, 2)[:, :, :tokens], state


def _products(q: Tensor, k: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k of each token times k of all up to it, decayed in between; and k decayed to the chunk's end.

    All [..., size, K]; the products [..., size, size], 0 for later tokens. Keys decay token by token, so that no decay
    is the quotient of two others, which may be 0.
    """
    size = q.shape[-2]
    keys = k.clone()
    rows = torch.stack((q, k), -2)
    products = q.new_zeros(2, *q.shape[:-1], size)
    for token in range(size):
        keys[..., :token, :].mul_(factors[..., token : token + 1, :])
        both = rows[..., token, :, :] @ keys[..., : token + 1, :].mT  # [..., 2, token + 1]
        products[..., token, : token + 1] = both.movedim(-2, 0)
    return products[0], products[1], keys
