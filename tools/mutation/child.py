"""What a forked process does: run test files in a copy of the checkout until one fails, and say how far it is."""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import shutil
import signal
import statistics
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

import pytest
from support.suite.clock import LOOPS_PER_UNIT, calibrate, processor_seconds


@dataclass(frozen=True, slots=True)
class Work:
    """Test files to run in order, in a copy of the checkout, until `budget` units of processor time are used."""

    checkout: Path
    tests: tuple[str, ...]
    budget: float
    marker: str | None  # expression for pytest's -m; None: that of `make test`
    model: Path | None  # the real model, without which its tests are left out


class Reporter:
    """A plugin of pytest that writes each test as it starts, and the first that fails; it stops at the budget."""

    def __init__(self, out: TextIO, work: Work) -> None:
        self._out, self._work = out, work
        self.stopped = False
        self._unit = LOOPS_PER_UNIT * statistics.median(calibrate() for _ in range(5))
        self.write(unit=self._unit)

    def used(self) -> float:
        """The units of processor time of this process and of its children that ended."""
        return processor_seconds() / self._unit

    def write(self, **line: object) -> None:
        """One line of the report."""
        print(json.dumps(line), file=self._out, flush=True)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out tests of the real model where there is none."""
        if self._work.model is None:
            items[:] = [item for item in items if item.get_closest_marker("model") is None]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        if report.failed:
            self.write(failed=report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The test that is under way."""
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that failed."""
        if report.failed:
            self.write(failed=report.nodeid)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Where to say that it is enough."""
        self._session = session

    def pytest_runtest_logfinish(self) -> None:
        """Stop where the budget ends."""
        if self.used() > self._work.budget:
            self.stopped, self._session.shouldstop = True, "the budget is used up"


def run(work: Work, report: Path, log: Path) -> NoReturn:
    """Run the tests; never returns."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with report.open("w") as out, log.open("w") as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _enter(work)
            code = _run_files(work, Reporter(out, work), log.parent / "temporary")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _enter(work: Work) -> None:
    """Be a fresh interpreter in the checkout: its package, and nothing of this tool and of what it imports."""
    here = Path(__file__).resolve().parents[1]
    ours = (here, here.parent / "tests")
    sys.path[:] = [str(work.checkout.parent), *(each for each in sys.path if Path(each).resolve() not in ours)]
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("mutation", "mutate", "support", "__main__")
    ]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv[:] = ["pytest"]
    os.chdir(work.checkout)
    os.environ["PYTHONPATH"] = str(work.checkout.parent)
    if work.model is not None:
        os.environ["PAGODA_TEST_MODEL"] = str(work.model)
    shutil.rmtree(work.checkout / ".hypothesis", ignore_errors=True)  # examples that failed for other mutants


def _run_files(work: Work, reporter: Reporter, temporary: Path) -> int:
    """1 if a test fails."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={temporary}"]
    if work.marker is not None:
        options += ["-m", work.marker]
    for path in work.tests:
        if reporter.stopped or (before := reporter.used()) > work.budget:
            break
        code = pytest.main([*options, path], plugins=[reporter])
        fine = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        fine |= code == pytest.ExitCode.INTERRUPTED and reporter.stopped
        reporter.write(file=path, units=reporter.used() - before, whole=not reporter.stopped, passed=fine)
        if not fine:
            return 1
    return 0


def environment() -> dict[str, str]:
    """What must be set before torch and its like are imported, as tests/conftest.py does."""
    return {
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "8000",
        "TRITON_INTERPRET": "1",
        "JAX_NUM_CPU_DEVICES": "8",
    }


def preload(modules: Sequence[str], empty: Path) -> None:
    """Import what most tests import, and pytest's plugins, once for all forks. `empty`: a folder without files."""
    for name in modules:
        try:
            __import__(name)
        except ImportError:
            print(f"not preloaded: {name}", file=sys.stderr)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        pytest.main(
            ["-q", "--collect-only", "-p", "no:cacheprovider", f"--rootdir={empty}", "-c", os.devnull, str(empty)]
        )
    if "pagoda" in sys.modules:
        raise RuntimeError("pagoda was imported before the fork: mutants would have no effect")
    gc.collect()
    gc.freeze()
