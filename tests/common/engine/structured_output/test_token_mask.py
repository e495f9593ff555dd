"""Masks against brute force: a token is allowed exactly when the text stays the beginning of one that fits.

Where all texts that fit go on alike, llguidance allows but the token that the tokenizer would spell them with.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable

import numpy as np
import pytest
from support.checkpoints.grammars import (
    END_THINK,
    EOS,
    SIZE,
    TEXTS,
    THINK,
    Answer,
    asking,
    grammar,
    set_of,
    spell,
    text_of,
    vocabulary,
)
from support.suite.rows import each_row

from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import MAX_WHITESPACE, Grammar, Thinking
from pagoda.common.engine.structured_output.token_mask import masks_after, refresh_masks
from pagoda.common.errors import RequestError


@pytest.fixture(scope="module")
def structured() -> Structured:
    return Structured(vocabulary)


def fitting(fits: Iterable[str], prefix: str) -> set[int]:
    """Return the tokens that may follow `prefix` if `fits` are all valid texts."""
    fits = [text for text in fits if text.startswith(prefix)]
    allowed = {token for token, text in enumerate(TEXTS) if any(each[len(prefix) :].startswith(text) for each in fits)}
    return allowed | ({EOS} if prefix in fits else set())


def is_forced(allowed: set[int], fits: list[str], prefix: str) -> bool:
    """True if one token is allowed, which continues every valid text."""
    return len(allowed) == 1 and all(
        text.startswith(prefix + text_of([*allowed])) for text in fits if text.startswith(prefix)
    )


def follow(structured: Structured, constraint: Grammar, fits: list[str], seed: int) -> str:
    """Return a random answer; each of its masks is compared with all valid texts."""
    answer, rng = Answer(asking(constraint), structured), random.Random(seed)
    while not answer.mask_state.finished:
        want = fitting(fits, text_of(answer.outputs))
        assert answer.allowed == want or is_forced(answer.allowed, fits, text_of(answer.outputs))
        answer.go(rng.choice(sorted(answer.allowed)))
    assert answer.outputs[-1] == EOS
    return text_of(answer.outputs)


CHOICES = ["a", "ab", "abba,b", "bbb", ",", "aé"]
WORDS = ["".join(letters) for size in range(7) for letters in itertools.product("ab,", repeat=size)]


@each_row("seed", range(8))
def test_choices(structured, seed):
    assert follow(structured, grammar(choice=CHOICES), CHOICES, seed) in CHOICES


@each_row("pattern", ["(a|b){2,4},?", "^a(b,?){1,2}$", "[ab]{3}|,", "(ab|b)?,a", "^$|a", "a/b?|\\."])
def test_regular_expressions(structured, pattern):
    fits = [word for word in (*WORDS, "a/", "a/b", ".") if re.fullmatch(pattern, word)]
    for seed in range(4):
        assert follow(structured, grammar(regex=pattern), fits, seed) in fits


@each_row(
    "schema",
    [
        {"enum": ["a", "ab", 1, 12, None, True, {"a": 1}, [1, "b"]]},
        {
            "type": "object",
            "properties": {"a": {"enum": [1, 11]}, "b": {"const": "b,"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 8, "maximum": 11}]},
    ],
)
def test_schemas_with_few_answers(structured, schema):
    values = schema.get("enum") or [
        *({"a": a} | b for a in (1, 11) for b in ({}, {"b": "b,"})),
        *(list(each) for size in range(3) for each in itertools.product((1, 2), repeat=size)),
        *(True, False, 8, 9, 10, 11),
    ]
    jsonschema = pytest.importorskip("jsonschema")
    fits = [
        json.dumps(value, separators=(",", ":"))
        for value in values
        if jsonschema.Draft202012Validator(schema).is_valid(value)
    ]
    constraint = grammar(json=schema, disable_any_whitespace=True)
    for seed in range(6):
        assert follow(structured, constraint, fits, seed) in fits


def test_white_space_of_json_is_bounded(structured):
    space, end = TEXTS.index(" "), TEXTS.index("}")
    answer = Answer(asking(grammar(json={"type": "object"})), structured)
    answer.go(TEXTS.index("{"))
    for _ in range(MAX_WHITESPACE):
        assert space in answer.allowed
        answer.go(space)
    assert space not in answer.allowed
    assert end in answer.allowed
    own = Answer(asking(grammar(json={"type": "object"}, whitespace_pattern=" {0,2}")), structured)
    for token in (TEXTS.index("{"), space, space):
        own.go(token)
    assert space not in own.allowed


@pytest.mark.parametrize(
    "text",
    ['start: ("a" | "b"){1,3} ","', 'root ::= ("a" | "b") rest ","\nrest ::= "" | [ab] [ab]?'],
)
def test_lark_and_ebnf(structured, text):
    fits = [word for word in WORDS if re.fullmatch("[ab]{1,3},", word)]
    for seed in range(4):
        assert follow(structured, grammar(grammar=text), fits, seed) in fits


def test_special_and_padding_tokens_match_no_text(structured):
    answer = Answer(asking(grammar(regex="(.|\n)*")), structured)
    assert answer.allowed == set(range(EOS + 1))


def test_special_tokens_in_a_tag_match_by_id(structured):
    tag = {"format": {"type": "tag", "begin": "<think>a", "content": {"type": "any_text"}, "end": "</think>"}}
    answer = Answer(asking(grammar(structural_tag=tag)), structured)
    assert answer.allowed == {THINK}
    answer.go(THINK, *spell("ab,"))
    assert END_THINK in answer.allowed
    assert answer.go(END_THINK).allowed == {EOS}


def test_sampling_rules_and_grammar_are_combined(structured):
    constraint = grammar(choice=["a", "b", "ab,"])
    assert Answer(asking(constraint, allowed_token_ids=(TEXTS.index("b"), EOS, 9)), structured).allowed == {
        TEXTS.index("b")
    }
    assert TEXTS.index("ab") not in Answer(asking(constraint, bad_words=((TEXTS.index("ab"),),)), structured).allowed
    word = (TEXTS.index("a"), TEXTS.index("b"))
    two = Answer(asking(constraint, bad_words=(word,)), structured).go(word[0])
    assert two.allowed == {EOS, TEXTS.index("b,")}
    longer = Answer(asking(constraint, min_tokens=2, stop_ids=(EOS,)), structured).go(TEXTS.index("a"))
    assert EOS not in longer.allowed


def test_an_empty_mask_is_an_error(structured):
    constraint = grammar(choice=["a", "b"])
    with pytest.raises(RequestError, match="allowed_token_ids exclude all"):
        Answer(asking(constraint, allowed_token_ids=(TEXTS.index(","),)), structured)
    answer = Answer(asking(constraint, min_tokens=3, stop_ids=(EOS,)), structured).go(TEXTS.index("a"))
    assert answer.mask_state.error == "the grammar is complete after 1 tokens, but min_tokens is 3"


def test_a_token_outside_the_grammar_is_an_error_of_the_answer(structured):
    answer = Answer(asking(grammar(choice=["a", "b"])), structured)
    answer.mask_state.accept(TEXTS.index(","))
    assert "does not fit" in (answer.mask_state.error or "")


OPEN = Thinking(ends=((END_THINK,),), open=True)


def test_the_grammar_begins_after_the_reasoning(structured):
    answer = Answer(asking(grammar(choice=["a", "b"]), OPEN), structured)
    thinking = answer.allowed
    assert EOS not in thinking, "an answer that ends while it thinks has no form"
    assert thinking == set(range(SIZE)) - {EOS}
    answer.go(*spell("1+1,"), END_THINK)
    assert answer.allowed == {TEXTS.index("a"), TEXTS.index("b")}
    assert answer.go(TEXTS.index("a")).allowed == {EOS}


def test_a_grammar_that_constrains_the_reasoning_too(structured):
    holds = Thinking(ends=((END_THINK,),), open=True, in_grammar=True)
    assert Answer(asking(grammar(choice=["a", "b"]), holds), structured).allowed == {TEXTS.index("a"), TEXTS.index("b")}


def test_reasoning_that_the_answer_may_open(structured):
    a, b = TEXTS.index("a"), TEXTS.index("b")
    start = (a, THINK)
    constraint, may = grammar(choice=["ab", "b"]), Thinking(ends=((END_THINK,),), open=False, starts=(start, (THINK,)))
    answer = Answer(asking(constraint, may), structured)
    assert answer.allowed == {a, b, TEXTS.index("ab"), THINK}
    assert Answer(asking(constraint, may), structured).go(b).allowed == {EOS}
    assert Answer(asking(constraint, may), structured).go(a).allowed == {b, THINK}
    assert Answer(asking(constraint, may), structured).go(a, b).allowed == {EOS}
    thinking = Answer(asking(constraint, may), structured).go(a, THINK)
    assert thinking.allowed == set(range(SIZE)) - {EOS}
    assert thinking.go(a, a, END_THINK).allowed == {a, b, TEXTS.index("ab")}


def test_a_start_sequence_that_the_grammar_rejects(structured):
    x = TEXTS.index("x")
    may = Thinking(ends=((END_THINK,),), open=False, starts=((x, THINK),))
    answer = Answer(asking(grammar(choice=["a", "b"]), may), structured).go(x)
    assert answer.allowed == {THINK}
    assert answer.go(THINK, END_THINK).allowed == {TEXTS.index("a"), TEXTS.index("b")}


def test_a_budget_forces_the_end_with_and_without_a_grammar(structured):
    two = Thinking(ends=((TEXTS.index(","), END_THINK),), open=True, budget=2)
    for constraint, then in ((grammar(choice=["a"]), {TEXTS.index("a")}), (None, set(range(SIZE)))):
        answer = Answer(asking(constraint, two), structured).go(*spell("1"), *spell("2"))
        assert answer.allowed == {TEXTS.index(",")}
        assert answer.go(TEXTS.index(",")).allowed == {END_THINK}
        assert answer.go(END_THINK).allowed == then


def test_masks_that_depend_on_the_newest_token(structured):
    constraint = Answer(asking(grammar(choice=["ab"])), structured).mask_state
    assert (constraint.depends_on(0), constraint.depends_on(1)) == (False, True)
    budget = Thinking(ends=((END_THINK,),), open=True, budget=2)
    free = Answer(asking(None, budget), structured)
    assert (free.mask_state.depends_on(1), free.mask_state.depends_on(2)) == (False, True)
    assert not free.go(END_THINK).mask_state.depends_on(9)


@each_row("seed", range(6))
def test_masks_after_drafts_equal_those_of_accepting_the_tokens(structured, seed):
    """The state itself is unchanged."""
    rng, constraint = random.Random(seed), grammar(regex="(a|b){3,6},")
    answer = Answer(asking(constraint, bad_words=((TEXTS.index("a"), TEXTS.index("b")),)), structured)
    drafts: list[int] = []
    ahead = Answer(asking(constraint, bad_words=((TEXTS.index("a"), TEXTS.index("b")),)), structured)
    want = [ahead.allowed]
    for _ in range(3):
        drafts.append(rng.choice(sorted(ahead.allowed)))
        want.append(ahead.go(drafts[-1]).allowed)
        if ahead.mask_state.finished:
            want[-1] = set(range(SIZE))
            break
    before = answer.allowed
    masks = masks_after(answer.mask_state, drafts, answer.outputs)
    assert [set_of(row) for row in masks] == want
    assert answer.allowed == before
    assert answer.go(drafts[0]).allowed == want[1]


def test_masks_after_a_rejected_draft_are_all_ones(structured):
    state = Answer(asking(grammar(choice=["ab", "ba"])), structured).mask_state
    masks = masks_after(state, [TEXTS.index("a"), TEXTS.index(","), TEXTS.index("b")], [])
    assert set_of(masks[1]) == {TEXTS.index("b")}
    assert (masks[2:] == np.uint32(0xFFFFFFFF)).all()


def test_answers_of_one_grammar_are_independent(structured):
    constraint = grammar(choice=["ab", "ba"])
    first, second = Answer(asking(constraint), structured), Answer(asking(constraint), structured)
    first.go(TEXTS.index("a"))
    assert second.allowed == {TEXTS.index(text) for text in ("a", "b", "ab", "ba")}


@each_row(
    ("params", "words"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: ("}, "Expected token"),
        ({"json": {"type": "banana"}}, "banana"),
        ({"json": {"not": {}}}, "no value matches"),
        ({"json": {"$ref": "#/$defs/nowhere"}}, "nowhere"),
    ],
)
def test_an_invalid_grammar_is_reported(structured, params, words):
    with pytest.raises(RequestError, match=words) as caught:
        structured.mask_state(asking(grammar(**params)))
    assert caught.value.field == "structured_outputs"
    assert "\n" not in str(caught.value)


class Counted(list[int]):
    """A list of tokens that counts slices of its end."""

    looks = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        self.looks += isinstance(key, slice)
        return super().__getitem__(key)


def test_only_bad_words_with_a_matching_head_are_compared():
    a, b, comma = (TEXTS.index(text) for text in "ab,")
    words = ((a, b), (a, a, b), (comma,), *((b, token) for token in range(60)), *((b, b, t) for t in range(60)))
    state = Structured(vocabulary).mask_state(asking(grammar(regex="[ab,]{1,9}"), bad_words=words))
    outputs = Counted([a])
    state.accept(a)
    refresh_masks([(state, outputs)])
    assert state.bits is not None
    allowed = np.flatnonzero(np.unpackbits(state.bits.view(np.uint8), bitorder="little"))
    assert a in allowed
    assert not {b, comma} & set(allowed.tolist())
    assert outputs.looks <= 2
