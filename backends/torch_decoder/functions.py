"""Torch operations that both torch backends have. Rounding follows transformers: norms in float32, one cast.

Axis letters: T tokens, n heads of any kind, K KV heads, C cached tokens, H head dim, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.common.models.mixers import BlockIndexer, QueryGrowth
from pagoda.common.models.primitives import Norm


def norm(x: Tensor, spec: Norm, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """RMSNorm or LayerNorm of x [..., D] over its last axis; weight and bias [D], or [n, D]. Keeps x's dtype."""
    if weight is not None and weight.ndim > 1:
        scaled = norm(x, replace(spec, scale=False), None) * weight
        return scaled if bias is None else scaled + bias
    if spec.kind == "layer":
        scale = 1 + weight if spec.unit_offset and weight is not None else weight
        return F.layer_norm(x, (x.shape[-1],), scale, bias, spec.eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    if weight is None:
        return wide.to(x.dtype)
    if spec.unit_offset:
        return (wide * (1 + weight.float())).to(x.dtype)
    return wide.to(x.dtype) * weight


def l2_norm(x: Tensor) -> Tensor:
    """Return x [..., H] divided by its L2 norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the float32 softmax of scores [..., T, C] over the last axis; `sinks` [..., T or 1]: one more logit."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    sink = sinks[..., None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1, dtype=torch.float32)[..., :-1]


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def alibi(head_slopes: Sequence[float], *, queries: int, keys: int, like: Tensor, causal: bool, root: bool) -> Tensor:
    """Return what ALiBi adds to the scores of the last `queries` of `keys` tokens: [n, queries or 1, keys].

    `root`: it grows with the root of the distance. For earlier keys, without roots, it is the same for all queries, but
    for a constant per query.
    """
    slopes = torch.tensor(head_slopes, device=like.device)[:, None, None]
    tokens = torch.arange(keys, dtype=torch.float32, device=like.device)
    if causal and not root:
        return (slopes * (tokens + (1 - keys))).to(like.dtype)
    distances = tokens[keys - queries :, None] - tokens
    if not causal:
        return (-slopes * distances.abs()).to(like.dtype)
    return (-slopes * distances.clamp(min=0).sqrt()).to(like.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    """Rotate the first `dim` channels of x [T, n, H]; channel i pairs with i + dim/2. cos, sin: [T, dim/2]."""
    half = dim // 2
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    first = x[..., :half]
    second = x[..., half:dim]
    rest = x[..., dim:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def query_growth(spec: QueryGrowth, positions: Tensor) -> Tensor:
    """Return the factor on queries at positions int [T], float32 [T, 1, 1]."""
    steps = (positions.float() + spec.offset).div(spec.period).floor()
    return (1 + spec.rate * torch.log1p(steps))[:, None, None]


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


def select_blocks(scores: Tensor, spec: BlockIndexer, context: int) -> Tensor:
    """Return which tokens queries from position `context` on attend to, bool [K, T, C] as the scores."""
    queries, keys = scores.shape[1:]
    at = torch.arange(context, context + queries, device=scores.device)[:, None]
    seen = torch.arange(keys, device=scores.device) <= at
    scores = F.pad(scores.masked_fill(~seen, -torch.inf), (0, -keys % spec.tokens), value=-torch.inf)
    blocks = scores.unflatten(-1, (-1, spec.tokens)).amax(-1)  # [K, T, B]
    numbers = torch.arange(blocks.shape[-1], device=scores.device)
    own = at // spec.tokens
    blocks = blocks.masked_fill((numbers <= own) & (numbers > own - spec.local), torch.inf)
    best = blocks.topk(min(spec.top_k, len(numbers)), dim=-1).indices
    chosen = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, best, True)
    return chosen.repeat_interleave(spec.tokens, -1)[..., :keys] & seen
