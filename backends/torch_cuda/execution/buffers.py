"""Static input and output buffers of decode steps, which captured graphs reference by address.

One vector holds all inputs but the block tables, with a layout per batch size; only one step uses it at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import (
    TABLE_ALIGN,
    CudaStepBatch,
    CudaStepShape,
    GroupBatch,
    round_up,
)
from pagoda.common.engine.step import PREVIOUS


class DecodeBuffers:
    """DecodeBuffers for decode steps of at most S sequences in G groups with W blocks each."""

    def __init__(self, seqs: int, groups: int, width: int, vocab: int, device: torch.device) -> None:
        self.groups, self.width = groups, round_up(width, TABLE_ALIGN)
        size = decode_shape(seqs, groups, self.width).prefix_size
        self._prefix = torch.zeros(size, dtype=torch.int32, device=device)
        self._tables = torch.zeros((groups, seqs, self.width), dtype=torch.int32, device=device)
        self.logits = torch.zeros((seqs, vocab), dtype=torch.float32, device=device)
        self.tokens = torch.zeros(seqs, dtype=torch.int32, device=device)  # sampled

    def clear(self) -> None:
        """Make every input padding, for any batch size."""
        self._prefix.zero_()
        self._tables.zero_()

    def fill(self, shape: CudaStepShape, packed: Tensor, seqs: int) -> None:
        """Copy a packed decode step, int32 [shape.size]; `seqs`: its sequences without padding."""
        self._prefix[: shape.prefix_size].copy_(packed[: shape.prefix_size])
        self._tables[:, :seqs, : shape.width].copy_(tables(shape, packed)[:, :seqs])

    def fill_sampling(self, shape: CudaStepShape, packed: Tensor) -> None:
        """Copy only the sampling parameters of a packed step."""
        end = shape.sections["sampling"].end
        self._prefix[:end].copy_(packed[:end])

    def sampling(self, rows: int) -> Tensor:
        """Return int32 [7, R]: packed sampling parameters."""
        return decode_shape(rows, self.groups, self.width).sections["sampling"].of(self._prefix)

    def batch(self, size: int, last: Tensor, splits: int) -> CudaStepBatch:
        """Return the decode step of `size` sequences in the buffers; see `make_batch`."""
        shape = decode_shape(size, self.groups, self.width)
        return make_batch(shape, self._prefix, self._tables[:, :size], last, num_decodes=size, splits=splits)


def decode_shape(size: int, groups: int, width: int) -> CudaStepShape:
    """Return the shape of a step of `size` sequences with one token each."""
    return CudaStepShape(tokens=size, seqs=size, rows=size, groups=groups, width=width)


def tables(shape: CudaStepShape, packed: Tensor) -> Tensor:
    """Return the block tables, int32 [G, S, W]."""
    return shape.sections["tables"].of(packed).reshape(shape.groups, shape.seqs, shape.width)


def make_batch(
    shape: CudaStepShape,
    packed: Tensor,
    tables: Tensor,
    last: Tensor,
    *,
    num_decodes: int,
    splits: int,
    tile: int | None = None,
) -> CudaStepBatch:
    """Return the decoder's input from int32 [shape.prefix_size or more] and block tables [G, S, W].

    `last` int32 [rows]: each row's last sampled token, which replaces PREVIOUS on the device.
    """
    token_ids, token_rows = shape.vector(packed, "token_ids"), shape.vector(packed, "token_rows")
    return CudaStepBatch(
        token_ids=torch.where(token_ids == PREVIOUS, last.index_select(0, token_rows), token_ids),
        positions=shape.vector(packed, "positions"),
        query_start=shape.vector(packed, "query_start"),
        kv_lens=shape.vector(packed, "kv_lens"),
        groups=tuple(map(GroupBatch, tables, shape.sections["slots"].of(packed))),
        num_decodes=num_decodes,
        tiles=shape.sections["tiles"].of(packed) if shape.tiles else None,
        splits=splits,
        tile=tile,
    )
