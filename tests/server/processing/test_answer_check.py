"""Which part of an output is held against its JSON schema once it has ended."""

from __future__ import annotations

import pytest
from support.checkpoints.byte_text import EOS, byte_tokenizer
from support.suite.rows import each_row

from pagoda.common.engine.structured_output.grammar import ResolvedGrammar, Thinking
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.processing.answer_check import EndedAnswers

TOKENIZER = byte_tokenizer()
ENDS = (tuple(TOKENIZER.encode("/t", add_special_tokens=False)),)
STARTS = (tuple(TOKENIZER.encode("t:", add_special_tokens=False)),)


def output(text: str, reason: str | None, stop: str | None = None, index: int = 0, end: bool = True) -> RequestOutput:
    tokens = TOKENIZER.encode(text, add_special_tokens=False) + [EOS] * end
    completion = CompletionOutput(index, text, tokens, finish_reason=reason, stop_reason=stop)
    return RequestOutput("r", None, [], None, [completion], reason is not None)


def answers(ended: EndedAnswers, *outputs: RequestOutput) -> list[tuple[int, str]]:
    return [(completion.index, text) for each in outputs for completion, text in ended.add(each)]


def ended(thinking: Thinking | None = None, *, yields_deltas: bool = False) -> EndedAnswers:
    return EndedAnswers(ResolvedGrammar(""), TOKENIZER, thinking=thinking, yields_deltas=yields_deltas)


@each_row(
    ("thinking", "text", "answer"),
    [
        (None, "[1]", "[1]"),
        (Thinking(ends=ENDS), "hm/t[1]", "[1]"),
        (Thinking(ends=ENDS, open=False, starts=STARTS), "t:hm/t[1]", "[1]"),
        (Thinking(ends=ENDS, open=False, starts=STARTS), '["/t"]', '["/t"]'),
        (Thinking(ends=ENDS, in_grammar=True), "hm/t[1]", "hm/t[1]"),
    ],
)
def test_the_reasoning_is_no_part_of_the_answer(thinking, text, answer):
    assert answers(ended(thinking), output(text, "stop")) == [(0, answer)]


@pytest.mark.parametrize("yields_deltas", [False, True])
def test_sequences_are_joined_and_read_when_they_end(yields_deltas: bool) -> None:
    first, whole = output("[1", None, end=False), output(",2]" if yields_deltas else "[1,2]", "stop")
    other = output("x", "stop", index=1)
    assert answers(ended(yields_deltas=yields_deltas), first, other, whole) == [(1, "x"), (0, "[1,2]")]


def test_another_end_token_of_the_model_ends_an_answer() -> None:
    again = EndedAnswers(ResolvedGrammar(""), TOKENIZER, thinking=None, yields_deltas=False, end_token_ids=[106])
    ends = [output("[1]j", "stop", 106, end=False), output("[2]", "stop", 7, index=1)]  # type: ignore[arg-type]
    assert answers(again, *ends) == [(0, "[1]")], "its text is no part of the answer"


@each_row(("reason", "stop"), [("length", None), ("stop", "]"), ("abort", None), ("error", "why")])
def test_what_was_cut_off_is_not_read(reason, stop):
    assert answers(ended(), output("[1", reason, stop)) == []
