"""Block sizes of the kernels: the table in tuning.json, and candidates for tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.launch import KIB, Chip, settings

TUNING: Final = Path(__file__).with_name("tuning.json")
MIN_DOT: Final = 16
"""Rows, tokens and channels of Triton's smallest matrix product."""
WGMMA_ROWS: Final = 64
"""Rows from which sm_90 multiplies in warp groups from shared memory, which needs another buffer."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the best block sizes depend on."""

    head_dim: int
    group: int  # query heads per KV head
    query_len: int
    cache: torch.dtype

    @property
    def width(self) -> int:
        """H padded."""
        return padded(self.head_dim)

    @property
    def rows(self) -> int:
        """Query rows of a KV head, padded."""
        return padded(self.group * self.query_len)

    @property
    def key(self) -> str:
        """Key of the table, e.g. 16bit_h128_r16."""
        return f"{8 * self.cache.itemsize}bit_h{self.width}_r{min(self.rows, WGMMA_ROWS)}"


@dataclass(frozen=True, slots=True)
class DecodeBlockSizes:
    """Constants of a launch."""

    ROWS: int  # query rows per program
    TILE: int  # tokens per loop iteration
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """Return the next power of two that a matrix product supports."""
    return max(MIN_DOT, 1 << (size - 1).bit_length())


def blocks(shape: DecodeShape, chip: Chip) -> DecodeBlockSizes:
    """Return the tuned block sizes."""
    tuned = settings(TUNING, chip, shape.key)
    return DecodeBlockSizes(min(tuned["ROWS"], shape.rows), tuned["TILE"], tuned["num_warps"], tuned["num_stages"])


def shared_bytes(shape: DecodeShape, chosen: DecodeBlockSizes, chip: Chip) -> int:
    """Return the shared memory of a program, to within a few KiB: tiles in flight, queries, weights."""
    grouped = chosen.ROWS >= WGMMA_ROWS and chip.capability >= (9, 0)
    tiles = (chosen.num_stages - 1 + grouped) * 2 * chosen.TILE * shape.width * shape.cache.itemsize
    return tiles + chosen.ROWS * (shape.width + chosen.TILE) * max(2, shape.cache.itemsize)


def candidates(shape: DecodeShape, chip: Chip) -> Iterator[DecodeBlockSizes]:
    """Yield what a benchmark should try: enough bytes in flight, two programs per multiprocessor."""
    all_rows = sorted({min(shape.rows, most) for most in (MIN_DOT, 32, WGMMA_ROWS)})
    for choice in product(all_rows, (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4, 5)):
        chosen = DecodeBlockSizes(*choice)
        size = 2 * chosen.TILE * shape.width * shape.cache.itemsize
        enough = 8 * KIB <= size <= 64 * KIB and size // chosen.num_warps >= 4 * KIB
        fits = shared_bytes(shape, chosen, chip) <= chip.shared_bytes // 2
        if enough and fits and (chosen.ROWS < WGMMA_ROWS or chosen.num_warps >= 4):
            yield chosen
