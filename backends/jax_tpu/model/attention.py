"""Grouped-query attention over what a step says: the paged cache, or the prompts of the step alone.

Project, normalise, rotate; the step writes K and V and attends. Heads lie in slots (see `layout.HeadLayout`): a slot
is one KV head and its query heads, so that one axis is split over the devices.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.model.layers import AnyStep, JaxBuildContext, local_part, normalise, project, scaled, total
from pagoda.backends.jax_tpu.model.layout import HeadLayout
from pagoda.backends.jax_tpu.model.rotary import JaxRotation
from pagoda.common.models.spec import Attention


class JaxAttention(nnx.Module):
    """`qkv` [K * (G+2), H, D]: per slot K the G query heads, then key, then value; `out` [D, K * G * H]: flat,
    because the TPU would lay out a last axis but one of G rows in a way that it must undo in every step.
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
        exact = replace(build, dtype=jnp.dtype(jnp.float32))
        self.kv_scale = exact.parameter(".", 2) if build.scaled_cache else None  # of K, of V

    def __call__(
        self, x: jax.Array, cache: jax.Array, place: jax.Array, rotation: JaxRotation | None, step: AnyStep
    ) -> tuple[jax.Array, jax.Array]:
        """X [T, D], the stacked cache, (group, index) int32 [2] of this layer -> [T, D] and the cache."""
        # The barrier keeps XLA from giving the product another shape, for which it would copy the weight first.
        heads = jax.lax.optimization_barrier(project(x, self.qkv[...], self.qkv_scale))
        heads = heads.reshape(heads.shape[0], -1, self.layout.group + 2, self.spec.head_dim)
        if self.qkv_bias is not None:
            heads = heads + self.qkv_bias[...]
        tokens, slots, places, dim = heads.shape
        q, k, v = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
        q, k = self._normalise(q, k)
        q = q.reshape(tokens, slots * (places - 2), dim)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        scales = None if self.kv_scale is None else self.kv_scale[...]
        attended, cache = step.attend(q, k, v, cache, place, self.spec, scales)
        out = total(project(attended.reshape(tokens, -1), self.out[...], self.out_scale))
        return (out if self.out_bias is None else out + self.out_bias[...]), cache

    def _normalise(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """QK norm of q [T, K, G, H] and k [T, K, H], when the layer has one."""
        norm = self.spec.qk_norm
        if norm is None or self.q_norm is None or self.k_norm is None:
            return q, k
        if self.spec.qk_norm_over == "per_head":
            return normalise(q, norm, self.q_norm[...]), normalise(k, norm, self.k_norm[...])
        once = local_part(jnp.asarray(self.layout.first_copy), k.shape[1])[:, None]
        wide_q, wide_k = q.astype(jnp.float32), k.astype(jnp.float32)
        # Empty places hold zeros and copies are counted once, so the sums are those of the whole projection.
        mean_q = total(jnp.square(wide_q).sum((1, 2, 3))) / (self.spec.heads * self.spec.head_dim)
        mean_k = total((jnp.square(wide_k) * once).sum((1, 2))) / (self.spec.kv_heads * self.spec.head_dim)
        new_q = scaled(wide_q, mean_q[:, None, None, None], norm, self.q_norm[...])
        new_k = scaled(wide_k, mean_k[:, None, None], norm, self.k_norm[...])
        return new_q.astype(q.dtype), new_k.astype(k.dtype)


def _qk_norms(
    spec: Attention, slots: int, group: int, build: JaxBuildContext
) -> tuple[nnx.Param | None, nnx.Param | None]:
    """Weights of the QK norms: [H] each, or one per channel of the whole projections."""
    if spec.qk_norm is None:
        return None, None
    if spec.qk_norm_over == "per_head":
        return build.parameter("H", spec.head_dim), build.parameter("H", spec.head_dim)
    return build.parameter("KGH", slots, group, spec.head_dim), build.parameter("KH", slots, spec.head_dim)
