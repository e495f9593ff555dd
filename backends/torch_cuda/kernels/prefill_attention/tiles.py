"""Tiles of query tokens, cut by the host once per step for all layers, and the kernel's tuned block sizes."""

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
MIN_DOT: Final = 16
"""The smallest side of a tensor-core matrix product."""


def padded(size: int) -> int:
    """Return rows or channels as the kernel needs them: a power of two."""
    return max(MIN_DOT, 1 << (size - 1).bit_length())


def key(head_dim: int, dtype: torch.dtype, *, float8: bool = False) -> str:
    """Return a layer's key in the table: head dim, bytes per query element, and whether the cache is float8.

    The group does not matter: it only changes how many of a tile's last rows are empty.
    """
    return f"h{head_dim}_b{dtype.itemsize}" + ("_f8" if float8 and dtype.itemsize == 2 else "")


def tuned(head_dim: int, dtype: torch.dtype, chip: Chip, *, float8: bool = False) -> Settings:
    """Return BLOCK_M (rows of a tile, for any cache), BLOCK_N (keys of a pass), num_warps and num_stages."""
    return settings(TUNING, chip, key(head_dim, dtype, float8=float8))


def query_tile(group: int, head_dim: int, dtype: torch.dtype, chip: Chip) -> int:
    """Return the best tokens per tile for a layer. A tile's rows are its tokens times the `group` heads of a KV head.

    One list of tiles serves layers of several shapes if made with the minimum over them.
    """
    return max(1, tuned(head_dim, dtype, chip)["BLOCK_M"] // group)


def make_tiles(query_lens: Int32, first_sequence: int, tile: int, kv_lens: Int32 | None = None) -> Int32:
    """Return (sequence, first query token in it) per tile, int32 [n, 2], of the sequences from `first_sequence` on.

    query_lens, kv_lens: int32 [S], of all sequences. Tiles that see more keys come first, so that no long one starts
    late; without kv_lens, nothing is assumed to be cached.
    """
    counts = -(-query_lens[first_sequence:] // tile)
    sequences = np.repeat(np.arange(first_sequence, len(query_lens)), counts)
    firsts = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    cached = 0 if kv_lens is None else (kv_lens - query_lens)[sequences]
    order = np.argsort(-(cached + firsts), kind="stable")
    return np.stack([sequences, firsts], axis=1)[order].astype(np.int32)


def candidates(head_dim: int, dtype: torch.dtype, chip: Chip, *, float8: bool = False) -> Iterator[Settings]:
    """Yield settings worth trying in place of `tuned` that fit the chip's shared memory."""
    width, size = padded(head_dim), dtype.itemsize
    for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        stored = keys * (stages + size if float8 else stages * size)  # float8 is converted beside its buffers
        if width * (rows * size + 2 * stored) <= chip.shared_bytes:
            yield {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
