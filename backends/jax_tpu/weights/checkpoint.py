"""Pre-sharded checkpoints: the decoder's arrays on disk, written and read by Orbax (OCDBT, zarr3).

An array is stored in the layout of the devices it was converted for, in chunks along its sharded axes, so that on the
same number of devices each reads only its own piece. A canonical layout could not offer that where heads are copied or
padded. On another number of devices most arrays are equal or differ in the zero padding of ffn width and vocabulary,
which Orbax trims or extends while each device reads its piece. Arrays of heads with a different slot layout are read
in their stored layout, sharded over the devices, and rearranged there (`head_moves`, `move_heads`).

zarr3 as Orbax writes it has no chunk checksums, so each array has a checksum in the manifest, computed and verified on
the devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from pathlib import Path as File
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pagoda import __version__
from pagoda.backends.jax_tpu.model.model import Leaves, Model, build_model
from pagoda.backends.jax_tpu.parallel import DATA, MODEL, replicated
from pagoda.backends.jax_tpu.weights.arrange import Path, split_slot_axis
from pagoda.backends.jax_tpu.weights.loading import constants
from pagoda.backends.jax_tpu.weights.placement import placements
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.shapes import params
from pagoda.common.weights.sharded import Leaf, Manifest, ShardedCheckpoint

Index = npt.NDArray[np.int32]
HEADS: Final = "K"
_UNMOVED: Final = "LD"  # axes of an array of heads that no placement slices or reorders

_CHUNK_BYTES: Final = 8 << 20
_DTYPES: Final = ("bfloat16", "float32")
_CONVERT_AGAIN: Final = "convert the model again"

_Key = TypeVar("_Key")


def save(model: Model, leaves: Leaves, folder: File, architectures: Sequence[str]) -> Manifest:
    """Write a model's arrays into a new folder and return the manifest. Raise ConfigError or OSError."""
    ocp = import_orbax()
    stored = _stored(model)
    tree = {_name(path): leaf for path, leaf in zip(model.paths, leaves) if path in stored}
    axes = {_name(path): letters for path, letters in zip(model.paths, model.axes)}
    chunks = dict.fromkeys(tree, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
    with _checkpointer(ocp) as writer:
        writer.save(folder.resolve(), args=ocp.args.PyTreeSave(tree, save_args=chunks))
    sums = _checksums(tree, model.mesh)
    return Manifest(
        pagoda=__version__,
        architectures=tuple(architectures),
        dtype=model.dtype.name,
        tensor_parallel_size=model.tensor,
        leaves={name: Leaf(leaf.shape, axes[name], leaf.dtype.name, sums[name]) for name, leaf in tree.items()},
    )


def load(model: Model, checkpoint: ShardedCheckpoint) -> Leaves:
    """Load every array of the model, from a checkpoint for any number of devices and any float dtype.

    Raise ConfigError without Orbax, WeightError naming an array that is missing, damaged or does not fit the model.
    """
    ocp = import_orbax()
    manifest = checkpoint.manifest
    source = _with_tensor_size(model, manifest.tensor_parallel_size)
    _check(checkpoint, source)
    stored = _stored(model)
    constant_arrays = constants(model)
    moves = head_moves(source, model)
    source_leaves = dict(zip(source.paths, source.leaves))
    arrays = {}
    with _checkpointer(ocp) as reader:
        for path, leaf, axes in zip(model.paths, model.leaves, model.axes):
            if path in stored:
                target = _sharded_over_width(source_leaves[path], axes, model.mesh) if path in moves else leaf
                arrays[path] = _read(ocp, reader, checkpoint, _name(path), target)
    for path, checksum in _checksums(arrays, model.mesh).items():
        if checksum != manifest.leaves[_name(path)].checksum:
            raise _damaged(checkpoint, _name(path), "its checksum differs")
    empty_slots = {model.paths[index] for index in model.adapter_leaves}
    return tuple(
        jax.device_put(constant_arrays[path], leaf.sharding)
        if path in constant_arrays
        else jax.jit(partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
        if path in empty_slots
        else _convert(arrays.pop(path), leaf, axes, moves.get(path))
        for path, leaf, axes in zip(model.paths, model.leaves, model.axes)
    )


def _read(ocp: Any, reader: Any, checkpoint: ShardedCheckpoint, name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Read one array in its stored dtype, each device its piece; trailing zeros are trimmed or added."""
    dtype = jnp.dtype(checkpoint.manifest.leaves[name].dtype)
    restore = ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, dtype=dtype, strict=False)
    args = ocp.args.PyTreeRestore({name: target}, restore_args={name: restore}, partial_restore=True)
    try:
        array = reader.restore(checkpoint.arrays.resolve(), args=args)[name]
    except Exception as error:  # Orbax raises bare Exception for tensorstore errors
        raise _damaged(checkpoint, name, str(error).strip().partition("\n")[0][:200]) from None
    if not isinstance(array, jax.Array):
        raise _damaged(checkpoint, name, "it is missing")
    return array


def _convert(values: jax.Array, leaf: jax.ShapeDtypeStruct, axes: str, index: Index | None) -> jax.Array:
    """Convert an array to the model's layout and dtype."""
    if index is None and values.dtype == leaf.dtype:
        return values

    def convert(values: jax.Array, index: jax.Array | None) -> jax.Array:
        return (values if index is None else move_heads(values, axes, index, leaf.shape)).astype(leaf.dtype)

    return jax.block_until_ready(jax.jit(convert, out_shardings=leaf.sharding)(values, index))


def _check(checkpoint: ShardedCheckpoint, source: Model) -> None:
    """Raise WeightError if the manifest's arrays are not those of its config.json."""
    leaves = checkpoint.manifest.leaves
    stored = _stored(source)
    expected = {
        _name(path): (leaf.shape, axes)
        for path, leaf, axes in zip(source.paths, source.leaves, source.axes)
        if path in stored
    }
    for name in (*expected, *leaves):
        actual = (leaves[name].shape, leaves[name].axes) if name in leaves else None
        if actual != expected.get(name):
            raise WeightError(
                f"{checkpoint.folder}: array {name} is {_shape_text(actual)} in the checkpoint of pagoda "
                f"{checkpoint.manifest.pagoda}, but {_shape_text(expected.get(name))} by its config.json; restore the "
                f"config.json that was converted, or {_CONVERT_AGAIN}"
            )
    for name, leaf in leaves.items():
        if leaf.dtype not in _DTYPES:
            known = " or ".join(_DTYPES)
            raise WeightError(f"{checkpoint.folder}: array {name} is {leaf.dtype}, expected {known}; {_CONVERT_AGAIN}")


def _with_tensor_size(model: Model, tensor: int) -> Model:
    """Return the same model sharded over `tensor` abstract devices."""
    mesh: Any = AbstractMesh((1, tensor), (DATA, MODEL))
    return build_model(model.spec, model.layout, mesh, model.dtype, model.max_len, model.kernel, drafter=model.drafter)


def _sharded_over_width(source: jax.ShapeDtypeStruct, axes: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shard an array to rearrange along its width D if divisible by the devices, else replicate it."""
    width = axes.find("D")
    divisible = width >= 0 and source.shape[width] % mesh.shape[MODEL] == 0
    spec = PartitionSpec(*(MODEL if divisible and axis == width else None for axis in range(len(axes))))
    return jax.ShapeDtypeStruct(source.shape, source.dtype, sharding=NamedSharding(mesh, spec))


def _checksums(arrays: Mapping[_Key, jax.Array], mesh: Mesh) -> dict[_Key, int]:
    """Return each array's sum of words modulo 2^32, which does not depend on sharding or trailing zeros."""
    sums = jax.jit(lambda arrays: [_sum(array) for array in arrays], out_shardings=replicated(mesh))
    return dict(zip(arrays, map(int, sums(list(arrays.values())))))


def _sum(values: jax.Array) -> jax.Array:
    words = jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
    return words.astype(jnp.uint32).sum(dtype=jnp.uint32)


def _stored(model: Model) -> set[Path]:
    """Return the arrays filled by parameters; the others follow from the spec."""
    return {placement.target for placement in placements(model.spec, model.tensor).values()} & set(model.paths)


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _shape_text(array: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if array is None else f"{list(array[0])}"


def _damaged(checkpoint: ShardedCheckpoint, name: str, why: str) -> WeightError:
    return WeightError(f"{checkpoint.arrays}: array {name} cannot be read ({why}); copy it again, or {_CONVERT_AGAIN}")


def _checkpointer(ocp: Any) -> Any:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))


def import_orbax() -> Any:
    """Import Orbax, an optional dependency of pre-sharded checkpoints. Raise ConfigError if it is not installed."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        why = f"sharded_state needs orbax-checkpoint ({error}); pip install 'pagoda[tpu]'"
        raise ConfigError("--load-format", why) from None
    return ocp


# Rearranging arrays of heads between two slot layouts (`slots.HeadLayout`). The position of each head is derived by
# sending element numbers instead of weights through `placements`, so the layout is described in one place only.


def head_moves(source: Model, target: Model) -> dict[Path, Index]:
    """For each array of heads whose layout differs: the source position of each target position, -1 if empty.

    Positions are counted over all axes except L and D.
    """
    shapes = dict(zip(source.paths, (leaf.shape for leaf in source.leaves)))
    differing = {path for path, leaf in zip(target.paths, target.leaves) if leaf.shape != shapes.get(path)}
    before = _element_numbers(source)
    after = _element_numbers(target)
    return {
        path: _positions(before[path], numbers)
        for path, numbers in after.items()
        if path in differing and path in before  # not adapters
    }


def move_heads(values: jax.Array, axes: str, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Rearrange an array of heads to `shape` by an index int32 [n] of `head_moves`."""
    outer = axes.index(HEADS)
    inner = prod(size for axis, size in zip(axes[outer:], shape[outer:]) if axis in _UNMOVED)
    rows = values.reshape(prod(shape[:outer]), -1, inner)
    return jnp.where((index >= 0)[:, None], rows[:, jnp.maximum(index, 0)], 0).reshape(shape)


def _element_numbers(model: Model) -> dict[Path, npt.NDArray[np.int64]]:
    """Per array of heads, with L and D reduced to 1: the number of the element at each position, 0 if empty.

    Numbers are the same in every layout. Repeated layers are alike, so only the first is numbered.
    """
    numbers = {
        path: np.zeros([1 if axis in _UNMOVED else size for axis, size in zip(axes, leaf.shape)], np.int64)
        for path, axes, leaf in zip(model.paths, model.axes, model.leaves)
        if HEADS in axes
    }
    known = params(model.spec)
    first = 1
    for name, placement in placements(model.spec, model.tensor).items():
        if name not in known or placement.target not in numbers or placement.start[0]:
            continue
        shape = [1 if axis in _UNMOVED else size for axis, size in zip(known[name].axes, known[name].shape)]
        part = placement.arrange(np.arange(first, first + prod(shape)).reshape(shape))
        window = zip_longest(placement.start, part.shape, fillvalue=0)
        target = numbers[placement.target]
        target = target.reshape(split_slot_axis(target.shape, part.shape))
        target[tuple(slice(start, start + size) for start, size in window)] = part
        first += prod(shape)
    return numbers


def _positions(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> Index:
    """Return the position in `source` of each number in `target`; of several copies the first."""
    order = np.argsort(source, axis=None, kind="stable")
    nearest = np.searchsorted(source.ravel()[order], target.ravel())
    return np.where(target.ravel() > 0, order[np.minimum(nearest, len(order) - 1)], -1).astype(np.int32)
