"""Attention to the blocks of tokens that an indexer selects: its projections, its cache of keys, and the kernels."""

from __future__ import annotations

import jax
from flax import nnx

from pagoda.backends.jax_tpu.model.layers import Caches, JaxNorm, Rotations
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.common.models.mixers import Attention, BlockIndexer
from pagoda.kernels_pallas.block_selection import BlockRule, attend_to_blocks, select_blocks, store_heads
from pagoda.kernels_pallas.latent_attention.write import store_latents
from pagoda.kernels_pallas.ragged_paged_attention.plan import make_knobs


class JaxBlockIndex(nnx.Module):
    """One layer's indexer. K: KV heads in slots; H: channels of its keys.

    `q` [K, H, D]; `k` [H, D], whole on every device.
    """

    def __init__(
        self, spec: BlockIndexer, attention: Attention, slots: int, width: int, build: JaxBuildContext
    ) -> None:
        self.spec = spec
        self.attention = attention
        self.kv_heads = slots // build.tensor
        self.rule = BlockRule(spec.tokens, spec.top_k, spec.local)
        self.q = build.parameter("K.D", slots, spec.head_dim, width)
        self.k = build.parameter(".D", spec.head_dim, width)
        self.q_norm, self.k_norm = (JaxNorm(spec.norm, spec.head_dim, build) for _ in "qk")

    def store(
        self, x: jax.Array, cache: jax.Array, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> jax.Array:
        """Return the stacked cache with the keys of x [T, D]."""
        rotate = rotations[self.spec.rope]
        kernel = step.kernel
        keys = rotate(self.k_norm(project(x, self.k[...]))[:, None])[:, 0]
        layer = step.cache_layer(cache_index, cache)
        layout = kernel.latent_layout(self.spec.head_dim, 0)
        options = {"use_kernel": kernel.use_kernel, "interpret": kernel.interpret}
        return store_latents(keys, cache, layer, step.ragged(cache_index).cleaned(), layout, **options)

    def attend(
        self,
        x: jax.Array,
        heads: tuple[jax.Array, jax.Array, jax.Array],
        caches: Caches,
        cache_index: jax.Array,
        rotations: Rotations,
        step: AnyStep,
    ) -> tuple[jax.Array, jax.Array]:
        """Write K and V [T, K, H], then attend: q of `heads` [T, N, H] -> [T, N, H], and the stacked cache.

        x [T, D]; `caches`: of K and V, and of the indexer's keys, with those of x.
        """
        rotate = rotations[self.spec.rope]
        kernel = step.kernel
        q, k, v = heads
        dim = self.attention.head_dim
        layout = kernel.kv_layout(self.kv_heads, dim, dim)
        batch = step.ragged(cache_index).cleaned()
        layer = step.cache_layer(cache_index, caches[0])
        options = {"use_kernel": kernel.use_kernel, "interpret": kernel.interpret}
        cache = store_heads(k, v, caches[0], layer, batch, layout, **options)
        queries = rotate(self.q_norm(project(x, self.q[...])))
        selected = select_blocks(
            queries,
            caches[1],
            layout=kernel.latent_layout(self.spec.head_dim, 0),
            layer=step.cache_layer(cache_index[2:], caches[1]),
            batch=step.ragged(cache_index[2:]).cleaned(),
            rule=self.rule,
            decode_only=step.decode_only,
            **kernel.options,
        )
        knobs = make_knobs(self.attention.scale)
        return attend_to_blocks(
            q, cache, selected, layout=layout, layer=layer, batch=batch, rule=self.rule, knobs=knobs, **kernel.options
        )
