"""The table of sampling state, and what is packed of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.devices.sampling_definition import decode_step
from support.suite.rows import each_row

from pagoda.common.engine.sampling.rules import SamplingRules, mix, noise_keys
from pagoda.common.engine.sampling.state import RowTable, SampledRows, by_sequence, prompt_targets
from pagoda.common.engine.steps.contract import PREVIOUS, RowStart


def table(*rules: SamplingRules, rows: int = 6) -> RowTable:
    made = RowTable(rows)
    for row, each in enumerate(rules):
        made.start(RowStart(row, np.array([5, 6, 7], np.int32), 2, each), 100)
    return made


FLAGS = ("random", "filtered", "penalised", "edited", "masked", "logprobs", "prompt_logprobs", "needs_edit")


@each_row(
    ("rules", "flags"),
    [
        ({}, ()),
        ({"temperature": 1.0}, ("random",)),
        ({"temperature": 1.0, "top_k": 1}, ("random", "filtered")),
        ({"temperature": 1.0, "top_p": 0.9}, ("random", "filtered")),
        ({"temperature": 1.0, "min_p": 0.1}, ("random", "filtered")),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.1}, ()),
        ({"presence_penalty": 0.1}, ("penalised", "needs_edit")),
        ({"logit_bias": ((1, 1.0),)}, ("edited", "needs_edit")),
        ({"bad_words": ((1,),)}, ("edited", "needs_edit")),
        ({"min_tokens": 1, "stop_ids": (2,)}, ("edited", "needs_edit")),
        ({"min_tokens": 1}, ()),
        ({"stop_ids": (2,)}, ()),
        ({"allowed_token_ids": ()}, ("masked", "needs_edit")),
        ({"logprobs": 0}, ("logprobs", "needs_edit")),
        ({"prompt_logprobs": 0}, ("prompt_logprobs",)),
    ],
)
def test_what_a_row_needs(rules: dict, flags: tuple[str, ...]) -> None:
    columns = table(SamplingRules(**rules)).columns[0]
    assert tuple(flag for flag in FLAGS if columns[flag]) == flags


def test_a_row_holds_its_parameters_until_the_next_request() -> None:
    made = table(SamplingRules(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=-3))
    assert len(made) == 6
    assert made.columns[0].tolist()[:5] == (-3, 0.5, 7, 0.25, 0.125)
    assert made[0].prompt.tolist() == [5, 6]
    made.start(RowStart(0, np.array([1], np.int32), 1, SamplingRules(temperature=0.0, top_k=900)), 100)
    assert made.columns[0].tolist()[:5] == (0, 0.0, 100, 1.0, 0.0)
    assert made[0].prompt.tolist() == [1]


def test_sampling_rows_are_selected() -> None:
    made = table(*[SamplingRules(logprobs=row) for row in range(6)])
    plan = replace(
        decode_step([4, 9, 3], [5, 1, 2], samples=[True, False, True]), query_start=np.array([0, 1, 2, 5], np.int32)
    )
    whole = SampledRows.of({0: plan, 2: decode_step([8], [4])}, 10, made)
    assert whole.indices.tolist() == [0, 2, 20]
    assert whole.rows.tolist() == [5, 2, 4]
    assert whole.ends.tolist() == [4, 2 + 3, 8]
    compact = SampledRows.compact(plan, made)
    assert [compact.indices.tolist(), compact.rows.tolist(), compact.ends.tolist()] == [[0, 1], [5, 2], [4, 5]]
    all_sample = SampledRows.compact(decode_step([4, 9], [5, 1]), made)
    assert [all_sample.rows.tolist(), all_sample.ends.tolist()] == [[5, 1], [4, 9]]


def test_rows_by_what_they_need() -> None:
    made = table(SamplingRules(), SamplingRules(logprobs=2), SamplingRules(logprobs=3))
    chosen = SampledRows.of({1: decode_step([4, 5, 6], [2, 0, 1])}, 10, made).where("logprobs")
    assert [(each.index, each.row, each.known, each.state.rules.logprobs) for each in chosen] == [
        (10, 2, 4, 3),
        (12, 1, 6, 2),
    ]
    assert [each.generated for each in chosen] == [2, 4]


def test_the_cheapest_program_that_serves_all() -> None:
    made = table(SamplingRules(), SamplingRules(temperature=1.0), SamplingRules(temperature=1.0, top_k=2))
    kinds = [SampledRows.compact(decode_step([3] * len(rows), rows), made).kind for rows in ([0], [0, 1], [1, 2, 0])]
    assert kinds == ["greedy", "random", "filtered"]


def test_packed_parameters() -> None:
    made = table(
        SamplingRules(),
        SamplingRules(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=9),
        SamplingRules(temperature=2.0, seed=1 << 40),
    )
    chosen = SampledRows.of({0: decode_step([3, 4, 5], [2, 0, 1], samples=[True, False, True])}, 4, made)
    packed = chosen.pack(4, 5)
    assert packed[:2].tolist() == [[2, 5, 1, 5], [3, 0, 5, 0]]
    keys = noise_keys(np.array([1 << 40, 9]), np.array([3, 5])).view(np.int32)
    assert packed[2].tolist() == [keys[0], 0, keys[1], 0]
    assert packed[4].tolist() == [0, 0, 7, 0]
    assert [packed.view(np.float32)[row].tolist() for row in (3, 5, 6)] == [
        [2.0, 0, 0.5, 0],
        [1.0, 0, 0.25, 0],
        [0, 0, 0.125, 0],
    ]
    greedy = SampledRows.of({0: decode_step([4], [0])}, 2, made).pack(2, 5)
    assert greedy.tolist() == [[0, 5], [4, 0], *[[0, 0]] * 5]


def test_packed_parameters_of_steps_with_drafts() -> None:
    """Positions and counters of a sequence whose newest token is in flight can be lowered on the device."""
    made = table(SamplingRules(), SamplingRules(temperature=0.5, top_k=7, seed=1 << 40), SamplingRules())
    lengths = np.array([1, 1, 3, 2], np.int32)
    plan = replace(
        decode_step([1] * 4, [2, 0, 1, 0]),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context=np.array([8, 4, 10, 20], np.int32),
        token_ids=np.array([PREVIOUS, 50, PREVIOUS, 61, 62, 70, 71], np.int32),
        samples=np.array([True, True, True, False]),
        num_drafts=np.array([0, 0, 2, 0], np.int32),
    )
    plans = {1: plan}
    chosen = SampledRows.of(plans, 12, made, width=3)
    packed = chosen.pack_with_drafts(plans, 24, 9)
    assert chosen.indices.tolist() == [12, 15, 18, 19, 20]
    assert packed[:2, 12:].tolist() == [[2, 9, 9, 0, 9, 9, 1, 1, 1, 9, 9, 9], [9, 0, 0, 5, 0, 0, 11, 12, 13, 0, 0, 0]]
    assert packed[4, 18:21].tolist() == [7] * 3
    for shift in range(11):
        keys = noise_keys(np.full(3, 1 << 40), np.arange(11, 14) - shift)
        assert mix((packed[2, 18:21] - np.int32(shift)).view(np.uint32)).tolist() == keys.tolist()
    assert packed[7, 12:].tolist() == [2, *[9] * 5, 1, 1, 1, *[9] * 3]
    assert packed[8, 12:].tolist() == [*[-1] * 6, 61, 62, -1, *[-1] * 3]
    assert packed[[0, 7], :12].tolist() == [[9] * 12] * 2
    groups = [(sequence, [row.index for row in rows]) for sequence, rows in by_sequence(chosen.where("random"), 3)]
    assert groups == [(6, [18, 19, 20])]


def test_prompt_tokens_that_a_step_predicts() -> None:
    made = RowTable(3)
    for row, best in enumerate((None, 2, None)):
        start = RowStart(row, np.arange(10, 20, dtype=np.int32), 8, SamplingRules(prompt_logprobs=best))
        made.start(start, 100)
    made.start(RowStart(2, np.arange(30, 36, dtype=np.int32), 6, SamplingRules(prompt_logprobs=0)), 100)
    plan = replace(
        decode_step([1, 1, 1]),
        query_start=np.array([0, 4, 7, 12], np.int32),
        context=np.array([0, 2, 1], np.int32),
    )
    first, second = prompt_targets(plan, made)
    assert (first.index, first.begin, first.targets.tolist(), first.best) == (1, 4, [13, 14, 15], 2)
    assert (second.index, second.begin, second.targets.tolist(), second.best) == (2, 7, [32, 33, 34, 35], 0)
    last = replace(plan, query_start=np.array([0, 1, 3, 4], np.int32), context=np.array([7, 6, 4], np.int32))
    assert [(each.index, each.targets.tolist()) for each in prompt_targets(last, made)] == [(1, [17]), (2, [35])]
    done = replace(plan, query_start=np.array([0, 1, 2, 3], np.int32), context=np.array([7, 7, 5], np.int32))
    assert list(prompt_targets(done, made)) == []
