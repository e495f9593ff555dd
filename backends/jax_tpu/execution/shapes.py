"""The closed set of step shapes: every step is padded up to one of them, and each is compiled before serving.

Steps of one token per sequence have T equal to S. All others have few sequences or as many as allowed, so that the set
grows with the logarithm of the limits, not with their product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.execution.step_input import JaxStepShape, pack
from pagoda.common.config.defaults import TPU_TABLE_ENTRIES
from pagoda.common.config.engine import Limits
from pagoda.common.engine.buckets import ShapeLadder
from pagoda.common.engine.step import Int32, StepPlan, TokenMasks
from pagoda.common.errors import ConfigError

LEAST_TOKENS: Final = 16
LEAST_ROWS: Final = 8
SHORT: Final = 8
"""The shorter page tables are for sequences up to this part of the longest."""


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Ladders of rows, tokens and pages for one engine. `groups`: block tables per step."""

    decode: ShapeLadder
    tokens: ShapeLadder
    rows: ShapeLadder
    pages: ShapeLadder
    groups: int

    @classmethod
    def of(cls, limits: Limits, groups: int, *, factor: int = 2) -> StepShapes:
        """Shapes up to the limits; `factor` (a power of two) from one size to the next."""
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        pages = -(-limits.max_model_len // limits.block_size)
        return cls(
            decode=_thinned(ShapeLadder.between(min(LEAST_ROWS, seqs), seqs), factor),
            tokens=_thinned(ShapeLadder.between(min(LEAST_TOKENS, tokens), tokens), factor),
            rows=ShapeLadder(tuple(sorted({min(LEAST_ROWS, seqs), seqs}))),
            pages=ShapeLadder(tuple(sorted({-(-pages // SHORT), pages}))),
            groups=groups,
        )

    def shape_for(self, tokens: int, seqs: int, pages: int, decode_only: bool) -> JaxStepShape:
        """The smallest shape that holds such a step."""
        if decode_only:
            rows = self.decode.bucket_for(seqs)
            return JaxStepShape(rows, rows, self.pages.bucket_for(pages), self.groups, True)
        rows = self.rows.bucket_for(seqs)
        return JaxStepShape(self.tokens.bucket_for(tokens), rows, self.pages.bucket_for(pages), self.groups, False)

    def __iter__(self) -> Iterator[JaxStepShape]:
        """Every shape a step can have: more tokens than sequences, or as many."""
        for pages in self.pages.sizes:
            for rows in self.decode.sizes:
                yield JaxStepShape(rows, rows, pages, self.groups, True)
            for tokens in self.tokens.sizes:
                for rows in self.rows.sizes:
                    if rows <= self.rows.bucket_for(min(tokens, self.rows.sizes[-1])):
                        yield JaxStepShape(tokens, rows, pages, self.groups, False)

    @property
    def seqs(self) -> tuple[int, ...]:
        """Every number of padded sequences that a step can have."""
        return tuple(sorted({*self.decode.sizes, *self.rows.sizes}))


def check_tables(limits: Limits) -> None:
    """Raise ConfigError if the block tables of `max_num_seqs` sequences of maximum length exceed scalar memory."""
    seqs, longest = limits.max_num_seqs, limits.max_model_len
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


def _thinned(ladder: ShapeLadder, factor: int) -> ShapeLadder:
    """Every n-th size so that neighbours differ by `factor`; the top stays."""
    every = factor.bit_length() - 1
    return ShapeLadder((*ladder.sizes[:-1][::every], ladder.sizes[-1]))


Plans = Mapping[int, StepPlan]
"""Shard -> its plan for one step, with global row numbers. Not empty; idle shards are absent."""


def make_batch(
    plans: Plans, shards: int, shapes: StepShapes, block_size: int, empty_row: int
) -> tuple[JaxStepShape, Int32]:
    """Return the smallest shape that fits every shard's plan, and the packed step int32 [shards, shape.size]."""
    tokens, seqs = (max(sizes) for sizes in zip(*((plan.num_tokens, plan.num_seqs) for plan in plans.values())))
    longest = max(int((plan.context + np.diff(plan.query_start)).max()) for plan in plans.values())
    decode_only = all(plan.num_tokens == plan.num_seqs and plan.embeds is None for plan in plans.values())
    shape = shapes.shape_for(tokens, seqs, -(-longest // block_size), decode_only)
    return shape, np.stack([_packed(plans.get(shard), shape, empty_row) for shard in range(shards)])


def make_embeds(plans: Plans, shards: int, tokens: int, width: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return [shards * tokens, width]: the plans' embeddings for tokens marked EMBEDDED, zeros elsewhere."""
    embeds = np.zeros((shards, tokens, width), dtype)
    for shard, plan in plans.items():
        if plan.embeds is not None:
            embeds[shard, plan.embedded] = plan.embeds.view(embeds.dtype)
    return embeds.reshape(-1, width)


def _packed(plan: StepPlan | None, shape: JaxStepShape, empty_row: int) -> Int32:
    if plan is None:
        return pack(shape, _EMPTY, _ZERO, _EMPTY, _EMPTY, (0, 0), (), empty_row)
    lengths = np.diff(plan.query_start)
    prefills = np.flatnonzero(lengths != 1)
    counts = (int(prefills[0]) if len(prefills) else plan.num_seqs, plan.num_seqs)
    tables = tuple(table[:, : shape.pages] for table in plan.block_tables)
    return pack(shape, plan.token_ids, plan.query_start, plan.context + lengths, plan.rows, counts, tables, empty_row)


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
    sequences of one token first, so new requests with one token and a cached prefix are moved to the end.
    """
    lengths = np.diff(plan.query_start)
    readers = np.isin(plan.rows, [start.row for start in plan.starts]) & (lengths == 1) & (plan.context > 0)
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
        masks=plan.masks and _reorder_masks(plan.masks, order),
        embeds=None if plan.embeds is None else plan.embeds[np.argsort(np.argsort(tokens)[plan.embedded])],
    )
    return reordered, order


def _reorder_masks(masks: TokenMasks, order: npt.NDArray[np.intp]) -> TokenMasks:
    new_index = np.argsort(order)[masks.sequences]
    ascending = np.argsort(new_index)
    return TokenMasks(new_index[ascending].astype(np.int32), masks.bits[ascending])
