"""Load a stream of canonical weights into the decoder's arrays, each piece directly to its devices.

The arrays are allocated on the devices; each parameter is sharded, sent, and written into its slice with the array
donated. Peak memory is the model plus one parameter. Numbers of a quantised checkpoint are sent as they are where the
decoder has matrices of them, else dequantised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from pagoda.backends.jax_tpu.memory.kv_scales import KV_SCALE
from pagoda.backends.jax_tpu.model.layers import table
from pagoda.backends.jax_tpu.model.model import Leaves, Model
from pagoda.backends.jax_tpu.model.parameters import quantize
from pagoda.backends.jax_tpu.parallel import named_sharding
from pagoda.backends.jax_tpu.weights.arrange import MatrixFormat, Path, Placement, split_slot_axis
from pagoda.backends.jax_tpu.weights.packing import (
    KernelPart,
    StoredNumbers,
    kernel_part,
    quantize_groups,
    stored_numbers,
)
from pagoda.backends.jax_tpu.weights.placement import placements
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.primitives import Param
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import checked, lacking, params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights import dtypes
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value, log_dequantized
from pagoda.common.weights.rope_order import half_split
from pagoda.kernels_pallas.grouped_matmul.quantized import CODES, PER_WORD

_NARROW = {
    dtypes.BFLOAT16: ml_dtypes.bfloat16,
    dtypes.FLOAT8_E4M3FN: ml_dtypes.float8_e4m3fn,
    dtypes.FLOAT8_E5M2: ml_dtypes.float8_e5m2,
}


def load(model: Model, weights: Iterable[Weight]) -> Leaves:
    """Return every array of the model. Raise WeightError for an unknown, repeated, misshapen or missing parameter."""
    writer = WeightWriter.of(model, zeros(model))
    for path, values in constants(model).items():
        writer.send(path, (), values)
    missing = params(model.spec)
    writer.write(weights, missing)
    if missing:
        raise lacking(missing)
    return writer.leaves()


class ArrayShapes(Protocol):
    """The arrays that parameters are written into; see `StepModel`."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]: ...

    @property
    def paths(self) -> tuple[Path, ...]: ...

    @property
    def axes(self) -> tuple[str, ...]: ...

    @property
    def formats(self) -> Mapping[Path, MatrixFormat]: ...


def zeros(arrays: ArrayShapes) -> Leaves:
    """Allocate the arrays on their devices, by one program."""

    def make() -> Leaves:
        return tuple(jnp.zeros(leaf.shape, leaf.dtype) for leaf in arrays.leaves)

    leaves: Leaves = jax.jit(make, out_shardings=tuple(leaf.sharding for leaf in arrays.leaves))()
    return leaves


def constants(model: Model) -> dict[Path, npt.NDArray[np.float32]]:
    """Return the arrays that come from no checkpoint: rotary tables, and KV scales, initially 1."""
    return rotary_tables(model.spec.ropes, model.max_len) | unit_scales(model)


def rotary_tables(ropes: tuple[Rope, ...], max_len: int) -> dict[Path, npt.NDArray[np.float32]]:
    """Return the rotary tables of a decoder by path."""
    return {("rotary", number): table(rope, max_len) for number, rope in enumerate(ropes)}


def unit_scales(arrays: ArrayShapes) -> dict[Path, npt.NDArray[np.float32]]:
    """Return KV scales of 1 by path."""
    return {
        path: np.ones(leaf.shape, np.float32) for path, leaf in zip(arrays.paths, arrays.leaves) if path[-1] == KV_SCALE
    }


