"""Products with quantised weights by kernels compiled for this processor.

Activations are rounded to 8 bits, with a scale per group of inputs: that of the weights, else of up to 128. One per
row, as W8A8 checkpoints have it, is hardly faster and several times less exact. A precise layer multiplies what the
rounding leaves as further rows: 16 bits in all.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.quantized.groups import ScaledMatrix

if importlib.util.find_spec("llvmlite"):
    from pagoda.backends.cpu_kernels.emission import jit, tiles
    from pagoda.backends.cpu_kernels.products.quantized_form import (
        FACTOR_BYTES,
        MATRIX_ROWS,
        QUAD,
        SQUARE_ROWS,
        ProductForm,
        Real,
    )
    from pagoda.backends.cpu_kernels.products.quantized_products import Argument, product

_REAL: Final[dict[torch.dtype, Real]] = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}
_CHUNK: Final = 32
_GROUPS: Final = (128, 64, 32)
"""Inputs that share a scale of the activations where weights have one per output: the first that divides a row."""

_SERIAL_WORK: Final = 1 << 18
"""Numbers that one thread multiplies by itself: waking others takes as long."""

_PANEL_BYTES: Final = 1 << 18
"""Of rounded activations that are multiplied with all weights before the next: they stay in the second cache."""

_TASKS_PER_THREAD: Final = 4

_TASK_BYTES: Final = 1 << 18
"""Of weights of a task that meet the rows of a panel in several parts: they stay in the second cache, too."""


def lanes() -> Literal[0, 8, 16]:
    """Return the outputs that one instruction of this processor multiplies; 0: there is no kernel."""
    if importlib.util.find_spec("llvmlite") is None:
        return 0
    if jit.has_feature("avx512vnni") and jit.has_feature("avx512bw"):
        return 16
    return 8 if jit.has_feature("avxvnni") and jit.has_feature("f16c") else 0


class CompiledLinear:
    """A layer of one matrix."""

    def __init__(
        self,
        matrix: ScaledMatrix,
        bias: Tensor | None,
        x: torch.dtype,
        out: torch.dtype,
        width: Literal[8, 16],
        precise: bool = False,
    ) -> None:
        """`x`, `out`: types of input and output; `width`: from `lanes`.

        `precise`: has no effect where the checkpoint rounds activations, too.
        """
        self.precise = precise and not matrix.form.rounds_activations
        form = matrix.form
        self.outputs, self.inputs = matrix.shape
        chunk: Literal[16, 32] = 32 if not form.grouped or form.group % _CHUNK == 0 else 16
        self.padding = -self.inputs % chunk
        padded = self.inputs + self.padding
        group = form.group if form.grouped else next(size for size in _GROUPS if padded % size == 0)
        tiled = width == MATRIX_ROWS and chunk == _CHUNK and tiles.available("amx-int8")
        self.form = ProductForm(
            bits=form.bits,
            zero=form.zero,
            grouped=form.grouped,
            offsets=form.offsets,
            biased=bias is not None,
            x=_REAL[x],
            out=_REAL[out],
            chunk=chunk,
            chunks=group // chunk,
            e2m1=form.e2m1,
            precise=self.precise,
            lanes=width,
            matrix_groups=padded // group if tiled else 0,
        )
        self.kernel = product(self.form)
        self.dtype = x
        self.out = out
        self.order = None if matrix.order is None else torch.from_numpy(matrix.order.astype(np.int64))
        self.groups = padded // group
        self.row_bytes = padded + padded // group * FACTOR_BYTES
        self.padded = padded
        self.tiles = -(-self.outputs // width)
        signed = self.form.signed and form.bits == 8
        self._arrays = _Packed.of(matrix, width, padded, chunk, None if bias is None else bias.float(), signed)
        self._words = self._constants(group // chunk)

    @property
    def nbytes(self) -> int:
        return self._arrays.nbytes

    def _constants(self, chunks: int) -> array[int]:
        words = array("q", bytes(8 * len(Argument)))
        arrays = self._arrays
        for field, tensor in (
            (Argument.WEIGHTS, arrays.numbers),
            (Argument.SCALES, arrays.scales),
            (Argument.OFFSETS, arrays.offsets),
            (Argument.FACTORS, arrays.factors),
            (Argument.BIAS, arrays.bias),
        ):
            words[field] = 0 if tensor is None else tensor.data_ptr()
        words[Argument.GROUPS] = self.groups
        words[Argument.CHUNKS] = chunks
        words[Argument.OUTPUTS] = self.outputs
        words[Argument.TILES] = self.tiles
        panel = max(1, _PANEL_BYTES // self.padded // SQUARE_ROWS)
        words[Argument.PANEL] = panel * SQUARE_ROWS
        return words

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """X [T, I] -> [T, O]. `out`: where to write it, rows without gaps."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self.padding:
            x = F.pad(x, (0, self.padding))
        if x.dtype != self.dtype or x.stride(1) != 1:
            x = x.to(self.dtype).contiguous()
        rows = len(x) * 2 if self.precise else len(x)
        if out is None:
            out = jit.allocate(len(x), self.outputs, dtype=self.out)
        scratch = jit.allocate(rows * self.row_bytes, dtype=torch.uint8)
        threads = torch.get_num_threads() if rows * self.outputs * self.padded > _SERIAL_WORK else 1
        words = self._words[:]
        step = -(-self.tiles // (_TASKS_PER_THREAD * threads)) if threads > 1 else self.tiles
        if self.form.matrix_rows:
            step = min(step, max(1, _TASK_BYTES // (self.padded * MATRIX_ROWS)))
        if self.form.matrix_groups:
            step += step % 2  # tiles are multiplied in pairs
        tasks = -(-self.tiles // step)
        words[Argument.X] = x.data_ptr()
        words[Argument.X_STRIDE] = x.stride(0)
        words[Argument.OUT] = out.data_ptr()
        words[Argument.OUT_STRIDE] = out.stride(0)
        words[Argument.ROWS] = rows
        words[Argument.NUMBERS] = numbers = scratch.data_ptr()
        words[Argument.ROW_FACTORS] = numbers + rows * self.padded
        words[Argument.TILE_STEP] = step
        words[Argument.TILE_TASKS] = tasks
        words[Argument.TASKS] = tasks * -(-rows // words[Argument.PANEL])
        self.kernel.run(words, threads)
        return out


class SideBySide:
    """Layers of one input, whose outputs are parts of one result."""

    def __init__(self, layers: Sequence[CompiledLinear]) -> None:
        self.layers = tuple(layers)
        self.outputs = sum(layer.outputs for layer in layers)

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, I] -> [T, O]."""
        out = jit.allocate(len(x), self.outputs, dtype=self.layers[0].out)
        for layer, part in zip(self.layers, out.split([layer.outputs for layer in self.layers], 1)):
            layer(x, part)
        return out


@dataclass(frozen=True, slots=True)
class _Packed:
    """A matrix as the kernel reads it."""

    numbers: Tensor  # [tiles, chunks, vectors, width, QUAD]
    scales: Tensor | None
    offsets: Tensor | None
    factors: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        parts = (self.numbers, self.scales, self.offsets, self.factors, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    @classmethod
    def of(
        cls, matrix: ScaledMatrix, width: int, padded: int, chunk: int, bias: Tensor | None, signed: bool
    ) -> _Packed:
        """Return tiles of `width` outputs with `padded` inputs. `signed`: 8-bit numbers less their zero of 128."""
        outputs = matrix.shape[0]
        missing = -matrix.shape[0] % width
        numbers = torch.from_numpy(matrix.numbers)
        if matrix.form.bits == 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], -1).view(outputs, -1)
        numbers = F.pad(numbers, (0, padded - numbers.shape[1], 0, missing))
        numbers = numbers ^ 0x80 if signed else numbers
        packed = numbers.view(-1, width, padded // chunk, chunk // QUAD, QUAD).permute(0, 2, 3, 1, 4)
        if matrix.form.bits < 8:
            planes = [_side_by_side(packed & 15, 4)]
            if matrix.form.bits > 4:
                planes.append(_side_by_side(packed >> 4, matrix.form.bits - 4))
            packed = torch.cat(planes, 2)
        return cls(
            packed.contiguous(),
            _tiled(matrix.scales, width),
            _tiled(matrix.offsets, width),
            F.pad(torch.from_numpy(matrix.factors), (0, missing)).contiguous(),
            bias,
        )


def _side_by_side(quads: Tensor, bits: int) -> Tensor:
    """Return vectors [tiles, chunks, quads, ...] whose bytes have numbers of `bits` bits of 8 / `bits` quads each."""
    per_byte = 8 // bits
    return sum(
        (quads[:, :, part::per_byte] << part * bits for part in range(per_byte)), torch.zeros((), dtype=torch.uint8)
    )


def _tiled(values: np.ndarray, width: int) -> Tensor | None:
    """Return [O, groups] as [tiles, groups, width]; None without any."""
    if not values.size:
        return None
    padded = F.pad(torch.from_numpy(values), (0, 0, 0, -len(values) % width))
    return padded.view(-1, width, values.shape[1]).transpose(1, 2).contiguous()
