"""What a program of an engine is: `ProgramKind`, and what all programs of a generating engine are made for."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.drafters.drafter import JaxDrafter
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.model.mixers.ops import BatchLoad
from pagoda.backends.jax_tpu.model.model import Model, StepModel
from pagoda.backends.jax_tpu.model.roofline import RooflineCost
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.parallel import named_sharding, partition
from pagoda.common.engine.sampling import state as sampling_state
from pagoda.common.engine.sampling.rules import LogprobsMode
from pagoda.common.engine.steps.shapes import StepShapes

_VMEM_LIMIT: Final = "xla_tpu_scoped_vmem_limit_kib"
_STATED_OPTION: Final = re.compile(r"(?:^|\s)--?(?:no)?(xla_\w+)")
_TALL_TILES: Final = "xla_tpu_control_large_2nd_minor_layout_for_x16"
_OVERLAP: Final = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
}


class ProgramKind(ABC):
    """A kind of program and its sizes: the key of a compiled one, whose `repr` names it."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Return a readable name, such as `decode 64 rows, 8 pages`."""

    @property
    def variant(self) -> object:
        """Return what tells programs apart beside their sizes."""
        return type(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes by which programs of a variant are compared."""
        return (0,)

    @property
    def data_trips(self) -> int:
        """Return how often loops run whose trip count depends on data: once per sequence or row of logits."""
        return 1

    def json_fields(self, page_size: int) -> dict[str, Any]:
        """Return what reports tell of the sizes beside the label."""
        return {}

    def full_load(self, model: Model, num_blocks: int) -> BatchLoad:
        """Return the attention work of a batch that fills the program's shape: none in most."""
        return BatchLoad(0, 0)

    @abstractmethod
    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        """Return the minimum cost. `load` matters to programs with the model's layers only."""


@dataclass(frozen=True, slots=True)
class ProgramParts:
    """What a program is lowered from."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes, dtypes and shardings
    donated: tuple[int, ...] = ()  # indices of arguments


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the programs of a generating engine are made for."""

    model: StepModel
    shapes: StepShapes
    num_blocks: tuple[int, ...]  # KV cache blocks of each pool, per shard
    rows: int  # request rows per shard
    mode: LogprobsMode = "raw_logprobs"
    media_rows: int = 0  # rows of media items per shard; 0: prompts have none
    drafter: JaxDrafter | None = None

    @property
    def history(self) -> jax.ShapeDtypeStruct:
        """int32 [shards*rows+1, max_len+1]: token ids by row and position; the last row is padding.

        An engine with drafts has another column: how many drafts the row's previous step rejected. In front of it are
        the newest guesses of the row, if a drafter model makes them.
        """
        columns = self.model.max_len + len(self.shapes.widths) + self.shapes.guesses
        return self.array((self.model.shards * self.rows + 1, columns), jnp.int32)

    @property
    def media(self) -> jax.ShapeDtypeStruct:
        """[shards * R, D] rows of media items, in the dtype of the embedding table."""
        model = self.model
        return self.array((model.shards * self.media_rows, model.spec.hidden_width), model.dtype, "R.")

    @property
    def counts(self) -> jax.ShapeDtypeStruct:
        """uint8 [shards * 2 * (rows + 1), V]: how often each row has each token, see `sampling.penalise`."""
        vocab = padded(self.model.spec.vocab, self.model.tensor)
        return self.array((self.model.shards * 2 * (self.rows + 1), vocab), jnp.uint8, "R.")

    @property
    def state_bytes(self) -> int:
        """Return the bytes of history and counts on one device."""
        arrays = self.history, self.counts
        return sum(prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize for each in arrays)

    @property
    def cache_shardings(self) -> tuple[Any, ...]:
        """Return the shardings of the caches."""
        return tuple(cache.sharding for cache in self.model.caches(self.num_blocks))

    @property
    def adapter_arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the arrays of adapters."""
        assert isinstance(self.model, Model), "no other has adapters"
        return tuple(self.model.leaves[index] for index in self.model.adapter_leaves)

    def rules(self, seqs: int) -> jax.ShapeDtypeStruct:
        """Return the rules int32 [n, R] of `seqs` rows of logits per shard."""
        fields = sampling_state.SAMPLING_FIELDS + (2 if self.shapes.width > 1 else 0)
        return self.array((fields, self.model.shards * seqs), jnp.int32)

    def logits(self, seqs: int) -> jax.ShapeDtypeStruct:
        """Return the logits float32 [R, V] of `seqs` rows per shard."""
        rows = self.model.shards * seqs
        return self.array((rows, padded(self.model.spec.vocab, self.model.tensor)), jnp.float32, "R.")

    def array(self, shape: tuple[int, ...], dtype: Any, axes: str = "") -> jax.ShapeDtypeStruct:
        """Return an argument; `axes`: logical ones, by default it is replicated."""
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=named_sharding(self.model.mesh, axes))


class StepProgramKind(ProgramKind):
    """A program of a generating engine."""

    @abstractmethod
    def parts(self, context: StepContext) -> ProgramParts:
        """Return what it is lowered from."""

    @abstractmethod
    def outputs(self, context: StepContext) -> Any:
        """Return the shardings of the results.

        Logits and hidden states stay with their shard; what the host reads is replicated.
        """

    def overlaps(self, context: StepContext) -> bool:
        """Return whether its tokens are exchanged in pieces, see `compiler_options`."""
        return False


def compiler_options(kernel: KernelChoice, *, overlaps: bool = False) -> dict[str, str] | None:
    """Return the XLA options of a program; None off the TPU. They are the same for serving and ahead of time.

    XLA gives the windows of one operation an eighth to a quarter of VMEM; half (in KiB) allows larger tiles, which
    raises the matrix units of a v6e from 65-80 % to 92 % of peak. Three quarters leave too little for what XLA keeps in
    VMEM between operations (benchmarks/LOG.md). Where XLA prefers tiles of 16 rows, it would copy all weights in every
    step: those of arguments have 8. An option set in LIBTPU_INIT_ARGS takes precedence.

    `overlaps`: its tokens are exchanged in pieces. XLA then sends a piece while it multiplies another one, and sums
    on the sparse cores.
    """
    if not kernel.use_kernel or kernel.interpret:
        return None
    options = {_VMEM_LIMIT: str(kernel.chip.vmem_bytes // 2 // 1024)}
    options |= {_TALL_TILES: "false"} if kernel.chip.tall_tiles else {}
    options |= _OVERLAP if overlaps else {}
    stated = set(_STATED_OPTION.findall(os.environ.get("LIBTPU_INIT_ARGS", "")))
    return {name: value for name, value in options.items() if name not in stated}


def lower(model: StepModel, parts: ProgramParts, outputs: Any, *, overlaps: bool = False) -> jax.stages.Lowered:
    """Trace and lower a program. Not thread-safe."""
    with model.matmul_precision:
        options = compiler_options(model.kernel, overlaps=overlaps)
        jitted = jax.jit(parts.function, donate_argnums=parts.donated, out_shardings=outputs, compiler_options=options)
        return jitted.trace(*parts.arguments).lower()


def shapes_of(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the shapes, dtypes and shardings of all arguments."""
    return [(each.shape, each.dtype.name, each.sharding.spec) for each in jax.tree.leaves(arguments)]


def per_shard(model: StepModel, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Map the function over the shards' rows; the compiler alone would gather all logits."""
    specs = jax.tree.map(partition, (in_axes, out_axes))
    # check_vma=False: devices that hold the same rows compute the same values
    return jax.shard_map(function, mesh=model.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
