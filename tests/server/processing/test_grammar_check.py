"""Grammars are tried in a process of their own: what is wrong with them is told, what kills it or hangs is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints.byte_text import EOS, byte_tokenizer
from support.suite.rows import each_row
from support.suite.watching import Children, until

from pagoda.common.engine.structured_output.grammar import Grammar, ResolvedGrammar, Vocabulary, vocabulary_of
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.errors import QueueFullError, RequestError
from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.processing.workers import grammar_check
from pagoda.server.processing.workers.grammar_check import GrammarCheck


def vocabulary() -> Vocabulary:
    return vocabulary_of(byte_tokenizer(), 300, (EOS,))


def text(**asked: object) -> Grammar:
    return Grammar(guidance_text(StructuredOutputsParams(**asked), {}))


def why(check: GrammarCheck, grammar: Grammar) -> str:
    """What is wrong with it; empty: nothing."""
    refusal: RequestError | None = None
    try:
        asyncio.run(check.check(grammar))
    except RequestError as error:
        refusal = error
    assert refusal is None or (refusal.field == "structured_outputs" and "\n" not in str(refusal))
    return "" if refusal is None else str(refusal)


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    made = GrammarCheck(vocabulary)
    yield made
    made.close()


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def chain(length: int) -> dict[str, object]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": links | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


RECURSIVE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}},
    "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}],
}
WIDE = {
    "type": "object",
    "properties": {f"property {i}": {"type": "string", "description": "x" * 60} for i in range(999)},
}


@each_row(
    "asked",
    [
        {"regex": "(a+)+b"},
        {"regex": "(x+x+)+y"},
        {"json": RECURSIVE},
        {"json": {"enum": [f"value {i}" for i in range(10_000)]}},
        {"json": WIDE},
        {"json": nested(50)},
        {"choice": ["only"]},
    ],
)
def test_what_compiles_passes(check, asked):
    assert why(check, text(**asked)) == ""


@each_row(
    ("grammar", "words"),
    [
        (text(regex="(a"), "unclosed group"),
        (text(regex=r"(a)\1"), "backreferences are not supported"),
        (text(json={"type": "banana"}), "type 'banana' is unknown"),
        (text(json={"type": "object", "required": ["a"], "maxProperties": 0, "if": {}}), "no value matches"),
        (text(json={"$defs": {"d": {"$ref": "#/$defs/d"}}, "$ref": "#/$defs/d"}), "no text fits"),
        (Grammar(f'{{"grammars":[{{"json_schema":{nested(500)}}}]}}'), "recursion limit"),
        (Grammar("start: " + "(" * 9000 + '"a"' + ")" * 9000), "too deeply nested"),
        (text(json=chain(20_000)), "too large or nested too deeply"),
        (Grammar("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"'), "too large"),
        (Grammar('start: "\ud800"'), "invalid characters"),
    ],
)
def test_what_does_not_is_told_and_the_next_passes(check, grammar, words):
    assert words in why(check, grammar)
    assert why(check, text(choice=["x", "y"])) == ""


def test_what_is_too_large_once_it_is_entered_is_refused() -> None:
    """Its first mask is computed; the one after a token fails. The lowest token ends the answer, which is no way in."""
    tokens = (b"<eos>", b"a", b"a" * 64, b"a" * 1000, b"b")
    check = GrammarCheck(lambda: Vocabulary(tokens, frozenset({0}), (0,), lambda text: [1] * len(text)))
    try:
        assert "too many expressions" in why(check, text(regex="a{1000000000}"))
        assert "too many expressions" in why(check, text(regex="(a{1000000000})?"))
        assert why(check, text(regex="[ab]*")) == ""
        assert why(check, text(regex="(ab)?")) == ""
    finally:
        check.close()


def test_what_takes_too_long_is_refused() -> None:
    patterns = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(30)]}
    check = GrammarCheck(vocabulary, seconds=0.3, elapsed=300)
    try:
        assert "takes more than 0.3 s" in why(check, text(json=patterns))
        assert why(check, text(choice=["x"])) == ""
    finally:
        check.close()


SCRIPT = """
import itertools, os, sys
import msgspec
from pagoda.common.engine.structured_output.grammar import ResolvedGrammar
from pagoda.server.processing.workers.grammar_worker import GrammarReply
from pagoda.server.processing.workers.worker import read_frame, write_frame
gate, *answers = sys.argv[1:]
read_frame(sys.stdin.buffer)
write_frame(sys.stdout.buffer, b"ready")
with open(gate, "rb", buffering=0) as opened, open(gate + ".asked", "a", buffering=1) as asked:
    for answer in itertools.chain(answers, itertools.repeat("no")):
        hangs = b"hang" in read_frame(sys.stdin.buffer)
        print(file=asked)
        opened.read(1) if not hangs else open(gate + ".hanging", "rb", buffering=0).read(1)
        reply = GrammarReply(answer) if answer else GrammarReply(resolved=ResolvedGrammar("text"))
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(reply))
"""


class Scripted:
    """A program that gives these answers, then `no`, each when it may; to grammars with `hang` when they may."""

    def __init__(self, folder: Path, *answers: str) -> None:
        path, gate = folder / "worker.py", folder / "gate"
        path.write_text(SCRIPT)
        os.mkfifo(gate)
        os.mkfifo(f"{gate}.hanging")
        self.command = (sys.executable, "-P", str(path), str(gate), *answers)
        self._gate, self._asked = os.open(gate, os.O_RDWR), folder / "gate.asked"
        self._hanging = os.open(f"{gate}.hanging", os.O_RDWR)

    @property
    def asked(self) -> int:
        """How many requests it has read."""
        return self._asked.stat().st_size if self._asked.exists() else 0

    def answer(self, count: int = 1) -> None:
        os.write(self._gate, b"." * count)

    def answer_hanging(self) -> None:
        os.write(self._hanging, b".")

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._hanging)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., Scripted]]:
    with contextlib.ExitStack() as opened:
        yield lambda *answers: opened.enter_context(contextlib.closing(Scripted(tmp_path, *answers)))


class Clock:
    """A clock that stands still until it is moved, and counts how often it was read."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


