"""The gated delta rule with a decay per channel (KDA).

A decode step goes token by token. A prefill goes by chunks of tokens (arXiv 2510.26692, section 3): within a chunk the
rule is a triangular system, as without channels; the decay between two tokens enters the products of their channels.

Axis letters: S sequences, T tokens, N heads, K channels of a key head, V of a value head, C of the convolution.
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
from pagoda.common.models.mixers import KimiDelta

KDA_CHUNK: Final = 32
"""Tokens whose updates of the state are solved for at once."""


class KimiDeltaLayer:
    """One layer's projections, convolution and rule, a RecurrentLayer.

    N heads of H channels. All but the linear layers and the norm in float32.
    """

    def __init__(self, weights: NamedWeights, prefix: str, spec: KimiDelta) -> None:
        self.spec = spec
        low_rank = spec.rank is not None
        last = ("decay_a", "gate_a") if low_rank else ("decay", "gate")
        # [D] -> q, k and v [3*N*H], beta [N], low-rank decay, low-rank gate; or decay and gate
        self.inner = weights.linear(*(f"{prefix}.{part}" for part in ("q", "k", "v", "beta", *last)))
        self.decay = weights.linear(f"{prefix}.decay_b") if low_rank else None  # low-rank -> [N*H]
        self.gate = weights.linear(f"{prefix}.gate_b") if low_rank else None  # low-rank -> [N*H]
        self.convolve = Convolution(weights.convolution(*(f"{prefix}.{part}_conv" for part in "qkv")))
        self.decay_rate = -weights.take(f"{prefix}.decay_rate").exp()  # [N] -exp of the parameter
        self.decay_offset = weights.take(f"{prefix}.decay_offset")  # [N*H]
        self.norm = weights.take_wide(f"{prefix}.norm")  # [H]
        self.project_out = weights.linear(f"{prefix}.o")  # [N*H] -> [D]
        (cache,) = spec.caches()
        self.elements = cache.block_elements(1)

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> (q, k and v before the convolution [T, C], beta [T, N], log decay [T, N*K]), gates [T, N*V]."""
        spec = self.spec
        rank = spec.rank or spec.width
        qkv, beta, decay, gate = self.inner(x).split([3 * spec.width, spec.heads, rank, rank], -1)
        decay, gate = (
            part if layer is None else layer(part) for part, layer in ((decay, self.decay), (gate, self.gate))
        )
        shifted = (decay.float() + self.decay_offset).unflatten(-1, (spec.heads, -1))
        rate = self.decay_rate[:, None]
        if spec.decay_bound is None:
            log_decay = rate * F.softplus(shifted)
        else:
            log_decay = spec.decay_bound * (-rate * shifted).sigmoid()
        return (qkv.float(), beta.float().sigmoid(), log_decay.flatten(1)), gate

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

    def out(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Heads float32 and gates [T, N*V] -> [T, D]."""
        normed = norm(heads.unflatten(-1, (self.spec.heads, -1)), self.spec.norm, self.norm.float())
        return self.project_out((normed.flatten(-2) * gate.float().sigmoid()).to(gate.dtype))


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


KIMI_DELTA: Final = recurrent_ops(KimiDelta, KimiDeltaLayer)
