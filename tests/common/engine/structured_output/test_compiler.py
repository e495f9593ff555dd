"""Grammars in the step loop, over the strict fake backend: beside other requests, preempted, sharded, failing."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from fakes import FakeBackend, FakeShards, full_layout, scrambled
from llguidance import gbnf_to_lark
from support.grammars import END_THINK, EOS, SPECIAL, TEXTS, asking, grammar, text_of, vocabulary

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.step import StepPlan
from pagoda.common.engine.structured_output.compiler import MAX_GRAMMARS, Structured
from pagoda.common.engine.structured_output.grammar import Grammar, Thinking
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import StructuredOutputsParams

CHOICES = ("ab,ab", "b,b,a,a", "aaaaaaab")


def limits(**settings) -> Limits:
    defaults = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4}
    return Limits(**(defaults | settings))


def engine(made: Structured, num_blocks: int = 64, **settings) -> EngineCore:
    backend = FakeBackend(full_layout(), num_blocks=num_blocks, next_token=scrambled)
    return generation_core(backend, backend.layout, limits(**settings), num_blocks, structured=made)


@pytest.fixture(scope="module")
def made() -> Structured:
    return Structured(vocabulary)


def drain(core: EngineCore) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    core.check_integrity()
    return outputs


def tokens(news: list[EngineOutput]) -> list[int]:
    return [token for output in news for token in output.new_token_ids]


def plain(name: str, **settings) -> EngineRequest:
    return replace(asking(name=name), stop_token_ids=frozenset(), eos_token_ids=frozenset(), **settings)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_answers_fit_and_others_are_as_ever(made, ahead, num_blocks):
    """Few blocks: requests are preempted in the middle of their grammar."""
    core = engine(made, num_blocks, async_scheduling=ahead)
    alone = engine(made, async_scheduling=ahead)
    for number in range(3):
        core.add_request(asking(grammar(choice=CHOICES), name=f"held {number}"))
        core.add_request(plain(f"free {number}", max_tokens=12, prompt_token_ids=[7, number]))
        alone.add_request(plain(f"free {number}", max_tokens=12, prompt_token_ids=[7, number]))
    found, want = drain(core), drain(alone)
    assert (core.stats.preemptions > 0) == (num_blocks == 9)
    for number in range(3):
        held = found[f"held {number}"]
        assert text_of(tokens(held)) in CHOICES
        assert (held[-1].finish_reason, held[-1].stop_reason, tokens(held)[-1]) == ("stop", None, EOS)
        assert tokens(found[f"free {number}"]) == tokens(want[f"free {number}"])


def plans_of(made: Structured, free: int) -> list[StepPlan]:
    """The plans of one held answer beside so many others."""
    core = engine(made, max_num_seqs=16, max_num_batched_tokens=64)
    core.add_request(asking(grammar(choice=["aaaaaaab"]), name="held"))
    for _, state in core._grammars._compiling.values():
        state.result(10)  # it is compiled, so that all begin together
    for number in range(free):
        core.add_request(plain(str(number), max_tokens=20, prompt_token_ids=[number, 7]))
    drain(core)
    return core._execute.__self__.plans


def test_a_few_held_rows_wait_for_their_tokens_while_others_go_ahead(made):
    plans = plans_of(made, 9)
    masked = [plan for plan in plans if plan.masks is not None]
    assert masked
    assert all(plan.token_ids[plan.masks.sequences[0]] >= 0 for plan in masked), "its newest token is known"
    assert any((plan.token_ids < 0).any() for plan in plans), "another's is not"
    assert any(plan.masks is None for plan in plans[: plans.index(masked[-1])]), "a step without it"


def test_steps_with_many_held_rows_are_planned_once_all_can_take_part(made):
    plans = plans_of(made, 3)
    masked = [index for index, plan in enumerate(plans) if plan.masks is not None]
    assert masked == list(range(masked[0], masked[-1] + 1)), "no step goes without the held row"
    assert all(plan.num_seqs == 4 for plan in plans[masked[0] : masked[-1]])


def test_a_cached_prompt_serves_a_held_answer(made):
    core = engine(made, max_num_batched_tokens=32)
    prompt = list(range(1, 18))
    core.add_request(plain("first", prompt_token_ids=prompt))
    drain(core)
    core.add_request(replace(asking(grammar(choice=CHOICES), name="second"), prompt_token_ids=prompt))
    found = drain(core)["second"]
    assert found[0].num_cached_tokens == 16
    assert text_of(tokens(found)) in CHOICES


def test_shards_share_the_grammars(made):
    backend = FakeShards(full_layout(), 2, num_blocks=40, next_token=scrambled)
    core = sharded_core(backend, backend.layout, limits(), 40, 2, structured=made)
    for number in range(6):
        core.add_request(asking(grammar(choice=CHOICES), name=str(number)))
    core.add_request(asking(grammar(regex="(a"), name="bad"))
    found = drain(core)
    assert all(text_of(tokens(found[str(number)])) in CHOICES for number in range(6))
    assert found["bad"][0].finish_reason == "error"
    assert not core._scheduler._shard_of


def test_an_answer_cut_by_length_is_the_beginning_of_one_that_fits(made):
    core = engine(made)
    core.add_request(asking(grammar(choice=["aaaaaaab"]), max_tokens=2))
    (news,) = drain(core).values()
    assert news[-1].finish_reason == "length"
    assert "aaaaaaab".startswith(text_of(tokens(news)))


def test_a_bad_grammar_ends_its_request_alone(made):
    core = engine(made)
    core.add_request(asking(grammar(regex="(a"), name="bad"))
    core.add_request(asking(grammar(choice=CHOICES), name="good"))
    found = drain(core)
    (news,) = found["bad"]
    assert (news.finish_reason, news.new_token_ids) == ("error", [])
    assert news.error is not None
    assert news.error[0] == "structured_outputs"
    assert "unclosed" in news.error[1]
    assert text_of(tokens(found["good"])) in CHOICES


def test_an_answer_that_cannot_go_on_ends_alone(made):
    core = engine(made)
    core.add_request(asking(grammar(choice=["a"]), name="short", min_tokens=4, stop_ids=(EOS,)))
    core.add_request(asking(grammar(choice=CHOICES), name="good"))
    found = drain(core)
    last = found["short"][-1]
    assert last.finish_reason == "error"
    assert "min_tokens is 4" in (last.error or ("", ""))[1]
    assert text_of(tokens(found["good"])) in CHOICES


class Panic(BaseException):
    """As native libraries raise it."""


@pytest.mark.parametrize("fault", [ZeroDivisionError, Panic])
def test_a_library_that_fails_ends_its_request_alone(made, monkeypatch, fault):
    def fail(grammar: Grammar) -> None:
        raise fault

    broken = Structured(vocabulary)
    monkeypatch.setattr(broken, "matcher", fail)
    core = engine(broken)
    core.add_request(asking(grammar(choice=CHOICES), name="bad"))
    core.add_request(plain("free"))
    found = drain(core)
    assert found["bad"][0].finish_reason == "error"
    assert len(tokens(found["free"])) == 30


def test_the_grammar_ends_an_answer_that_ignores_eos(made):
    core = engine(made)
    core.add_request(replace(asking(grammar(choice=["a"])), stop_token_ids=frozenset(), eos_token_ids=frozenset()))
    (news,) = drain(core).values()
    assert (tokens(news), news[-1].finish_reason, news[-1].stop_reason) == ([TEXTS.index("a"), EOS], "stop", None)


def test_a_stop_token_ends_a_held_answer(made):
    core = engine(made)
    a = TEXTS.index("a")
    core.add_request(replace(asking(grammar(regex="a{1,9}"), allowed_token_ids=(a,)), stop_token_ids=frozenset({a})))
    (news,) = drain(core).values()
    assert (tokens(news), news[-1].finish_reason, news[-1].stop_reason) == ([a], "stop", a)


def test_a_spent_budget_ends_the_thinking(made):
    core = engine(made)
    budget = Thinking(ends=((END_THINK,),), open=True, budget=5)
    core.add_request(asking(grammar(choice=["ab"]), budget, name="held"))
    core.add_request(replace(plain("free"), thinking=budget))
    found = drain(core)
    held, free = tokens(found["held"]), tokens(found["free"])
    assert held.index(END_THINK) == free.index(END_THINK) == 5
    assert text_of(held[6:]) == "ab"
    assert len(free) == 30


def test_aborted_while_its_grammar_compiles(made, monkeypatch):
    slow, go = Structured(vocabulary), threading.Event()
    usual = slow.mask_state
    monkeypatch.setattr(slow, "mask_state", lambda request: go.wait(5) and usual(request))
    core = engine(slow)
    core.add_request(asking(grammar(choice=CHOICES)))
    with pytest.raises(RequestError, match="already in the engine"):
        core.add_request(asking(grammar(choice=CHOICES)))
    assert core.has_work
    assert core.step().outputs == []
    core.abort(["r"])
    assert not core.has_work
    go.set()
    assert drain(core) == {}


def test_without_a_tokenizer_a_grammar_is_refused():
    backend = FakeBackend(full_layout())
    core = generation_core(backend, backend.layout, limits(), 64)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        core.add_request(asking(grammar(choice=CHOICES)))


def test_compiled_grammars_are_kept_up_to_a_number(monkeypatch):
    made = Structured(vocabulary)
    library, _ = made.matcher(grammar(choice=["a"]))
    compiled: list[str] = []
    usual = library.compile
    monkeypatch.setattr(library, "compile", lambda text: compiled.append(text) or usual(text))
    made.matcher(grammar(choice=["a"]))
    assert compiled == []
    for number in range(MAX_GRAMMARS):
        made.matcher(Grammar(f'start: "a{number}"'))
    made.matcher(grammar(choice=["a"]))
    assert len(compiled) == MAX_GRAMMARS + 1
    assert len(made._compiled) == MAX_GRAMMARS


def test_several_answers_to_one_grammar(made):
    """As n > 1 asks for them: each goes its own way."""
    core = engine(made)
    for index in range(4):
        core.add_request(replace(asking(grammar(choice=CHOICES), name=f"{index}_r"), prompt_token_ids=[index, 2]))
    found = {text_of(tokens(news)) for news in drain(core).values()}
    assert found <= set(CHOICES)
    assert len(found) > 1


def test_texts_are_pure():
    """No library is needed to say what JSON or a choice must look like."""
    asked = StructuredOutputsParams(json={"type": "integer"})
    assert guidance_text(asked, SPECIAL) == '{"grammars":[{"json_schema":{"type":"integer"}}]}'


def test_ebnf_of_any_shape_is_read_at_once(monkeypatch):
    """Blank lines cost the converter their number squared, so it never sees them."""
    seen: list[str] = []
    monkeypatch.setattr(gbnf_to_lark, "is_lark_syntax", lambda text: seen.append(text) or False)
    rules = ["root ::= x", "x ::= ", '  "b"']
    text = guidance_text(StructuredOutputsParams(grammar="\n \n\n".join(rules) + "\n" * 1000), SPECIAL)
    assert seen == ["\n".join(rules)]
    assert text == guidance_text(StructuredOutputsParams(grammar="\n".join(rules)), SPECIAL)
    with pytest.raises(RequestError, match="at most 262144 are allowed"):
        guidance_text(StructuredOutputsParams(grammar="root ::= x" + "#\n" * (1 << 17)), SPECIAL)
