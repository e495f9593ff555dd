"""The readable definition of the mixers with recurrent state: token by token, from a state of zeros.

Axis letters: T tokens, N heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder import functions
from pagoda.common.models.mixers import (
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Recurrent,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope


@dataclass(frozen=True, slots=True)
class NaiveParts:
    """A model's parameters by name, applied."""

    weights: Mapping[str, Tensor]

    def linear(self, name: str, x: Tensor, expert: int | None = None) -> Tensor:
        """Return W x + b. `expert`: of stacked weights."""
        weight = self.weights[name]
        bias = self.weights.get(f"{name}_bias")
        if expert is not None:
            weight = weight[expert]
            bias = None if bias is None else bias[expert]
        return F.linear(x, weight, bias)

    def norm(self, name: str, norm: Norm | None, x: Tensor) -> Tensor:
        """Return the norm of x, or x without a norm."""
        if norm is None:
            return x
        weight = self.weights[name] if norm.scale else None
        return functions.norm(x, norm, weight, self.weights.get(f"{name}_bias"))

    def wide(self, name: str) -> Tensor:
        """Return a parameter in float32."""
        return self.weights[name].float()

    def convolved(self, name: str, x: Tensor) -> Tensor:
        """Return the causal convolution of each channel of x [T, channels] by itself, in float32."""
        taps = self.wide(name)[:, 0]
        bias = self.weights.get(f"{name}_bias")
        padded = F.pad(x.float(), (0, 0, taps.shape[1] - 1, 0))
        mixed = torch.stack([padded[at : at + len(x)] * taps[:, at] for at in range(taps.shape[1])]).sum(0)
        return mixed if bias is None else mixed + bias.float()


Rotate = Callable[[Rope, Tensor], Tensor]
"""(rope, x [T, n, H]) -> x rotated at positions 0 to T-1."""


def recurrent(parts: NaiveParts, name: str, mixer: Recurrent, x: Tensor, rotate: Rotate) -> Tensor:
    """X [T, D] -> [T, D]."""
    match mixer:
        case GatedDelta():
            return gated_delta(parts, name, mixer, x)
        case KimiDelta():
            return kimi_delta(parts, name, mixer, x)
        case LightningAttention():
            return lightning_attention(parts, name, mixer, x, rotate)
        case Mamba():
            return mamba(parts, name, mixer, x)
        case Mamba2():
            return mamba2(parts, name, mixer, x)
        case ShortConvolution():
            return short_convolution(parts, name, x)


