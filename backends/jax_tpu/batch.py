"""StepPlan -> the padded shape and the packed array of one step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.shapes import StepShapes
from pagoda.backends.jax_tpu.step_input import StepShape, pack
from pagoda.common.engine.step import Int32, StepPlan


def make_batch(plan: StepPlan, shapes: StepShapes, block_size: int, empty_row: int) -> tuple[StepShape, Int32]:
    """The shape to run and int32 [shape.size]."""
    lengths = np.diff(plan.query_start)
    kv_len = plan.context + lengths
    pages = -(-int(kv_len.max()) // block_size)
    shape = shapes.shape_for(plan.num_tokens, plan.num_seqs, pages)
    longer = np.flatnonzero(lengths != 1)
    decodes = int(longer[0]) if len(longer) else plan.num_seqs
    tables = tuple(table[:, :pages] for table in plan.block_tables)
    counts = (decodes, plan.num_seqs)
    packed = pack(shape, plan.token_ids, plan.query_start, kv_len, plan.rows, counts, tables, empty_row)
    return shape, packed


def writers_first(plan: StepPlan) -> tuple[StepPlan, npt.NDArray[np.intp]]:
    """The plan with its sequences in an order that the kernel can take, and the old number of each sequence.

    A new request may read pages that a longer sequence fills in this very step. The kernel writes a sequence's K and V
    when its turn comes, and sequences of one token have theirs first: new ones that read a cache go last instead.
    """
    lengths = np.diff(plan.query_start)
    late = np.isin(plan.rows, [start.row for start in plan.starts]) & (lengths == 1) & (plan.context > 0)
    if not late.any() or lengths.max() == 1:
        return plan, np.arange(plan.num_seqs)
    order = np.concatenate([np.flatnonzero(~late), np.flatnonzero(late)])
    tokens = [plan.token_ids[plan.query_start[index] : plan.query_start[index + 1]] for index in order]
    moved = replace(
        plan,
        rows=plan.rows[order],
        query_start=np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int32),
        context=plan.context[order],
        token_ids=np.concatenate(tokens),
        block_tables=tuple(table[order] for table in plan.block_tables),
        samples=plan.samples[order],
    )
    return moved, order
