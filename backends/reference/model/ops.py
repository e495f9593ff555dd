"""Torch operations of the naive model and the decoder. Rounding follows transformers: norms in float32, one cast.

Axis letters: T tokens, n heads of any kind, H head dim, D width, E experts, k chosen experts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.common.models.spec import ClampedGlu, ExpertGroups, Mlp, PoolerActivation, Router, SparseMixer
from pagoda.common.weights import dtypes

_NARROW = {
    dtypes.BFLOAT16: torch.bfloat16,
    dtypes.FLOAT8_E4M3FN: torch.float8_e4m3fn,
    dtypes.FLOAT8_E5M2: torch.float8_e5m2,
}

SMALLEST_SUM = 1e-20
"""Of scores that are renormalised: sigmoids may all be 0."""


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


_INVARIANT: dict[PoolerActivation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: (x.float() * _sigmoid(x.float())).to(x.dtype),
    "gelu": lambda x: F.gelu(x.contiguous()),
    "gelu_tanh": lambda x: _gelu_tanh(x.float()).to(x.dtype),
}
"""In place of torch's, which compute the last elements of a tensor (or of a row, if rows are apart) by another formula.
"""

_ACTIVATIONS: dict[PoolerActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
}


def to_torch(array: npt.NDArray[np.generic]) -> Tensor:
    """Return a tensor over the same memory. The tensor of a read-only array (a mapped file) must not be written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype in _NARROW:
            return torch.from_numpy(dtypes.as_uint(array)).view(_NARROW[array.dtype])
        return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> npt.NDArray[np.generic]:
    """Return an array over the same memory, of bfloat16 as `dtypes.BFLOAT16`."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(dtypes.BFLOAT16)
    return tensor.numpy()


def activation(name: PoolerActivation, *, batch_invariant: bool = False) -> Callable[[Tensor], Tensor]:
    """Return the elementwise function of that name; with `batch_invariant` no element depends on its place."""
    return _INVARIANT.get(name, _ACTIVATIONS[name]) if batch_invariant else _ACTIVATIONS[name]


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid in float32; no element depends on its place in the tensor. Keeps x's dtype."""
    return _sigmoid(x.float()).to(x.dtype)


def gated(spec: Mlp, gate: Tensor, up: Tensor) -> Tensor:
    """Return the hidden values of a gated Mlp."""
    if spec.clamped is not None:
        return clamped_glu(gate, up, spec.clamped)
    hidden = activation(spec.activation)(gate)
    return hidden * up if spec.clip is None else clipped(hidden, up, spec.clip)


def clipped(hidden: Tensor, up: Tensor, clip: float) -> Tensor:
    """Return the product of an activated gate and up [T, F] within the limits of `Mlp.clip`."""
    return hidden.clamp(max=clip) * up.clamp(-clip, clip)


def clamped_glu(gate: Tensor, up: Tensor, spec: ClampedGlu) -> Tensor:
    """Return the activation of gate and up [T, F]."""
    gate = gate.clamp(max=spec.limit)
    up = up.clamp(-spec.limit, spec.limit)
    return gate * sigmoid(spec.alpha * gate) * (up + 1)


def sparse(x: Tensor, quantile: float) -> Tensor:
    """Return relu(x - cutoff) of x [T, F]; the cutoff lies `quantile` standard deviations above the mean of a row."""
    return F.relu(x - (x.mean(-1, keepdim=True) + x.std(-1, keepdim=True, correction=0) * quantile))


def route(logits: Tensor, spec: Router | SparseMixer, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights float32 [T, k] and expert indices int64 [T, k] from router logits [T, E].

    `correction` float32 [E]: if the router has one.
    """
    if isinstance(spec, SparseMixer):
        return _sparse_mixer(logits.float(), spec)
    scores = logits.float().softmax(-1) if spec.scores == "softmax" else sigmoid(logits.float())
    choice = scores if correction is None else scores + correction
    if spec.groups is not None:
        choice = _of_best_groups(choice, spec.groups)
    experts = choice.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if spec.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
    return (weights if spec.scale == 1.0 else weights * spec.scale), experts


def _of_best_groups(choice: Tensor, groups: ExpertGroups) -> Tensor:
    """Return scores [T, E], -inf for experts that are not in the best groups."""
    grouped = choice.unflatten(-1, (groups.count, -1))
    ranked = grouped.amax(-1) if groups.rank_by == "best" else grouped.topk(2, dim=-1).values.sum(-1)
    best = ranked.topk(groups.used, dim=-1).indices
    excluded = torch.ones_like(ranked, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)


def _sparse_mixer(logits: Tensor, spec: SparseMixer) -> tuple[Tensor, Tensor]:
    rest = logits
    weights = []
    experts = []
    for _ in range(spec.top_k):
        largest, expert = rest.max(-1, keepdim=True)
        near = largest - logits <= 2 * spec.jitter * logits.abs().maximum(largest)
        weights.append(1 / (rest - largest).exp().where(near, 0).sum(-1, keepdim=True))
        experts.append(expert)
        rest = rest.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, -1), torch.cat(experts, -1)


def mix_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    expert: Callable[[int, Tensor], Tensor],
    at: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, D]. `expert(e, rows [t, D])` runs expert e on its rows.

    `at`: returns a context for what runs on the tokens of these indices.
    """
    mixed = torch.zeros_like(x)
    for e in sorted(set(experts.flatten().tolist())):  # so that a token's sum has one order
        rows, slots = (experts == e).nonzero(as_tuple=True)
        with at(rows):
            y = expert(e, x[rows])
        mixed.index_add_(0, rows, (y * weights[rows, slots, None]).to(x.dtype))
    return mixed
