"""Load a stream of canonical weights into the decoder's arrays, each piece directly to its devices.

The arrays are allocated on the devices; each parameter is sharded, sent, and written into its slice with the array
donated. Peak memory is the model plus one parameter. Numbers of a quantised checkpoint are sent as they are where the
decoder has matrices of them, else dequantised.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.memory.kv_scales import KV_SCALE
from pagoda.backends.jax_tpu.model.layers import table
from pagoda.backends.jax_tpu.model.model import Leaves, Model
from pagoda.backends.jax_tpu.parallel import named_sharding
from pagoda.backends.jax_tpu.weights.placement import SCALE, Path, Placement, placements, quantize, split_slot_axis
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.primitives import Param
from pagoda.common.models.shapes import checked, lacking, params
from pagoda.common.weights import dtypes
from pagoda.common.weights.quantization import Float8, Int8, QuantizedTensor, Value, log_dequantized

_NARROW = {
    dtypes.BFLOAT16: ml_dtypes.bfloat16,
    dtypes.FLOAT8_E4M3FN: ml_dtypes.float8_e4m3fn,
    dtypes.FLOAT8_E5M2: ml_dtypes.float8_e5m2,
}

_MINUS_ZERO: Final = 0x80


def load(model: Model, weights: Iterable[Weight]) -> Leaves:
    """Return every array of the model. Raise WeightError for an unknown, repeated, misshapen or missing parameter."""
    writer = WeightWriter(model, _zeros(model))
    for path, values in constants(model).items():
        writer.send(path, (), values)
    missing = params(model.spec)
    writer.write(weights, missing)
    if missing:
        raise lacking(missing)
    return writer.leaves()


def _zeros(model: Model) -> Leaves:
    return tuple(
        jax.jit(partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=leaf.sharding)() for leaf in model.leaves
    )


def constants(model: Model) -> dict[Path, npt.NDArray[np.float32]]:
    """Return the arrays that come from no checkpoint: rotary tables, and KV scales, initially 1."""
    scales = {
        path: np.ones(leaf.shape, np.float32) for path, leaf in zip(model.paths, model.leaves) if path[-1] == KV_SCALE
    }
    return {("rotary", number): table(rope, model.max_len) for number, rope in enumerate(model.spec.ropes)} | scales


def as_jax(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """View the array with a dtype that jax supports."""
    return dtypes.as_uint(array).view(_NARROW[array.dtype]) if array.dtype in _NARROW else array


class WeightWriter:
    """Writes parameters into a model's arrays, which are donated: afterwards only `leaves` are valid."""

    def __init__(self, model: Model, leaves: Leaves) -> None:
        self._model = model
        self._copied: list[str] = []  # names of quantised parameters that were sent as they are
        self._rounded: list[str] = []  # names of dense parameters that were quantised
        self._dequantised: list[str] = []
        self._index = {path: index for index, path in enumerate(model.paths)}
        self._placements: dict[str, Placement] = placements(model.spec, model.tensor)
        self._arrays = list(leaves)
        self._write = jax.jit(_write, donate_argnums=0)
        self._write_quantized = jax.jit(_write_quantized, donate_argnums=0)

    def write(self, weights: Iterable[Weight], missing: dict[str, Param]) -> None:
        """Write parameters, removing each from `missing`. Raise WeightError."""
        for name, value in checked(weights, missing):
            self._put(name, value)
        if self._copied and self._rounded:
            dense, stored = self._rounded[0], self._copied[0]
            raise WeightError(
                f"parameter {dense} is dense and {stored} is not, but config.json states the same of both"
            )
        log_dequantized(self._dequantised, "jax_tpu")

    def _put(self, name: str, value: Value) -> None:
        """Send one parameter to the devices."""
        placement = self._placements[name]
        target, start = placement.target, placement.start
        scales = (*target[:-1], f"{target[-1]}{SCALE}")
        if isinstance(value, QuantizedTensor):
            dtype = self._arrays[self._index[target]].dtype.name
            stored = _stored_matrix(value, dtype) if scales in self._index else None
            if stored is not None:
                numbers, row_scales = stored
                # No arrangement pads column 0, so it holds the scales of all rows.
                spread = placement.arrange(np.broadcast_to(row_scales[:, None], numbers.shape))
                self.send(target, start, placement.arrange(numbers))
                self.send(scales, start, spread[..., 0])
                self._copied.append(name)
                return
            self._dequantised.append(name)
            value = value.dequantize()
        array = placement.arrange(as_jax(value))
        if scales in self._index:
            self._send_quantized(target, scales, start, array)
            self._rounded.append(name)
        else:
            self.send(target, start, array)

    def send(self, target: Path, start: tuple[int, ...], part: npt.NDArray[np.generic]) -> None:
        """Write a part of an array, at these offsets of its leading axes."""
        index = self._index[target]
        sent, offset = self._on_devices(index, start, part)
        self._arrays[index] = self._write(self._arrays[index], sent, offset)

    def _send_quantized(
        self, target: Path, scales: Path, start: tuple[int, ...], part: npt.NDArray[np.generic]
    ) -> None:
        """Send a dense part of a matrix, which is quantised on the devices."""
        index, scales_index = self._index[target], self._index[scales]
        sent, offset = self._on_devices(index, start, part)
        matrix = self._arrays[index], self._arrays[scales_index]
        self._arrays[index], self._arrays[scales_index] = self._write_quantized(matrix, sent, offset)

    def _on_devices(
        self, index: int, start: tuple[int, ...], part: npt.NDArray[np.generic]
    ) -> tuple[jax.Array, npt.NDArray[np.int32]]:
        """Shard a part over the devices as its array is; return it with its offsets there."""
        axes, array = self._model.axes[index], self._arrays[index]
        if part.ndim > array.ndim:
            axes = f"{axes[:2]}.{axes[2:]}"
        part = _pad(part, split_slot_axis(array.shape, part.shape), axes)
        offset = np.zeros(part.ndim, np.int32)
        offset[: len(start)] = start
        sharding = named_sharding(self._model.mesh, axes)
        sent = jax.make_array_from_callback(part.shape, sharding, part.__getitem__)  # this host's devices only
        return sent, offset

    def leaves(self) -> Leaves:
        """Wait for the devices and return the arrays."""
        return jax.block_until_ready(tuple(self._arrays))


