"""The ladder of shapes: every step within the limits has a bucket, and none is larger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagoda.common.config.engine import Limits
from pagoda.common.engine.steps.shapes import ShapeLadder, StepShape, StepShapes


def test_powers_of_two_up_to_the_limit_itself():
    assert ShapeLadder.between(5, 48).sizes == (8, 16, 32, 48)
    assert ShapeLadder.between(16, 16).sizes == (16,)
    assert ShapeLadder.between(1, 1).sizes == (1,)


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4)])
def test_an_invalid_ladder_is_refused(low, high):
    with pytest.raises(ValueError, match="no ladder"):
        ShapeLadder.between(low, high)


def test_bucket_for_is_the_smallest_bucket_that_fits():
    ladder = ShapeLadder.between(8, 48)
    assert [ladder.bucket_for(n) for n in (1, 8, 9, 33, 48)] == [8, 8, 16, 48, 48]
    with pytest.raises(ValueError, match="above the top"):
        ladder.bucket_for(49)


def test_every_step_within_the_limits_falls_into_a_listed_bucket():
    limits = Limits(max_model_len=100, max_num_batched_tokens=40, max_num_seqs=12, block_size=4)
    shapes = StepShapes.of(limits, 1)
    listed = set(shapes)
    assert max(listed) == StepShape(40, 12, 25, 1, False)
    for rows in range(1, 13):
        for tokens in range(rows, 41):
            assert shapes.shape_for(tokens, rows, tokens == rows) in listed


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_steps_with_drafts_have_shapes_of_their_own(drafts: int):
    limits = Limits(max_model_len=100, max_num_batched_tokens=40, max_num_seqs=12, block_size=4, max_drafts=drafts)
    shapes, plain = StepShapes.of(limits, 1), StepShapes.of(replace(limits, max_drafts=0), 1)
    listed = list(shapes)
    assert len(set(listed)) == len(listed)
    assert {shape for shape in listed if shape.width == 1} == set(plain)
    assert {shape.width for shape in listed} == {1, 1 + drafts} == set(shapes.widths)
    assert plain.widths == (1,)
    for rows in range(1, 13):
        for tokens in range(rows + 1, 41):
            shape = shapes.shape_for(tokens, rows, False, drafts=True)
            assert shape in listed
            assert shape.tokens >= tokens
            assert shape.seqs >= rows
            if tokens <= rows * (1 + drafts):
                assert shape.seqs == shapes.decode.bucket_for(rows), "no more rows of logits than needed"
                assert shape.tokens == min(shape.seqs * (1 + drafts), 40)


def test_finer_sizes_pad_less_where_time_grows_with_the_size() -> None:
    limits = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256, block_size=128)
    coarse, fine = StepShapes.of(limits, 1), StepShapes.of(limits, 1, fine=True)
    assert fine.tokens.sizes[:5] == (16, 32, 64, 128, 256)
    assert fine.tokens.sizes[5:] == (320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
    assert fine.decode == coarse.decode

    def padding(shapes: StepShapes) -> float:
        """Padded over real tokens of all sizes from 257 to 2048."""
        sizes = range(257, 2049)
        return sum(map(shapes.tokens.bucket_for, sizes)) / sum(sizes)

    assert padding(coarse) > 1.3
    assert padding(fine) < 1.09
    assert set(coarse) <= set(fine)
    assert fine.shape_for(600, 20, False).tokens == 640
    assert max(ShapeLadder.between(16, 700, fine_above=256).sizes) == 700
