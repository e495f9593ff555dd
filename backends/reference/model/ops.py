"""Torch operations of the naive model and the decoder. Rounding follows transformers: norms in float32, one cast.

Axis letters: T tokens, n heads of any kind, H head dim, D width, E experts, k chosen experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import PoolerActivation, Router
from pagoda.common.weights import dtypes

_NARROW = {
    dtypes.BFLOAT16: torch.bfloat16,
    dtypes.FLOAT8_E4M3FN: torch.float8_e4m3fn,
    dtypes.FLOAT8_E5M2: torch.float8_e5m2,
}

_ACTIVATIONS: dict[PoolerActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}


def to_torch(array: npt.NDArray[np.generic]) -> Tensor:
    """Return a tensor over the same memory. The tensor of a read-only array (a mapped file) must not be written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype in _NARROW:
            return torch.from_numpy(dtypes.as_uint(array)).view(_NARROW[array.dtype])
        return torch.from_numpy(array)


def norm(x: Tensor, spec: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """RMSNorm or LayerNorm of x [..., D] over its last axis; weight and bias [D]. Keeps x's dtype."""
    if spec.kind == "layer":
        scale = 1 + weight if spec.unit_offset else weight
        return F.layer_norm(x, (x.shape[-1],), scale, bias, spec.eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.unit_offset:
        return (wide * (1 + weight.float())).to(x.dtype)
    return wide.to(x.dtype) * weight


def l2_norm(x: Tensor) -> Tensor:
    """Return x [..., H] divided by its L2 norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def activation(name: PoolerActivation) -> Callable[[Tensor], Tensor]:
    """Return the elementwise function of that name."""
    return _ACTIVATIONS[name]


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    """Rotate the first `dim` channels of x [T, n, H]; channel i pairs with i + dim/2. cos, sin: [T, dim/2]."""
    half = dim // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half:dim], x[..., dim:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def deinterleave(x: Tensor, dim: int) -> Tensor:
    """Return x [..., H] with channels 2i and 2i + 1 of the first `dim` moved to i and i + dim/2."""
    pairs = x[..., :dim].unflatten(-1, (dim // 2, 2)).transpose(-1, -2).flatten(-2)
    return pairs if dim == x.shape[-1] else torch.cat((pairs, x[..., dim:]), -1)


def select(scores: Tensor, seen: Tensor | None, top_k: int) -> Tensor:
    """Return the `top_k` columns with the highest scores in each row of scores [T, C], as bool [T, C].

    Of equal scores the earlier. `seen`: bool [T, C], the columns to choose from; None: all.
    """
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    best = scores.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    return chosen if seen is None else chosen & seen


def route(logits: Tensor, spec: Router) -> tuple[Tensor, Tensor]:
    """Return weights float32 [T, k] and expert indices int64 [T, k] from router logits [T, E]."""
    weights, experts = logits.float().softmax(-1).topk(spec.top_k, dim=-1)
    if spec.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def mix_experts(x: Tensor, weights: Tensor, experts: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return the weighted sum of each token's experts, [T, D]. `expert(e, rows [t, D])` runs expert e on its rows."""
    mixed = torch.zeros_like(x)
    for e in set(experts.flatten().tolist()):
        rows, slots = (experts == e).nonzero(as_tuple=True)
        mixed.index_add_(0, rows, (expert(e, x[rows]) * weights[rows, slots, None]).to(x.dtype))
    return mixed
