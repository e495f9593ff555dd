"""Products of bfloat16 matrices with float32 sums, by the processor's instructions for pairs of bfloat16 numbers.

Weights [out, in] are packed as panels of COLUMNS outputs: of each pair of inputs, the pairs of all outputs of the
panel. A task is one panel times all rows; the last panel is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.cpu_kernels.emission.blocks import PAIRS, add_block
from pagoda.backends.cpu_kernels.emission.emit import LANES, Emitter
from pagoda.backends.cpu_kernels.emission.jit import Kernel, allocate, has_feature
from pagoda.backends.cpu_kernels.products import tile_products
from pagoda.backends.cpu_kernels.products.panels import COLUMNS, PanelProduct, pack

_BLOCKS: Final = (12, 8, 4, 2, 1)
"""Rows that are multiplied at a time: as many as registers hold, then what is left."""


def supported(columns: int) -> bool:
    """Whether the processor has the instructions; `columns`: inputs of the matrix, which are taken in pairs."""
    return has_feature("avx512bf16") and columns % 2 == 0


def instructions(columns: int) -> str:
    """Return what a supported product computes with."""
    return "tiles" if tile_products.supported(columns) else "pairs"


@cache
def product_kernel(width: int, *, bfloat16: bool, bias: bool) -> Kernel:
    """Return x [T, in] times the transposed weight, rounded to bfloat16 or in float32.

    Arguments: rows, x and its row stride, panels, results [T, out padded], their row stride, bias float32 [out padded].
    """
    return Kernel(_PairedProduct(width, bfloat16, bias).emit().module)


class PackedProduct:
    """A linear layer whose weight is packed; the plain weight is dropped. A row's sums do not depend on other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, result: torch.dtype) -> None:
        """`weight` bfloat16 [out, in]; `result`: bfloat16 or float32."""
        self.outputs, self.width = weight.shape
        self._tiled = tile_products.supported(self.width)
        self.result = result
        self.panels = pack(weight, LANES if self._tiled else COLUMNS)
        self.padded = -(-self.outputs // COLUMNS) * COLUMNS
        self.bias = None if bias is None else F.pad(bias.float(), (0, self.padded - self.outputs))
        compiled = tile_products.tile_product_kernel if self._tiled else product_kernel
        self._kernel = compiled(self.width, bfloat16=result == torch.bfloat16, bias=bias is not None)
        self._packed = self.panels.data_ptr(), 0 if self.bias is None else self.bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """X bfloat16 [T, in] -> [T, out]."""
        out = allocate(x.shape[0], self.padded, dtype=self.result)
        self._run(self._kernel, self.padded // COLUMNS, x, out)
        return out if self.padded == self.outputs else out[:, : self.outputs].contiguous()

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """Return act(gate) * up in bfloat16 [T, F] of results [gate, up] of width 2F; None without a kernel for it."""
        half = self.outputs // 2
        if not self._tiled or self.result != torch.bfloat16 or self.outputs % COLUMNS:
            return None
        kernel = tile_products.gated_product_kernel(self.width, activation, bias=self.bias is not None)

        def gate(x: Tensor) -> Tensor:
            out = allocate(x.shape[0], half, dtype=torch.bfloat16)
            self._run(kernel, half // LANES, x, out)
            return out

        return gate

    def _run(self, kernel: Kernel, units: int, x: Tensor, out: Tensor) -> None:
        """Run a kernel over this many panels, or units of tile products."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        panels, bias = self._packed
        arguments = x.shape[0], x.data_ptr(), x.stride(0), panels, out.data_ptr(), out.stride(0), bias, units
        tasks = tile_products.tasks(self.width, x.shape[0], units) if self._tiled else units
        kernel(arguments, tasks, torch.get_num_threads())


class _PairedProduct(PanelProduct):
    def emit(self) -> Emitter:
        e = self.e
        with e.tasks() as panel:
            begin: Any = 0
            for rows in _BLOCKS:
                end = e.add(begin, e.mul(e.div(e.sub(self.count, begin), rows), rows))
                with e.loop(begin, end, rows) as row:
                    self._block(panel, row, rows)
                begin = end
        return e

    def _block(self, panel: Any, first: Any, rows: int) -> None:
        e = self.e
        parts = range(0, COLUMNS, LANES)
        sums = [e.zeros(len(parts)) for _ in range(rows)]
        starts = [e.mul(e.add(first, row), self.stride) for row in range(rows)]
        base = e.mul(panel, self.width * COLUMNS)

        def weights(pair: Any) -> list[Any]:
            start = e.add(base, e.mul(pair, 2 * COLUMNS))
            return [e.load_pairs(self.panels, e.add(start, 2 * part)) for part in parts]

        add_block(e, PAIRS, sums, self.width // 2, self.x, starts, weights)
        for row, of_row in enumerate(sums):
            for part, variable in zip(parts, of_row):
                column = e.add(e.mul(panel, COLUMNS), part)
                value = self.biased(e.builder.load(variable), column)
                e.store(value, self.out, e.add(e.mul(e.add(first, row), self.out_stride), column))
