"""Multi-head latent attention (MLA) over the paged cache of latents.

Decode is absorbed: all heads attend to the latents. Prefill is, too, unless it is cheaper to expand them to the keys
and values of the heads (`kernels_pallas.latent_attention.expanded`), which the program decides for each step. Every
device keeps the whole latents, and its share of the heads.

With an indexer, whose keys are in a second cache, each query attends to the tokens that it selects, absorbed in
prefills too; every device selects for itself. A program none of whose sequences can be longer than what is selected
attends to all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, PoolInput
from pagoda.backends.jax_tpu.model.layers import Caches, JaxNorm, Rotations, query_growth, reduced
from pagoda.backends.jax_tpu.model.lora import adapted, matrix_lora
from pagoda.backends.jax_tpu.model.mixers.ops import JaxMixerOps, LargestStep, MixerModule
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import HeadLayout, LatentStack, Stack
from pagoda.backends.jax_tpu.weights.arrange import Placement, arrange_columns
from pagoda.common.models.mixers import Indexer, LatentAttention
from pagoda.kernels_pallas.latent_attention import LatentLayout, latent_attention
from pagoda.kernels_pallas.latent_attention.expanded import (
    ExpandedHeads,
    Expansion,
    expanded_attention,
    plan_expansion,
    scratch_pages,
)
from pagoda.kernels_pallas.latent_attention.selected import selected_attention
from pagoda.kernels_pallas.latent_attention.write import store_latents
from pagoda.kernels_pallas.ragged_paged_attention.plan import make_knobs
from pagoda.kernels_pallas.token_selection import SelectedTokens, select_tokens


def head_layout(spec: LatentAttention, tensor: int) -> HeadLayout:
    """Return how the heads are arranged in slots."""
    return HeadLayout.of(heads=spec.heads, kv_heads=spec.heads, tensor=tensor)


class JaxIndexer(nnx.Module):
    """The projections of an indexer, whole on every device, and its cache of keys."""

    def __init__(self, spec: Indexer, width: int, query_rank: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.q = build.parameter("..", spec.heads * spec.head_dim, query_rank)
        self.k = build.parameter(".D", spec.head_dim, width)
        self.k_norm = JaxNorm(spec.norm, spec.head_dim, build)
        self.weights = build.parameter(".D", spec.heads, width)

    def store(
        self, x: jax.Array, cache: jax.Array, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> jax.Array:
        """Return the stacked cache with the keys of x [T, D]."""
        kernel = step.kernel
        rotate = rotations[self.spec.rope]
        keys = rotate(self.k_norm(project(x, self.k[...]))[:, None])[:, 0]
        layer = step.cache_layer(cache_index, cache)
        layout = kernel.latent_layout(self.spec.head_dim, 0)
        batch = step.ragged(cache_index).cleaned()
        return store_latents(
            keys, cache, layer, batch, layout, use_kernel=kernel.use_kernel, interpret=kernel.interpret
        )

    def select(
        self,
        x: jax.Array,
        low_rank: jax.Array,
        cache: jax.Array,
        cache_index: jax.Array,
        rotations: Rotations,
        step: AnyStep,
    ) -> SelectedTokens:
        """Return the tokens that those of x [T, D] attend to; `low_rank` as of `JaxLatentAttention.low_rank`."""
        rotate = rotations[self.spec.rope]
        return select_tokens(
            rotate(project(low_rank, self.q[...]).reshape(len(x), self.spec.heads, -1)),
            project(x, self.weights[...]),
            cache,
            layout=step.kernel.latent_layout(self.spec.head_dim, 0),
            layer=step.cache_layer(cache_index, cache),
            batch=step.ragged(cache_index).cleaned(),
            top=self.spec.top_k,
            decode_only=step.decode_only,
            **step.kernel.options,
        )


class JaxLatentAttention(MixerModule):
    """One layer's latent attention.

    `queries` [N, H, low rank or D]; `kv_up` [N, nope + value channels, rank], the projections from the latent to a
    head's key and value; `out` [D, N * V]; `gate` [N, D].
    """

    def __init__(self, spec: LatentAttention, width: int, build: JaxBuildContext) -> None:
        heads = head_layout(spec, build.tensor).slots
        rank = spec.latent_dim
        low_rank = spec.query_rank
        self.spec = spec
        self.q_a = None if low_rank is None else build.matrix("q_a", ".D", low_rank, width)
        self.q_a_bias = None if low_rank is None or not spec.bias else build.parameter(".", low_rank)
        self.q_a_norm = None if low_rank is None else JaxNorm(spec.norm, low_rank, build)
        self.queries = build.matrix("queries", "K.D", heads, spec.nope_dim + spec.rope.dim, low_rank or width)
        self.kv_a = build.matrix("kv_a", ".D", rank + spec.rope.dim, width)
        self.kv_a_bias = build.parameter(".", rank + spec.rope.dim) if spec.bias else None
        self.kv_a_norm = JaxNorm(spec.norm, rank, build)
        self.kv_up = build.parameter("K..", heads, spec.nope_dim + spec.value_dim, rank)
        self.out = build.matrix("out", "DK", width, heads * spec.value_dim)
        self.out_bias = build.parameter("D", width) if spec.bias else None
        self.gate = build.parameter("KD", heads, width) if spec.gate_per_head else None
        latents = rank + spec.rope.dim
        queries = (heads, spec.nope_dim + spec.rope.dim)
        self.q_a_lora = None if low_rank is None else matrix_lora(build, "D", width, ".", (low_rank,))
        self.queries_lora = matrix_lora(build, "D" if low_rank is None else ".", low_rank or width, "K.", queries)
        self.kv_a_lora = matrix_lora(build, "D", width, ".", (latents,))
        self.gate_lora = matrix_lora(build, "D", width, "K", (heads,)) if spec.gate_per_head else None
        self.lora_out = matrix_lora(build, "K", heads * spec.value_dim, "D", (width,))
        self.indexer = (
            None if spec.indexer is None or low_rank is None else JaxIndexer(spec.indexer, width, low_rank, build)
        )

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], stacked latents and index keys -> [T, D], and the caches.

        `cache_index` int32 [2 n]: block table and cache layer of each. In a model whose layers share selections the
        last of `caches` is what the last indexer selected, `SelectedTokens`.
        """
        spec = self.spec
        rotate = rotations[self.spec.rope]
        low_rank = self.low_rank(x, step)
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        heads = jax.lax.optimization_barrier(project(low_rank, self.queries, step))
        heads = adapted(heads, self.queries_lora, low_rank, step)
        if spec.query_growth is not None:  # before RoPE, which does not change lengths
            heads = heads * query_growth(spec.query_growth, step.positions).astype(heads.dtype)
        nope = heads[..., : spec.nope_dim]
        rotary = heads[..., spec.nope_dim :]
        key_up = self.kv_up[:, : spec.nope_dim]
        value_up = self.kv_up[:, spec.nope_dim :]
        absorbed = jnp.einsum("tnh,nhr->tnr", nope, key_up)
        rotary = rotate(rotary)
        q = jnp.concatenate([absorbed, rotary], -1)
        latents = self._latents(x, rotations, step)
        if self.indexer is not None:
            caches = caches[0], self.indexer.store(x, caches[1], cache_index[2:], rotations, step), *caches[2:]
        if spec.selected_tokens is not None and step.max_context > spec.selected_tokens:
            selection, caches = self._select(x, low_rank, caches, cache_index, rotations, step)
            mixed, cache = self._attend_selected(q, latents, caches[0], cache_index, step, selection)
            attended = jnp.einsum("tnr,nvr->tnv", mixed, value_up)
        else:
            expansion = _expansion(step, cache_index, spec, q.shape[1])
            mixed, cache = _attend(step, q, latents, caches[0], cache_index, spec, expansion)
            attended = jnp.einsum("tnr,nvr->tnv", mixed, value_up)
            if expansion is not None:
                q = jnp.concatenate([nope, rotary], -1)
                attended = self._attend_expanded(q, cache, cache_index, step, expansion, attended)
        if self.gate is not None:
            attended = (
                attended * jax.nn.sigmoid(adapted(project(x, self.gate[...]), self.gate_lora, x, step))[..., None]
            )
        attended = attended.reshape(len(x), -1)
        out = reduced(adapted(project(attended, self.out, step), self.lora_out, attended, step), step)
        return (out if self.out_bias is None else out + self.out_bias[...]), (cache, *caches[1:])

    def _select(
        self,
        x: jax.Array,
        low_rank: jax.Array,
        caches: Caches,
        cache_index: jax.Array,
        rotations: Rotations,
        step: AnyStep,
    ) -> tuple[SelectedTokens, Caches]:
        """Return the tokens that those of x [T, D] attend to, and the caches; arguments as of `__call__`."""
        if self.indexer is None:
            return cast(SelectedTokens, caches[-1]), caches
        selection = self.indexer.select(x, low_rank, caches[1], cache_index[2:], rotations, step)
        shared = len(caches) > 2
        return selection, (*caches[:2], cast(jax.Array, selection)) if shared else caches

    def _attend_selected(
        self,
        q: jax.Array,
        latents: jax.Array,
        cache: jax.Array,
        cache_index: jax.Array,
        step: AnyStep,
        selection: SelectedTokens,
    ) -> tuple[jax.Array, jax.Array]:
        """Write latents [T, C] into the stacked cache, then attend: q [T, N, C] -> [T, N, rank], and the cache."""
        spec = self.spec
        kernel = step.kernel
        batch = step.ragged(cache_index).cleaned()
        layout = _latents(spec, kernel)
        layer = step.cache_layer(cache_index, cache)
        cache = store_latents(
            latents, cache, layer, batch, layout, use_kernel=kernel.use_kernel, interpret=kernel.interpret
        )
        knobs = make_knobs(spec.scale)
        decode_only = step.decode_only
        options = {"layout": layout, "decode_only": decode_only, **kernel.options}
        return selected_attention(q, cache, layer, batch, knobs, selection, **options), cache

    def _attend_expanded(
        self,
        q: jax.Array,
        cache: jax.Array,
        cache_index: jax.Array,
        step: AnyStep,
        expansion: Expansion,
        absorbed: jax.Array,
    ) -> jax.Array:
        """Return absorbed [T, N, V], or the outputs of expanded heads for the sequences that attend to them.

        q [T, N, H]: of the heads that `kv_up` expands.
        """
        kernel = step.kernel
        batch = step.ragged(cache_index)
        layer = step.cache_layer(cache_index, cache)
        expanded = expanded_attention(
            q,
            self.kv_up[...],
            cache,
            layer,
            batch.cleaned(),
            make_knobs(self.spec.scale),
            expansion,
            layout=_latents(self.spec, kernel),
            heads=_expanded_heads(self.spec, q.shape[1]),
            **kernel.options,
        )
        token = jnp.arange(len(q))
        real = (token >= step.counts[0]) & (token < step.query_start[-1]) & expansion.use
        return jnp.where(real[:, None, None], expanded, absorbed)

    def low_rank(self, x: jax.Array, step: AnyStep) -> jax.Array:
        """X [T, D] -> what queries are projected from: the normalised low-rank queries, or x."""
        if self.q_a is None or self.q_a_norm is None:
            return x
        low_rank = adapted(project(x, self.q_a, step), self.q_a_lora, x, step)
        return self.q_a_norm(low_rank if self.q_a_bias is None else low_rank + self.q_a_bias[...])

    def _latents(self, x: jax.Array, rotations: Rotations, step: AnyStep) -> jax.Array:
        """X [T, D] -> [T, C]: the normalised latent, then the rotated rotary key."""
        both = adapted(project(x, self.kv_a, step), self.kv_a_lora, x, step)
        rotate = rotations[self.spec.rope]
        if self.kv_a_bias is not None:
            both = both + self.kv_a_bias[...]
        latent = both[:, : self.spec.latent_dim]
        rotary = both[:, self.spec.latent_dim :]
        return jnp.concatenate([self.kv_a_norm(latent), rotate(rotary[:, None])[:, 0]], -1)


