"""Beam search against enumeration: a beam as wide as the tree is exact, a beam of one is greedy."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from support.suite.rows import each_row

from pagoda.common.beam_search import Beam, BeamSearch, BeamSearchParams
from pagoda.common.errors import RequestError

END = 3
VOCAB = 4


def table(seed: int) -> Mapping[tuple[int, ...], dict[int, float]]:
    """Next-token log-probabilities of every history of up to four tokens."""
    draw = random.Random(seed)
    logprobs: dict[tuple[int, ...], dict[int, float]] = {}
    histories: list[tuple[int, ...]] = [()]
    while histories:
        history = histories.pop()
        weights = [draw.random() + 0.01 for _ in range(VOCAB)]
        logprobs[history] = {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}
        if len(history) < 3:
            histories += [(*history, token) for token in range(VOCAB)]
    return logprobs


def every_answer(model: Mapping[tuple[int, ...], dict[int, float]], longest: int) -> list[Beam]:
    answers: list[Beam] = []
    open_beams = [Beam()]
    for step in range(longest):
        following = [
            Beam((*beam.token_ids, token), beam.logprob + logprob, token == END)
            for beam in open_beams
            for token, logprob in model[beam.token_ids].items()
        ]
        answers += [beam for beam in following if beam.ended or step == longest - 1]
        open_beams = [beam for beam in following if not beam.ended]
    return answers


def searched(model: Mapping[tuple[int, ...], dict[int, float]], params: BeamSearchParams, room: int = 99) -> list[Beam]:
    search = BeamSearch(params, {END}, room)
    while not search.finished:
        search.take([model[beam.token_ids] for beam in search.live])
    return search.best()


@each_row("seed", range(20))
@each_row("penalty", [0.0, 1.0, 2.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best(seed: int, penalty: float) -> None:
    model = table(seed)
    params = BeamSearchParams(beam_width=64, max_tokens=3, length_penalty=penalty)
    best = sorted(every_answer(model, 3), key=lambda beam: -beam.score(penalty))
    assert searched(model, params) == best[:64]


@each_row("seed", range(20))
def test_a_beam_of_one_is_greedy(seed: int) -> None:
    model = table(seed)
    tokens: tuple[int, ...] = ()
    while len(tokens) < 3 and (not tokens or tokens[-1] != END):
        tokens = (*tokens, max(model[tokens], key=model[tokens].__getitem__))
    (beam,) = searched(model, BeamSearchParams(beam_width=1, max_tokens=3, early_stopping=True))
    assert beam.token_ids == tokens
    assert beam.ended == (tokens[-1] == END)


def test_ignore_eos_and_the_context_limit() -> None:
    model = table(1)
    params = BeamSearchParams(beam_width=8, max_tokens=9, ignore_eos=True)
    beams = searched(model, params, room=2)
    assert {len(beam.token_ids) for beam in beams} == {2}
    assert not any(beam.ended for beam in beams)


@pytest.mark.parametrize(("early", "tokens"), [(True, (0, END)), (False, (0, 1, END))])
def test_early_stopping_ends_with_the_first_answers(early: bool, tokens: tuple[int, ...]) -> None:
    model: dict[tuple[int, ...], dict[int, float]] = {
        (): {0: -0.1, 1: -9.0},
        (0,): {END: -0.5, 1: -0.6},
        (0, 1): {END: -0.1, 2: -9.0},
    }
    params = BeamSearchParams(beam_width=1, max_tokens=3, length_penalty=2.0, early_stopping=early)
    assert [beam.token_ids for beam in searched(model, params)] == [tokens]


@each_row(
    ("values", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 10**6}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 1e300}, "length_penalty"),
    ],
)
def test_invalid_params_name_the_field(values: dict[str, float], field: str) -> None:
    with pytest.raises(RequestError) as error:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | values))  # type: ignore[arg-type]
    assert error.value.field == field
