"""The decoder's arrays on disk, written and read by Orbax (OCDBT, zarr3): what `convert` makes and serving loads.

An array is stored as it lies on the devices it was laid out for, cut into chunks along the axes that are split. So on
as many devices each reads its own piece and nothing else, which a canonical form could not offer where heads are
copied or padded. On another number most arrays are the same or differ in zeros behind the ffn width and the
vocabulary, which Orbax cuts or adds while each device reads its piece; arrays of heads whose slots differ are read in
their own layout, spread over the devices, and brought into the new one there (`relayout`).

zarr3 as Orbax writes it has no checksums of chunks; so each array has one here, made and verified on the devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from pagoda.backends.jax_tpu.parallel.sharding import DATA, MODEL, whole
from pagoda.backends.jax_tpu.weights.loading import tables
from pagoda.backends.jax_tpu.weights.placement import Path, placements, seen
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.shapes import params
from pagoda.common.weights.sharded import Leaf, Manifest, ShardedCheckpoint

# Arrays of heads laid out for one number of devices, brought into the layout for another.
#
# Heads lie in slots that depend on the number of devices (`layout.HeadLayout`): a KV head may be copied, and places may
# be empty. Where each head went is asked of `placement` itself, by sending numbers in place of weights through it; so
# there is one description of the layout, and this cannot disagree with it.

Index = npt.NDArray[np.int32]
HEADS: Final = "K"
_UNMOVED: Final = "LD"  # axes of an array of heads that no placement cuts or reorders


def moves(there: Model, here: Model) -> dict[Path, Index]:
    """For each array of heads that differs: which place of `there` each place of `here` takes, -1 for an empty one.

    Places are counted over all axes but L and D.
    """
    shapes = dict(zip(there.paths, (leaf.shape for leaf in there.leaves)))
    differing = {path for path, leaf in zip(here.paths, here.leaves) if leaf.shape != shapes.get(path)}
    before, after = _numbered(there), _numbered(here)
    return {path: _taken(before[path], numbers) for path, numbers in after.items() if path in differing}


def move(values: jax.Array, axes: str, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array with L and D around its axes of heads -> one of `shape`, taken as `index` int32 [n] of `moves` says."""
    outer = axes.index(HEADS)
    inner = prod(size for axis, size in zip(axes[outer:], shape[outer:]) if axis in _UNMOVED)
    rows = values.reshape(prod(shape[:outer]), -1, inner)
    return jnp.where((index >= 0)[:, None], rows[:, jnp.maximum(index, 0)], 0).reshape(shape)


def _numbered(model: Model) -> dict[Path, npt.NDArray[np.int64]]:
    """Per array of heads, in the size it has without L and D: the number of what lies at each place, 0 for nothing.

    Numbers are the same in every layout. Layers that repeat are alike, so the first stands for all.
    """
    found = {
        path: np.zeros([1 if axis in _UNMOVED else size for axis, size in zip(axes, leaf.shape)], np.int64)
        for path, axes, leaf in zip(model.paths, model.axes, model.leaves)
        if HEADS in axes
    }
    known, first = params(model.spec), 1
    for name, place in placements(model.spec, model.tensor).items():
        if name not in known or place.target not in found or place.start[0]:
            continue
        shape = [1 if axis in _UNMOVED else size for axis, size in zip(known[name].axes, known[name].shape)]
        part = place.arrange(np.arange(first, first + prod(shape)).reshape(shape))
        window = zip_longest(place.start, part.shape, fillvalue=0)
        target = found[place.target]
        target = target.reshape(seen(target.shape, part.shape))
        target[tuple(slice(start, start + size) for start, size in window)] = part
        first += prod(shape)
    return found


def _taken(there: npt.NDArray[np.int64], here: npt.NDArray[np.int64]) -> Index:
    """The place in `there` of each number in `here`; the first of several copies."""
    order = np.argsort(there, axis=None, kind="stable")
    at = np.searchsorted(there.ravel()[order], here.ravel())
    return np.where(here.ravel() > 0, order[np.minimum(at, len(order) - 1)], -1).astype(np.int32)


_CHUNK_BYTES: Final = 8 << 20
_DTYPES: Final = ("bfloat16", "float32")
_AGAIN: Final = "convert the model again"


_Key = TypeVar("_Key")


def save(model: Model, leaves: Leaves, folder: File, architectures: Sequence[str]) -> Manifest:
    """Write a model's arrays into a new folder; the manifest of it. Raises ConfigError, OSError."""
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
    """Every array of the model, from a checkpoint for any number of devices and of any float dtype.

    Raises ConfigError without Orbax, WeightError naming the array that is missing, damaged or not the model's.
    """
    ocp, manifest = import_orbax(), checkpoint.manifest
    there = _laid_out(model, manifest.tensor_parallel_size)
    _check(checkpoint, there)
    stored, made, moved = _stored(model), tables(model), moves(there, model)
    before = dict(zip(there.paths, there.leaves))
    read = {}
    with _checkpointer(ocp) as reader:
        for path, leaf, axes in zip(model.paths, model.leaves, model.axes):
            if path in stored:
                wanted = _spread(before[path], axes, model.mesh) if path in moved else leaf
                read[path] = _read(ocp, reader, checkpoint, _name(path), wanted)
    for path, found in _checksums(read, model.mesh).items():
        if found != manifest.leaves[_name(path)].checksum:
            raise _damaged(checkpoint, _name(path), "its checksum differs")
    return tuple(
        jax.device_put(made[path], leaf.sharding)
        if path in made
        else _fitted(read.pop(path), leaf, axes, moved.get(path))
        for path, leaf, axes in zip(model.paths, model.leaves, model.axes)
    )