def gated_delta(parts: NaiveParts, name: str, mixer: GatedDelta, x: Tensor) -> Tensor:
    """X [T, D] -> [T, D]."""
    dims = mixer.key_dim, mixer.key_dim, mixer.value_dim
    q, k, v = (_projected(parts, name, part, x).unflatten(-1, (-1, dim)) for part, dim in zip("qkv", dims))
    q = functions.l2_norm(q) * mixer.key_dim**-0.5
    k = functions.l2_norm(k)
    q, k = (part.repeat_interleave(mixer.value_heads // mixer.key_heads, dim=1) for part in (q, k))
    beta = mixer.beta_scale * parts.linear(f"{name}.beta", x).float().sigmoid()
    softplus = F.softplus((parts.linear(f"{name}.decay", x) + parts.weights[f"{name}.decay_offset"]).float())
    decay = torch.exp(-parts.wide(f"{name}.decay_rate").exp() * softplus)
    heads = _delta_rule(q, k, v, beta, decay[..., None])
    normed = parts.norm(f"{name}.norm", mixer.norm, heads.to(x.dtype))
    gate = F.silu(parts.linear(f"{name}.gate", x).float()).view(normed.shape)
    return parts.linear(f"{name}.o", (normed * gate).to(x.dtype).flatten(1))


def kimi_delta(parts: NaiveParts, name: str, mixer: KimiDelta, x: Tensor) -> Tensor:
    """X [T, D] -> [T, D]."""
    q, k, v = (_projected(parts, name, part, x).unflatten(-1, (mixer.heads, -1)) for part in "qkv")
    q = functions.l2_norm(q) * mixer.head_dim**-0.5
    k = functions.l2_norm(k)
    beta = parts.linear(f"{name}.beta", x).float().sigmoid()
    decay, gate = (
        parts.linear(f"{name}.{part}", x)
        if mixer.rank is None
        else parts.linear(f"{name}.{part}_b", parts.linear(f"{name}.{part}_a", x))
        for part in ("decay", "gate")
    )
    shifted = (decay.float() + parts.wide(f"{name}.decay_offset")).view(q.shape)
    rate = parts.wide(f"{name}.decay_rate").exp()[:, None]
    if mixer.decay_bound is None:
        decay = torch.exp(-rate * F.softplus(shifted))
    else:
        decay = torch.exp(mixer.decay_bound * (rate * shifted).sigmoid())
    normed = parts.norm(f"{name}.norm", mixer.norm, _delta_rule(q, k, v, beta, decay))
    return parts.linear(f"{name}.o", (normed.flatten(1) * gate.float().sigmoid()).to(x.dtype))


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Return the heads [T, N, V]; q, k [T, N, K], v [T, N, V], beta [T, N], decay [T, N, K or 1]."""
    state = torch.zeros(*k.shape[1:], v.shape[-1])
    heads = []
    for t in range(len(q)):
        state = state * decay[t, :, :, None]
        delta = beta[t, :, None] * (v[t] - torch.einsum("nk,nkv->nv", k[t], state))
        state = state + torch.einsum("nk,nv->nkv", k[t], delta)
        heads.append(torch.einsum("nk,nkv->nv", q[t], state))
    return torch.stack(heads)


def _projected(parts: NaiveParts, name: str, part: str, x: Tensor) -> Tensor:
    """Return silu of the convolution of a projection of x [T, D], [T, channels]."""
    return F.silu(parts.convolved(f"{name}.{part}_conv", parts.linear(f"{name}.{part}", x)))


def lightning_attention(parts: NaiveParts, name: str, mixer: LightningAttention, x: Tensor, rotate: Rotate) -> Tensor:
    """X [T, D] -> [T, D]."""
    q, k, v = (parts.linear(f"{name}.{part}", x).view(len(x), mixer.heads, -1) for part in "qkv")
    q, k, v = (F.silu(part) if mixer.silu else part for part in (q, k, v))
    q, k = (parts.norm(f"{name}.{part}_norm", mixer.qk_norm, heads) for part, heads in (("q", q), ("k", k)))
    if mixer.rope is not None:
        q = rotate(mixer.rope, q)
        k = rotate(mixer.rope, k)
    q = mixer.scale * q.float()
    k = k.float()
    v = v.float()
    decay = torch.exp(-torch.tensor(mixer.slopes))[:, None, None]
    state = torch.zeros(mixer.heads, mixer.head_dim, mixer.head_dim)
    heads = []
    for t in range(len(x)):
        state = decay * state + torch.einsum("nk,nv->nkv", k[t], v[t])
        heads.append(torch.einsum("nk,nkv->nv", q[t], state))
    grouped = torch.stack(heads).flatten(1).to(x.dtype).unflatten(1, (mixer.groups, -1))
    weight = parts.weights[f"{name}.norm"].view(mixer.groups, -1)
    normed = functions.norm(grouped, mixer.norm, weight).flatten(1)
    return parts.linear(f"{name}.o", normed * parts.linear(f"{name}.gate", x).sigmoid())


def mamba2(parts: NaiveParts, name: str, mixer: Mamba2, x: Tensor) -> Tensor:
    """X [T, D] -> [T, D]."""
    v = _projected(parts, name, "v", x).unflatten(-1, (mixer.heads, -1))
    b, c = (_projected(parts, name, part, x).unflatten(-1, (mixer.groups, -1)) for part in "bc")
    b, c = (part.repeat_interleave(mixer.heads // mixer.groups, dim=1) for part in (b, c))
    step = F.softplus(parts.linear(f"{name}.step", x).float() + parts.wide(f"{name}.step_offset"))
    step = step.clamp(min=mixer.step_limit[0], max=mixer.step_limit[1])
    decay = torch.exp(-parts.wide(f"{name}.decay_rate").exp() * step)
    state = torch.zeros(mixer.heads, mixer.head_dim, mixer.state_dim)
    heads = []
    for t in range(len(x)):
        state = decay[t, :, None, None] * state + torch.einsum("n,nh,ns->nhs", step[t], v[t], b[t])
        heads.append(torch.einsum("nhs,ns->nh", state, c[t]))
    output = (torch.stack(heads) + parts.wide(f"{name}.skip")[:, None] * v).flatten(1)
    gate = F.silu(parts.linear(f"{name}.gate", x).float())
    if mixer.norm is None:
        output = output * gate
    elif mixer.norm_before_gate:
        output = _group_norm(parts, f"{name}.norm", mixer.norm, mixer.groups, output) * gate
    else:
        output = _group_norm(parts, f"{name}.norm", mixer.norm, mixer.groups, output * gate)
    return parts.linear(f"{name}.o", output.to(x.dtype))


def mamba(parts: NaiveParts, name: str, mixer: Mamba, x: Tensor) -> Tensor:
    """X [T, D] -> [T, D]."""
    v = _projected(parts, name, "v", x)
    step, b, c = (
        parts.norm(f"{name}.{part}_norm", mixer.part_norm, parts.linear(f"{name}.{part}", v.to(x.dtype)))
        for part in ("step_a", "b", "c")
    )
    step = F.softplus(parts.linear(f"{name}.step", step).float() + parts.wide(f"{name}.step_offset"))
    rate = -parts.wide(f"{name}.decay_rate").exp()
    state = torch.zeros(mixer.channels, mixer.state_dim)
    outputs = []
    for t in range(len(x)):
        state = torch.exp(step[t, :, None] * rate) * state + torch.outer(step[t] * v[t], b[t].float())
        outputs.append(state @ c[t].float())
    output = torch.stack(outputs) + parts.wide(f"{name}.skip") * v
    gate = F.silu(parts.linear(f"{name}.gate", x).float())
    return parts.linear(f"{name}.o", (output * gate).to(x.dtype))


def short_convolution(parts: NaiveParts, name: str, x: Tensor) -> Tensor:
    """X [T, D] -> [T, D]."""
    b, c, v = (parts.linear(f"{name}.{part}", x) for part in "bcv")
    return parts.linear(f"{name}.o", (c * parts.convolved(f"{name}.conv", b * v)).to(x.dtype))


def _group_norm(parts: NaiveParts, name: str, norm: Norm, groups: int, x: Tensor) -> Tensor:
    """Return x [T, channels], each group of channels normalised by itself."""
    return functions.norm(x.unflatten(-1, (groups, -1)), norm, parts.wide(name).view(groups, -1)).flatten(-2)
