"""The parameters of grouped-query attention, and the projections around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.reference.model.linear import Linear
from pagoda.backends.reference.model.mixers.rotary import Rotation
from pagoda.backends.reference.model.ops import sigmoid
from pagoda.backends.reference.model.params import NormParams
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.functions import norm
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm


@dataclass(frozen=True, slots=True)
class BlockIndexerParams:
    """`q`: [D] -> [K*H]; `k`: [D] -> [H]; norms [H]."""

    q: Linear
    k: Linear
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """`qkv`: [D] -> [(N+K)*H + K*V], or [N*H] without K and V of its own; `out`: [N*V] -> [D].

    `gate`: [D] -> [N*V] or [N], None without an output gate. `out_norm` [N*V]. `sinks` [N].
    """

    qkv: Linear
    out: Linear
    gate: Linear | None
    out_norm: NormParams | None
    q_norm: NormParams | None
    k_norm: NormParams | None
    sinks: Tensor | None
    blocks: BlockIndexerParams | None


def load_attention(weights: NamedWeights, prefix: str, mixer: Attention) -> AttentionParams:
    """Return the parameters of attention."""
    if mixer.values_are_keys:
        for suffix in ("", "_bias"):
            weights.share(f"{prefix}.k{suffix}", f"{prefix}.v{suffix}")
    return AttentionParams(
        qkv=weights.linear(
            *(f"{prefix}.{part}" for part in ("qkv" if mixer.shares_cache_of is None else "q")), precise=True
        ),
        out=weights.linear(f"{prefix}.o"),
        gate=weights.linear(f"{prefix}.gate") if mixer.output_gate else None,
        out_norm=weights.norm(f"{prefix}.out_norm"),
        q_norm=weights.norm(f"{prefix}.q_norm"),
        k_norm=weights.norm(f"{prefix}.k_norm"),
        sinks=weights.wide(f"{prefix}.sinks"),
        blocks=None if mixer.blocks is None else _load_blocks(weights, f"{prefix}.blocks"),
    )


def _load_blocks(weights: NamedWeights, prefix: str) -> BlockIndexerParams:
    q, k = (weights.linear(f"{prefix}.{part}") for part in "qk")
    return BlockIndexerParams(q, k, weights.take_wide(f"{prefix}.q_norm"), weights.take_wide(f"{prefix}.k_norm"))


class Projection:
    """One layer's projections around attention."""

    def __init__(
        self, spec: Attention, params: AttentionParams, head_norm: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """`head_norm`: computes the QK norm of heads [T, N + K, H]."""
        self.spec = spec
        self.params = params
        self._normalise = self._normalise_parts if head_norm is None else head_norm

    def __call__(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """X [T, D] -> queries [T, N, H], keys [T, K, H] and values [T, K, V], normalised and rotated."""
        spec = self.spec
        heads, values = self.before_rotation(x)
        if rotation is not None:
            heads = rotation(heads)
        if spec.qk_norm_after_rope:
            heads = self._normalise(heads)
        return heads[:, : spec.heads], heads[:, spec.heads :], values

    def before_rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """X [T, D] -> queries and keys [T, N + K, H], normalised if that comes before RoPE, and values [T, K, V]."""
        spec = self.spec
        projected = self.params.qkv(x)
        count = spec.heads + spec.kv_heads
        if spec.qkv_clip is not None:
            projected = projected.clamp(-spec.qkv_clip, spec.qkv_clip)
        heads = projected[:, : count * spec.head_dim].view(len(x), count, spec.head_dim)
        if not spec.qk_norm_after_rope:
            heads = self._normalise(heads)
        values = projected[:, count * spec.head_dim :].view(len(x), spec.kv_heads, spec.value_width)
        return heads, values if spec.value_norm is None else norm(values, spec.value_norm, None)

    def queries(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """X [T, D] -> queries [T, N, H] of a mixer that reads another layer's K and V."""
        spec = self.spec
        q_norm = self.params.q_norm
        queries = self.params.qkv(x).view(x.shape[0], spec.heads, spec.head_dim)
        if spec.qkv_clip is not None:
            queries = queries.clamp(-spec.qkv_clip, spec.qkv_clip)
        if spec.qk_norm_after_rope and rotation is not None:
            queries = rotation(queries)
        if spec.qk_norm is not None:
            queries = self._normalise_part(queries, spec.qk_norm, q_norm)
        return queries if spec.qk_norm_after_rope or rotation is None else rotation(queries)

    def out(self, heads: Tensor, x: Tensor) -> Tensor:
        """Attended heads [T, N*V] and the layer's input x [T, D], of which the output gate is computed -> [T, D]."""
        if self.spec.out_norm is not None:
            assert self.params.out_norm is not None, "the weights are complete"
            heads = norm(heads, self.spec.out_norm, self.params.out_norm.weight)
        if self.params.gate is None:
            return self.params.out(heads)
        gate = sigmoid(self.params.gate(x))
        if self.spec.gate_per_head:
            gate = gate.repeat_interleave(self.spec.value_width, 1)
        return self.params.out(heads * gate)

    def _normalise_parts(self, heads: Tensor) -> Tensor:
        """Apply the QK norm, if any, to heads [T, N+K, H]."""
        spec = self.spec
        params = self.params
        if spec.qk_norm is None:
            return heads
        parts = (heads[:, : spec.heads], params.q_norm), (heads[:, spec.heads :], params.k_norm)
        return torch.cat([self._normalise_part(h, spec.qk_norm, p) for h, p in parts], dim=1)

    def _normalise_part(self, heads: Tensor, spec: Norm, params: NormParams | None) -> Tensor:
        if params is None:
            assert not spec.scale, "the weights are complete"
            return norm(heads, spec, None)
        if self.spec.qk_norm_over == "full":
            return norm(heads.flatten(1), spec, params.weight, params.bias).view(heads.shape)
        return norm(heads, spec, params.weight, params.bias)