def _attend(
    step: AnyStep,
    q: jax.Array,
    latents: jax.Array,
    cache: jax.Array,
    cache_index: jax.Array,
    spec: LatentAttention,
    expansion: Expansion | None,
) -> tuple[jax.Array, jax.Array]:
    """Write latents [T, C] into the stacked cache, then attend: absorbed q [T, N, C] -> [T, N, rank], and the cache.

    `expansion`: if it is used, only decoded sequences attend.
    """
    kernel = step.kernel
    batch = step.kernel_batch(cache_index, cache)
    return latent_attention(
        q,
        latents,
        cache,
        layout=_latents(spec, kernel),
        scale=spec.scale,
        expansion=expansion,
        **batch,
        **kernel.options,
    )


def _expansion(step: AnyStep, cache_index: jax.Array, spec: LatentAttention, heads: int) -> Expansion | None:
    """Return which contexts are expanded to the keys and values of `heads` heads; None if none ever are."""
    layout = _latents(spec, step.kernel)
    if isinstance(step, PoolInput) or step.decode_only or not _expands(layout, step.kernel):
        return None
    batch = step.ragged(cache_index).cleaned()
    return plan_expansion(batch, step.shape.tokens, layout, _expanded_heads(spec, heads))


def _latents(spec: LatentAttention, kernel: KernelChoice) -> LatentLayout:
    return kernel.latent_layout(spec.latent_dim, spec.rope.dim)


