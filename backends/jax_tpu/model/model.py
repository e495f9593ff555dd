"""A model as a function over flat arrays: what programs are compiled from, with or without weights.

The NNX decoder is built abstractly and split once; a step hands over a tuple of arrays, which costs the host a fraction
of what traversing modules would.
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
from pagoda.backends.jax_tpu.model.layout import CachePlaces, cache_places
from pagoda.backends.jax_tpu.parallel.sharding import DATA, MODEL, partition, placed
from pagoda.backends.jax_tpu.weights.placement import Path
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.shapes import StepShape
from pagoda.common.models.spec import ModelSpec
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout as KvPages

Leaves = tuple[jax.Array, ...]
CACHE_AXES = ".PK.."
"""Logical axes of a stacked cache [L, P, R, B, 128]: rows of different KV heads are on different devices, and the pages
of a shard with it.
"""


@dataclass(frozen=True, slots=True)
class Model:
    """One model on one mesh. `leaves`: shapes, dtypes and shardings of the parameters, at `paths` of the decoder."""

    spec: ModelSpec
    mesh: Mesh
    layout: KvLayout
    places: CachePlaces
    kernel: KernelChoice
    max_len: int
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[Path, ...]
    axes: tuple[str, ...]
    split: tuple[Any, Any]  # the decoder's graph and the tree of its state
    quantized: str | None = None  # the 8-bit type of the layers' matrices

    @property
    def tensor(self) -> int:
        """Devices that share each layer."""
        return self.mesh.shape[MODEL]

    @property
    def shards(self) -> int:
        """Copies of the model, each with a part of every step."""
        return self.mesh.shape[DATA]

    @property
    def dtype(self) -> jnp.dtype:
        """Of weights and activations."""
        return self.leaves[0].dtype

    @property
    def exact(self) -> Any:
        """A context in which float32 products are float32 on every platform."""
        return jax.default_matmul_precision("highest" if self.dtype == jnp.float32 else "default")

    def decoder(self, leaves: Leaves) -> JaxDecoder:
        """The decoder over these arrays; for use while tracing."""
        graph, tree = self.split
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

    def caches(self, num_blocks: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The stacked caches for so many blocks of each shard."""
        found = []
        for (slots, head_dim), depth in zip(self.places.shapes, self.places.depths):
            local = self.kernel.kv_layout(slots // self.tensor, head_dim)
            layers, pages, rows, size, lanes = local.shape(depth, num_blocks)
            sharding = placed(self.mesh, CACHE_AXES)
            shape = (layers, pages * self.shards, rows * self.tensor, size, lanes)
            found.append(jax.ShapeDtypeStruct(shape, local.word_dtype, sharding=sharding))
        return tuple(found)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block id over all layers, on one device."""
        return sum(kv.bytes_per_page * depth for kv, depth in zip(self.kv_layouts, self.places.depths))

    @property
    def kv_layouts(self) -> tuple[KvPages, ...]:
        """How the layers of each stack keep K and V, on one device."""
        return tuple(self.kernel.kv_layout(slots // self.tensor, head_dim) for slots, head_dim in self.places.shapes)

    def forward(
        self,
        shape: StepShape,
        leaves: Leaves,
        caches: Caches,
        history: jax.Array,
        packed: jax.Array,
        *rows: jax.Array,
    ) -> tuple[Caches, jax.Array, jax.Array]:
        """The step as a function: caches with the new K and V, hidden [T, D], float32 logits [S, V] of the newest.

        `packed` int32 [shards, packed_size(shape)]; T and S: the shape's once per shard, in the order of the shards.
        `rows`: [T, D], the embeddings of tokens that are EMBEDDED, in steps that may have such.
        """
        specs = tuple(map(partition, self.axes))
        cache_specs = tuple(partition(CACHE_AXES) for _ in caches)
        each = partition("R.")
        mapped = jax.shard_map(
            partial(self._forward, shape),
            mesh=self.mesh,
            in_specs=(specs, cache_specs, PartitionSpec(), each, *(each for _ in rows)),
            out_specs=(cache_specs, each, each),
            check_vma=False,
        )
        return mapped(leaves, caches, history, packed, *rows)

    def _forward(
        self,
        shape: StepShape,
        leaves: Leaves,
        caches: Caches,
        history: jax.Array,
        packed: jax.Array,
        *rows: jax.Array,
    ) -> tuple[Caches, jax.Array, jax.Array]:
        step = StepInput.unpack(packed[0], shape, self.kernel)
        decoder = self.decoder(leaves)
        hidden, caches = decoder.hidden(step.known_ids(history), step, caches, *rows)
        newest = jnp.maximum(step.query_start[1:] - 1, 0)
        return caches, hidden, decoder.logits(hidden[newest])

    def score(self, leaves: Leaves, hidden: jax.Array, wanted: jax.Array) -> jax.Array:
        """float32 logits [n, V] of the tokens `wanted` int32 [n] of hidden [T, D], both once per shard."""
        mapped = jax.shard_map(
            lambda parts, rows, index: self.decoder(parts).logits(rows[index]),
            mesh=self.mesh,
            in_specs=(tuple(map(partition, self.axes)), partition("R."), partition("R")),
            out_specs=partition("R."),
            check_vma=False,
        )
        return mapped(leaves, hidden, wanted)


def build_model(
    spec: ModelSpec,
    layout: KvLayout,
    mesh: Mesh,
    dtype: jnp.dtype,
    max_len: int,
    kernel: KernelChoice,
    quantized: str | None = None,
) -> Model:
    """A model without weights; makes no array. Raises ConfigError when the mesh does not suit the heads."""
    tensor = mesh.shape[MODEL]
    places = cache_places(spec, layout, tensor)
    build = JaxBuildContext(jnp.dtype(dtype), tensor, scaled_cache=kernel.scaled, quantized=quantized)
    module = nnx.eval_shape(lambda: JaxDecoder(spec, places, max_len, build))
    graph, state = nnx.split(module)
    flat = list(nnx.to_flat_state(state))
    values, tree = jax.tree.flatten(state)
    axes = tuple(variable.get_metadata("axes") for _, variable in flat)
    leaves = tuple(
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=placed(mesh, names))
        for value, names in zip(values, axes)
    )
    paths = tuple(tuple(part if isinstance(part, int) else str(part) for part in path) for path, _ in flat)
    return Model(spec, mesh, layout, places, kernel, max_len, leaves, paths, axes, (graph, tree), quantized)
