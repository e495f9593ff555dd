"""Grammars that are out of proportion, of one key, with another key's streams and grammars beside them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from faults.bombs import COMPLETIONS, KEYS, beside_streams
from faults.report import Options, Report
from faults.server import CACHE, Server, serving

PATTERNS: Final[Sequence[Callable[[int], str]]] = (
    lambda i: f"a{{{10**9 + i}}}",
    lambda i: f"x{{40}}a{{{10**6 + i}}}",
    lambda i: rf"\w*a\w{{{64 + i}}}",
    lambda i: rf"(\w+\s){{3,{500 + i}}}",
    lambda i: f"a{{{100_000 + i}}}",
)
"""Short texts whose automatons are large."""

DISTINCT: Final = 300
AT_ONCE: Final = 8
MAX_KEPT: Final = 200.0  # MB that the engine may keep of all of them
STATES: Final = 200
SEQUENCES: Final = 64


def grammars(options: Options) -> Iterator[Report]:
    """What hostile grammars leave in memory, the gaps that they cause, and how long another key's grammar waits."""
    flags = [*CACHE, *(word for key in KEYS for word in ("--api-key", key))]
    log = Path(options.log_folder) / "grammars.log"
    for row, carry_out in ROWS.items():
        with serving(options.model, *flags, log=log) as server:
            yield carry_out(row, server)


def _patterns(row: str, server: Server) -> Report:
    """Send 300 distinct patterns, 8 at a time; measure the engine's memory before, at most and after."""
    report = Report(row)
    try:
        _measure_patterns(server, report)
    except RuntimeError as error:  # the server has no engine any more
        report.fail(error)
    return report


def _measure_patterns(server: Server, report: Report) -> None:
    _ask(server, _regex("[ab]+", 0), key=KEYS[0])  # what the first grammar loads is not theirs
    engine = server.engine_pid()
    before = peak = server.memory_of(engine)
    statuses: list[int] = []
    requests = [_regex(PATTERNS[i % len(PATTERNS)](i), i) for i in range(DISTINCT)]
    threads = _in_threads(lambda body: statuses.append(_ask(server, body, key=KEYS[0])), requests, AT_ONCE)
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        peak = max(peak, server.memory_of(engine))
    time.sleep(2.0)
    report.at_most("engine's memory grows by", server.memory_of(engine) - before, MAX_KEPT, "MB")
    report.require("no 5xx, no timeout", not {*statuses} - {200, 400}, dict(Counter(statuses)))
    report.require("the engine lives", server.engine_pid() == engine)
    report.notes |= {"engine's memory before, MB": round(before), "at most": round(peak)}


def _automaton(row: str, server: Server) -> Report:
    """Send a nondeterministic automaton of 200 states for 64 sequences of one request."""

    def attack(report: Report) -> None:
        fields = {"n": SEQUENCES, "max_tokens": 8, "temperature": 1.0}
        begin = time.monotonic()
        report.notes["answer"] = _ask(server, _guided({"grammar": _random_automaton()}) | fields, key=KEYS[0])
        report.notes["seconds"] = round(time.monotonic() - begin, 1)

    return beside_streams(row, server, attack, max_gap=2.0)


def _flood(row: str, server: Server) -> Report:
    """Send 200 grammars that take long to compile with one key; the other key's new grammar is answered."""
    neighbour: list[tuple[int, float]] = []

    def attack(report: Report) -> None:
        schemas = [_schema(number, 400) for number in range(200)]
        threads = _in_threads(lambda body: _ask(server, body, key=KEYS[0]), schemas, len(schemas))
        time.sleep(1.0)
        for number in range(5):
            begin = time.monotonic()
            status = _ask(server, _schema(10_000 + number, 3), key=KEYS[1])
            neighbour.append((status, time.monotonic() - begin))
        for thread in threads:
            thread.join(60)

    report = beside_streams(row, server, attack)
    statuses = [status for status, _ in neighbour]
    report.require("another key's grammars are answered", statuses == [200] * 5, statuses)
    report.at_most("within", max((seconds for _, seconds in neighbour), default=float("inf")), 3.0)
    return report


def _in_threads(
    function: Callable[[dict[str, Any]], object], bodies: Iterable[dict[str, Any]], count: int
) -> list[Any]:
    """Call a function with each body, in `count` threads, which are returned."""
    left, lock = iter(bodies), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                body = next(left, None)
            if body is None:
                return
            function(body)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def _ask(server: Server, body: dict[str, Any], *, key: str) -> int:
    """Return the status of a completion; 0 if there was none."""
    with suppress(OSError, HTTPException):
        return server.request("POST", COMPLETIONS, body, key=key, timeout=120)[0]
    return 0


def _guided(constraint: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 2, "structured_outputs": constraint}


def _regex(pattern: str, seed: int) -> dict[str, Any]:
    fields = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.5, "seed": seed}
    return _guided({"regex": pattern}) | fields


def _schema(number: int, size: int) -> dict[str, Any]:
    """Return a request for an object of `size` strings, a schema that no other number has."""
    properties = {f"p{number}_{i}": {"type": "string", "pattern": "^[a-z]{1,64}[0-9]{1,32}$"} for i in range(size)}
    return _guided({"json": {"type": "object", "properties": properties}})


def _random_automaton() -> str:
    """Return an automaton as a grammar: from each state four edges for each of two letters."""
    chance = random.Random(0)
    lines = ["start: s0"]
    for state in range(STATES):
        edges = [f'"{letter}" s{chance.randrange(STATES)}' for letter in "ab" for _ in range(4)]
        lines.append(f"s{state}: " + " | ".join(edges) + (' | ""' if state % 7 == 0 else ""))
    return "\n".join(lines)


ROWS: Final[Mapping[str, Callable[[str, Server], Report]]] = {
    f"{DISTINCT} hostile patterns of one key": _patterns,
    f"an automaton of {STATES} states, n = {SEQUENCES}": _automaton,
    "200 grammars of one key": _flood,
}
"""Each on a server of its own."""