def _expands(layout: LatentLayout, kernel: KernelChoice) -> bool:
    """False where the kernel writes latents only while it attends: pages of one section (float32, small pages)."""
    return not kernel.use_kernel or layout.sections == 2


def _expanded_heads(spec: LatentAttention, heads: int) -> ExpandedHeads:
    return ExpandedHeads(heads, spec.nope_dim, spec.rope.dim, spec.value_dim)


class LatentAttentionOps(JaxMixerOps[LatentAttention]):
    """What the backend knows of this kind, see `JaxMixerOps`."""

    matrices = frozenset({"q_a", "queries", "kv_a", "out"})

    def module(self, spec: LatentAttention, width: int, build: JaxBuildContext) -> JaxLatentAttention:
        return JaxLatentAttention(spec, width, build)

    def placements(self, spec: LatentAttention, tensor: int) -> Iterator[tuple[str, Placement]]:
        heads = head_layout(spec, tensor)
        for name in ("q_a", "q_a_bias", "kv_a", "kv_a_bias"):
            yield name, Placement((name,))
        for name in ("q_a_norm", "kv_a_norm"):
            yield name, Placement((name, "weight"))
            yield f"{name}_bias", Placement((name, "bias"))
        for name in ("q", "q_b"):  # the one that the model has
            yield name, Placement(("queries",), (), lambda rows: heads.keys(rows, spec.nope_dim + spec.rope.dim))
        yield "gate", Placement(("gate",), (), lambda rows: heads.keys(rows, 1)[:, 0])
        yield "kv_b", Placement(("kv_up",), (), lambda rows: heads.keys(rows, spec.nope_dim + spec.value_dim))
        yield (
            "o",
            Placement(("out",), (), lambda rows: arrange_columns(rows, lambda rows: heads.keys(rows, spec.value_dim))),
        )
        yield "o_bias", Placement(("out_bias",))
        for name in ("q", "k", "weights"):
            yield f"indexer.{name}", Placement(("indexer", name))
        yield "indexer.k_norm", Placement(("indexer", "k_norm", "weight"))
        yield "indexer.k_norm_bias", Placement(("indexer", "k_norm", "bias"))

    def stacks(self, spec: LatentAttention, tensor: int) -> tuple[tuple[Stack, ...], ...]:
        latents = LatentStack(spec.latent_dim, spec.rope.dim)
        return ((latents,),) if spec.indexer is None else ((latents,), (LatentStack(spec.indexer.head_dim, 0),))

    def cache_without_scale(self, spec: LatentAttention) -> str | None:
        return "latents (MLA)"

    def scored_heads(self, spec: LatentAttention) -> int:
        return spec.heads

    def scratch_bytes(self, spec: LatentAttention, kernel: KernelChoice, tensor: int, largest: LargestStep) -> int:
        """Return the bytes of the scratch cache of expanded heads."""
        layout = _latents(spec, kernel)
        expanded = _expanded_heads(spec, head_layout(spec, tensor).slots // tensor)
        if not _expands(layout, kernel):
            return 0
        pages = scratch_pages(largest.tokens, largest.seqs, largest.max_pages, layout, expanded)
        return pages * expanded.layout(layout).bytes_per_page
