"""Processor time of each test file, held against the table in `tests/data/budgets.json`.

Processors differ and a busy one is slower, so the table counts in units of a calibration loop that is timed throughout
the same run: one unit is about one processor second of a server processor of 2025. Child processes count when they are
waited for, and those of the fork server with them. A file that needs more than TWICE its row fails the run, as does a
test process of more than TOO_MUCH_MEMORY; more than MUCH is printed. What collection costs (each test process imports
every test file) is in rows of its own.

Writing the table: `make test-budgets`.
"""

from __future__ import annotations

import json
import resource
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from support.suite import fork_server
from support.suite.clock import LOOPS_PER_UNIT, calibrate, processor_seconds

TESTS: Final = Path(__file__).resolve().parents[2]
TABLE: Final = TESTS / "data" / "budgets.json"

COLLECTION: Final = "(collection)"
FORK_SERVER: Final = "(start of the fork servers)"
MEMORY: Final = "(return of memory)"
"""Rows of what belongs to no file."""

PROGRAMS: Final = "(tests of programs that not everybody has)"
"""What no row is held against: those tests are skipped where their program is not installed."""

TWICE: Final = 2.0
MUCH: Final = 1.3
"""Multiples of a row above which a file fails and is printed."""

FIRST_USE: Final = 4.0
"""Units that a file may need above its row: the first file in a process that uses a library pays for its start."""

MAX_MEMORY: Final = 2 << 30
"""Bytes of resident memory above which a process is printed."""

TOO_MUCH_MEMORY: Final = 5 << 29
"""The same from which it fails the run: processors whose libraries store weights in other forms need more."""


def peak_memory() -> int:
    """Return the bytes of resident memory that this process has reached."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Usage:
    """What one test process has used, in processor seconds."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of each file, relative to TESTS
    loops: list[float] = field(default_factory=list)  # of calibration
    memory: int = 0  # bytes, at most
    largest: str = ""  # the file during which the process was largest

    def units(self) -> dict[str, float]:
        """Return the units of each file."""
        unit = statistics.median(self.loops) * LOOPS_PER_UNIT if self.loops else 1.0
        return {name: seconds / unit for name, seconds in self.seconds.items()}


class Recorder:
    """A plugin of each process that runs tests: measures its files."""

    def __init__(self) -> None:
        self.usage = Usage(loops=[calibrate()])
        self._file = COLLECTION
        self._used = 0.0
        self._fork_server = 0.0

    def switch(self, name: str) -> None:
        """Charge what was used since the last call to the file before, and what follows to `name`."""
        used, forked = processor_seconds(), fork_server.processor_seconds()
        if self._fork_server == 0.0:
            self.usage.seconds[FORK_SERVER] += forked
        else:
            self.usage.seconds[self._file] += forked - self._fork_server
        self.usage.seconds[self._file] += used - self._used
        if (memory := peak_memory()) > self.usage.memory:
            self.usage.memory, self.usage.largest = memory, self._file
        if name != self._file:
            self.usage.loops.append(calibrate())
        self._file, self._used, self._fork_server = name, processor_seconds(), forked

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        needs_program = item.get_closest_marker("program") is not None
        self.switch(PROGRAMS if needs_program else item.path.relative_to(TESTS).as_posix())
        return (yield)

    def finish(self) -> dict[str, Any]:
        """Return the usage of this process as plain values."""
        self.switch("")
        return vars(self.usage) | {"seconds": dict(self.usage.seconds)}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["budgets"] = json.dumps(self.finish())


