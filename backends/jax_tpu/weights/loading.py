"""The stream of canonical weights -> the decoder's arrays, each piece straight to the devices that hold it.

The arrays are made empty on the devices; a parameter is cut by device, sent, and written into its place with the array
donated. So beside the model there is never more than one parameter in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.memory.kv_scales import KV_SCALE
from pagoda.backends.jax_tpu.model.model import Leaves, Model
from pagoda.backends.jax_tpu.model.rotary import ropes, table
from pagoda.backends.jax_tpu.parallel.sharding import placed
from pagoda.backends.jax_tpu.weights.placement import SCALE, Path, Placement, placements, quantized, seen
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.shapes import params
from pagoda.common.weights import dtypes

_NARROW = {
    dtypes.BFLOAT16: ml_dtypes.bfloat16,
    dtypes.FLOAT8_E4M3FN: ml_dtypes.float8_e4m3fn,
    dtypes.FLOAT8_E5M2: ml_dtypes.float8_e5m2,
}


def load(model: Model, weights: Iterable[Weight]) -> Leaves:
    """Every array of the model. Raises WeightError naming a parameter: unknown, repeated, misshapen or missing."""
    filling = _Filling(model)
    waiting = params(model.spec)
    for name, array in weights:
        param = waiting.pop(name, None)
        if param is None:
            raise WeightError(f"parameter {name} is unknown or came twice")
        if array.shape != param.shape:
            raise WeightError(f"parameter {name} has shape {array.shape}, the model needs {param.shape}")
        filling.put(name, as_jax(array))
    if waiting:
        raise WeightError(f"the checkpoint lacks {len(waiting)} parameters, first {next(iter(waiting))}")
    return filling.leaves()


def tables(model: Model) -> dict[Path, npt.NDArray[np.float32]]:
    """The arrays that no parameter fills: tables of rotary positions, and scales of K and V, which begin as 1."""
    scales = {
        path: np.ones(leaf.shape, np.float32) for path, leaf in zip(model.paths, model.leaves) if path[-1] == KV_SCALE
    }
    return {("rotary", number): table(rope, model.max_len) for number, rope in enumerate(ropes(model.spec))} | scales


def as_jax(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The array with a dtype that jax knows, over the same memory."""
    return dtypes.as_uint(array).view(_NARROW[array.dtype]) if array.dtype in _NARROW else array


class _Filling:
    """The arrays while they are being filled."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._index = {path: index for index, path in enumerate(model.paths)}
        self._places: dict[str, Placement] = placements(model.spec, model.tensor)
        self._arrays = [
            jax.jit(partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=leaf.sharding)() for leaf in model.leaves
        ]
        self._write = jax.jit(_write, donate_argnums=0)
        self._write_quantized = jax.jit(_write_quantized, donate_argnums=0)
        for path, values in tables(model).items():
            self._fill(path, (), values)

    def put(self, name: str, array: npt.NDArray[np.generic]) -> None:
        """Send one parameter."""
        place = self._places[name]
        self._fill(place.target, place.start, place.arrange(array))

    def _fill(self, target: Path, start: tuple[int, ...], part: npt.NDArray[np.generic]) -> None:
        index = self._index[target]
        axes, array = self._model.axes[index], self._arrays[index]
        if part.ndim > array.ndim:
            axes = f"{axes[:2]}.{axes[2:]}"
        part = _pad(part, seen(array.shape, part.shape), axes)
        offset = np.zeros(part.ndim, np.int32)
        offset[: len(start)] = start
        sharding = placed(self._model.mesh, axes)
        sent = jax.make_array_from_callback(part.shape, sharding, part.__getitem__)  # to the devices of this host alone
        scales = self._index.get((*target[:-1], f"{target[-1]}{SCALE}"))
        if scales is None:
            self._arrays[index] = self._write(array, sent, offset)
        else:
            both = array, self._arrays[scales]
            self._arrays[index], self._arrays[scales] = self._write_quantized(both, sent, offset)

    def leaves(self) -> Leaves:
        """The filled arrays; waits for the devices."""
        return jax.block_until_ready(tuple(self._arrays))


def _write(array: jax.Array, part: jax.Array, offset: jax.Array) -> jax.Array:
    whole = array.reshape(seen(array.shape, part.shape))
    return jax.lax.dynamic_update_slice(whole, part.astype(array.dtype), tuple(offset)).reshape(array.shape)


def _write_quantized(
    both: tuple[jax.Array, jax.Array], part: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A matrix and its scales with a part of it in place; the last axis is whole, on however many devices it is."""
    matrix, scales = both
    numbers, factors = quantized(part, matrix.dtype.name)
    return _write(matrix, numbers, offset), _write(scales, factors, offset[:-1])


def _pad(part: npt.NDArray[np.generic], shape: tuple[int, ...], axes: str) -> npt.NDArray[np.generic]:
    """Zeros behind the ffn width and the vocabulary, up to the array's size."""
    missing = [(0, size - have if axis in "FV" else 0) for have, size, axis in zip(part.shape, shape, axes)]
    return np.pad(part, missing) if any(after for _, after in missing) else part
