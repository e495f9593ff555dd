"""Proposers of tokens alone: prompt lookup and suffix decoding, over an index of a growing text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from support.suite.rows import each_row

from pagoda.common.engine.speculative.ngram import NgramProposer
from pagoda.common.engine.speculative.proposer import DraftContext, PaddedGuesses, Proposer
from pagoda.common.engine.speculative.suffix import LENGTHS, SEPARATOR, PastAnswers, SuffixProposer
from pagoda.common.engine.speculative.token_index import TokenIndex, hashes_of
from pagoda.common.engine.steps.contract import EMBEDDED


def context(
    prompt: Sequence[int], outputs: Sequence[int] = (), drafts: Sequence[int] = (), most: int = 4, name: str = "a"
) -> DraftContext:
    return DraftContext(name, np.array(prompt, np.int32), list(outputs), list(drafts), most)


def proposed(proposer: Proposer, contexts: Sequence[DraftContext]) -> list[list[int]]:
    guesses = proposer.propose(contexts)
    if isinstance(guesses, PaddedGuesses):
        return [row[:count] for row, count in zip(guesses.tokens.tolist(), guesses.counts.tolist(), strict=True)]
    return [list(tokens) for tokens in guesses]


def one(proposer: Proposer, given: DraftContext) -> list[int]:
    return proposed(proposer, [given])[0]


def ends(text: Sequence[int], gram: Sequence[int]) -> list[int]:
    """Where a gram occurred, the newest first, by comparing all places."""
    length = len(gram)
    places = range(length, len(text))
    return [end for end in reversed(places) if list(text[end - length : end]) == list(gram) and EMBEDDED not in gram]


@each_row("seed", range(20))
def test_an_index_finds_what_a_scan_finds(seed: int) -> None:
    rng = random.Random(seed)
    lengths = sorted(rng.sample(range(1, 9), 3))
    text: list[int] = []
    index = TokenIndex(lengths)
    for _ in range(30):
        vocab = rng.choice([3, 50])
        added = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 5, 31, 33, 100]))]
        if rng.random() < 0.2:
            added[rng.randrange(len(added))] = EMBEDDED
        index.extend(added if rng.random() < 0.5 else np.array(added, np.int32))
        text += added
        tail = text[rng.randrange(len(text)) :][:12]
        for number, hash in enumerate(hashes_of(tail, lengths)):
            want = ends(text, tail[-lengths[number] :])
            found = list(index.ends_of(tail, number, hash))
            assert found == want[: len(found)]
            assert len(found) == len(want) or len(found) > 20, "chains are followed for a bounded number of links"


def scanned(text: Sequence[int], drafts: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    """What prompt lookup is to propose, by comparing all places."""
    whole, best, best_end = [*text, *drafts], 0, 0
    for end in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(longest, end, len(whole)) and text[end - 1 - length] == whole[-1 - length]:
            length += 1
        if length >= shortest and EMBEDDED not in text[end - shortest : end] and length > best:
            best, best_end = length, end
    if not best:
        return []
    while len(whole) < best_end + most:
        whole.append(whole[best_end + len(whole) - len(text) - len(drafts)])
    proposed = whole[best_end : best_end + most]
    return proposed[: proposed.index(EMBEDDED)] if EMBEDDED in proposed else proposed


@each_row("seed", range(6))
def test_ngram_proposes_for_many_growing_sequences_what_scans_find(seed: int) -> None:
    rng = random.Random(seed)
    shortest, longest = rng.choice([(1, 1), (1, 3), (2, 5), (3, 3)])
    proposer, number, found = NgramProposer(shortest, longest), 0, 0
    running: dict[str, tuple[list[int], list[int], int]] = {}
    for _ in range(60):
        while len(running) < 7:
            vocab = rng.choice([40, 200])
            prompt = [rng.randrange(vocab) for _ in range(rng.choice([0, 1, 2, 30, 510, 511, 700]))]
            if prompt and rng.random() < 0.3:
                prompt[rng.randrange(len(prompt))] = EMBEDDED
            running[f"{number}"] = prompt, [], vocab
            number += 1
        contexts, want = [], []
        for name, (prompt, outputs, vocab) in running.items():
            if rng.random() < 0.3:
                continue
            again = [prompt, outputs][bool(outputs)][-rng.randrange(1, 20) :]
            outputs += [token for token in again if token != EMBEDDED] if rng.random() < 0.4 else []
            outputs += [rng.randrange(vocab) for _ in range(rng.choice([0, 1, 1, 5, 40]))]
            drafts = [rng.randrange(vocab) for _ in range(rng.choice([0, 0, 1, 4]))]
            most = rng.randrange(1, 8)
            contexts.append(context(prompt, outputs, drafts, most, name))
            want.append(scanned([*prompt, *outputs], drafts, shortest, longest, most))
        if contexts:
            assert proposed(proposer, contexts) == want
        found += sum(map(bool, want))
        for name in rng.sample(sorted(running), rng.randrange(2)):
            proposer.finish(name, running.pop(name)[1])
    assert found > 10


def test_ngram_continues_the_longest_match() -> None:
    proposer = NgramProposer(1, 3)
    assert one(proposer, context([1, 2, 3, 9, 8, 3, 7, 5, 1, 2, 3])) == [9, 8, 3, 7]


def test_ngram_takes_the_newest_of_equal_matches() -> None:
    assert one(NgramProposer(2, 2), context([1, 2, 5, 5, 5, 5, 1, 2, 6, 7, 8, 9, 1, 2])) == [6, 7, 8, 9]


@pytest.mark.parametrize(("shortest", "want"), [(2, [7, 8]), (3, [])])
def test_ngram_needs_the_shortest_match(shortest: int, want: list[int]) -> None:
    assert one(NgramProposer(shortest, 5), context([4, 5, 6, 7, 8, 1], [5, 6], most=2)) == want


def test_ngram_reads_outputs_and_drafts_as_they_come() -> None:
    proposer = NgramProposer(2, 4)
    assert one(proposer, context([1, 2, 3], [9])) == []
    assert one(proposer, context([1, 2, 3], [9, 1, 2])) == [3, 9, 1, 2]
    assert one(proposer, context([1, 2, 3], [9, 1, 2], drafts=[3, 9], most=2)) == [1, 2]
    assert one(proposer, context([1, 2, 3], [9, 1, 2, 4, 9, 1], most=3)) == [2, 4, 9]


def test_ngram_goes_on_in_a_loop() -> None:
    assert one(NgramProposer(2, 2), context([7, 1, 2, 1, 2], most=5)) == [1, 2, 1, 2, 1]
    assert one(NgramProposer(2, 2), context([7, 1, 2, 1], [2], drafts=[1], most=4)) == [2, 1, 2, 1]


def test_no_proposal_has_or_follows_an_embedding() -> None:
    e = EMBEDDED
    for proposer in (NgramProposer(2, 3), SuffixProposer(24, 10, 4.0, 0.0)):
        assert one(proposer, context([1, 2, 3, e, 5, 1, 2], name=f"{proposer.name} 1")) == [3]
        assert one(proposer, context([1, e, 2, 7, 8, 1, e, 2], name=f"{proposer.name} 2")) == []


def test_a_finished_request_is_forgotten() -> None:
    proposer = NgramProposer(1, 1)
    assert one(proposer, context([1, 2, 1])) == [2, 1, 2, 1]
    proposer.finish("a", [])
    proposer.finish("never seen", [])
    assert one(proposer, context([1, 3, 1])) == [3, 1, 3, 1], "another request of that name"


def test_suffix_proposes_the_most_frequent_continuation() -> None:
    text = [1, 2, 3, 0, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2]
    assert one(SuffixProposer(24, 0, 4.0, 0.5), context(text)) == [3], "2 of 3; then 0 or 8: 1/3 is not probable enough"


def test_suffix_proposes_as_many_tokens_as_the_factor_allows() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert one(SuffixProposer(24, 0, 1.0, 0.1), context(text, most=10)) == [4, 5, 6]
    assert one(SuffixProposer(24, 0, 2.0, 0.1), context(text, most=10)) == [4, 5, 6, 7, 8, 9]
    assert one(SuffixProposer(5, 0, 2.0, 0.1), context(text, most=10)) == [4, 5], "match and proposal have 5 tokens"


def test_suffix_proposes_from_past_answers_of_other_requests() -> None:
    proposer = SuffixProposer(24, 10, 1.0, 0.1)
    proposer.finish("before", [5, 6, 7, 8, 9])
    assert one(proposer, context([1, 5, 6, 7])) == [8, 9]
    proposer.finish("a", [])
    none = SuffixProposer(24, 0, 1.0, 0.1)
    none.finish("before", [5, 6, 7, 8, 9])
    assert one(none, context([1, 5, 6, 7])) == []


def test_a_longer_match_among_rarer_ones_wins() -> None:
    text = [1, 2, 3, 4, 5, 6, 0, 4, 9, 0, 4, 9, 0, 4, 9, 1, 2, 3, 4]
    assert one(SuffixProposer(24, 0, 1.0, 0.1), context(text)) == [5, 6, 0, 4]


@pytest.mark.parametrize("answers", [1, 2, 7])
def test_past_answers_are_bounded(answers: int) -> None:
    past = PastAnswers(answers, 1000)
    for number in range(50):
        past.add([number, number, number])
        kept = [token for part in past.parts for token in part.tokens if token != SEPARATOR]
        assert set(kept) <= set(range(number - answers + 1, number + 1))
        assert len(set(kept)) >= min(number + 1, answers // 2)
    past.add(list(range(5000)))
    assert sum(map(len, past.parts)) <= 1000
    assert tuple(sorted(LENGTHS)) == LENGTHS


def test_an_answer_does_not_run_into_the_next_one() -> None:
    proposer = SuffixProposer(24, 100, 4.0, 0.0)
    proposer.finish("one", [1, 2, 3])
    proposer.finish("two", [4, 5, 6])
    assert one(proposer, context([9, 1, 2], most=4)) == [3]
    assert one(proposer, context([9, 2, 3], name="b")) == []
