"""Transformer blocks in front of the mixers of several layers, which share their weights but for low-rank adapters.

Modules run inside `shard_map`, see `layers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.model.layers import Caches, JaxNorm, MlpFfn, Rotations
from pagoda.backends.jax_tpu.model.mixers.attention import JaxAttention, head_layout
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.common.models.spec import InputBlock, Layer


class JaxAdapters(nnx.Module):
    """What a layer has of its input block by itself: low-rank adapters, and the last projection.

    `first` [3, r, 2D] of q, k and v; `q` [K, G, H, r], `k` and `v` [K, 1, H, r] as the slots of the attention's `qkv`.
    `ffn_first` [r, D], `ffn` [2, F, r] of gate and up. `out` [D, D].
    """

    def __init__(self, layer: Layer, block: InputBlock, width: int, build: JaxBuildContext) -> None:
        spec = layer.attends_before
        heads = head_layout(spec, build.tensor)
        rank = spec.adapter_rank
        ffn_rank = block.adapter_rank
        keys = heads.slots, 1, spec.head_dim, rank or 0
        queries = heads.slots, heads.group, spec.head_dim, rank or 0
        self.first = None if rank is None else build.parameter("..D", 3, rank, spec.input_width(width))
        self.q = None if rank is None else build.parameter("K...", *queries)
        self.k = None if rank is None else build.parameter("K...", *keys)
        self.v = None if rank is None else build.parameter("K...", *keys)
        inner = padded(block.ffn.width, build.tensor)
        self.ffn_first = None if ffn_rank is None else build.parameter(".D", ffn_rank, width)
        self.ffn = None if ffn_rank is None else build.parameter(".F.", 2, inner, ffn_rank)
        self.out = build.parameter("D.", width, width)

    def heads(self, x: jax.Array) -> jax.Array | None:
        """X [T, 2D] -> what is added to the projected heads [T, K, n, H]; None without adapters."""
        if self.first is None or self.q is None or self.k is None or self.v is None:
            return None
        low = project(x, self.first[...])
        return jnp.concatenate([project(low[:, at], part[...]) for at, part in enumerate((self.q, self.k, self.v))], 2)

    def inner(self, x: jax.Array) -> jax.Array | None:
        """X [T, D] -> what is added to gate and up [T, 2, F]; None without adapters."""
        if self.ffn_first is None or self.ffn is None:
            return None
        return project(project(x, self.ffn_first[...]), self.ffn[...])


class JaxInputBlock(nnx.Module):
    """The weights of a transformer block in front of the mixers of several layers, stacked once."""

    def __init__(self, layer: Layer, width: int, build: JaxBuildContext) -> None:
        block = layer.block
        assert block is not None
        self.attention = JaxAttention(layer.attends_before, width, build.at("attention"))
        self.ffn = MlpFfn(block.ffn, width, build.at("ffn"))
        self.norm = JaxNorm(block.norm, 2 * width, build)
        self.ffn_norm = JaxNorm(block.norm, width, build)

    def __call__(
        self,
        both: jax.Array,
        caches: Caches,
        cache_index: jax.Array,
        rotations: Rotations,
        step: AnyStep,
        adapters: JaxAdapters,
    ) -> tuple[jax.Array, Caches]:
        """Return what is added to the mixers' input [T, D], of x and the embedding side by side [T, 2D].

        Other arguments and results are those of a mixer.
        """
        normed = self.norm(both)
        attended, caches = self.attention(normed, caches, cache_index, rotations, step, adapters.heads(normed))
        h = self.ffn_norm(attended)
        return project(self.ffn(h, step, adapters.inner(h)), adapters.out[...]), caches


ModuleT = TypeVar("ModuleT", bound=nnx.Module)


def unstacked(module: ModuleT) -> ModuleT:
    """Return a module that is stacked once with parameters that are not stacked."""
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda stack: stack[0], state))


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """What layers with an input block read besides their own parameters."""

    first: jax.Array  # the first hidden states [T, D]
    blocks: tuple[JaxInputBlock, ...]
