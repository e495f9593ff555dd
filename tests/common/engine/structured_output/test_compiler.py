"""Grammars in the step loop over the strict fake backend: with other requests, preempted, sharded, failing."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from fakes import FakeBackend, FakePending, FakeShards, full_layout, scrambled
from llguidance import gbnf_to_lark
from support.checkpoints.grammars import END_THINK, EOS, SPECIAL, TEXTS, asking, grammar, text_of, vocabulary
from support.engines.engine_runs import drain, new_tokens
from support.suite.rows import each_row

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.steps.contract import PREVIOUS, StepPlan, StepResult, TokenMasks
from pagoda.common.engine.structured_output.compiler import MAX_GRAMMARS, Structured
from pagoda.common.engine.structured_output.grammar import Grammar, Thinking
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import StructuredOutputsParams

CHOICES = ("ab,ab", "b,b,a,a", "aaaaaaab")


def limits(**settings) -> Limits:
    defaults = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4}
    return Limits(**(defaults | settings))


def engine(structured: Structured, num_blocks: int = 64, **settings) -> EngineCore:
    backend = FakeBackend(full_layout(), num_blocks=num_blocks, next_token=scrambled)
    return generation_core(backend, backend.layout, limits(**settings), backend.num_blocks, structured=structured)


@pytest.fixture(scope="module")
def structured() -> Structured:
    return Structured(vocabulary)


def plain(name: str, **settings) -> EngineRequest:
    return replace(asking(name=name), stop_token_ids=frozenset(), eos_token_ids=frozenset(), **settings)


@each_row("ahead", [False, True])
@each_row("num_blocks", [64, 9])
def test_constrained_answers_fit_and_others_are_unchanged(structured, ahead, num_blocks):
    """Few blocks: requests are preempted in the middle of their grammar."""
    core = engine(structured, num_blocks, async_scheduling=ahead)
    alone = engine(structured, async_scheduling=ahead)
    for number in range(3):
        core.add_request(asking(grammar(choice=CHOICES), name=f"constrained {number}"))
        core.add_request(plain(f"free {number}", max_tokens=12, prompt_token_ids=[7, number]))
        alone.add_request(plain(f"free {number}", max_tokens=12, prompt_token_ids=[7, number]))
    outputs_of, expected = drain(core), drain(alone)
    assert (core.stats.preemptions > 0) == (num_blocks == 9)
    for number in range(3):
        constrained = outputs_of[f"constrained {number}"]
        assert text_of(new_tokens(constrained)) in CHOICES
        assert (constrained[-1].finish_reason, constrained[-1].stop_reason, new_tokens(constrained)[-1]) == (
            "stop",
            None,
            EOS,
        )
        assert new_tokens(outputs_of[f"free {number}"]) == new_tokens(expected[f"free {number}"])


def plans_of(structured: Structured, free: int) -> tuple[list[StepPlan], int]:
    """Return the plans of one constrained answer beside `free` others, and its number of tokens."""
    core = engine(structured, max_num_seqs=16, max_num_batched_tokens=64)
    core.add_request(asking(grammar(choice=["aaaaaaab"]), name="constrained"))
    for _, state in core._grammars._compiling.values():
        state.result(10)  # The grammar is compiled, so that all begin together.
    for number in range(free):
        core.add_request(plain(str(number), max_tokens=20, prompt_token_ids=[number, 7]))
    answer = new_tokens(drain(core)["constrained"])
    return core._execute.__self__.plans, len(answer)


@pytest.mark.parametrize("free", [0, 3, 9])
def test_masked_rows_are_planned_ahead_as_others_are(structured, free):
    plans, length = plans_of(structured, free)
    masked = [plan for plan in plans if plan.masked is not None]
    assert len(masked) == length + 1 > 4, "one of them was planned before the last token was known"
    assert all((plan.token_ids == PREVIOUS).all() for plan in masked[1:]), "each step but the first is planned ahead"
    assert all(plan.num_seqs == free + 1 for plan in masked)


class Recorder:
    """A fake backend's steps, recording the order of calls by step."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.calls: list[tuple[str, int]] = []

    def execute(self, plan: StepPlan) -> RecordedStep:
        self.calls.append(("execute", plan.step))
        return RecordedStep(self, self.backend.execute(plan))


class RecordedStep:
    def __init__(self, recorder: Recorder, step: FakePending) -> None:
        self.recorder, self.step = recorder, step

    def bind_masks(self, masks: TokenMasks) -> None:
        self.recorder.calls.append(("bind", self.step.plan.step))
        self.step.bind_masks(masks)

    def result(self) -> StepResult:
        self.recorder.calls.append(("result", self.step.plan.step))
        return self.step.result()


