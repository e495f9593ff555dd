"""The tensors that every decode step reads and writes: captured graphs know them by address.

One vector holds everything but block tables and logits, cut anew for each size; only one step uses it at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import TABLE_ALIGN, CudaStepBatch, CudaStepShape, GroupBatch, up
from pagoda.common.engine.step import PREVIOUS


class Buffers:
    """Room for decode steps of at most S sequences in G groups with W blocks each.

    `logits` float32 [S, V]; `tokens` int32 [S], what was chosen.
    """

    def __init__(self, seqs: int, groups: int, width: int, vocab: int, device: torch.device) -> None:
        self.groups, self.width = groups, up(width, TABLE_ALIGN)
        self._numbers = torch.zeros(decode_shape(seqs, groups, self.width).numbers, dtype=torch.int32, device=device)
        self._tables = torch.zeros((groups, seqs, self.width), dtype=torch.int32, device=device)
        self.logits = torch.zeros((seqs, vocab), dtype=torch.float32, device=device)
        self.tokens = torch.zeros(seqs, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Padding alone, whatever the size: what a step leaves behind lies otherwise in steps of other sizes."""
        self._numbers.zero_()
        self._tables.zero_()

    def fill(self, shape: CudaStepShape, sent: Tensor, seqs: int) -> None:
        """Take a decode step as it came, int32 [shape.size]; `seqs`: how many of its sequences are no padding."""
        self._numbers[: shape.numbers].copy_(sent[: shape.numbers])
        self._tables[:, :seqs, : shape.width].copy_(tables(shape, sent)[:, :seqs])

    def fill_rules(self, shape: CudaStepShape, sent: Tensor) -> None:
        """Take the rules alone, of a step whose other inputs are read where they came."""
        end = shape.parts["rules"].end
        self._numbers[:end].copy_(sent[:end])

    def rules(self, rows: int) -> Tensor:
        """int32 [7, R]: what the sampler packed."""
        return decode_shape(rows, self.groups, self.width).parts["rules"].of(self._numbers)

    def batch(self, size: int, last: Tensor, splits: int) -> CudaStepBatch:
        """A decode step of `size` sequences, whatever is in the buffers; finding its tokens runs on the device."""
        shape = decode_shape(size, self.groups, self.width)
        return make_batch(shape, self._numbers, self._tables[:, :size], last, num_decodes=size, splits=splits)


def decode_shape(size: int, groups: int, width: int) -> CudaStepShape:
    """A step of `size` sequences with a token each."""
    return CudaStepShape(tokens=size, seqs=size, rows=size, groups=groups, width=width)


def tables(shape: CudaStepShape, sent: Tensor) -> Tensor:
    """int32 [G, S, W]."""
    return shape.parts["tables"].of(sent).reshape(shape.groups, shape.seqs, shape.width)


def make_batch(
    shape: CudaStepShape,
    numbers: Tensor,
    tables: Tensor,
    last: Tensor,
    *,
    num_decodes: int,
    splits: int,
    tile: int | None = None,
) -> CudaStepBatch:
    """What the decoder reads, from int32 [shape.numbers or more] and block tables [G, S, W].

    `last` int32 [rows]: the token that each row sampled last, for those that the host does not know.
    """
    said, owners = shape.vector(numbers, "token_ids"), shape.vector(numbers, "owners")
    return CudaStepBatch(
        token_ids=torch.where(said == PREVIOUS, last.index_select(0, owners), said),
        positions=shape.vector(numbers, "positions"),
        query_start=shape.vector(numbers, "query_start"),
        kv_lens=shape.vector(numbers, "kv_lens"),
        groups=tuple(map(GroupBatch, tables, shape.parts["slots"].of(numbers))),
        num_decodes=num_decodes,
        tiles=shape.parts["tiles"].of(numbers) if shape.tiles else None,
        splits=splits,
        tile=tile,
    )
