"""The reasoning state, token by token: start sequences, end sequences, budgets."""

from __future__ import annotations

from support.suite.rows import each_row

from pagoda.common.engine.structured_output.grammar import Thinking
from pagoda.common.engine.structured_output.token_mask import Phase, ReasoningState

OPEN = Thinking(ends=((7, 8), (9,)), open=True)


def after(thinking: Thinking, *tokens: int) -> ReasoningState:
    thought = ReasoningState(thinking)
    for token in tokens:
        thought.accept(token)
    return thought


@each_row(
    ("tokens", "phase"),
    [
        ((), Phase.THINKING),
        ((1, 7, 1, 8), Phase.THINKING),
        ((1, 7, 7, 8), Phase.OVER),
        ((9,), Phase.OVER),
        ((9, 1, 2), Phase.OVER),
    ],
)
def test_any_end_sequence_ends_the_reasoning(tokens, phase):
    assert after(OPEN, *tokens).phase is phase


def test_answers_without_reasoning_start_in_phase_over():
    assert ReasoningState(None).phase is Phase.OVER
    assert ReasoningState(Thinking(ends=((9,),), open=False)).phase is Phase.OVER


def test_a_start_sequence_counts_only_at_the_beginning():
    may_open = Thinking(ends=((9,),), open=False, starts=((4, 5), (6,)))
    assert ReasoningState(may_open).openings == {4, 6}
    assert after(may_open, 4).openings == {5}
    assert after(may_open, 4, 5).phase is Phase.THINKING
    assert after(may_open, 6).phase is Phase.THINKING
    assert after(may_open, 4, 6).phase is Phase.OVER
    assert after(may_open, 1).phase is Phase.OVER
    assert after(may_open, 1).openings == set()


def test_a_spent_budget_forces_the_rest_of_the_first_end_sequence():
    three = Thinking(ends=((7, 8), (9,)), open=True, budget=3)
    assert after(three, 1, 1).forced is None
    assert after(three, 1, 1, 1).forced == 7
    assert after(three, 1, 1, 1, 7).forced == 8
    assert after(three, 1, 1, 7).forced == 8
    assert after(three, 1, 1, 1, 7, 8).phase is Phase.OVER
    assert after(three, 1, 1, 1, 7, 8).forced is None
    assert after(Thinking(ends=((7, 7, 8),), budget=2), 7, 7).forced == 8


def test_may_force_after_tokens_in_flight():
    three = Thinking(ends=((9,),), open=True, budget=3)
    assert not ReasoningState(three).may_force_after(2)
    assert ReasoningState(three).may_force_after(3)
    assert after(three, 1).may_force_after(2)
    assert not after(three, 1, 9).may_force_after(9)
    assert not ReasoningState(OPEN).may_force_after(99)


def test_a_copy_is_independent():
    thought = after(OPEN, 7)
    twin = thought.copy()
    twin.accept(8)
    assert (thought.phase, twin.phase) == (Phase.THINKING, Phase.OVER)
