"""What compiled grammars use is bounded: of those kept, of all together, at the cost of the key with most."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.checkpoints.grammars import Answer, asking, grammar, vocabulary

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.structured_output.compiler import Structured, TurnThreads
from pagoda.common.engine.structured_output.grammar import Grammar
from pagoda.common.engine.structured_output.memory import CompiledGrammar, GrammarMemory
from pagoda.common.errors import RequestError

MIB = 1 << 20


class Resident:
    """What a process uses, as a test says."""

    def __init__(self) -> None:
        self.bytes = 100 * MIB


def numbered(number: int) -> Grammar:
    return Grammar(f'start: "a{number}"')


def request(number: int, owner: str = "") -> EngineRequest:
    return replace(asking(numbered(number)), owner=owner)


@pytest.fixture
def structured() -> Structured:
    made = Structured(vocabulary, max_cached_bytes=10 * MIB)
    made._resident = made._memory._resident = Resident()
    return made


def kept(structured: Structured) -> list[str]:
    return [each.text for each in structured._kept]


def test_the_key_with_most_makes_room(structured: Structured) -> None:
    mine = structured.mask_state(request(0, "mine"))
    mine.grow(MIB)
    mine.release()
    for number in range(1, 6):
        state = structured.mask_state(request(number, "hostile"))
        state.grow(3 * MIB)
        state.release()
    assert kept(structured) == [numbered(number).text for number in (0, 4, 5)]
    assert structured._shares.of("mine")[0] == 1
    assert structured._shares.bytes <= 10 * MIB


def test_growth_of_a_grammar_in_use_is_counted(structured: Structured) -> None:
    """It is dropped from those kept, and its memory goes once its last answer has ended."""
    one, other = structured.mask_state(request(0)), structured.mask_state(request(0))
    compiled = one._compiled
    one.grow(11 * MIB)
    assert kept(structured) == []
    one.release()
    assert hasattr(compiled, "matcher")
    other.release()
    assert not hasattr(compiled, "matcher")
    assert structured._memory._released >= 11 * MIB
    assert structured.mask_state(request(0))._compiled is not compiled


def test_a_grammar_that_fails_at_an_answer_is_not_kept(structured: Structured) -> None:
    answer = Answer(asking(grammar(regex="a{1000000000}")), structured)
    assert kept(structured) == [grammar(regex="a{1000000000}").text]
    while answer.mask_state.error is None:
        answer.go(min(answer.allowed))
    assert "too" in answer.mask_state.error
    assert kept(structured) == []


@pytest.mark.parametrize("grown", [9, 30])
def test_the_largest_of_the_key_with_most_ends_when_all_take_too_much(structured: Structured, grown: int) -> None:
    """Both must say so: what is counted, which has what others took meanwhile, and what the process has grown by."""
    memory = structured._memory
    memory._max_bytes = 20 * MIB
    structured._shares.max_bytes = 100 * MIB  # All grammars are kept.
    owners = ["a", "b", "b", "b"]
    states = [structured.mask_state(request(number, owner)) for number, owner in enumerate(owners)]
    memory._resident.bytes += grown * MIB
    for state, size in zip(states, (10, 3, 5, 4), strict=True):
        state.grow(size * MIB)
    for state in states:
        state.accept(vocabulary().encode("a")[0])
        state.refresh(np.full_like(state.bits, 0xFFFFFFFF), [0])
    errors = [state.error for state in states]
    assert [error is not None for error in errors] == [False, False, grown == 30, False]
    assert grown == 9 or "take 5 MiB" in (errors[2] or "")
    for state in states:
        state.release()
    again = structured.mask_state(request(2, "b"))
    assert again.error is None, "a later request has room for it"


def test_free_memory_is_given_back_once_enough_was_released() -> None:
    trims: list[int] = []
    memory = GrammarMemory(Resident(), lambda: trims.append(1))
    for size, count in ((10, 0), (5, 0), (1, 1), (15, 1), (200, 2)):
        each = CompiledGrammar(
            library=None,
            matcher=object(),
            first=np.zeros(1, np.uint32),
            owner="",
            size=size * MIB,
            changed=lambda _: None,
            lock=threading.RLock(),
        )
        memory.add(each)
        memory.release(each)
        assert len(trims) == count


def test_a_refused_grammar_and_an_aborted_one_are_let_go(structured: Structured) -> None:
    with pytest.raises(RequestError, match="bad_words or allowed"):
        structured.mask_state(asking(numbered(1), allowed_token_ids=(40,)))
    (compiled,) = structured._kept.values()
    assert compiled.answers == 0


class Calls:
    """Calls of threads, each of which goes on when it may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._may: set[str] = set()

    def make(self, name: str) -> Callable[[], str]:
        def call() -> str:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: name in self._may, 60)
            return name

        return call

    def await_begun(self, *names: str) -> None:
        """Wait until these, and no others, have begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: sorted(self.begun) == sorted(names), 60), self.begun

    def go_on(self, name: str) -> None:
        with self._changed:
            self._may.add(name)
            self._changed.notify_all()


def test_keys_take_turns_and_one_leaves_a_thread_to_others() -> None:
    threads, calls = TurnThreads[str](2, "turns", 1 << 20), Calls()
    for name in ("a1", "a2", "a3"):
        threads.submit("a", calls.make(name))
    calls.await_begun("a1")
    begun, last = threads.submit("b", calls.make("b1")), threads.submit("b", calls.make("b2"))
    calls.await_begun("a1", "b1")
    waiting = threads.submit("b", calls.make("b3"))
    threads.submit("c", calls.make("c1"))
    assert waiting.cancel()
    assert not begun.cancel()
    for done, next_one in (("a1", "a2"), ("b1", "b2"), ("a2", "c1"), ("b2", "a3")):
        names = list(calls.begun)
        calls.go_on(done)
        calls.await_begun(*names, next_one)
    for name in ("a3", "c1"):
        calls.go_on(name)
    assert last.result(60) == "b2"


def test_calls_of_no_key_use_all_threads() -> None:
    threads, calls = TurnThreads[str](2, "turns", 1 << 20), Calls()
    results = [threads.submit("", calls.make(name)) for name in ("1", "2", "3")]
    calls.await_begun("1", "2")
    for name in "123":
        calls.go_on(name)
    assert [each.result(60) for each in results] == ["1", "2", "3"]