def _read(ocp: Any, reader: Any, checkpoint: ShardedCheckpoint, name: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """One array in its stored dtype, each device reading its piece; zeros at the end are cut or added."""
    dtype = jnp.dtype(checkpoint.manifest.leaves[name].dtype)
    how = ocp.ArrayRestoreArgs(sharding=wanted.sharding, global_shape=wanted.shape, dtype=dtype, strict=False)
    args = ocp.args.PyTreeRestore({name: wanted}, restore_args={name: how}, partial_restore=True)
    try:
        found = reader.restore(checkpoint.arrays.resolve(), args=args)[name]
    except Exception as error:  # Orbax raises bare Exception for what tensorstore found
        raise _damaged(checkpoint, name, str(error).strip().partition("\n")[0][:200]) from None
    if not isinstance(found, jax.Array):
        raise _damaged(checkpoint, name, "it is not there")
    return found


def _fitted(values: jax.Array, leaf: jax.ShapeDtypeStruct, axes: str, index: Index | None) -> jax.Array:
    """The array in the model's layout and dtype."""
    if index is None and values.dtype == leaf.dtype:
        return values

    def fit(values: jax.Array, index: jax.Array | None) -> jax.Array:
        return (values if index is None else move(values, axes, index, leaf.shape)).astype(leaf.dtype)

    return jax.block_until_ready(jax.jit(fit, out_shardings=leaf.sharding)(values, index))


def _check(checkpoint: ShardedCheckpoint, there: Model) -> None:
    """Raises WeightError where the config's arrays, laid out as the manifest says, are not those of the manifest."""
    leaves, stored = checkpoint.manifest.leaves, _stored(there)
    wanted = {
        _name(path): (leaf.shape, axes)
        for path, leaf, axes in zip(there.paths, there.leaves, there.axes)
        if path in stored
    }
    for name in (*wanted, *leaves):
        have = (leaves[name].shape, leaves[name].axes) if name in leaves else None
        if have != wanted.get(name):
            raise WeightError(
                f"{checkpoint.folder}: array {name} is {_said(have)} in the checkpoint of pagoda "
                f"{checkpoint.manifest.pagoda}, {_said(wanted.get(name))} by its config.json here; put back the "
                f"config.json that was converted, or {_AGAIN}"
            )
    for name, leaf in leaves.items():
        if leaf.dtype not in _DTYPES:
            known = " or ".join(_DTYPES)
            raise WeightError(f"{checkpoint.folder}: array {name} is {leaf.dtype}, expected {known}; {_AGAIN}")


def _laid_out(model: Model, tensor: int) -> Model:
    """The same model for another number of devices, which need not be there."""
    mesh: Any = AbstractMesh((1, tensor), (DATA, MODEL))
    return build_model(model.spec, model.layout, mesh, model.dtype, model.max_len, model.kernel)


def _spread(source: jax.ShapeDtypeStruct, axes: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An array that is about to move: split along its width where the devices divide it, else whole on each."""
    at = axes.find("D")
    split = at >= 0 and source.shape[at] % mesh.shape[MODEL] == 0
    parts = PartitionSpec(*(MODEL if split and number == at else None for number in range(len(axes))))
    return jax.ShapeDtypeStruct(source.shape, source.dtype, sharding=NamedSharding(mesh, parts))


def _checksums(arrays: Mapping[_Key, jax.Array], mesh: Mesh) -> dict[_Key, int]:
    """The sum of each array's words modulo 2^32: the same however it is split, and with zeros behind it."""
    sums = jax.jit(lambda arrays: [_sum(array) for array in arrays], out_shardings=whole(mesh))
    return dict(zip(arrays, map(int, sums(list(arrays.values())))))


def _sum(values: jax.Array) -> jax.Array:
    words = jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
    return words.astype(jnp.uint32).sum(dtype=jnp.uint32)


def _stored(model: Model) -> set[Path]:
    """The arrays that parameters fill; the others follow from the spec."""
    return {place.target for place in placements(model.spec, model.tensor).values()} & set(model.paths)


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _said(array: tuple[tuple[int, ...], str] | None) -> str:
    return "not there" if array is None else f"{list(array[0])}"


def _damaged(checkpoint: ShardedCheckpoint, name: str, why: str) -> WeightError:
    return WeightError(f"{checkpoint.arrays}: array {name} cannot be read ({why}); copy it anew, or {_AGAIN}")


def _checkpointer(ocp: Any) -> Any:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))


def import_orbax() -> Any:
    """Orbax, which only those need who convert or load a sharded checkpoint. Raises ConfigError without it."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        why = f"sharded_state needs orbax-checkpoint ({error}); pip install 'pagoda[tpu]'"
        raise ConfigError("--load-format", why) from None
    return ocp