@pytest.mark.parametrize("ahead", [False, True])
def test_masks_are_bound_after_the_result_before_and_before_the_own_result(structured, ahead):
    core = engine(structured, async_scheduling=ahead)
    recorder = Recorder(core._execute.__self__)
    core._execute = recorder.execute
    core.add_request(asking(grammar(choice=["aaaaaaab"]), name="constrained"))
    answer = new_tokens(drain(core)["constrained"])
    steps = [step for call, step in recorder.calls if call == "execute"]
    order = {call: index for index, call in enumerate(recorder.calls)}
    assert len(order) == len(recorder.calls) == 3 * len(steps), "each step has each call once"
    assert len(steps) == len(answer) + ahead > 2, "one step was planned before the last token was known"
    for step in steps:
        assert order["execute", step] < order["bind", step] < order["result", step]
        if step:
            assert order["result", step - 1] < order["bind", step]
            assert order["bind", step - 1] < order["execute", step]
            assert (order["execute", step] < order["result", step - 1]) == ahead


def test_prefix_cache_serves_a_constrained_answer(structured):
    core = engine(structured, max_num_batched_tokens=32)
    prompt = list(range(1, 18))
    core.add_request(plain("first", prompt_token_ids=prompt))
    drain(core)
    core.add_request(replace(asking(grammar(choice=CHOICES), name="second"), prompt_token_ids=prompt))
    outputs_of = drain(core)["second"]
    assert outputs_of[0].num_cached_tokens == 16
    assert text_of(new_tokens(outputs_of)) in CHOICES


def test_shards_share_compiled_grammars(structured):
    backend = FakeShards(full_layout(), 2, num_blocks=40, next_token=scrambled)
    core = sharded_core(backend, backend.layout, limits(), (40,), 2, structured=structured)
    for number in range(6):
        core.add_request(asking(grammar(choice=CHOICES), name=str(number)))
    core.add_request(asking(grammar(regex="(a"), name="bad"))
    outputs_of = drain(core)
    assert all(text_of(new_tokens(outputs_of[str(number)])) in CHOICES for number in range(6))
    assert outputs_of["bad"][0].finish_reason == "error"
    assert not core._scheduler._shard_of


def test_an_answer_cut_by_length_is_a_prefix_of_a_valid_one(structured):
    core = engine(structured)
    core.add_request(asking(grammar(choice=["aaaaaaab"]), max_tokens=2))
    (answer,) = drain(core).values()
    assert answer[-1].finish_reason == "length"
    assert "aaaaaaab".startswith(text_of(new_tokens(answer)))


def test_an_invalid_grammar_ends_only_its_request(structured):
    core = engine(structured)
    core.add_request(asking(grammar(regex="(a"), name="bad"))
    core.add_request(asking(grammar(choice=CHOICES), name="good"))
    outputs_of = drain(core)
    (answer,) = outputs_of["bad"]
    assert (answer.finish_reason, answer.new_token_ids) == ("error", [])
    assert answer.error is not None
    assert answer.error[0] == "structured_outputs"
    assert "unclosed" in answer.error[1]
    assert text_of(new_tokens(outputs_of["good"])) in CHOICES


def test_an_answer_with_an_empty_mask_ends_only_its_request(structured):
    core = engine(structured)
    core.add_request(asking(grammar(choice=["a"]), name="short", min_tokens=4, stop_ids=(EOS,)))
    core.add_request(asking(grammar(choice=CHOICES), name="good"))
    outputs_of = drain(core)
    last = outputs_of["short"][-1]
    assert last.finish_reason == "error"
    assert "min_tokens is 4" in (last.error or ("", ""))[1]
    assert text_of(new_tokens(outputs_of["good"])) in CHOICES


class Panic(BaseException):
    """The exception of a panic in native code."""


@pytest.mark.parametrize("fault", [ZeroDivisionError, Panic])
def test_a_library_failure_ends_only_its_request(structured, monkeypatch, fault):
    def fail(grammar: Grammar, owner: str) -> None:
        raise fault

    broken = Structured(vocabulary)
    monkeypatch.setattr(broken, "compiled", fail)
    core = engine(broken)
    core.add_request(asking(grammar(choice=CHOICES), name="bad"))
    core.add_request(plain("free"))
    outputs_of = drain(core)
    assert outputs_of["bad"][0].finish_reason == "error"
    assert len(new_tokens(outputs_of["free"])) == 30


def test_the_grammar_ends_an_answer_that_ignores_eos(structured):
    core = engine(structured)
    core.add_request(replace(asking(grammar(choice=["a"])), stop_token_ids=frozenset(), eos_token_ids=frozenset()))
    (answer,) = drain(core).values()
    assert (new_tokens(answer), answer[-1].finish_reason, answer[-1].stop_reason) == (
        [TEXTS.index("a"), EOS],
        "stop",
        None,
    )


def test_a_stop_token_ends_a_constrained_answer(structured):
    core = engine(structured)
    a = TEXTS.index("a")
    core.add_request(replace(asking(grammar(regex="a{1,9}"), allowed_token_ids=(a,)), stop_token_ids=frozenset({a})))
    (answer,) = drain(core).values()
    assert (new_tokens(answer), answer[-1].finish_reason, answer[-1].stop_reason) == ([a], "stop", a)


