"""What hostile grammars can cost: memory of the process that checks them, entries of caches, and no other request."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.checkpoints.byte_text import EOS, byte_tokenizer
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.engine.structured_output.grammar import Grammar, ResolvedGrammar, Vocabulary, vocabulary_of
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.processing.workers import grammar_check
from pagoda.server.processing.workers.grammar_check import GrammarCheck
from pagoda.server.processing.workers.grammar_worker import MEMORY_BYTES, GrammarReply


def vocabulary() -> Vocabulary:
    return vocabulary_of(byte_tokenizer(), 300, (EOS,))


def text(**asked: Any) -> Grammar:
    return Grammar(guidance_text(StructuredOutputsParams(**asked), {}))


def why(check: GrammarCheck, grammar: Grammar) -> str:
    """What is wrong with it; empty: nothing."""
    try:
        asyncio.run(check.check(grammar))
    except RequestError as error:
        return str(error)
    return ""


def program_of(folder: Path, body: str) -> tuple[str, ...]:
    (folder / "worker.py").write_text("from pagoda.server.processing.workers.worker import serve\n" + body)
    return (sys.executable, "-P", str(folder / "worker.py"))


LARGE = {"enum": [f"value {i} {'x' * 40}" for i in range(30_000)]}


@pytest.mark.skipif(sys.platform != "linux", reason="limits are read in /proc")
def test_the_process_may_use_so_much_memory_more_than_at_its_start() -> None:
    check = GrammarCheck(vocabulary)
    try:
        check._workers[0].start()
        process = Path(f"/proc/{check._workers[0].pid}")
        found = re.search(r"Max address space +(\d+)", (process / "limits").read_text())
        assert found is not None, "the address space is limited"
        mapped = int((process / "statm").read_text().split()[0]) * 4096
        assert abs(int(found[1]) - mapped - MEMORY_BYTES) < MEMORY_BYTES // 8
    finally:
        check.close()


def test_a_grammar_beyond_the_memory_is_refused_and_the_next_passes(tmp_path: Path) -> None:
    program = program_of(
        tmp_path, "from pagoda.server.processing.workers.grammar_worker import handler\nserve(handler, 32 << 20)\n"
    )
    small = GrammarCheck(vocabulary, program, seconds=60)
    usual = GrammarCheck(vocabulary, seconds=60)
    try:
        assert "too large" in why(small, text(json=LARGE))
        assert why(small, text(choice=["x", "y"])) == ""
        assert why(usual, text(json=LARGE)) == "", "it is the memory that it lacks"
    finally:
        small.close()
        usual.close()


def test_the_cache_of_passed_grammars_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passing = GrammarReply(resolved=ResolvedGrammar("ab"))
    program = program_of(tmp_path, f"serve(lambda setup: lambda data: {msgspec.msgpack.encode(passing)!r}, 1 << 30)\n")
    monkeypatch.setattr(grammar_check, "MAX_PASSED", 3)
    check = GrammarCheck(vocabulary, program)
    try:
        for number in range(8):
            assert why(check, Grammar(f"g{number}")) == ""
            assert len(check._passed) <= 3
        monkeypatch.setattr(grammar_check, "MAX_PASSED_CHARACTERS", 4)
        assert why(check, Grammar("another")) == ""
        assert len(check._passed) == 2, "of two characters each"
    finally:
        check.close()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": links | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "nested quantifiers": {"regex": "((a+)+)+b"},
    "overlapping alternatives": {"regex": "(a|a|aa)*c"},
    "counted quantifiers": {"regex": "((a{1,100}){1,100}){1,100}"},
    "many optional": {"regex": "a?" * 200 + "a" * 200},
    "exponential automaton": {"regex": "(a|b)*a(a|b){40}"},
    "huge count": {"regex": "a{1000000000}"},
    "many parentheses": {"regex": "(" * 2000 + "a" + ")" * 2000},
    "backreference": {"regex": r"(a*)*\1"},
    "lookaround": {"regex": "(?=a)(?!b)a"},
    "not a pattern": {"regex": "[z-a"},
    "references to references": {"json": chain(2000)},
    "a reference to itself": {"json": {"$ref": "#"}},
    "an absent reference": {"json": {"$ref": "#/$defs/none"}},
    "a reference to a file": {"json": {"$ref": "file:///etc/passwd"}},
    "a reference to a host": {"json": {"$ref": "http://127.0.0.1:1/x"}},
    "recursive": {"json": {"type": "object", "properties": {"next": {"$ref": "#"}}}},
    "a huge enum": {"json": {"enum": [f"value {i}" for i in range(20_000)]}},
    "a deep schema": {"json": deep(40)},
    "an invalid type": {"json": {"type": ["banana", 1, None]}},
    "numbers for schemas": {"json": {"properties": 1, "required": 2, "items": "x"}},
    "negative bounds": {"json": {"type": "string", "minLength": -5, "maxLength": -7}},
    "huge bounds": {"json": {"type": "array", "items": {}, "minItems": 10**12}},
    "a hostile pattern": {"json": {"type": "string", "pattern": "^(a+)+(b+)+$"}},
    "contradictions": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "left recursion": {"grammar": 'root ::= root root "a" | root | ""'},
    "an endless rule": {"grammar": "root ::= root"},
    "an absent rule": {"grammar": "root ::= none"},
    "no grammar": {"grammar": "::= ::= \0"},
}


@each_row("name", HOSTILE)
def test_hostile_grammars_are_answered_and_the_next_request_is_served(server: LiveServer, name: str) -> None:
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": HOSTILE[name]}
    status, answer = server.post("/v1/completions", body)
    assert status in (200, 400), answer
    status, answer = server.post("/v1/completions", body | {"structured_outputs": {"choice": ["bc", "xy"]}})
    assert (status, answer["choices"][0]["text"] in ("bc", "xy")) == (200, True)
