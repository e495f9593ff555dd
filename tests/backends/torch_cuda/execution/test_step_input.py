"""A plan as one array: what is in it, and how it is aligned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagoda.backends.torch_cuda.execution.step_input import (
    ALIGN,
    TABLE_ALIGN,
    CudaStepShape,
    DecodeBuffers,
    RowTokens,
    decode_shape,
    logits_indices,
    make_batch,
    pack,
    table_width,
    tables,
)
from pagoda.common.engine.steps.contract import PREVIOUS, StepPlan

BLOCK = 4


def plan(lengths: list[int], context: list[int], groups: int = 2) -> StepPlan:
    """Sequences in rows 5, 6, ..; the table of group g, sequence s has blocks 100 g + 10 s + 1, 2, ..."""
    total = sum(lengths)
    pages = max(-(-(c + n) // BLOCK) for c, n in zip(context, lengths))
    table = [[[100 * g + 10 * s + p + 1 for p in range(pages)] for s in range(len(lengths))] for g in range(groups)]
    tokens = np.arange(1000, 1000 + total, dtype=np.int32)
    tokens[0] = PREVIOUS
    return StepPlan(
        step=0,
        starts=(),
        rows=np.arange(5, 5 + len(lengths), dtype=np.int32),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context=np.array(context, np.int32),
        token_ids=tokens,
        block_tables=tuple(np.array(one, np.int32) for one in table),
        samples=np.ones(len(lengths), np.bool_),
    )


def packed(plan: StepPlan, shape: CudaStepShape, empty_row: int = 0) -> np.ndarray:
    flat = np.full(shape.size, -7, np.int32)  # what the last step left
    pack(flat, shape, plan, BLOCK, empty_row)
    return flat


@pytest.mark.parametrize(("lengths", "context"), [([1, 1, 1], [9, 0, 6]), ([1, 3, 6], [9, 2, 0])])
def test_packed_tokens_have_their_positions_and_slots(lengths: list[int], context: list[int]) -> None:
    step_plan = plan(lengths, context)
    total = sum(lengths)
    shape = CudaStepShape(tokens=16, seqs=4, rows=4, groups=2, width=table_width(step_plan))
    numbers = torch.from_numpy(packed(step_plan, shape))
    before = RowTokens(torch.arange(500, 520, dtype=torch.int32), torch.zeros(20, dtype=torch.int32))
    batch = make_batch(shape, numbers, tables(shape, numbers), before, num_decodes=1, block_size=BLOCK)
    positions = [c + at for c, n in zip(context, lengths) for at in range(n)]
    token_rows = [s for s, n in enumerate(lengths) for _ in range(n)]
    assert batch.token_ids.tolist() == [505, *range(1001, 1000 + total)] + [0] * (16 - total)
    assert batch.positions.tolist() == positions + [0] * (16 - total)
    assert batch.query_start.tolist() == [*np.cumsum([0, *lengths]).tolist(), total]
    assert batch.kv_lens.tolist() == [c + n for c, n in zip(context, lengths)] + [0]
    for number, group in enumerate(batch.groups):
        blocks = [100 * number + 10 * s + p // BLOCK + 1 for s, p in zip(token_rows, positions)]
        want = [block * BLOCK + p % BLOCK for block, p in zip(blocks, positions)]
        assert group.slots.tolist() == want + [0] * (16 - total)
        assert (
            group.tables[:3, : step_plan.block_tables[0].shape[1]].tolist() == step_plan.block_tables[number].tolist()
        )
        assert not group.tables[:3, step_plan.block_tables[0].shape[1] :].any()


def test_rejected_drafts_lower_the_positions_of_tokens_in_flight() -> None:
    """Every sequence has four tokens, padded at the front; the sequences in rows 5 and 7 begin with PREVIOUS."""
    step_plan = replace(plan([1, 1, 3], [9, 2, 12]), num_drafts=np.array([0, 0, 2], np.int32))
    step_plan.token_ids[2] = PREVIOUS
    shape = decode_shape(4, 2, table_width(step_plan), drafts=True, query_len=4)
    numbers = torch.from_numpy(packed(step_plan, shape, empty_row=19))
    rejected = torch.zeros(20, dtype=torch.int32)
    rejected[5:8] = torch.tensor([2, 3, 1])
    before = RowTokens(torch.arange(500, 520, dtype=torch.int32), rejected)
    batch = make_batch(shape, numbers, tables(shape, numbers), before, num_decodes=4, block_size=BLOCK)
    assert batch.query_len == 4
    assert batch.token_ids.tolist() == [0, 0, 0, 505, 0, 0, 0, 1001, 0, 507, 1003, 1004, *[0] * 4]
    assert batch.positions.tolist() == [0, 0, 0, 7, 0, 0, 0, 2, 0, 11, 12, 13, *[0] * 4]
    assert batch.kv_lens.tolist() == [8, 3, 14, 0]
    assert logits_indices(step_plan, 4, 4).tolist() == [3, 0, 0, 0, 7, 0, 0, 0, 9, 10, 11, 0]
    assert logits_indices(step_plan, None, 4).tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 2, 3, 4, 0]
    for number, group in enumerate(batch.groups):
        own = [(100 * number + 10 * s + p // BLOCK + 1) * BLOCK + p % BLOCK for s, p in enumerate((7, 2))]
        last = [(100 * number + 20 + p // BLOCK + 1) * BLOCK + p % BLOCK for p in (11, 12, 13)]
        assert group.slots.tolist() == [0, 0, 0, own[0], 0, 0, 0, own[1], 0, *last, *[0] * 4]


@pytest.mark.parametrize("seqs", [1, 3, 24, 33])
def test_sections_are_aligned_and_do_not_overlap(seqs: int) -> None:
    """Triton recompiles for a pointer that is less aligned than before."""
    shape = CudaStepShape(tokens=seqs, seqs=seqs, rows=seqs, groups=3, width=TABLE_ALIGN, tiles=5)
    flat = np.zeros(shape.size, np.int32)
    for section in shape.sections.values():
        assert section.begin % ALIGN == 0
        view = section.of(flat)
        assert view.base is not None
        assert not view.any()
        view += 1
    slots = torch.from_numpy(flat)
    assert all(row.data_ptr() % 64 == slots.data_ptr() % 64 for row in shape.sections["slots"].of(slots))
    assert shape.sections["tables"].stride % TABLE_ALIGN == 0


def test_a_size_reads_the_same_addresses_whatever_the_width() -> None:
    buffers = DecodeBuffers(8, 2, 40, 16, torch.device("cpu"), BLOCK, pieces={4: 9, 8: 9})
    before = buffers.batch(4, RowTokens(*torch.zeros((2, 20), dtype=torch.int32)))
    assert before.work is not None
    assert (len(before.work.items), len(before.work.merges)) == (4 + 9, 4)
    for step_plan in (plan([1, 1, 1], [9, 0, 6]), plan([1, 1], [150, 0])):
        shape = decode_shape(4, 2, table_width(step_plan), pieces=9)
        numbers = torch.from_numpy(packed(step_plan, shape))
        shape.sections["items"].of(numbers)[:] = torch.arange(52).view(13, 4) + step_plan.num_seqs
        buffers.fill(shape, numbers, step_plan.num_seqs)
        assert before.work.items.tolist() == shape.sections["items"].of(numbers).tolist()
        assert before.kv_lens.tolist()[: step_plan.num_seqs] == (step_plan.context + 1).tolist()
        assert before.kv_lens[step_plan.num_seqs :].tolist() == [0] * (4 - step_plan.num_seqs)
        for group, table in zip(before.groups, step_plan.block_tables):
            assert group.tables[: step_plan.num_seqs, : table.shape[1]].tolist() == table.tolist()