class Judge:
    """A plugin of the process that reports: holds what all processes used against the table, or writes the table."""

    def __init__(self, own: Recorder | None, *, judge: bool, file: str | None) -> None:
        self._own, self._judge, self._file = own, judge, file
        self.usages: list[Usage] = []

    def add(self, values: Mapping[str, Any]) -> None:
        self.usages.append(Usage(**values))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if text := getattr(node, "workeroutput", {}).get("budgets"):
            self.add(json.loads(text))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._own is not None:
            self.add(self._own.finish())
        used = total(self.usages)
        if self._file is not None:
            write(used, Path(self._file))
        if (
            self._judge
            and session.exitstatus == pytest.ExitCode.OK
            and (faults(used, read()) or any(each.memory > TOO_MUCH_MEMORY for each in self.usages))
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        used, table = total(self.usages), read()
        loops = [loop for usage in self.usages for loop in usage.loops]
        unit = statistics.median(loops) * LOOPS_PER_UNIT if loops else 1.0
        terminalreporter.section("processor time")
        terminalreporter.line(
            f"{sum(used.values()):.0f} units of {unit:.2f} s, the table has {sum(table.values()):.0f}; "
            f"memory of the processes: {', '.join(f'{each.memory >> 20} MiB' for each in self.usages)}"
        )
        for line in (*notes(used, table), *faults(used, table), *large(self.usages)):
            terminalreporter.line(line)


def recorder(config: pytest.Config) -> Recorder | None:
    """Return what measures this process, if anything does."""
    found = config.pluginmanager.get_plugin("budget-recorder")
    return found if isinstance(found, Recorder) else None


def total(usages: list[Usage]) -> dict[str, float]:
    """Return the units of each file over all processes."""
    units: dict[str, float] = defaultdict(float)
    for usage in usages:
        for name, value in usage.units().items():
            units[name] += value
    return dict(units)


def faults(used: Mapping[str, float], table: Mapping[str, float]) -> list[str]:
    """Return a line for each file that needed more than twice its row, or has none."""
    return [
        f"FAILED: {name} needed {value:.1f} units, its row in tests/data/budgets.json is {table.get(name, 0):.1f}"
        for name, value in sorted(used.items())
        if name != PROGRAMS and _is_over(value, table.get(name, 0.0), TWICE)
    ]


def large(usages: Sequence[Usage]) -> list[str]:
    """Return a line for each process that needed too much memory."""
    return [
        f"{'FAILED: ' * (each.memory > TOO_MUCH_MEMORY)}a process reached {each.memory >> 20} MiB in {each.largest}, "
        f"more than {MAX_MEMORY >> 20}"
        for each in usages
        if each.memory > MAX_MEMORY
    ]


def notes(used: Mapping[str, float], table: Mapping[str, float]) -> list[str]:
    """Return a line for each file that needed much more than its row, but not twice as much."""
    return [
        f"{name} needed {value:.1f} units, its row is {table.get(name, 0):.1f}"
        for name, value in sorted(used.items())
        if _is_over(value, table.get(name, 0.0), MUCH) and not _is_over(value, table.get(name, 0.0), TWICE)
    ]


def _is_over(value: float, row: float, factor: float) -> bool:
    return value > factor * row and value > row + FIRST_USE


def read() -> dict[str, float]:
    """Return the units of each file in the table."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8"))["files"]) if TABLE.is_file() else {}


def write(used: Mapping[str, float], file: Path = TABLE) -> None:
    """Write a table; files that need next to nothing have no row."""
    rows = {name: round(value, 1) for name, value in sorted(used.items()) if value >= 0.05 and name != PROGRAMS}
    text = json.dumps({"unit": "100 calibration loops", "files": rows}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n", encoding="utf-8")


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("budgets")
    group.addoption("--budgets", action="store_true", help="fail if a file needs more than twice its processor time")
    group.addoption("--write-budgets", metavar="FILE", help="write the table of this run, as tests/data/budgets.json")


def register(config: pytest.Config) -> None:
    """Register what this process needs: a recorder where tests run, a judge where they are reported."""
    if not (config.getoption("--budgets") or config.getoption("--write-budgets")):
        return
    is_worker = hasattr(config, "workerinput")
    runs_tests = is_worker or not config.getoption("numprocesses", None)
    own = Recorder() if runs_tests else None
    if own is not None:
        config.pluginmanager.register(own, "budget-recorder")
    if not is_worker:
        judge, file = config.getoption("--budgets"), config.getoption("--write-budgets")
        config.pluginmanager.register(Judge(own, judge=judge, file=file), "budget-judge")
