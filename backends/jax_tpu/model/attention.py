"""Grouped-query attention over the paged cache (generation) or within the prompts of a step (pooling).

Heads are arranged in slots (see `layout.HeadLayout`): a slot is one KV head with its query heads, so that one axis can
be sharded over the devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.model.layers import (
    AnyStep,
    JaxBuildContext,
    all_reduce,
    local_part,
    normalise,
    project,
    scale_norm,
)
from pagoda.backends.jax_tpu.model.layout import HeadLayout
from pagoda.backends.jax_tpu.model.rotary import JaxRotation
from pagoda.common.models.spec import Attention


class JaxAttention(nnx.Module):
    """`qkv` [K * (G+2), H, D]: per slot K the G query heads, then key, then value; `out` [D, K * G * H].

    `out` is flat: with G as the second-last axis the TPU would choose a layout that must be undone in every step.
    """

    def __init__(self, spec: Attention, width: int, build: JaxBuildContext) -> None:
        layout = HeadLayout.of(spec, build.tensor)
        slots, group, dim = layout.slots, layout.group, spec.head_dim
        self.spec, self.layout = spec, layout
        self.qkv, self.qkv_scale = build.matrix("K.D", slots * (group + 2), dim, width)
        self.qkv_bias = build.parameter("KGH", slots, group + 2, dim) if spec.qkv_bias else None
        self.out, self.out_scale = build.matrix("DK", width, slots * group * dim)
        self.out_bias = build.parameter("D", width) if spec.out_bias else None
        self.q_norm, self.k_norm = _qk_norms(spec, slots, group, build)
        self.kv_scale = build.float32().parameter(".", 2) if build.scaled_cache else None  # of K, of V

    def __call__(
        self, x: jax.Array, cache: jax.Array, cache_index: jax.Array, rotation: JaxRotation | None, step: AnyStep
    ) -> tuple[jax.Array, jax.Array]:
        """X [T, D], the stacked cache, this layer's int32 [2] (block table, cache layer) -> [T, D] and the cache."""
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        heads = jax.lax.optimization_barrier(project(x, self.qkv[...], self.qkv_scale))
        heads = heads.reshape(heads.shape[0], -1, self.layout.group + 2, self.spec.head_dim)
        if self.qkv_bias is not None:
            heads = heads + self.qkv_bias[...]
        tokens, slots, per_slot, dim = heads.shape
        q, k, v = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
        q, k = self._normalise(q, k)
        q = q.reshape(tokens, slots * (per_slot - 2), dim)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        scales = None if self.kv_scale is None else self.kv_scale[...]
        attended, cache = step.attend(q, k, v, cache, cache_index, self.spec, scales)
        out = all_reduce(project(attended.reshape(tokens, -1), self.out[...], self.out_scale))
        return (out if self.out_bias is None else out + self.out_bias[...]), cache

    def _normalise(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Apply the QK norm, if any, to q [T, K, G, H] and k [T, K, H]."""
        norm = self.spec.qk_norm
        if norm is None or self.q_norm is None or self.k_norm is None:
            return q, k
        if self.spec.qk_norm_over == "per_head":
            return normalise(q, norm, self.q_norm[...]), normalise(k, norm, self.k_norm[...])
        first_copy = local_part(jnp.asarray(self.layout.first_copy), k.shape[1])[:, None]
        wide_q, wide_k = q.astype(jnp.float32), k.astype(jnp.float32)
        # Empty head positions hold zeros and copies count once, so the sums cover exactly the full projection.
        mean_q = all_reduce(jnp.square(wide_q).sum((1, 2, 3))) / (self.spec.heads * self.spec.head_dim)
        mean_k = all_reduce((jnp.square(wide_k) * first_copy).sum((1, 2))) / (self.spec.kv_heads * self.spec.head_dim)
        new_q = scale_norm(wide_q, mean_q[:, None, None, None], norm, self.q_norm[...])
        new_k = scale_norm(wide_k, mean_k[:, None, None], norm, self.k_norm[...])
        return new_q.astype(q.dtype), new_k.astype(k.dtype)


def _qk_norms(
    spec: Attention, slots: int, group: int, build: JaxBuildContext
) -> tuple[nnx.Param | None, nnx.Param | None]:
    """Create the QK norm weights: [H] each, or one per channel of the full projections."""
    if spec.qk_norm is None:
        return None, None
    if spec.qk_norm_over == "per_head":
        return build.parameter("H", spec.head_dim), build.parameter("H", spec.head_dim)
    return build.parameter("KGH", slots, group, spec.head_dim), build.parameter("KH", slots, spec.head_dim)
