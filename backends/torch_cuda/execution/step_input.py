"""StepPlan -> one int32 array, and where in it each of a step's tensors lies.

    rules | token ids | owners | positions | slots | query starts | KV lengths | newest | tiles | block tables

Rules come first, so that they lie alike in every step with as many rows of logits.

Everything but the tables is a few kilobytes; a graph reads that part from one static buffer, so one copy fills it.
Every part begins at a multiple of 128 bytes and rows of tables are multiples of 64 bytes long: Triton compiles a
kernel anew for pointers and strides that are less aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagoda.backends.reference.execution import Embedded
from pagoda.common.engine.step import Int32, StepPlan

ALIGN: Final = 32
"""Numbers: every part begins at a multiple, and so does every row of those that have several."""

TABLE_ALIGN: Final = 16
"""Blocks: the width of a block table is a multiple."""

RULES: Final = 7
"""Numbers per row of logits that the sampler packs."""

Flat = TypeVar("Flat", Int32, Tensor)
"""All parts in a row, on the host or on the device."""


def up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of `rows` x `columns` from `begin` on, one row every `stride` numbers."""

    begin: int
    rows: int
    columns: int
    stride: int

    @property
    def end(self) -> int:
        """Where it ends, the padding of its last row included."""
        return self.begin + self.rows * self.stride

    def of(self, flat: Flat) -> Flat:
        """View [rows, columns]."""
        return flat[self.begin : self.end].reshape(self.rows, self.stride)[:, : self.columns]


@dataclass(frozen=True, slots=True)
class CudaStepShape:
    """The padded sizes of a step: T tokens, S sequences, n `tiles`, G groups, tables of W blocks.

    `rows`: of logits, of which row s is sequence s's; more than S where choosing is padded further than the rest.
    """

    tokens: int
    seqs: int
    rows: int
    groups: int
    width: int
    tiles: int = 0

    @property
    def parts(self) -> dict[str, Part]:
        """By name, in the order in which they lie; the tables of all groups stand one below the other."""
        return _parts(self)

    @property
    def numbers(self) -> int:
        """Length of what comes before the tables; the same for every width."""
        return self.parts["tables"].begin

    @property
    def size(self) -> int:
        """Length of the whole."""
        return self.parts["tables"].end

    def vector(self, flat: Flat, name: str) -> Flat:
        """The part of that name, which has one row: [columns]."""
        return self.parts[name].of(flat)[0]


@lru_cache(maxsize=1024)
def _parts(shape: CudaStepShape) -> dict[str, Part]:
    found: dict[str, Part] = {}
    at = 0
    for name, rows, columns, align in (
        ("rules", RULES, shape.rows, ALIGN),
        ("token_ids", 1, shape.tokens, ALIGN),
        ("owners", 1, shape.tokens, ALIGN),
        ("positions", 1, shape.tokens, ALIGN),
        ("slots", shape.groups, shape.tokens, ALIGN),
        ("query_start", 1, shape.seqs + 1, ALIGN),
        ("kv_lens", 1, shape.seqs, ALIGN),
        ("newest", 1, shape.rows, ALIGN),
        ("tiles", shape.tiles, 2, 2),
        ("tables", shape.groups * shape.seqs, shape.width, TABLE_ALIGN),
    ):
        found[name] = part = Part(at, rows, columns, up(columns, align))
        at = up(part.end, ALIGN)
    return found


def width_of(plan: StepPlan) -> int:
    """Blocks that the widest table of a plan has, padded."""
    return up(max(table.shape[1] for table in plan.block_tables), TABLE_ALIGN)


def pack(flat: Int32, shape: CudaStepShape, plan: StepPlan, block_size: int) -> None:
    """Fill int32 [shape.size] with what the plan says; rules, newest and tiles are left to others, padding is zero.

    `owners`: the row of each token's sequence. Padding tokens go to slot 0, padding sequences see nothing.
    """
    flat[: shape.numbers] = 0
    seqs, tokens = plan.num_seqs, plan.num_tokens
    sequence, positions = _places(plan)
    shape.vector(flat, "token_ids")[:tokens] = plan.token_ids
    shape.vector(flat, "owners")[:tokens] = plan.rows[sequence]
    shape.vector(flat, "positions")[:tokens] = positions
    starts = shape.vector(flat, "query_start")
    starts[: seqs + 1] = plan.query_start
    starts[seqs + 1 :] = tokens
    shape.vector(flat, "kv_lens")[:seqs] = plan.context + np.diff(plan.query_start)
    slots = shape.parts["slots"].of(flat)
    tables = shape.parts["tables"].of(flat).reshape(shape.groups, shape.seqs, shape.width)
    pages, offsets = positions // block_size, positions % block_size
    for group, table in enumerate(plan.block_tables):
        slots[group, :tokens] = table[sequence, pages] * block_size + offsets
        tables[group, :seqs, : table.shape[1]] = table
        tables[group, :seqs, table.shape[1] :] = 0


def _places(plan: StepPlan) -> tuple[npt.NDArray[np.intp], Int32]:
    """Each token's sequence, and its position in it."""
    every = np.arange(plan.num_seqs)
    if plan.num_tokens == plan.num_seqs:
        return every, plan.context
    sequence = np.repeat(every, np.diff(plan.query_start))
    positions = np.arange(plan.num_tokens, dtype=np.int32)
    positions += (plan.context - plan.query_start[:-1])[sequence]
    return sequence, positions


# What one step reads, as tensors on the device.


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What layers of one KV group need. `tables`: block ids of each sequence; `slots`: where each token's K, V go.

    A slot is block * page size + offset; a token of padding has slot 0, in the block that nobody reads.
    """

    tables: Tensor  # int32 [S, W]
    slots: Tensor  # int32 [T]


@dataclass(frozen=True, slots=True)
class CudaStepBatch:
    """One step of S sequences with T tokens in all, those of the first `num_decodes` sequences `query_len` each.

    A sequence of padding has kv_len 0. Token j of a sequence stands at position kv_len - its query tokens + j.
    Sequences from `num_decodes` on are cut into `tiles` of `tile` tokens (see prefill_attention.make_tiles); None where
    there are none.
    """

    token_ids: Tensor  # int32 or int64 [T], known: no PREVIOUS among them
    positions: Tensor  # int32 [T]
    query_start: Tensor  # int32 [S+1]
    kv_lens: Tensor  # int32 [S], the step's own tokens included
    groups: tuple[GroupBatch, ...]  # one per group of the KV layout
    num_decodes: int
    tiles: Tensor | None  # int32 [n, 2]
    splits: int  # in how many parts decode attention reads a sequence
    query_len: int = 1
    tile: int | None = None  # None: what suits each layer best, the same for all
    embedded: Embedded | None = None  # embeddings of a prompt; None: every token is looked up
