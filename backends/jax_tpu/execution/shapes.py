"""Plans of the shards -> the padded shape and the packed array of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.execution.step_input import pack_step
from pagoda.backends.jax_tpu.model.model import StepModel
from pagoda.common.backend import BackendOptions
from pagoda.common.config.defaults import TPU_TABLE_ENTRIES
from pagoda.common.config.engine import Limits
from pagoda.common.engine.lora.adapter import NO_ADAPTER
from pagoda.common.engine.steps.contract import Int32, StepPlan
from pagoda.common.engine.steps.shapes import StepShape, StepShapes
from pagoda.common.errors import ConfigError


def check_tables(limits: Limits) -> None:
    """Raise ConfigError if the block tables of `max_num_seqs` sequences of maximum length exceed scalar memory."""
    seqs = limits.max_num_seqs
    longest = limits.max_model_len
    size = limits.block_size
    while seqs * -(-longest // size) > TPU_TABLE_ENTRIES:
        size *= 2
    if size > limits.block_size:
        fits = TPU_TABLE_ENTRIES // -(-longest // limits.block_size)
        fewer = f", or --max-num-seqs {fits}" if fits else ""
        raise ConfigError(
            "--block-size",
            f"with {limits.block_size} tokens per block, the block tables of {seqs} sequences of {longest} tokens "
            f"exceed the {TPU_TABLE_ENTRIES} entries of a TPU's scalar memory; use --block-size {size}{fewer}",
        )


def check_invariant(options: BackendOptions) -> None:
    """Raise ConfigError for settings with which there is more than one program, or sums have more than one order."""
    if options.parallel.tensor > 1:
        raise ConfigError(
            "--batch-invariant",
            "the order in which TPUs sum over devices depends on a token's place in the batch; use "
            "--tensor-parallel-size 1, or drop it",
        )
    if options.limits.max_drafts:
        raise ConfigError("--batch-invariant", "jax_tpu has other programs for drafts; drop it or --speculative-config")
    if options.lora is not None:
        raise ConfigError("--batch-invariant", "jax_tpu has other programs for adapters; drop it or --enable-lora")


def step_shapes(model: StepModel, limits: Limits, *, factor: int) -> StepShapes:
    """Return the shapes of a model's steps; `factor` (a power of two) from one size to the next."""
    groups = len(model.layout.groups)
    if model.kernel.batch_invariant:
        return StepShapes.single(limits, groups)
    shapes = StepShapes.of(limits, groups, factor=factor, fine=model.kernel.use_kernel)
    return replace(shapes, replays=limits.max_drafts) if model.state_pools else shapes


Plans = Mapping[int, StepPlan]
"""Shard -> its plan for one step, with global row numbers. Not empty; idle shards are absent."""


class LastDrafts:
    """How many drafts each row had in its last step. The device knows how many of them were rejected."""

    def __init__(self, rows: int) -> None:
        self._counts = np.zeros(rows, np.int32)

    def replaced(self, plan: StepPlan) -> Int32:
        """Return the drafts of the last step of each of the plan's rows, int32 [S]; its own drafts replace them."""
        self._counts[[start.row for start in plan.starts]] = 0
        counts = self._counts[plan.rows]
        self._counts[plan.rows] = 0 if plan.num_drafts is None else plan.num_drafts
        return counts


def make_batch(
    plans: Plans, shards: int, shapes: StepShapes, empty_row: int, last_drafts: LastDrafts
) -> tuple[StepShape, Int32]:
    """Return the smallest shape for every shard's plan, and the packed step int32 [shards, packed_size(shape)]."""
    tokens, seqs = (max(sizes) for sizes in zip(*((plan.num_tokens, plan.num_seqs) for plan in plans.values())))
    decode_only = all(plan.num_tokens == plan.num_seqs for plan in plans.values())
    drafts = any(plan.num_drafts is not None for plan in plans.values())
    adapted = any(map(is_adapted, plans.values()))
    shape = shapes.shape_for(tokens, seqs, decode_only, drafts, adapted)
    before = {shard: last_drafts.replaced(plan) for shard, plan in plans.items()} if shape.replays else {}
    packed = [_packed(plans.get(shard), shape, empty_row, before.get(shard)) for shard in range(shards)]
    return shape, np.stack(packed)


