"""Block sizes of the kernels: the table in tuning.json, and what is worth trying in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.launch import KIB, Chip, settings

TUNING: Final = Path(__file__).with_name("tuning.json")
LEAST: Final = 16
"""Rows, tokens and channels of the smallest matrix product that Triton has."""
WGMMA_ROWS: Final = 64
"""From so many rows on sm_90 multiplies in warp groups, straight from shared memory, which then needs a buffer more."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the best blocks depend on: head dim H, query heads of a KV head, tokens of a sequence, type of the cache."""

    head_dim: int
    group: int
    query_len: int
    cache: torch.dtype

    @property
    def width(self) -> int:
        """H as the kernel has it."""
        return padded(self.head_dim)

    @property
    def rows(self) -> int:
        """Query rows of a KV head as the kernel has them."""
        return padded(self.group * self.query_len)

    @property
    def key(self) -> str:
        """Of the table: 16bit_h128_r16 and the like."""
        return f"{8 * self.cache.itemsize}bit_h{self.width}_r{min(self.rows, WGMMA_ROWS)}"


@dataclass(frozen=True, slots=True)
class DecodeBlockSizes:
    """Constants of a launch. ROWS: query rows of a program; TILE: tokens of one step of its loop."""

    ROWS: int
    TILE: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The next power of two that a matrix product takes."""
    return max(LEAST, 1 << (size - 1).bit_length())


def blocks(shape: DecodeShape, chip: Chip) -> DecodeBlockSizes:
    """Of the table."""
    found = settings(TUNING, chip, shape.key)
    return DecodeBlockSizes(min(found["ROWS"], shape.rows), found["TILE"], found["num_warps"], found["num_stages"])


def shared_bytes(shape: DecodeShape, chosen: DecodeBlockSizes, chip: Chip) -> int:
    """Shared memory of a program, to within a few KiB: the tiles in flight, the queries, the weights."""
    grouped = chosen.ROWS >= WGMMA_ROWS and chip.capability >= (9, 0)
    tiles = (chosen.num_stages - 1 + grouped) * 2 * chosen.TILE * shape.width * shape.cache.itemsize
    return tiles + chosen.ROWS * (shape.width + chosen.TILE) * max(2, shape.cache.itemsize)


def candidates(shape: DecodeShape, chip: Chip) -> Iterator[DecodeBlockSizes]:
    """What a benchmark should try: enough bytes in flight for the memory, two programs to a multiprocessor."""
    all_rows = sorted({min(shape.rows, most) for most in (LEAST, 32, WGMMA_ROWS)})
    for choice in product(all_rows, (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4, 5)):
        chosen = DecodeBlockSizes(*choice)
        size = 2 * chosen.TILE * shape.width * shape.cache.itemsize
        enough = 8 * KIB <= size <= 64 * KIB and size // chosen.num_warps >= 4 * KIB
        fits = shared_bytes(shape, chosen, chip) <= chip.shared_bytes // 2
        if enough and fits and (chosen.ROWS < WGMMA_ROWS or chosen.num_warps >= 4):
            yield chosen
