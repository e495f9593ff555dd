"""A model as functions over a flat tuple of arrays, from which programs are compiled, with or without weights.

The NNX decoder is built abstractly and split once. Passing a flat tuple per step costs the host far less than
traversing modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, StepInput
from pagoda.backends.jax_tpu.model.decoder import Caches, JaxDecoder
from pagoda.backends.jax_tpu.model.layers import JaxBuildContext
from pagoda.backends.jax_tpu.model.layout import CacheIndex, build_cache_index
from pagoda.backends.jax_tpu.parallel import DATA, MODEL, named_sharding, partition
from pagoda.backends.jax_tpu.weights.placement import Path
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.shapes import StepShape
from pagoda.common.models.spec import ModelSpec, check_attention_only
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout

Leaves = tuple[jax.Array, ...]
CACHE_AXES = ".PK.."
"""Logical axes of a stacked cache [L, P, R, B, 128]: pages are sharded over data, KV head rows over tensor devices."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model on one mesh."""

    spec: ModelSpec
    mesh: Mesh
    layout: KvLayout
    cache_index: CacheIndex
    kernel: KernelChoice
    max_len: int
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # shapes, dtypes and shardings of the parameters
    paths: tuple[Path, ...]  # per leaf: its path in the decoder
    axes: tuple[str, ...]  # per leaf: its logical axes
    split: tuple[Any, Any]  # the decoder's graph definition and the tree of its state
    quantized: str | None = None  # 8-bit dtype of the layers' matrices

    @property
    def tensor(self) -> int:
        """Return the tensor parallel size."""
        return self.mesh.shape[MODEL]

    @property
    def shards(self) -> int:
        """Return the number of model replicas (data parallel size)."""
        return self.mesh.shape[DATA]

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of weights and activations."""
        return self.leaves[0].dtype

    @property
    def matmul_precision(self) -> Any:
        """Return a context in which float32 matmuls have full precision on every platform."""
        return jax.default_matmul_precision("highest" if self.dtype == jnp.float32 else "default")

    def decoder(self, leaves: Leaves) -> JaxDecoder:
        """Return the decoder over these arrays, while tracing."""
        graph, tree = self.split
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

    def caches(self, num_blocks: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the global shapes of the stacked caches with `num_blocks` blocks of each pool per shard."""
        shapes = []
        for local, depth, pool in zip(self.kv_layouts, self.cache_index.depths, self.cache_index.pools):
            layers, pages, rows, size, lanes = local.shape(depth, num_blocks[pool])
            sharding = named_sharding(self.mesh, CACHE_AXES)
            shape = (layers, pages * self.shards, rows * self.tensor, size, lanes)
            shapes.append(jax.ShapeDtypeStruct(shape, local.word_dtype, sharding=sharding))
        return tuple(shapes)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of one block of each pool over all its layers, on one device."""
        sizes = [0] * len(self.layout.pools)
        for kv, depth, pool in zip(self.kv_layouts, self.cache_index.depths, self.cache_index.pools):
            sizes[pool] += kv.bytes_per_page * depth
        return tuple(sizes)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page of tokens, one block in every group, on one device."""
        sizes = self.block_bytes
        return sum(sizes[group.pool] for group in self.layout.groups)

    @property
    def kv_layouts(self) -> tuple[PagedKvLayout, ...]:
        """Return the page layout of each stack on one device."""
        shapes = self.cache_index.shapes
        return tuple(self.kernel.kv_layout(slots // self.tensor, head_dim) for slots, head_dim in shapes)

    def forward(
        self,
        shape: StepShape,
        leaves: Leaves,
        caches: Caches,
        history: jax.Array,
        packed: jax.Array,
        *embeds: jax.Array,
        drafts: bool = False,
    ) -> tuple[Caches, jax.Array, jax.Array]:
        """Run one step: updated caches, hidden [T, D], float32 logits [S * width, V] after the last token of each
        sequence, or after its newest token and each draft.

        `packed` int32 [shards, packed_size(shape)]. T and S are the shape's times the number of shards, by shard.
        `embeds`: empty, or [T, D] with the embeddings of tokens marked EMBEDDED. `drafts`: of an engine with drafts,
        whose history ends with a column of rejected ones.
        """
        specs = tuple(map(partition, self.axes))
        cache_specs = tuple(partition(CACHE_AXES) for _ in caches)
        by_shard = partition("R.")
        mapped = jax.shard_map(
            partial(self._forward, shape, drafts),
            mesh=self.mesh,
            in_specs=(specs, cache_specs, PartitionSpec(), by_shard, *(by_shard for _ in embeds)),
            out_specs=(cache_specs, by_shard, by_shard),
            check_vma=False,
        )
        return mapped(leaves, caches, history, packed, *embeds)

    def _forward(
        self,
        shape: StepShape,
        drafts: bool,
        leaves: Leaves,
        caches: Caches,
        history: jax.Array,
        packed: jax.Array,
        *embeds: jax.Array,
    ) -> tuple[Caches, jax.Array, jax.Array]:
        step = StepInput.unpack(packed[0], shape, self.kernel)
        if drafts:
            step = step.shifted(history[:, -1])
        decoder = self.decoder(leaves)
        hidden, caches = decoder.hidden(step.resolve_ids(history), step, caches, *embeds)
        return caches, hidden, decoder.logits(hidden[step.sampled])

    def score(self, leaves: Leaves, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return float32 logits [n, V] for the token indices int32 [n] of hidden [T, D], both once per shard."""
        mapped = jax.shard_map(
            lambda parts, rows, index: self.decoder(parts).logits(rows[index]),
            mesh=self.mesh,
            in_specs=(tuple(map(partition, self.axes)), partition("R."), partition("R")),
            out_specs=partition("R."),
            check_vma=False,
        )
        return mapped(leaves, hidden, tokens)


def build_model(
    spec: ModelSpec,
    layout: KvLayout,
    mesh: Mesh,
    dtype: jnp.dtype,
    max_len: int,
    kernel: KernelChoice,
    quantized: str | None = None,
) -> Model:
    """Build a model without weights or arrays.

    Raise ModelError for an unsupported kind of layer, ConfigError if the heads cannot be sharded over the mesh.
    """
    check_attention_only(spec, "jax_tpu")
    tensor = mesh.shape[MODEL]
    cache_index = build_cache_index(spec, layout, tensor)
    build = JaxBuildContext(jnp.dtype(dtype), tensor, scaled_cache=kernel.scaled, quantized=quantized)
    module = nnx.eval_shape(lambda: JaxDecoder(spec, cache_index, max_len, build))
    graph, state = nnx.split(module)
    flat = list(nnx.to_flat_state(state))
    values, tree = jax.tree.flatten(state)
    axes = tuple(variable.get_metadata("axes") for _, variable in flat)
    leaves = tuple(
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=named_sharding(mesh, names))
        for value, names in zip(values, axes)
    )
    paths = tuple(tuple(part if isinstance(part, int) else str(part) for part in path) for path, _ in flat)
    return Model(spec, mesh, layout, cache_index, kernel, max_len, leaves, paths, axes, (graph, tree), quantized)
