"""Linear attention with a constant decay per head: the scan of Mamba-2 with a state per head of keys.

A prefill goes by chunks of tokens as there (lightning attention, arXiv 2401.04658, is that algorithm for one decay).

Axis letters: S sequences, T tokens, N heads, H head dim.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.mixers.mamba2 import chunked_scan, recurrent_scan
from pagoda.backends.reference.model.mixers.recurrence import Inputs, recurrent_ops
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.functions import norm
from pagoda.common.models.mixers import LightningAttention


class LightningLayer:
    """One layer's projections and scan, a RecurrentLayer.

    N heads of H channels.
    """

    def __init__(self, weights: NamedWeights, prefix: str, spec: LightningAttention) -> None:
        self.spec = spec
        # [D] -> q, k, v and gate, each [N*H]
        self.inner = weights.linear(*(f"{prefix}.{part}" for part in ("q", "k", "v", "gate")))
        self.q_norm = weights.wide(f"{prefix}.q_norm")  # [H]
        self.k_norm = weights.wide(f"{prefix}.k_norm")  # [H]
        self.norm = weights.take_wide(f"{prefix}.norm")  # [N*H]
        self.project_out = weights.linear(f"{prefix}.o")  # [N*H] -> [D]
        self.decay = -torch.tensor(spec.slopes)[:, None]
        (cache,) = spec.caches()
        self.elements = cache.block_elements(1)

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> (q, k and v [T, 3*N*H],), output gates [T, N*H]."""
        spec = self.spec
        channels = self.spec.heads * self.spec.head_dim
        qkv, gate = self.inner(x).split([3 * channels, channels], -1)
        qkv = F.silu(qkv) if spec.silu else qkv
        if spec.qk_norm is None and spec.rope is None:
            return (qkv.float(),), gate
        q, k, v = qkv.chunk(3, -1)
        pairs = (q, self.q_norm), (k, self.k_norm)
        q, k = (self._heads(part, weight, rotations) for part, weight in pairs)
        return (torch.cat((q, k, v), -1).float(),), gate

    def _heads(self, x: Tensor, weight: Tensor | None, rotations: Rotations) -> Tensor:
        """Return queries or keys [T, N*H], normalised and rotated."""
        heads = x.unflatten(-1, (self.spec.heads, -1))
        if self.spec.qk_norm is not None:
            heads = norm(heads, self.spec.qk_norm, weight)
        rotation = rotations[self.spec.rope]
        return (heads if rotation is None else rotation(heads)).flatten(1)

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, ...] and the states before them [S, elements] -> heads [S, T, N*H], the states after them."""
        spec = self.spec
        tokens = inputs[0].shape[1]
        q, k, v = (part.unflatten(-1, (spec.heads, -1)).transpose(1, 2) for part in inputs[0].chunk(3, -1))
        scan = recurrent_scan if tokens == 1 else chunked_scan
        decay = self.decay.expand(len(q), -1, tokens)
        heads, state = scan(v, k, q, decay, states.view(-1, spec.heads, spec.head_dim, spec.head_dim))
        heads = heads if spec.scale == 1.0 else heads * spec.scale
        return heads.transpose(1, 2).flatten(2), state.flatten(1)

    def out(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Heads float32 and gates [T, N*H] -> [T, D]."""
        grouped = heads.to(gate.dtype).unflatten(1, (self.spec.groups, -1))
        normed = norm(grouped, self.spec.norm, self.norm.view(self.spec.groups, -1)).flatten(1)
        return self.project_out(normed * gate.sigmoid())


LIGHTNING_ATTENTION: Final = recurrent_ops(LightningAttention, LightningLayer)