def _stored_matrix(
    value: QuantizedTensor, dtype: str
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.float32]] | None:
    """Return a matrix [O, I] in `dtype` and the scales [O], with exactly its values; None if there are none."""
    scales = value.channel_scales()
    if scales is None:
        return None
    match value.scheme, dtype:
        case Float8(), "float8_e4m3fn":
            return as_jax(value.data), scales
        case Float8(), "float8_e4m3b11fnuz":  # the same bits mean a sixteenth, those of -0 NaN
            bits = dtypes.as_uint(value.data)
            return np.where(bits == _MINUS_ZERO, 0, bits).astype(np.uint8).view(
                ml_dtypes.float8_e4m3b11fnuz
            ), 16 * scales
        case Int8(), "int8":
            return value.data, scales
        case _:
            return None


def _write(array: jax.Array, part: jax.Array, offset: jax.Array) -> jax.Array:
    view = array.reshape(split_slot_axis(array.shape, part.shape))
    return jax.lax.dynamic_update_slice(view, part.astype(array.dtype), tuple(offset)).reshape(array.shape)


def _write_quantized(
    matrix: tuple[jax.Array, jax.Array], part: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Quantise a part and write it into (values, scales). The part covers the full last axis."""
    values, scales = matrix
    part_values, part_scales = quantize(part, values.dtype.name)
    return _write(values, part_values, offset), _write(scales, part_scales, offset[:-1])


def _pad(part: npt.NDArray[np.generic], shape: tuple[int, ...], axes: str) -> npt.NDArray[np.generic]:
    """Pad ffn width and vocabulary with zeros to the array's size."""
    missing = [(0, size - have if axis in "FV" else 0) for have, size, axis in zip(part.shape, shape, axes)]
    return np.pad(part, missing) if any(after for _, after in missing) else part
