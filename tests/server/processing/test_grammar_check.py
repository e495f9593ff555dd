"""Grammars are tried in a process of their own: what is wrong with them is told, what kills it or hangs is refused."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Iterator

import pytest
from support.byte_text import EOS, byte_tokenizer
from support.rows import each_row
from support.watching import Children

from pagoda.common.engine.structured_output.grammar import Grammar, Vocabulary, vocabulary_of
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.errors import QueueFullError, RequestError
from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.processing import grammar_check
from pagoda.server.processing.grammar_check import GrammarCheck


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
        (text(json={"type": "banana"}), "Invalid type: banana"),
        (text(json={"if": {}, "type": "object"}), "Unimplemented keys"),
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


def test_what_takes_too_long_is_refused() -> None:
    patterns = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(30)]}
    check = GrammarCheck(vocabulary, seconds=0.3, elapsed=300)
    try:
        assert "takes more than 0.3 s" in why(check, text(json=patterns))
        assert why(check, text(choice=["x"])) == ""
    finally:
        check.close()


def scripted(tmp_path, body: str) -> tuple[str, ...]:
    """A process that says it is ready, and then this."""
    path = tmp_path / "worker.py"
    path.write_text(
        "import sys, time\nfrom pagoda.server.processing.worker import read_frame, write_frame\n"
        "inp, out = sys.stdin.buffer, sys.stdout.buffer\nread_frame(inp)\nwrite_frame(out, b'ready')\n"
        + textwrap.dedent(body)
    )
    return (sys.executable, "-P", str(path))


@pytest.mark.parametrize(("elapsed", "error"), [(60, ""), (0.2, "not compiled within 0.2 s; make it simpler, or try")])
def test_a_busy_machine_is_waited_for(tmp_path, elapsed, error):
    """The process computes nothing for longer than the processor time that it has."""
    program = scripted(tmp_path, "while True:\n    read_frame(inp)\n    time.sleep(1)\n    write_frame(out, b'')\n")
    check = GrammarCheck(vocabulary, program, seconds=0.1, elapsed=elapsed)
    try:
        answer = why(check, text(choice=["x"]))
        assert answer.startswith(f"structured_outputs: {error}") if error else answer == ""
    finally:
        check.close()


def test_what_passed_is_not_tried_again(tmp_path, monkeypatch):
    """The process answers `no` from the second grammar on."""
    program = scripted(tmp_path, "for say in (b'', b'no', b'no'):\n    read_frame(inp)\n    write_frame(out, say)\n")
    monkeypatch.setattr(grammar_check, "MAX_PASSED", 1)
    check = GrammarCheck(vocabulary, program)
    try:
        assert [why(check, Grammar(each)) for each in ("a", "a", "b")] == ["", "", "structured_outputs: no"]
    finally:
        check.close()


SLOW = "while True:\n    read_frame(inp)\n    time.sleep(0.2)\n    write_frame(out, b'')\n"


def test_a_full_line_is_refused_and_other_keys_keep_their_share(tmp_path):
    """32 grammars of one key are in line: more of it are refused, and another key's first is the next but one."""

    async def run() -> None:
        check = GrammarCheck(vocabulary, scripted(tmp_path, SLOW))
        try:
            many = [asyncio.create_task(check.check(Grammar(f"a{i}"), "a", 32)) for i in range(40)]
            await asyncio.sleep(0)
            refusals = [task.exception() for task in many if task.done()]
            assert len(refusals) == 8
            assert all(isinstance(each, QueueFullError) and "this API key" in str(each) for each in refusals)
            await asyncio.wait_for(check.check(Grammar("b"), "b", 32), 60)
            assert sum(task.done() for task in many) - len(refusals) <= 3
            for task in many:
                task.cancel()
            await asyncio.gather(*many, return_exceptions=True)
            await asyncio.wait_for(check.check(Grammar("c"), "a", 32), 60)
        finally:
            check.close()

    asyncio.run(run())


def test_the_line_is_bounded_for_all_keys_together(tmp_path):
    async def run() -> None:
        check = GrammarCheck(vocabulary, scripted(tmp_path, SLOW))
        try:
            many = [asyncio.create_task(check.check(Grammar(f"a{i}"), f"k{i % 8}")) for i in range(64)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="too many new grammars in line; try again later"):
                await check.check(Grammar("b"), "b")
            for task in many:
                task.cancel()
            await asyncio.gather(*many, return_exceptions=True)
        finally:
            check.close()

    asyncio.run(run())


def test_a_grammar_in_line_is_compiled_once_for_all_who_wait(tmp_path):
    """The process answers `no` from the second grammar on. The first request is cancelled: the others go on."""
    program = scripted(
        tmp_path,
        "for say in (b'', b'no', b'no'):\n    read_frame(inp)\n    time.sleep(0.2)\n    write_frame(out, say)\n",
    )

    async def run() -> None:
        check = GrammarCheck(vocabulary, program)
        try:
            await asyncio.gather(*(check.check(Grammar("same"), "a", 1) for _ in range(200)))
            same = [asyncio.create_task(check.check(Grammar("other"), "a", 1)) for _ in range(3)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            same[0].cancel()
            ends = await asyncio.gather(*same, return_exceptions=True)
            assert [type(each) for each in ends] == [asyncio.CancelledError, RequestError, RequestError]
        finally:
            check.close()

    asyncio.run(run())


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