def is_adapted(plan: StepPlan) -> bool:
    """Return whether a sequence has a LoRA adapter."""
    return plan.adapter_slots is not None and bool((plan.adapter_slots != NO_ADAPTER).any())


def token_slots(plan: StepPlan) -> Int32:
    """Return the slot of each token's adapter, int32 [T], or NO_ADAPTER."""
    slots = np.full(plan.num_seqs, NO_ADAPTER, np.int32) if plan.adapter_slots is None else plan.adapter_slots
    return np.repeat(slots, np.diff(plan.query_start))


def _packed(plan: StepPlan | None, shape: StepShape, empty_row: int, last_drafts: Int32 | None) -> Int32:
    if plan is None:
        return pack_step(shape, _EMPTY, _ZERO, _EMPTY, _EMPTY, (0, 0), (), empty_row)
    lengths = np.diff(plan.query_start)
    prefills = np.flatnonzero(lengths != 1)
    counts = (int(prefills[0]) if len(prefills) else plan.num_seqs, plan.num_seqs)
    tables = tuple(table[:, : shape.pages] for table in plan.block_tables)
    ends = plan.context + lengths
    return pack_step(
        shape,
        plan.numbered_ids,
        plan.query_start,
        ends,
        plan.rows,
        counts,
        tables,
        empty_row,
        plan.num_drafts,
        plan.adapter_slots,
        plan.num_guesses,
        last_drafts,
    )


_EMPTY: Final[Int32] = np.zeros(0, np.int32)
_ZERO: Final[Int32] = np.zeros(1, np.int32)


def with_row_offset(plan: StepPlan, offset: int) -> StepPlan:
    """Return the plan with `offset` added to its row numbers, to make them global across shards."""
    if not offset:
        return plan
    starts = tuple(replace(start, row=offset + start.row) for start in plan.starts)
    return replace(plan, rows=offset + plan.rows, starts=starts)


def writers_first(plan: StepPlan) -> tuple[StepPlan, npt.NDArray[np.intp]]:
    """Order sequences so that KV pages are written before they are read; return the plan and each old index.

    A new request with a cached prefix may read pages that a prefill in the same step writes. The kernel processes
    sequences of one token first, so new requests with one token and a cached prefix are moved to the end, and with them
    those that have drafts, too.
    """
    lengths = np.diff(plan.query_start)
    short = lengths == 1 if plan.num_drafts is None else (lengths == 1) | (plan.num_drafts > 0)
    readers = np.isin(plan.rows, [start.row for start in plan.starts]) & short & (plan.context > 0)
    if not readers.any() or lengths.max() == 1:
        return plan, np.arange(plan.num_seqs)
    order = np.concatenate([np.flatnonzero(~readers), np.flatnonzero(readers)])
    tokens = np.concatenate([np.arange(*plan.query_start[index : index + 2]) for index in order])
    reordered = replace(
        plan,
        rows=plan.rows[order],
        query_start=np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int32),
        context=plan.context[order],
        token_ids=plan.token_ids[tokens],
        block_tables=tuple(table[order] for table in plan.block_tables),
        samples=plan.samples[order],
        num_drafts=None if plan.num_drafts is None else plan.num_drafts[order],
        num_guesses=None if plan.num_guesses is None else plan.num_guesses[order],
        masked=None if plan.masked is None else np.flatnonzero(np.isin(order, plan.masked)).astype(np.int32),
        adapter_slots=None if plan.adapter_slots is None else plan.adapter_slots[order],
    )
    return reordered, order
