"""A model as functions over a flat tuple of arrays, from which programs are compiled, with or without weights.

The NNX decoder is built abstractly and split once. Passing a flat tuple per step costs the host far less than
traversing modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, StepInput
from pagoda.backends.jax_tpu.model.decoder import JaxDecoder, exchanged_pieces
from pagoda.backends.jax_tpu.model.layers import Caches
from pagoda.backends.jax_tpu.model.layout import CacheIndex, build_cache_index
from pagoda.backends.jax_tpu.model.lora import slot_axis
from pagoda.backends.jax_tpu.model.mixers.registry import MIXERS, ops_of
from pagoda.backends.jax_tpu.model.parameters import JaxBuildContext, LoraForm
from pagoda.backends.jax_tpu.model.slots import LANES
from pagoda.backends.jax_tpu.parallel import DATA, MODEL, named_sharding, partition
from pagoda.backends.jax_tpu.weights.arrange import NO_FORMATS, MatrixFormat, Path
from pagoda.common.config.memory import available_bytes
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.errors import ConfigError
from pagoda.common.models.drafters import DrafterSpec, mixers_of
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.supported import check_mixers
from pagoda.common.models.transformers_spec import AnySpec

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class HostLeaves:
    """Copies of some of the parameters' arrays on the host, while an engine sleeps."""

    arrays: dict[int, npt.NDArray[Any]]  # index of the leaf -> its values
    shardings: tuple[jax.sharding.Sharding, ...]  # of all leaves

    @classmethod
    def of(cls, leaves: Leaves, kept: Iterable[int]) -> HostLeaves:
        """Copy these leaves to the host. Raise MemoryError if they do not fit."""
        indices = list(kept)
        needed = sum(leaves[index].nbytes for index in indices)
        free = available_bytes()
        if needed > free:
            raise MemoryError(f"no room in host memory: the weights take {needed} bytes, {free} are free")
        arrays = {index: np.array(leaves[index], copy=True) for index in indices}
        return cls(arrays, tuple(leaf.sharding for leaf in leaves))

    @property
    def is_complete(self) -> bool:
        """Return whether every leaf is kept."""
        return len(self.arrays) == len(self.shardings)

    def restored(self, leaves: Leaves) -> Leaves:
        """Return the kept leaves on their devices, and the given ones in place of the others."""
        own = {index: jax.device_put(array, self.shardings[index]) for index, array in self.arrays.items()}
        both = (own[index] if index in own else leaves[index] for index in range(len(self.shardings)))
        restored: Leaves = jax.block_until_ready(tuple(both))
        return restored