@pytest.mark.parametrize(
    ("after", "error"), [(59, ""), (61, "not compiled within 60 s; make it simpler, or try again on a less busy")]
)
async def test_a_busy_machine_is_waited_for(scripted, after, error):
    """The process computes nothing for longer than the processor time that it has."""
    program, clock = scripted(""), Clock()
    check = GrammarCheck(vocabulary, program.command, seconds=0.1, elapsed=60, clock=clock)
    try:
        answer = asyncio.create_task(check.check(text(choice=["x"])))
        await until(lambda: program.asked == 1)
        clock.now, reads = after, clock.reads
        await until(lambda: clock.reads > reads)
        if error:
            with pytest.raises(RequestError, match=error):
                await answer
        else:
            assert not answer.done()
            program.answer()
            await answer
    finally:
        check.close()


def test_what_passed_is_not_tried_again(scripted, monkeypatch):
    program = scripted("")
    program.answer(2)
    monkeypatch.setattr(grammar_check, "MAX_PASSED", 1)
    check = GrammarCheck(vocabulary, program.command)
    try:
        assert [why(check, Grammar(each)) for each in ("a", "a", "b")] == ["", "", "structured_outputs: no"]
    finally:
        check.close()


async def test_a_full_line_is_refused_and_other_keys_keep_their_share(scripted):
    """32 grammars of one key are in line: more of it are refused, and another key's first is tried at once."""
    program = scripted(*[""] * 40)
    check = GrammarCheck(vocabulary, program.command)
    try:
        many = [asyncio.create_task(check.check(Grammar(f"hang{i}"), "a", 32)) for i in range(40)]
        await asyncio.sleep(0)
        refusals = [task.exception() for task in many if task.done()]
        assert len(refusals) == 8
        assert all(isinstance(each, QueueFullError) and "this API key" in str(each) for each in refusals)
        other = asyncio.create_task(check.check(Grammar("b"), "b", 32))
        program.answer()
        await asyncio.wait_for(other, 60)
        assert sum(task.done() for task in many) == len(refusals)
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        program.answer_hanging()
        program.answer()
        await asyncio.wait_for(check.check(Grammar("c"), "a", 32), 60)
    finally:
        check.close()


async def test_a_grammar_that_takes_long_keeps_only_its_key_waiting(scripted):
    """Also after its request was cancelled: the process is busy with it until it is done."""
    program = scripted(*[""] * 40)
    check = GrammarCheck(vocabulary, program.command)
    try:
        slow = asyncio.create_task(check.check(Grammar("hang"), "a"))
        await until(lambda: program.asked == 1)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        next_of_key = asyncio.create_task(check.check(Grammar("next"), "a"))
        other = asyncio.create_task(check.check(Grammar("other"), "b"))
        await until(lambda: program.asked == 2)
        program.answer()
        await asyncio.wait_for(other, 60)
        assert not next_of_key.done()
        assert program.asked == 2
        program.answer_hanging()
        await until(lambda: program.asked == 3)
        program.answer()
        await asyncio.wait_for(next_of_key, 60)
    finally:
        check.close()


async def test_the_line_is_bounded_for_all_keys_together(scripted):
    check = GrammarCheck(vocabulary, scripted().command)
    try:
        many = [asyncio.create_task(check.check(Grammar(f"a{i}"), f"k{i % 8}")) for i in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="too many new grammars in line; try again later"):
            await check.check(Grammar("b"), "b")
        answer = asyncio.create_task(check.answer_error(ResolvedGrammar("", "true"), "1", "b"))
        await asyncio.sleep(0)
        assert not answer.done(), "a finished answer is checked, however long the line is"
        many.append(answer)
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
    finally:
        check.close()


async def test_a_grammar_in_line_is_compiled_once_for_all_who_wait(scripted):
    """The first request is cancelled: the others go on."""
    program = scripted("")
    check = GrammarCheck(vocabulary, program.command)
    try:
        program.answer()
        await asyncio.gather(*(check.check(Grammar("same"), "a", 1) for _ in range(200)))
        same = [asyncio.create_task(check.check(Grammar("other"), "a", 1)) for _ in range(3)]
        await until(lambda: program.asked == 2)
        same[0].cancel()
        program.answer()
        ends = await asyncio.gather(*same, return_exceptions=True)
        assert [type(each) for each in ends] == [asyncio.CancelledError, RequestError, RequestError]
        assert program.asked == 2
    finally:
        check.close()


def test_a_process_that_does_not_start_is_no_answer():
    check = GrammarCheck(vocabulary, (sys.executable, "-c", "pass"))
    try:
        with pytest.raises(RuntimeError, match="did not start"):
            asyncio.run(check.check(text(choice=["x"])))
    finally:
        check.close()


def test_closing_while_it_starts_leaves_no_process():
    def close_first() -> Vocabulary:
        check.close()
        return vocabulary()

    check, young = GrammarCheck(close_first), Children()
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(check.check(text(choice=["x"])))
    assert young() == []
