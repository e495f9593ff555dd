"""What this suite forbids itself: what makes tests fail by chance on a busy machine, or slow."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.suite import budgets

TESTS = Path(__file__).parents[2]

MAX_UNITS = 1_300
"""Of all rows of the table of processor time together, of a run beside two busy processes; only to be lowered."""

MAX_ID = 80
"""Characters of a test's id after its file's path."""

MIN_TIMEOUT = 30
"""Seconds: a shorter one ends while a busy machine still does what is waited for."""

CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns"}

SLEEPS = {
    "support/suite/watching.py": "waits for a state, however long that takes",
    "support/engines/fake_engine.py": "an engine whose steps take time, or for ever",
    "support/engines/fake_pooling.py": "an engine whose steps take time",
    "clients/programs/run_openai.py": "a client that asks again, as its users do; no part of `make test`",
}
"""Files that may sleep, each with the reason."""

DURATIONS: dict[str, str] = {}
"""Files that may subtract readings of a clock."""

PORTS = {
    "server/cli/test_batch.py": "the port is taken, and stays so",
    "server/cli/test_doctor.py": "the port is taken, and stays so",
    "server/cli/test_main.py": "the port is taken, and stays so",
}
"""Files that may bind port 0: the socket that is bound is the one that is used."""

TIMEOUTS = {
    "benchmarks/test_reliability.py": "the client that is tested gives up",
    "server/core_client/test_engine_process.py": "an engine that hangs is killed at once",
}
"""Files that may have a short timeout."""

Check = Callable[[ast.AST], bool]


def called(node: ast.AST) -> str:
    """The last part of the name of a called function; "" for what is no call."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name
    return ""


def sleeps(node: ast.AST) -> bool:
    """Whether a call sleeps for a time, and does not just let others run."""
    match node:
        case ast.Call(args=[ast.Constant(value=0)]):
            return False
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep")):
            return True
        case ast.ImportFrom(module="time" | "asyncio", names=names):
            return any(alias.name == "sleep" for alias in names)
    return False


def measures(node: ast.AST) -> bool:
    """Whether two readings of a clock are subtracted."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and called(node.left) in CLOCKS


def picks_port(node: ast.AST) -> bool:
    """Whether a socket is bound to a port that the system picks."""
    match node:
        case ast.Call(func=ast.Attribute(attr="bind"), args=[ast.Tuple(elts=[_, ast.Constant(value=0)])]):
            return True
    return False


def unfreezes(node: ast.AST) -> bool:
    """Whether the collector is to go through all objects of the process again, which takes it seconds each time."""
    return called(node) == "unfreeze"


def hurries(node: ast.AST) -> bool:
    """Whether a wait ends after a few seconds."""
    if not isinstance(node, ast.Call):
        return False
    limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
    if called(node) in ("timeout", "wait_for"):
        limits += node.args[-1:]
    values = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
    return any(isinstance(value, int | float) and 0 < value < MIN_TIMEOUT for value in values)


@functools.cache
def places() -> dict[str, list[tuple[str, int]]]:
    """Files and lines that break each rule, of all files in one pass."""
    broken: dict[str, list[tuple[str, int]]] = {rule: [] for rule in RULES}
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call | ast.BinOp | ast.ImportFrom):
                for rule, (check, _) in RULES.items():
                    if check(node):
                        broken[rule].append((name, node.lineno))
    return broken


RULES = {
    "wait for the state, not for a time (support.suite.watching)": (sleeps, SLEEPS),
    "give the tested code a clock, do not measure real time": (measures, DURATIONS),
    "hand over the bound socket, or let the program say which port it got": (picks_port, PORTS),
    "freeze again what stays, and leave it frozen": (unfreezes, {}),
    f"a wait has at least {MIN_TIMEOUT} s": (hurries, TIMEOUTS),
}


@pytest.mark.parametrize("rule", RULES)
def test_nothing_fails_by_chance(rule: str) -> None:
    allowed = RULES[rule][1]
    broken = [f"{name}:{line}" for name, line in places()[rule] if name not in allowed]
    assert not broken, f"{rule}: {', '.join(broken)}"


@pytest.mark.parametrize("rule", RULES)
def test_exceptions_are_needed(rule: str) -> None:
    assert RULES[rule][1].keys() <= {name for name, _ in places()[rule]}


def test_the_rules_bite() -> None:
    def bites(check: Check, text: str) -> bool:
        return any(map(check, ast.walk(ast.parse(text))))

    assert bites(sleeps, "time.sleep(0.1)")
    assert bites(sleeps, "await asyncio.sleep(seconds)")
    assert not bites(sleeps, "await asyncio.sleep(0)")
    assert bites(measures, "assert time.monotonic() - began < 1")
    assert not bites(measures, "while time.monotonic() < deadline: pass")
    assert bites(picks_port, "taken.bind(('127.0.0.1', 0))")
    assert not bites(picks_port, "taken.bind(('127.0.0.1', port))")
    assert bites(unfreezes, "gc.unfreeze()")
    assert bites(hurries, "async with asyncio.timeout(4): pass")
    assert bites(hurries, "await asyncio.wait_for(done, 4)")
    assert bites(hurries, "process.wait(timeout=5)")
    assert not bites(hurries, "process.wait(timeout=60)")


def test_ids_are_short(request: pytest.FixtureRequest) -> None:
    ids = {item.nodeid.partition("::")[2] for item in request.session.items}
    assert not [name for name in ids if len(name) > MAX_ID]


def test_the_table_of_processor_time_is_within_its_limit() -> None:
    table = budgets.read()
    assert sum(table.values()) <= MAX_UNITS
    assert not [name for name in table if not name.startswith("(") and not (TESTS / name).is_file()]


def test_a_file_that_needs_more_than_twice_its_row_fails() -> None:
    table = {"a.py": 10.0, "b.py": 10.0, "c.py": 1.0}
    used = {"a.py": 20.5, "b.py": 14.5, "c.py": 4.0, "new.py": 5.0}
    faults = budgets.faults(used, table)
    assert [line.split()[1] for line in faults] == ["a.py", "new.py"]
    assert [line.split()[0] for line in budgets.notes(used, table)] == ["b.py"]


def test_tests_that_need_programs_are_held_against_no_row() -> None:
    item: Any = SimpleNamespace(path=TESTS / "a.py", get_closest_marker=lambda name: name == "program" or None)
    recorder = budgets.Recorder()
    next(recorder.pytest_runtest_protocol(item))
    assert recorder._file != "a.py"
    assert budgets.faults({recorder._file: 1000.0}, {}) == []


def test_large_processes_are_printed_and_larger_ones_fail() -> None:
    sizes = (budgets.MAX_MEMORY, budgets.MAX_MEMORY + (1 << 20), budgets.TOO_MUCH_MEMORY + (1 << 20))
    lines = budgets.large([budgets.Usage(memory=size, largest="a.py") for size in sizes])
    assert lines == [f"{word}a process reached {size} MiB in a.py, more than 2048" for word, size in
                     (("", 2049), ("FAILED: ", 2561))]  # fmt: skip


def test_units_count_processors_of_other_speeds_alike() -> None:
    slow = budgets.Usage({"a.py": 3.0}, loops=[0.02])
    fast = budgets.Usage({"a.py": 1.5}, loops=[0.01])
    assert slow.units() == fast.units()
    assert budgets.total([slow, fast]) == {"a.py": pytest.approx(3.0)}
