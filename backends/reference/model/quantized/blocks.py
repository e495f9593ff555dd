"""Products with, and look-ups in, matrices of ggml blocks, which stay as they are in the file.

A product dequantises some rows at a time, each thread other ones: one parallel region per layer, where torch would have
one per operation. The rows of one matrix are views of the mapped file where the layout allows,
so that their memory is the file's page cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Barrier
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.numerics import thread_count
from pagoda.backends.reference.model.quantized.block_kernels import dequantize_blocks, has_kernel
from pagoda.common.weights.gguf.dequantize import BlockType
from pagoda.common.weights.quantization.schemes import ScaledScheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_CHUNK: Final = 1 << 17
"""Elements that a thread dequantises at a time: 512 KiB of float32, which fits the L2 cache of a core."""


def keeps(weight: QuantizedTensor) -> bool:
    """Return whether a matrix can stay in blocks."""
    in_blocks = not isinstance(weight.scheme, ScaledScheme) and has_kernel(weight.scheme.kind)
    return in_blocks and weight.order is None


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix [O, I] of blocks of one type."""

    kind: BlockType
    data: Tensor  # uint8 [O, bytes]
    row_scales: Tensor | None  # [O]

    @classmethod
    def of(cls, weight: QuantizedTensor) -> BlockMatrix:
        """Return a matrix over the same memory, or a copy if its rows lie apart. `keeps` of the weight."""
        assert not isinstance(weight.scheme, ScaledScheme)
        scales = None if weight.row_scales is None else torch.from_numpy(weight.row_scales)
        return cls(weight.scheme.kind, torch.from_numpy(np.ascontiguousarray(weight.data)), scales)

    @property
    def shape(self) -> tuple[int, int]:
        rows, size = self.data.shape
        return rows, size // self.kind.bytes * self.kind.elements

    def values(self, data: Tensor, scales: Tensor | None, out: Tensor) -> Tensor:
        """Return the values of rows `data` [n, bytes] with these scales, in the first rows of `out` float32 [m, I]."""
        values = out[: len(data)]
        dequantize_blocks(data.reshape(-1, self.kind.bytes), self.kind, values.view(-1, self.kind.elements))
        return values if scales is None else values.mul_(scales[:, None])


class BlockLinear:
    """A linear layer over blocks, in the dtype of its input."""

    def __init__(self, weight: BlockMatrix, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._rows = max(1, _CHUNK // weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), self.weight.shape[0])
        starts = iter(range(0, y.shape[1], self._rows))  # that every thread takes from
        chunks = -(-y.shape[1] // self._rows)
        threads = _threads()
        futures = [threads.pool.submit(self._fill, x, y, starts) for _ in range(min(threads.count, chunks))]
        for future in futures:
            future.result()
        return y if self.bias is None else y.add_(self.bias)

    @torch.inference_mode()
    def _fill(self, x: Tensor, y: Tensor, starts: Iterator[int]) -> None:
        """Compute the columns of y that begin at these numbers."""
        weight = self.weight
        outputs, inputs = self.weight.shape
        buffer = torch.empty(min(self._rows, outputs), inputs)
        for start in starts:
            part = slice(start, start + self._rows)
            scales = None if weight.row_scales is None else weight.row_scales[part]
            rows = weight.values(weight.data[part], scales, buffer).to(x.dtype)
            y[:, part] = F.linear(x, rows)


@dataclass(frozen=True, slots=True)
class _Threads:
    """Threads of which each computes its operations alone."""

    pool: ThreadPoolExecutor
    count: int


@cache
def _threads() -> _Threads:
    """Return the process's threads, as many as torch has for an operation."""
    count = thread_count()
    pool = ThreadPoolExecutor(count, "pagoda-blocks", initializer=torch.set_num_threads, initargs=(1,))
    started = Barrier(count + 1)
    for _ in range(count):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(count)  # part of that setting is per process, not per thread
    return _Threads(pool, count)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """An embedding table of blocks, whose rows are dequantised when they are looked up."""

    matrix: BlockMatrix
    dtype: torch.dtype  # of its rows

    def __call__(self, ids: Tensor) -> Tensor:
        """Return rows [..., D] of ids [...]."""
        matrix = self.matrix
        flat = ids.reshape(-1)
        scales = None if matrix.row_scales is None else matrix.row_scales[flat]
        values = matrix.values(matrix.data[flat], scales, torch.empty(len(flat), matrix.shape[1]))
        return values.to(self.dtype).view(*ids.shape, -1)


Table = Tensor | BlockTable
"""An embedding table [V, D]."""


def look_up(ids: Tensor, table: Table) -> Tensor:
    """Return the rows [..., D] of ids [...]."""
    return table(ids) if isinstance(table, BlockTable) else F.embedding(ids, table)
