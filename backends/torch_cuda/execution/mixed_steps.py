"""Prefill and mixed steps as CUDA graphs: their shapes, and the static buffers that they read.

A step of up to MAX_TOKENS tokens is padded to one of a few numbers of tokens. What else varies is read on the device:
every sequence may be a decode, whose pieces are in the work list, and there are tiles for MAX_PROMPTS prompts; unused
ones name no sequence. Launching a step's kernels one by one costs the host some milliseconds, which the device
hides only in longer steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import (
    CudaStepBatch,
    CudaStepShape,
    DecodeBuffers,
    RowTokens,
    make_batch,
    round_up,
)
from pagoda.backends.torch_cuda.kernels.attention.work_list import NO_SEQUENCE

MAX_TOKENS: Final = 1024
"""Tokens of the largest captured step. On an H200 one of an 8B model computes for 15 ms or more (computed)."""

MAX_PROMPTS: Final = 32
"""Prompts of a captured step that may each leave a tile that is not full."""

_SMALL: Final = (16, 32, 64, 128)
_DENSE: Final = 512
"""Up to this size the sizes are multiples of 64, above of 128."""


def mixed_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the captured numbers of tokens, ascending: all multiples of 16."""
    largest = min(round_up(max_num_batched_tokens, _SMALL[0]), MAX_TOKENS)
    return (*(size for size in _usual() if size < largest), largest)


def _usual() -> Iterator[int]:
    yield from _SMALL
    yield from range(_SMALL[-1] + 64, _DENSE, 64)
    yield from range(_DENSE, MAX_TOKENS, 128)


@dataclass(frozen=True, slots=True)
class MixedShapes:
    """The shapes of captured prefill and mixed steps."""

    sizes: tuple[int, ...]  # tokens, ascending
    tile: int  # query tokens per tile of prefill attention
    max_seqs: int

    def size_for(self, tokens: int, tiles: int, rows: int) -> int | None:
        """Return the smallest size that holds the tokens, or None if it lacks tiles or rows of logits."""
        if tokens > self.sizes[-1]:
            return None
        size = self.sizes[bisect_left(self.sizes, tokens)]
        return size if tiles <= self.tiles(size) and rows <= self.seqs(size) else None

    def seqs(self, size: int) -> int:
        """Return the sequences of a step of `size` tokens, padding included."""
        return min(self.max_seqs, size)

    def tiles(self, size: int) -> int:
        """Return the tiles of a step of `size` tokens, unused ones included."""
        return size // self.tile + min(self.seqs(size), MAX_PROMPTS)

    def shape(self, size: int, groups: int, width: int, *, adapters: int, pieces: int) -> CudaStepShape:
        """Return the packed shape of a step of `size` tokens, `width` blocks per table."""
        seqs = self.seqs(size)
        return CudaStepShape(
            size, seqs, seqs, groups, width, self.tiles(size), adapters=adapters, pieces=pieces, decodes=seqs
        )


class MixedBuffers:
    """Static inputs of captured prefill and mixed steps. Their block tables are those of decode steps."""

    def __init__(self, shapes: MixedShapes, decode: DecodeBuffers, device: torch.device) -> None:
        self.shapes = shapes
        self._decode = decode
        size = max(self.shape(size, decode.width).prefix_size for size in shapes.sizes)
        self._prefix = torch.zeros(size, dtype=torch.int32, device=device)

    def shape(self, size: int, width: int) -> CudaStepShape:
        """Return the shape of a step with `width` blocks per table."""
        decode = self._decode
        seqs = self.shapes.seqs(size)
        pieces = next((decode.pieces[padded] for padded in sorted(decode.pieces) if padded >= seqs), 0)
        return self.shapes.shape(size, decode.groups, width, adapters=decode.adapters, pieces=pieces)

    def clear(self, size: int) -> None:
        """Make every input of a step of `size` tokens padding: no tile and no piece has a sequence."""
        self._prefix.zero_()
        shape = self.shape(size, self._decode.width)
        for name in ("items", "tiles"):
            shape.sections[name].of(self._prefix)[:] = NO_SEQUENCE

    def fill(self, shape: CudaStepShape, packed: Tensor, seqs: int) -> None:
        """Copy a packed step, int32 [shape.size]; `seqs`: its sequences without padding."""
        self._prefix[: shape.prefix_size].copy_(packed[: shape.prefix_size])
        self._decode.fill_tables(shape, packed, seqs)

    def batch(self, size: int, before: RowTokens) -> CudaStepBatch:
        """Return the step of `size` tokens in the buffers."""
        shape = self.shape(size, self._decode.width)
        return make_batch(
            shape,
            self._prefix,
            self._decode.tables(shape.seqs),
            before,
            num_decodes=shape.seqs,
            block_size=self._decode.block_size,
            tile=self.shapes.tile,
        )