class StepDecoder(Protocol):
    """What a model computes in a step, over given parameters."""

    def hidden(
        self, token_ids: jax.Array, step: StepInput, caches: Caches, rows: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        """Return hidden states [T, D] of token_ids int32 [T], and the caches with this step's K and V.

        `rows` [R, D]: what token ids from FIRST_ROW on name; None: none does.
        """
        ...

    def logits(self, hidden: jax.Array, adapter_slots: jax.Array | None = None) -> jax.Array:
        """Return float32 logits [R, V] of hidden [R, D]; adapter_slots int32 [R]: of their adapters, -1 for none."""
        ...


DraftInputsT = TypeVar("DraftInputsT")


class DraftInputs(NamedTuple, Generic[DraftInputsT]):
    """What a step leaves for a drafter model, or the shape or sharding of each. T and S as in `StepModel.forward`."""

    token_ids: DraftInputsT  # int32 [T]
    kv_len: DraftInputsT  # int32 [S] exact
    features: DraftInputsT  # [T, W] what the drafter reads of the model


@dataclass(frozen=True, slots=True)
class StepModel(ABC):
    """One generating model on one mesh, whichever code computes its layers."""

    spec: AnySpec
    mesh: Mesh
    layout: KvLayout
    cache_index: CacheIndex
    kernel: KernelChoice
    max_len: int
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # shapes, dtypes and shardings of the parameters
    paths: tuple[Path, ...]  # per leaf: its path in the decoder
    axes: tuple[str, ...]  # per leaf: its logical axes
    formats: Mapping[Path, MatrixFormat]  # of quantised matrices, by path in the decoder

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
    def untuned_attention(self) -> tuple[str, ...]:
        """Return what tuning.json of the attention kernel lacks for this model's heads on this chip."""
        keys: dict[str, None] = {}
        for mixer in dict.fromkeys(self.spec.mixers):
            keys |= dict.fromkeys(ops_of(mixer).untuned(mixer, self.kernel, self.tensor))
        return tuple(keys)

    def pieces(self, tokens: int, *, adapted: bool = False) -> int:
        """Return in how many pieces devices exchange the tokens of a step."""
        return 1

    @property
    def matmul_precision(self) -> Any:
        """Return a context in which float32 matmuls have full precision on every platform."""
        return jax.default_matmul_precision("highest" if self.dtype == jnp.float32 else "default")

    @abstractmethod
    def decoder(self, leaves: Leaves) -> StepDecoder:
        """Return the decoder over these arrays, while tracing."""

    def caches(self, num_blocks: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the global shapes of the stacked caches with `num_blocks` blocks of each pool per shard."""
        index = self.cache_index
        arrays = []
        devices = {"P": self.shards, "K": self.tensor}
        for stack, block, depth, pool in zip(index.stacks, self.cache_blocks, index.depths, index.pools):
            local = depth, num_blocks[pool], *block.shape
            shape = tuple(size * devices.get(axis, 1) for size, axis in zip(local, stack.axes))
            arrays.append(jax.ShapeDtypeStruct(shape, block.dtype, sharding=named_sharding(self.mesh, stack.axes)))
        return tuple(arrays)

    @property
    def cache_blocks(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shape of one layer's block of each array, on one device."""
        return tuple(self.kernel.block(stack, self.tensor) for stack in self.cache_index.stacks)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of one block of each pool over all its layers, on one device."""
        sizes = [0] * len(self.layout.pools)
        index = self.cache_index
        for block, depth, pool in zip(self.cache_blocks, index.depths, index.pools):
            sizes[pool] += depth * block.size * block.dtype.itemsize
        return tuple(sizes)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a sequence's recurrent state, whatever its length, on one device."""
        sizes = self.block_bytes
        return sum(sizes[group.pool] for group in self.layout.groups if isinstance(group.spec, StateCache))

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page of tokens, one block in every group that grows with them, on one device."""
        sizes = self.block_bytes
        return sum(sizes[group.pool] for group in self.layout.groups if not isinstance(group.spec, StateCache))

    def forward(
        self,
        shape: StepShape,
        leaves: Leaves,
        caches: Caches,
        history: jax.Array,
        packed: jax.Array,
        *rows: jax.Array,
        drafts: bool = False,
        captured: tuple[int, ...] = (),
    ) -> tuple[Any, ...]:
        """Run one step: updated caches, hidden [T, D], float32 logits [S * width, V] after the last token of each
        sequence, or after its newest token and each draft. With a drafter model also its `DraftInputs`.

        `packed` int32 [shards, packed_size(shape)]. T and S are the shape's times the number of shards, by shard.
        `rows`: empty, or [shards * R, D] of media, which token ids from FIRST_ROW on name. `drafts`: of an engine with
        drafts, whose history ends with a column of rejected ones. `captured`: layers whose inputs a drafter model
        reads; (): what the head reads.
        """
        specs = tuple(map(partition, self.axes))
        cache_specs = tuple(partition(stack.axes) for stack in self.cache_index.stacks)
        by_shard = partition("R.")
        mapped = jax.shard_map(
            partial(self._forward, shape, drafts, captured),
            mesh=self.mesh,
            in_specs=(specs, cache_specs, PartitionSpec(), by_shard, *(by_shard for _ in rows)),
            out_specs=(cache_specs, by_shard, by_shard, *([draft_inputs_specs()] if shape.guesses else ())),
            check_vma=False,
        )
        outputs: tuple[Any, ...] = mapped(leaves, caches, history, packed, *rows)
        return outputs

    def _forward(
        self,
        shape: StepShape,
        drafts: bool,
        captured: tuple[int, ...],
        leaves: Leaves,
        caches: Caches,
        history: jax.Array,
        packed: jax.Array,
        *rows: jax.Array,
    ) -> tuple[Any, ...]:
        step = StepInput.unpack(packed[0], shape, self.kernel)
        if drafts:
            step = step.shifted(history[:, -1])
        decoder = self.decoder(leaves)
        token_ids = step.resolve_ids(history)
        media = rows[0] if rows else None
        if captured:
            assert isinstance(decoder, JaxDecoder), "layers are captured of a decoder"
            hidden, caches, features = decoder.hidden_and_captured(token_ids, step, caches, captured, media)
        else:
            hidden, caches = decoder.hidden(token_ids, step, caches, media)
            features = hidden
        with jax.named_scope("head"):
            logits = decoder.logits(hidden[step.sampled], step.sampled_slots)
        outputs = caches, hidden, logits
        return (*outputs, DraftInputs(token_ids, step.kv_len, features)) if shape.guesses else outputs

    def write_rows(self, rows: jax.Array, values: jax.Array, numbers: jax.Array) -> jax.Array:
        """Return rows [shards * R, D] of media with `values` [shards * n, D] at `numbers` [shards, n] of each shard.

        A number of R or more writes nothing.
        """
        by_shard = partition("R.")
        mapped = jax.shard_map(
            lambda rows, values, numbers: rows.at[numbers[0]].set(values, mode="drop"),
            mesh=self.mesh,
            in_specs=(by_shard, by_shard, by_shard),
            out_specs=by_shard,
            check_vma=False,
        )
        written: jax.Array = mapped(rows, values, numbers)
        return written

    @property
    def state_pools(self) -> tuple[int, ...]:
        """Return the pools of recurrent state."""
        return tuple(pool for pool, each in enumerate(self.layout.pools) if isinstance(each.kind, StateCache))

    def copy_states(self, pool: int, caches: Caches, pairs: jax.Array) -> Caches:
        """Return the caches with blocks of a pool copied: `pairs` int32 [shards, 2, n], sources and destinations."""
        specs = tuple(partition(stack.axes) for stack in self.cache_index.stacks)
        mapped = jax.shard_map(
            lambda caches, pairs: tuple(
                _copied(cache, sources=pairs[0, 0], destinations=pairs[0, 1]) if of == pool else cache
                for cache, of in zip(caches, self.cache_index.pools)
            ),
            mesh=self.mesh,
            in_specs=(specs, partition("R..")),
            out_specs=specs,
            check_vma=False,
        )
        return mapped(caches, pairs)

    def score(self, leaves: Leaves, hidden: jax.Array, tokens: jax.Array, *adapter_slots: jax.Array) -> jax.Array:
        """Return float32 logits [n, V] for the token indices int32 [n] of hidden [T, D], both once per shard.

        `adapter_slots`: empty, or int32 [n], see `StepDecoder.logits`.
        """
        mapped = jax.shard_map(
            lambda parts, rows, index, *slots: self.decoder(parts).logits(rows[index], slots[0] if slots else None),
            mesh=self.mesh,
            in_specs=(
                tuple(map(partition, self.axes)),
                partition("R."),
                partition("R"),
                *(partition("R") for _ in adapter_slots),
            ),
            out_specs=partition("R."),
            check_vma=False,
        )
        return mapped(leaves, hidden, tokens, *adapter_slots)


def draft_inputs_specs() -> DraftInputs[PartitionSpec]:
    """Return the partition of each of them: by shard."""
    return DraftInputs(partition("R"), partition("R"), partition("R."))


@dataclass(frozen=True, slots=True)
class Model(StepModel):
    """A model that a spec describes, pooling ones included."""

    spec: ModelSpec
    split: tuple[Any, Any]  # the decoder's graph definition and the tree of its state
    lora: LoraForm | None = None  # slots for adapters
    drafter: DrafterSpec | None = None  # whose caches are in the layout, too

    @property
    def adapter_leaves(self) -> tuple[int, ...]:
        """Return the indices of the arrays of adapters."""
        return tuple(index for index, axes in enumerate(self.axes) if slot_axis(axes) is not None)

    @property
    def adapter_bytes(self) -> int:
        """Return the bytes of all slots for adapters, on one device."""
        return sum(_device_bytes(self.leaves[index]) for index in self.adapter_leaves)

    def pieces(self, tokens: int, *, adapted: bool = False) -> int:
        """Return in how many pieces devices exchange the tokens of a step."""
        return exchanged_pieces(self.spec, self.kernel.chip, self.tensor, tokens, adapted=adapted)

    def decoder(self, leaves: Leaves) -> JaxDecoder:
        """Return the decoder over these arrays, while tracing."""
        graph, tree = self.split
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def build_model(
    spec: ModelSpec,
    layout: KvLayout,
    mesh: Mesh,
    dtype: jnp.dtype,
    max_len: int,
    kernel: KernelChoice,
    formats: Mapping[Path, MatrixFormat] = NO_FORMATS,
    lora: LoraForm | None = None,
    drafter: DrafterSpec | None = None,
) -> Model:
    """Build a model without weights or arrays. `drafter`: whose caches are in the layout, too.

    Raise ModelError for an unsupported kind of layer, ConfigError if the heads cannot be sharded over the mesh or the
    cache cannot have 8 bits.
    """
    check_mixers(spec, MIXERS, "jax_tpu")
    if kernel.scaled:
        check_scaled(spec)
    tensor = mesh.shape[MODEL]
    cache_index = build_cache_index(spec, layout, tensor, mixers_of(drafter))
    build = JaxBuildContext(
        jnp.dtype(dtype),
        tensor,
        scaled_cache=kernel.scaled,
        formats=formats,
        lanes=LANES if kernel.use_kernel else 1,
        lora=lora,
    )
    arrays = module_arrays(lambda: JaxDecoder(spec, cache_index, max_len, build), mesh)
    return Model(
        spec=spec,
        mesh=mesh,
        layout=layout,
        cache_index=cache_index,
        kernel=kernel,
        max_len=max_len,
        leaves=arrays.leaves,
        paths=arrays.paths,
        axes=arrays.axes,
        formats=formats,
        split=arrays.split,
        lora=lora,
        drafter=drafter,
    )


class ModuleArrays(NamedTuple):
    """The arrays of a module, as in `StepModel`, and what it is made of them with."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[Path, ...]
    axes: tuple[str, ...]
    split: tuple[Any, Any]  # the graph definition and the tree of the state


def module_arrays(make: Callable[[], nnx.Module], mesh: Mesh) -> ModuleArrays:
    """Return the arrays of a module that `make` creates, without creating them."""
    graph, state = nnx.split(nnx.eval_shape(make))
    flat = list(nnx.to_flat_state(state))
    values, tree = jax.tree.flatten(state)
    axes = tuple(variable.get_metadata("axes") for _, variable in flat)
    leaves = tuple(
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=named_sharding(mesh, names))
        for value, names in zip(values, axes)
    )
    paths = tuple(tuple(part if isinstance(part, int) else str(part) for part in path) for path, _ in flat)
    return ModuleArrays(leaves, paths, axes, (graph, tree))


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None, "made with one"
    return prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _copied(cache: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """Copy blocks of a stacked cache, layer by layer: all sources are read before a destination is written."""

    def copy_layer(layer: jax.Array, cache: jax.Array) -> jax.Array:
        return cache.at[layer, destinations].set(cache[layer, sources])

    return jax.lax.fori_loop(0, cache.shape[0], copy_layer, cache)


def check_scaled(spec: ModelSpec) -> None:
    """Raise ConfigError if a cache of the model cannot be stored divided by a scale."""
    if spec.block_owners:
        raise ConfigError("--kv-cache-dtype", "jax_tpu keeps the cache of input blocks in the model's dtype; use auto")
    for mixer in spec.mixers:
        if words := ops_of(mixer).cache_without_scale(mixer):
            raise ConfigError("--kv-cache-dtype", f"jax_tpu keeps {words} in the model's dtype; use auto")
