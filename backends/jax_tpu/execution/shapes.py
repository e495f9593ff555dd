"""Plans of the shards -> the padded shape and the packed array of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.execution.step_input import pack
from pagoda.common.config.defaults import TPU_TABLE_ENTRIES
from pagoda.common.config.engine import Limits
from pagoda.common.engine.shapes import StepShape, StepShapes
from pagoda.common.engine.step import Int32, StepPlan, TokenMasks
from pagoda.common.errors import ConfigError


def check_tables(limits: Limits) -> None:
    """Raises ConfigError when the tables of the longest sequences together exceed a TPU's scalar memory."""
    seqs, longest = limits.max_num_seqs, limits.max_model_len
    size = limits.block_size
    while seqs * -(-longest // size) > TPU_TABLE_ENTRIES:
        size *= 2
    if size > limits.block_size:
        fits = TPU_TABLE_ENTRIES // -(-longest // limits.block_size)
        fewer = f", or --max-num-seqs {fits}" if fits else ""
        raise ConfigError(
            "--block-size",
            f"with {limits.block_size} tokens to a block, the tables of {seqs} sequences of {longest} tokens exceed "
            f"the {TPU_TABLE_ENTRIES} entries that a TPU's scalar memory holds; use --block-size {size}{fewer}",
        )


Plans = Mapping[int, StepPlan]
"""Shard -> what it computes in a step, rows as the device numbers them; at least one."""


def make_batch(
    plans: Plans, shards: int, shapes: StepShapes, block_size: int, empty_row: int
) -> tuple[StepShape, Int32]:
    """The shape that holds every shard's plan, and int32 [shards, packed_size(shape)]."""
    tokens, seqs = (max(sizes) for sizes in zip(*((plan.num_tokens, plan.num_seqs) for plan in plans.values())))
    longest = max(int((plan.context + np.diff(plan.query_start)).max()) for plan in plans.values())
    decode_only = all(plan.num_tokens == plan.num_seqs and plan.embeds is None for plan in plans.values())
    shape = shapes.shape_for(tokens, seqs, -(-longest // block_size), decode_only)
    return shape, np.stack([_packed(plans.get(shard), shape, empty_row) for shard in range(shards)])


def make_rows(plans: Plans, shards: int, tokens: int, width: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """[shards * tokens, width] the embeddings of every shard's plan where its tokens are EMBEDDED, else zeros."""
    rows = np.zeros((shards, tokens, width), dtype)
    for shard, plan in plans.items():
        if plan.embeds is not None:
            rows[shard, plan.embedded] = plan.embeds.view(rows.dtype)
    return rows.reshape(-1, width)


def _packed(plan: StepPlan | None, shape: StepShape, empty_row: int) -> Int32:
    if plan is None:
        return pack(shape, _NONE, _ZERO, _NONE, _NONE, (0, 0), (), empty_row)
    lengths = np.diff(plan.query_start)
    longer = np.flatnonzero(lengths != 1)
    counts = (int(longer[0]) if len(longer) else plan.num_seqs, plan.num_seqs)
    tables = tuple(table[:, : shape.pages] for table in plan.block_tables)
    return pack(shape, plan.token_ids, plan.query_start, plan.context + lengths, plan.rows, counts, tables, empty_row)


_NONE: Final[Int32] = np.zeros(0, np.int32)
_ZERO: Final[Int32] = np.zeros(1, np.int32)


def in_shard(plan: StepPlan, first: int) -> StepPlan:
    """The plan with its rows counted from `first` on, as the device numbers the rows of all shards."""
    if not first:
        return plan
    starts = tuple(replace(start, row=first + start.row) for start in plan.starts)
    return replace(plan, rows=first + plan.rows, starts=starts)


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
    tokens = np.concatenate([np.arange(*plan.query_start[index : index + 2]) for index in order])
    moved = replace(
        plan,
        rows=plan.rows[order],
        query_start=np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int32),
        context=plan.context[order],
        token_ids=plan.token_ids[tokens],
        block_tables=tuple(table[order] for table in plan.block_tables),
        samples=plan.samples[order],
        masks=plan.masks and _in_order(plan.masks, order),
        embeds=None if plan.embeds is None else plan.embeds[np.argsort(np.argsort(tokens)[plan.embedded])],
    )
    return moved, order


def _in_order(masks: TokenMasks, order: npt.NDArray[np.intp]) -> TokenMasks:
    """The masks of sequences that stand in another order now."""
    place = np.argsort(order)[masks.sequences]
    ascending = np.argsort(place)
    return TokenMasks(place[ascending].astype(np.int32), masks.bits[ascending])
