"""StepPlan -> the padded shape and the packed array of one step."""

from __future__ import annotations

import numpy as np

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
