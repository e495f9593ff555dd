"""StepPlan -> one int32 array -> the decoder's input, and the static buffers of decode steps. The array's layout:

    sampling | token ids | token rows | positions | slots | query starts | KV lengths | logits indices | tiles | tables

The sampling parameters come first, so that their offset depends on the number of logits rows alone. Everything but the
block tables is a few kilobytes; a graph reads it from one static buffer, so one copy fills it. Sections begin at
multiples of 128 bytes and table rows are multiples of 64 bytes long: Triton recompiles for less aligned pointers and
strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.reference.execution import Embedded
from pagoda.common.engine.step import PREVIOUS, Int32, StepPlan

ALIGN: Final = 32
"""Elements: alignment of every section, and of every row of those with several."""

TABLE_ALIGN: Final = 16
"""Blocks: alignment of a block table's width."""

SAMPLING_FIELDS: Final = 7
"""Packed sampling parameters per row of logits."""

Flat = TypeVar("Flat", Int32, Tensor)
"""The packed array, on the host or on the device."""


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One KV group's inputs. A slot is block * page size + offset; padding tokens use slot 0, in the null block."""

    tables: Tensor  # int32 [S, W]: block ids
    slots: Tensor  # int32 [T]: where each token's K and V are written


@dataclass(frozen=True, slots=True)
class CudaStepBatch:
    """One step of S sequences with T tokens, as device tensors.

    The first `num_decodes` sequences have `query_len` tokens each; the others are cut into `tiles` of `tile` tokens
    (see prefill_attention.make_tiles). Token j of a sequence is at position kv_len - its query tokens + j. Padding
    sequences have kv_len 0.
    """

    token_ids: Tensor  # int32 or int64 [T], without PREVIOUS
    positions: Tensor  # int32 [T]
    query_start: Tensor  # int32 [S+1]
    kv_lens: Tensor  # int32 [S], the step's own tokens included
    groups: tuple[GroupBatch, ...]  # one per group of the KV layout
    num_decodes: int
    tiles: Tensor | None  # int32 [n, 2]; None: decodes only
    splits: int  # split-KV count of decode attention
    query_len: int = 1
    tile: int | None = None  # None: each layer's own default, the same for all
    embedded: Embedded | None = None  # prompt embeddings; None: all tokens are looked up


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class InputSection:
    """A matrix [rows, columns] at offset `begin`, with `stride` elements per row."""

    begin: int
    rows: int
    columns: int
    stride: int

    @property
    def end(self) -> int:
        """End offset, with the padding of the last row."""
        return self.begin + self.rows * self.stride

    def of(self, flat: Flat) -> Flat:
        """Return the view [rows, columns]."""
        return flat[self.begin : self.end].reshape(self.rows, self.stride)[:, : self.columns]


@dataclass(frozen=True, slots=True)
class CudaStepShape:
    """The padded sizes of a step."""

    tokens: int
    seqs: int
    rows: int  # of logits; row s belongs to sequence s; may be more than `seqs`
    groups: int
    width: int  # blocks per table
    tiles: int = 0

    @property
    def sections(self) -> dict[str, InputSection]:
        """Sections by name, in memory order; the tables of all groups are stacked."""
        return _sections(self)

    @property
    def prefix_size(self) -> int:
        """Elements before the tables; does not depend on `width`."""
        return self.sections["tables"].begin

    @property
    def size(self) -> int:
        """Elements in all."""
        return self.sections["tables"].end

    def vector(self, flat: Flat, name: str) -> Flat:
        """Return a section with one row as [columns]."""
        return self.sections[name].of(flat)[0]


@lru_cache(maxsize=1024)
def _sections(shape: CudaStepShape) -> dict[str, InputSection]:
    sections: dict[str, InputSection] = {}
    begin = 0
    for name, rows, columns, align in (
        ("sampling", SAMPLING_FIELDS, shape.rows, ALIGN),
        ("token_ids", 1, shape.tokens, ALIGN),
        ("token_rows", 1, shape.tokens, ALIGN),
        ("positions", 1, shape.tokens, ALIGN),
        ("slots", shape.groups, shape.tokens, ALIGN),
        ("query_start", 1, shape.seqs + 1, ALIGN),
        ("kv_lens", 1, shape.seqs, ALIGN),
        ("logits_indices", 1, shape.rows, ALIGN),
        ("tiles", shape.tiles, 2, 2),
        ("tables", shape.groups * shape.seqs, shape.width, TABLE_ALIGN),
    ):
        sections[name] = section = InputSection(begin, rows, columns, round_up(columns, align))
        begin = round_up(section.end, ALIGN)
    return sections


def table_width(plan: StepPlan) -> int:
    """Return the width of the plan's widest block table, in blocks, padded."""
    return round_up(max(table.shape[1] for table in plan.block_tables), TABLE_ALIGN)


def pack(flat: Int32, shape: CudaStepShape, plan: StepPlan, block_size: int) -> None:
    """Write the plan into int32 [shape.size], all but sampling, logits_indices and tiles, which become zero.

    token_rows: the batch row of each token's sequence. Padding tokens get slot 0, padding sequences kv_len 0.
    """
    flat[: shape.prefix_size] = 0
    seqs, tokens = plan.num_seqs, plan.num_tokens
    sequence, positions = _token_positions(plan)
    shape.vector(flat, "token_ids")[:tokens] = plan.token_ids
    shape.vector(flat, "token_rows")[:tokens] = plan.rows[sequence]
    shape.vector(flat, "positions")[:tokens] = positions
    starts = shape.vector(flat, "query_start")
    starts[: seqs + 1] = plan.query_start
    starts[seqs + 1 :] = tokens
    shape.vector(flat, "kv_lens")[:seqs] = plan.context + np.diff(plan.query_start)
    slots = shape.sections["slots"].of(flat)
    tables = shape.sections["tables"].of(flat).reshape(shape.groups, shape.seqs, shape.width)
    pages, offsets = positions // block_size, positions % block_size
    for group, table in enumerate(plan.block_tables):
        slots[group, :tokens] = table[sequence, pages] * block_size + offsets
        tables[group, :seqs, : table.shape[1]] = table
        tables[group, :seqs, table.shape[1] :] = 0


def _token_positions(plan: StepPlan) -> tuple[npt.NDArray[np.intp], Int32]:
    """Return each token's sequence index and its position in it."""
    every = np.arange(plan.num_seqs)
    if plan.num_tokens == plan.num_seqs:
        return every, plan.context
    sequence = np.repeat(every, np.diff(plan.query_start))
    positions = np.arange(plan.num_tokens, dtype=np.int32)
    positions += (plan.context - plan.query_start[:-1])[sequence]
    return sequence, positions


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


class DecodeBuffers:
    """Static input buffers for decode steps of at most S sequences in G groups with W blocks each."""

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
