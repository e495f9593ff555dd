"""How a step's query tokens are cut into the kernel's tiles. The host does it once for all layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from pagoda.backends.torch_cuda.kernels.launch import Chip, Settings, settings

Int32 = npt.NDArray[np.int32]

TUNING: Final = Path(__file__).with_name("tuning.json")
LEAST: Final = 16
"""The smallest side of a matrix product on tensor cores."""


def padded(size: int) -> int:
    """Rows or channels as the kernel holds them: a power of two."""
    return max(LEAST, 1 << (size - 1).bit_length())


def key(head_dim: int, dtype: torch.dtype, *, float8: bool = False) -> str:
    """A layer's key in the table: head dim, bytes of a query's element, and whether the cache is float8.

    The group has no part in it: only how many of a tile's last rows stay empty depends on it.
    """
    return f"h{head_dim}_b{dtype.itemsize}" + ("_f8" if float8 and dtype.itemsize == 2 else "")


def tuned(head_dim: int, dtype: torch.dtype, chip: Chip, *, float8: bool = False) -> Settings:
    """BLOCK_M (rows of a tile, whatever the cache), BLOCK_N (keys of a pass), num_warps and num_stages."""
    return settings(TUNING, chip, key(head_dim, dtype, float8=float8))


def query_tile(group: int, head_dim: int, dtype: torch.dtype, chip: Chip) -> int:
    """Tokens per tile that suit a layer best. A tile's rows are its tokens times the `group` heads of a KV head.

    One list of tiles serves layers of several shapes when it is made with the smallest of their answers.
    """
    return max(1, tuned(head_dim, dtype, chip)["BLOCK_M"] // group)


def make_tiles(query_lens: Int32, first_sequence: int, tile: int, kv_lens: Int32 | None = None) -> Int32:
    """(sequence, first query token in it) of each tile, int32 [n, 2], of the sequences from `first_sequence` on.

    query_lens, kv_lens: int32 [S], of all sequences. Tiles that see more keys come first, so that no long one starts
    when the others end; without kv_lens, sequences count as having nothing cached before.
    """
    counts = -(-query_lens[first_sequence:] // tile)
    sequences = np.repeat(np.arange(first_sequence, len(query_lens)), counts)
    firsts = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    cached = 0 if kv_lens is None else (kv_lens - query_lens)[sequences]
    order = np.argsort(-(cached + firsts), kind="stable")
    return np.stack([sequences, firsts], axis=1)[order].astype(np.int32)


def candidates(head_dim: int, dtype: torch.dtype, chip: Chip, *, float8: bool = False) -> Iterator[Settings]:
    """What is worth trying on a GPU in place of `tuned`: settings whose shared memory the chip has."""
    width, size = padded(head_dim), dtype.itemsize
    for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        stored = keys * (stages + size if float8 else stages * size)  # float8 is widened beside its buffers
        if width * (rows * size + 2 * stored) <= chip.shared_bytes:
            yield {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