def as_jax(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """View the array with a dtype that jax supports."""
    return dtypes.as_uint(array).view(_NARROW[array.dtype]) if array.dtype in _NARROW else array


class WeightWriter:
    """Writes parameters into arrays, which are donated: afterwards only `leaves` are valid."""

    def __init__(
        self, model: ArrayShapes, leaves: Leaves, places: Mapping[str, Placement], spec: ModelSpec | None
    ) -> None:
        """`places`: of the parameters. `spec`: whose rotary channels have another order in the arrays, if any."""
        self._model = model
        self._spec = spec
        self._copied: list[str] = []  # names of quantised parameters that were sent as they are
        self._rounded: list[str] = []  # names of dense parameters that were quantised
        self._dequantised: list[str] = []
        self._index = {path: index for index, path in enumerate(model.paths)}
        self._placements = places
        self._arrays = list(leaves)
        self._write = jax.jit(_write, donate_argnums=0)
        self._write_quantized = jax.jit(_write_quantized, donate_argnums=0)
        self._write_part = jax.jit(_write_part, donate_argnums=0, static_argnums=3)
        self._write_groups = jax.jit(_write_groups, donate_argnums=0, static_argnums=(3, 4))

    @classmethod
    def of(cls, model: Model, leaves: Leaves) -> WeightWriter:
        """Return the writer of a model's parameters."""
        return cls(model, leaves, placements(model.spec, model.tensor), model.spec)

    def write(self, weights: Iterable[Weight], missing: dict[str, Param]) -> None:
        """Write parameters, removing each from `missing`. Raise WeightError."""
        values = checked(weights, missing)
        for name, value in values if self._spec is None else half_split(self._spec, values):
            self._put(name, value)
        if self._copied and self._rounded:
            dense = self._rounded[0]
            stored = self._copied[0]
            raise WeightError(
                f"parameter {dense} is dense and {stored} is not, but config.json states the same of both"
            )
        log_dequantized(self._dequantised, "jax_tpu")

    def _put(self, name: str, value: Value) -> None:
        """Send one parameter to the devices."""
        placement = self._placements[name]
        target = placement.target
        form = self._model.formats.get(target) if (*target, "numbers") in self._index else None
        if isinstance(value, QuantizedTensor):
            stored = None if form is None else stored_numbers(name, value, form)
            if form is not None and stored is not None:
                self._send_stored(name, stored, form, value.shape[-1])
                self._copied.append(name)
                return
            self._dequantised.append(name)
            value = value.dequantize()
        if form is None:
            self.send(target, placement.start, placement.arrange(as_jax(value)))
            return
        self._rounded.append(name)
        if form.for_kernel:
            self._quantize_groups(name, as_jax(value), form)
        else:
            self._quantize_channels(target, placement.start, placement.arrange(as_jax(value)))

    def _send_stored(self, name: str, stored: StoredNumbers, form: MatrixFormat, inputs: int) -> None:
        """Send a quantised parameter as it is."""
        placement = self._placements[name]
        if not form.for_kernel:
            # No arrangement pads column 0, so it holds the scales of all rows.
            spread = placement.arrange(np.broadcast_to(stored.scales, stored.numbers.shape))
            self.send((*placement.target, "numbers"), placement.start, placement.arrange(stored.numbers))
            self.send((*placement.target, "scales"), placement.start, spread[..., 0])
            return
        for part, array in stored.parts.items():
            self._send_part(
                (*placement.target, part), kernel_part(name, array, placement, inputs, form.group or inputs)
            )

    def _send_part(self, target: Path, part: KernelPart) -> None:
        """Write a part of an array of a GroupedMatrix."""
        index = self._index[target]
        part = part.padded(self._arrays[index].shape)
        view, sent, offset = self._part_on_devices(index, part)
        self._arrays[index] = self._write_part(self._arrays[index], sent, offset, view)

    def _quantize_groups(self, name: str, values: npt.NDArray[np.generic], form: MatrixFormat) -> None:
        """Send a dense parameter of a GroupedMatrix, which is quantised on the devices."""
        placement = self._placements[name]
        inputs = values.shape[-1]
        index, scales = (self._index[(*placement.target, part)] for part in ("numbers", "scales"))
        numbers = self._arrays[index]
        part = kernel_part(name, values, placement, inputs, form.group or inputs)
        part = part.padded((*numbers.shape[:3], self._inputs(index, form), numbers.shape[4]))
        view, sent, offset = self._part_on_devices(index, part)
        matrix = numbers, self._arrays[scales]
        self._arrays[index], self._arrays[scales] = self._write_groups(matrix, sent, offset, view, form)

    def _inputs(self, index: int, form: MatrixFormat) -> int:
        """Return the inputs of a GroupedMatrix's numbers."""
        rows: int = self._arrays[index].shape[3]
        return rows * PER_WORD if form.numbers in CODES else rows

    def _part_on_devices(
        self, index: int, part: KernelPart
    ) -> tuple[tuple[int, ...], jax.Array, npt.NDArray[np.int32]]:
        """Shard a part as its array is; return the array's shape with the part's axes, the part, and its offsets."""
        view = part.view(self._arrays[index].shape)
        axes = self._model.axes[index] + "." * (len(view) - 5)
        offset = np.zeros(len(view), np.int32)
        offset[: len(part.start)] = part.start
        sharding = named_sharding(self._model.mesh, axes)
        return view, jax.make_array_from_callback(part.array.shape, sharding, part.array.__getitem__), offset

    def send(self, target: Path, start: tuple[int, ...], part: npt.NDArray[np.generic]) -> None:
        """Write a part of an array, at these offsets of its leading axes."""
        index = self._index[target]
        sent, offset = self._on_devices(index, start, part)
        self._arrays[index] = self._write(self._arrays[index], sent, offset)

    def _quantize_channels(self, target: Path, start: tuple[int, ...], part: npt.NDArray[np.generic]) -> None:
        """Send a dense part of a matrix, which is quantised on the devices."""
        index = self._index[(*target, "numbers")]
        scales_index = self._index[(*target, "scales")]
        sent, offset = self._on_devices(index, start, part)
        matrix = self._arrays[index], self._arrays[scales_index]
        self._arrays[index], self._arrays[scales_index] = self._write_quantized(matrix, sent, offset)

    def _on_devices(
        self, index: int, start: tuple[int, ...], part: npt.NDArray[np.generic]
    ) -> tuple[jax.Array, npt.NDArray[np.int32]]:
        """Shard a part over the devices as its array is; return it with its offsets there."""
        axes = self._model.axes[index]
        array = self._arrays[index]
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


def _write_part(array: jax.Array, part: jax.Array, offset: jax.Array, view: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(array.reshape(view), part.astype(array.dtype), tuple(offset)).reshape(
        array.shape
    )


def _write_groups(
    matrix: tuple[jax.Array, jax.Array], part: jax.Array, offset: jax.Array, view: tuple[int, ...], form: MatrixFormat
) -> tuple[jax.Array, jax.Array]:
    """Quantise a part [1, E, parts, I, ...] and write it into (numbers, scales) of a GroupedMatrix."""
    values, scales = matrix
    part_values, part_scales = quantize_groups(part, form.numbers, form.group or part.shape[3])
    of_scales = (*view[:3], scales.shape[3], *view[4:])
    return _write_part(values, part_values, offset, view), _write_part(scales, part_scales, offset, of_scales)


def _pad(part: npt.NDArray[np.generic], shape: tuple[int, ...], axes: str) -> npt.NDArray[np.generic]:
    """Pad ffn width and vocabulary with zeros to the array's size."""
    missing = [(0, size - have if axis in "FV" else 0) for have, size, axis in zip(part.shape, shape, axes)]
    return np.pad(part, missing) if any(after for _, after in missing) else part