def test_a_spent_budget_ends_the_reasoning(structured):
    core = engine(structured)
    budget = Thinking(ends=((END_THINK,),), open=True, budget=5)
    core.add_request(asking(grammar(choice=["ab"]), budget, name="constrained"))
    core.add_request(replace(plain("free"), thinking=budget))
    outputs_of = drain(core)
    constrained, free = new_tokens(outputs_of["constrained"]), new_tokens(outputs_of["free"])
    assert constrained.index(END_THINK) == free.index(END_THINK) == 5
    assert text_of(constrained[6:]) == "ab"
    assert len(free) == 30


def test_abort_while_the_grammar_compiles(structured, monkeypatch):
    slow, go = Structured(vocabulary), threading.Event()
    usual = slow.mask_state
    monkeypatch.setattr(slow, "mask_state", lambda request: go.wait(60) and usual(request))
    core = engine(slow)
    core.add_request(asking(grammar(choice=CHOICES)))
    with pytest.raises(RequestError, match="already in the engine"):
        core.add_request(asking(grammar(choice=CHOICES)))
    assert core.has_work
    step = core.step()
    assert (step.outputs, step.stats.deferred, step.stats.waiting) == ([], 1, 0)
    core.abort(["r"])
    assert not core.has_work
    assert core.stats.deferred == 0
    go.set()
    assert drain(core) == {}


def test_requests_whose_grammar_compiles_are_counted_beside_running_ones(monkeypatch):
    slow, go = Structured(vocabulary), threading.Event()
    usual = slow.mask_state
    monkeypatch.setattr(slow, "mask_state", lambda request: go.wait(60) and usual(request))
    backend = FakeShards(full_layout(), 2, num_blocks=40, next_token=scrambled)
    core = sharded_core(backend, backend.layout, limits(), (40,), 2, structured=slow)
    core.add_request(asking(grammar(choice=CHOICES)))
    core.add_request(plain("free"))
    stats = core.step().stats
    assert (stats.running, stats.deferred, [each.deferred for each in stats.replicas]) == (1, 1, [1, 0])
    go.set()
    drain(core)
    assert core.stats.deferred == 0


def test_without_a_tokenizer_a_grammar_is_refused():
    backend = FakeBackend(full_layout())
    core = generation_core(backend, backend.layout, limits(), (64,))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        core.add_request(asking(grammar(choice=CHOICES)))


def test_the_grammar_cache_is_bounded(monkeypatch):
    structured = Structured(vocabulary)
    library = structured.compiled(grammar(choice=["a"])).library
    compiled: list[str] = []
    usual = library.compile
    monkeypatch.setattr(library, "compile", lambda text: compiled.append(text) or usual(text))
    structured.compiled(grammar(choice=["a"]))
    assert compiled == []
    for number in range(MAX_GRAMMARS):
        structured.compiled(Grammar(f'start: "a{number}"'))
    structured.compiled(grammar(choice=["a"]))
    assert len(compiled) == MAX_GRAMMARS + 1
    assert len(structured._kept) == MAX_GRAMMARS


def test_several_answers_of_one_grammar(structured):
    """As with n > 1: the answers differ."""
    core = engine(structured)
    for index in range(4):
        core.add_request(replace(asking(grammar(choice=CHOICES), name=f"{index}_r"), prompt_token_ids=[index, 2]))
    outputs_of = {text_of(new_tokens(answer)) for answer in drain(core).values()}
    assert outputs_of <= set(CHOICES)
    assert len(outputs_of) > 1


def test_grammar_texts_need_no_library():
    """JSON schemas and choices are converted without importing the library."""
    params = StructuredOutputsParams(json={"type": "integer"})
    schema = '{"type":"integer","x-guidance":{"whitespace_pattern":"[ \\\\n\\\\r\\\\t]{1,64}"}}'
    assert guidance_text(params, SPECIAL) == f'{{"grammars":[{{"json_schema":{schema},"close_objects":"no"}}]}}'


def test_blank_lines_of_ebnf_are_dropped_before_conversion(monkeypatch):
    """The converter's time is quadratic in blank lines, so they are dropped first."""
    seen: list[str] = []
    monkeypatch.setattr(gbnf_to_lark, "is_lark_syntax", lambda text: seen.append(text) or False)
    rules = ["root ::= x", "x ::= ", '  "b"']
    text = guidance_text(StructuredOutputsParams(grammar="\n \n\n".join(rules) + "\n" * 1000), SPECIAL)
    assert seen == ["\n".join(rules)]
    assert text == guidance_text(StructuredOutputsParams(grammar="\n".join(rules)), SPECIAL)
    with pytest.raises(RequestError, match="at most 262144 are allowed"):
        guidance_text(StructuredOutputsParams(grammar="root ::= x" + "#\n" * (1 << 17)), SPECIAL)
