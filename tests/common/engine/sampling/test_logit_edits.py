"""The arrays of logit edits, entry by entry."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import numpy as np
import pytest

from pagoda.common.engine.sampling.logit_edits import MAX_LISTED, MAX_WORD_HEADS, EditsTable, LogitEdits, allowed_bits
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.sampling.state import (
    MAX_ADDITIONS,
    MAX_WORDS,
    SampledRow,
    SamplingState,
    additions,
    allowed,
    banned_words,
    dense_additions,
    grammar_masks,
    penalties,
)
from pagoda.common.engine.steps.contract import TokenMasks


def sampled(index: int = 0, row: int = 0, known: int = 3, num_prompt: int = 1, **rules) -> SampledRow:
    made = SamplingRules(**rules)
    state = SamplingState(made, np.arange(num_prompt, dtype=np.int32), LogitEdits.of(made, VOCAB))
    return SampledRow(index, row, known, state)


VOCAB = 32


def floats(packed: np.ndarray) -> list[float]:
    return packed.view(np.float32).tolist()


def test_penalties_are_columns() -> None:
    packed = penalties(
        [
            sampled(3, 5, known=9, num_prompt=4, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25),
            sampled(1, 2, known=6, num_prompt=6, presence_penalty=2.0),
        ],
        4,
    )
    assert packed.shape == (8, 4)
    assert packed[:4].T.tolist() == [[3, 5, 4, 9], [1, 2, 6, 6], [0] * 4, [0] * 4]
    assert [floats(row) for row in packed[4:7]] == [[1.5, 1, 0, 0], [0.5, 0, 0, 0], [0.25, 2, 0, 0]]
    assert packed[7].tolist() == [2, 0, 0, 0]


def entries(rows: list[SampledRow], seqs: int = 4) -> list[list[tuple[int, int, float]]]:
    """Of each array, the entries in use; the others must be padding."""
    found = []
    for packed in additions(rows, seqs):
        assert packed.shape == (3, MAX_ADDITIONS)
        used = int((packed[0] < seqs).sum())
        assert (packed[0, used:] == seqs).all()
        assert not packed[1:, used:].any()
        found.append(list(zip(packed[0, :used].tolist(), packed[1, :used].tolist(), floats(packed[2, :used]))))
    return found


def test_additions_are_bias_single_words_and_stop_ids() -> None:
    first = sampled(2, logit_bias=((7, 0.5), (8, -1.0)), bad_words=((4,), (5, 6)))
    second = sampled(3, known=4, num_prompt=2, min_tokens=3, stop_ids=(9, 1))
    assert entries([first, second]) == [[(2, 7, 0.5), (2, 8, -1.0), (2, 4, -np.inf), (3, 9, -np.inf), (3, 1, -np.inf)]]
    assert entries([sampled(known=5, num_prompt=2, min_tokens=3, stop_ids=(9,))]) == []


@pytest.mark.parametrize(
    ("count", "sizes"), [(MAX_ADDITIONS, [MAX_ADDITIONS]), (2 * MAX_ADDITIONS + 1, [MAX_ADDITIONS, MAX_ADDITIONS, 1])]
)
def test_additions_are_split_over_arrays(count: int, sizes: list[int]) -> None:
    bias = tuple((token, float(token)) for token in range(count))
    arrays = entries([sampled(1, logit_bias=bias)])
    assert [len(each) for each in arrays] == sizes
    assert [entry for each in arrays for entry in each] == [(1, token, float(token)) for token in range(count)]


def words(rows: list[SampledRow], seqs: int = 4) -> list[list[tuple[int, int, list[list[int]]]]]:
    """Of each pair of arrays: (row of logits, last token, [[row, position, token] of each head]) per word."""
    found = []
    for packed, heads in banned_words(rows, seqs):
        assert (packed.shape, heads.shape) == ((2, MAX_WORDS), (4, MAX_WORD_HEADS))
        used = int((packed[0] < seqs).sum())
        assert (packed[0, used:] == seqs).all()
        length = int((heads[0] < MAX_WORDS).sum())
        assert (heads[0, length:] == MAX_WORDS).all()
        assert (heads[0, :length] < used).all()
        found.append(
            [
                (*packed[:, word].tolist(), heads[1:, :length].T[heads[0, :length] == word].tolist())
                for word in range(used)
            ]
        )
    return found


def test_banned_words_compare_the_newest_tokens() -> None:
    rows = [
        sampled(2, row=5, known=9, num_prompt=6, bad_words=((7,), (1, 2, 3), (4, 8))),
        sampled(3, row=1, known=4, num_prompt=2, bad_words=((5, 6),)),
    ]
    assert words(rows) == [
        [
            (2, 3, [[5, 7, 1], [5, 8, 2]]),
            (2, 8, [[5, 8, 4]]),
            (3, 6, [[1, 3, 5]]),
        ]
    ]


def test_a_word_needs_its_head_among_the_sampled_tokens() -> None:
    word = ((1, 2, 3),)
    assert words([sampled(known=9, num_prompt=7, bad_words=word)]) != []
    assert words([sampled(known=9, num_prompt=8, bad_words=word)]) == []
    assert words([sampled(known=9, num_prompt=9, bad_words=((4,),))]) == []


def test_words_are_split_over_arrays() -> None:
    many = tuple((word, word + 1) for word in range(2 * MAX_WORDS + 1))
    assert [len(each) for each in words([sampled(known=9, bad_words=many)])] == [MAX_WORDS, MAX_WORDS, 1]
    assert [len(each) for each in words([sampled(known=9, bad_words=many[:MAX_WORDS])])] == [MAX_WORDS]


def test_heads_are_split_over_arrays() -> None:
    half = tuple(range(MAX_WORD_HEADS // 2))
    rows = [sampled(known=2 * MAX_WORD_HEADS, bad_words=((*half, 1), (*half, 2), (*half, 3), (4, 5)))]
    assert [[last for _, last, _ in each] for each in words(rows)] == [[1, 2], [3, 5]]
    assert [[len(heads) for _, _, heads in each] for each in words(rows)] == [
        [MAX_WORD_HEADS // 2] * 2,
        [MAX_WORD_HEADS // 2, 1],
    ]


def test_of_a_longer_word_only_the_end_is_compared() -> None:
    word = tuple(range(MAX_WORD_HEADS + 3))
    [[(_, last, heads)]] = words([sampled(row=2, known=2 * MAX_WORD_HEADS, bad_words=(word,))])
    assert (last, len(heads)) == (MAX_WORD_HEADS + 2, MAX_WORD_HEADS)
    assert (heads[0], heads[-1]) == ([2, MAX_WORD_HEADS, 2], [2, 2 * MAX_WORD_HEADS - 1, MAX_WORD_HEADS + 1])


@pytest.mark.parametrize("vocab", [64, 65])
def test_bits_of_allowed_tokens(vocab: int) -> None:
    bits = allowed_bits({2: [0, 31, 32, 63], 0: []}, 3, vocab)
    assert (bits.shape, bits.dtype) == ((3, 2 if vocab == 64 else 3), np.uint32)
    assert bits[2, :2].tolist() == [0x80000001, 0x80000001]
    assert not bits[0].any()
    assert (bits[1] == 0xFFFFFFFF).all()


def test_rules_and_grammar_are_both_obeyed() -> None:
    rows = [sampled(1, allowed_token_ids=(3, 5)), sampled(2, allowed_token_ids=(4,)), sampled(4, allowed_token_ids=())]
    masks = {2: np.array([0b110000], np.uint32), 1: np.array([0b1000], np.uint32), 3: np.array([0b1], np.uint32)}
    found = {index: bits.tolist() for index, bits in allowed(rows, masks).items()}
    assert found == {1: [0b1000], 2: [0b10000], 3: [0b1], 4: [0]}


def test_grammar_masks_are_by_row_of_logits() -> None:
    bits = np.array([[1], [2]], np.uint32)
    found = grammar_masks({2: TokenMasks(np.array([0, 2], np.int32), np.zeros(2, np.int32), bits)}, 8)
    assert {index: row.tolist() for index, row in found.items()} == {16: [1], 18: [2]}


def test_long_lists_are_one_array_that_the_sequences_of_a_request_share() -> None:
    """Biased tokens are compiled once per request: not for each of its sequences, and not in each step."""
    vocab = 3 * MAX_LISTED
    bias = tuple((token, float(token % 7)) for token in range(MAX_LISTED))
    rules = SamplingRules(logit_bias=bias, bad_words=((5,), (7, 8)), allowed_token_ids=(1, 2))
    table = EditsTable()
    edits = [table.edits(replace(rules, seed=seed), vocab) for seed in range(300)]
    assert all(each is edits[0] for each in edits)
    assert len(table) == 1
    dense = edits[0].dense
    assert dense is not None
    assert dense[: MAX_LISTED + 1].tolist() == [-np.inf if t == 5 else float(t % 7) for t in range(MAX_LISTED)] + [0.0]
    rows = [SampledRow(index, index, 3, SamplingState(rules, np.arange(1), edits[0])) for index in (0, 2)]
    assert dense_additions(rows) == [(edits[0], [0, 2])]
    assert entries(rows) == [], "they are not listed as well"
    assert [len(each) for each in words(rows)] == [2]
    other = SamplingRules(logit_bias=((1, 1.0),))
    assert table.edits(other, vocab) is not edits[0]
    assert dense_additions([SampledRow(0, 0, 3, SamplingState(other, np.arange(1), table.edits(other, vocab)))]) == []
    del edits, rows, dense
    gc.collect()
    assert len(table) == 0, "no edits are kept once no sequence has them"


def test_edits_of_many_sequences_are_packed_in_bounded_time() -> None:
    """A step took 25 s for 256 sequences with a bias of 49k tokens."""
    vocab, seqs = 49_152, 256
    rules = SamplingRules(
        logit_bias=tuple((token, 1.0) for token in range(vocab)),
        bad_words=tuple((token, token + 1) for token in range(1000)),
        allowed_token_ids=tuple(range(vocab)),
    )
    table = EditsTable()
    states = [SamplingState(rules, np.arange(1, dtype=np.int32), table.edits(rules, vocab)) for _ in range(seqs)]
    rows = [SampledRow(index, index, 3, state) for index, state in enumerate(states)]
    begin = time.process_time()
    assert not list(additions(rows, seqs))
    assert len(dense_additions(rows)) == 1
    assert len(list(banned_words(rows, seqs))) == 2000
    assert len(allowed(rows, {})) == seqs
    assert time.process_time() - begin < 1.0
