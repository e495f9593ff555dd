"""Processes that run tests: forked from one that has pytest and torch imported, watched until they end or hang.

Nothing is judged by the wall clock, which says little on a busy machine: a test hangs when it uses far more processor
time than a test does, or when none of its processes wants a processor for a long time.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mutation import child
from mutation.child import Work

TEST_SECONDS: Final = 60.0
"""Processor seconds after which a single test hangs."""

IDLE_SAMPLES: Final = 90
"""Samples, one a second, after which a test hangs if in hardly any of them one of its processes wanted a processor."""

BUSY_SHARE: Final = 0.1
MEMORY: Final = 8 << 30
"""Bytes in all processes of a run after which it is stopped."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    passed: bool
    how: str = ""  # "failed", "processor time", "idle", "memory", "ended"
    test: str = ""  # the test in which it did
    file: str = ""  # its file
    units: float = 0.0  # of processor time
    files: tuple[str, ...] = ()  # test files that ran
    measured: dict[str, float] = field(
        default_factory=dict
    )  # test file -> units of processor time; cut off: above the budget


@dataclass(slots=True)
class _Process:
    """One line of /proc."""

    parent: int
    wants: bool  # a processor: it runs, is ready to run, waits for the disk, or was paused from outside
    ticks: int  # of its processor time and that of its children that ended
    pages: int


class Fork:
    """A running fork."""

    def __init__(self, work: Work, folder: Path) -> None:
        self._work, self._report, self._log = work, folder / "report", folder / "log"
        self._report.write_text("")
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.pid = os.fork()
        if not self.pid:
            child.run(work, self._report, self._log)
        self._size = 0  # of the report, the last time it was looked at
        self._ticks = 0  # of processor time when the report last grew
        self._samples: list[bool] = []  # whether a processor was wanted, since the report last grew
        self._stopped = ""

    def watch(self, processes: dict[int, _Process]) -> None:
        """Look at its processes, once a second; end them if they hang."""
        mine = [processes[pid] for pid in _tree(self.pid, processes)]
        ticks, size = sum(each.ticks for each in mine), self._report.stat().st_size
        if size != self._size:
            self._size, self._ticks = size, ticks
            self._samples.clear()
        self._samples.append(any(each.wants for each in mine))
        recent = self._samples[-IDLE_SAMPLES:]
        if ticks - self._ticks > TEST_SECONDS * os.sysconf("SC_CLK_TCK"):
            self._stop("processor time")
        elif len(recent) == IDLE_SAMPLES and sum(recent) < BUSY_SHARE * IDLE_SAMPLES:
            self._stop("idle")
        elif sum(each.pages for each in mine) * os.sysconf("SC_PAGE_SIZE") > MEMORY:
            self._stop("memory")

    def _stop(self, why: str) -> None:
        self._stopped = self._stopped or why
        for pid in _tree(self.pid, _processes()):
            _kill(pid)

    def outcome(self, status: int, seconds: float) -> Outcome:
        """How it ended, with this exit status after this much processor time."""
        lines = [json.loads(line) for line in self._report.read_text().splitlines() if line.endswith("}")]
        units = seconds / next((line["unit"] for line in lines if "unit" in line), 1.0)
        files = [line for line in lines if "file" in line]
        done = tuple(line["file"] for line in files if line["passed"])
        measured = {
            line["file"]: round(line["units"] if line["whole"] else max(line["units"], self._work.budget) + 1, 2)
            for line in files
            if line["passed"]
        }
        if os.waitstatus_to_exitcode(status) == 0:
            return Outcome(True, units=units, files=done, measured=measured)
        failed = [line["failed"] for line in lines if "failed" in line]
        started = [line["started"] for line in lines if "started" in line]
        file = self._work.tests[min(len(done), len(self._work.tests) - 1)]
        return Outcome(
            False,
            how=self._stopped or ("failed" if failed else "ended"),
            test=[*started, *failed][-1] if started or failed else file,
            file=file,
            units=units,
            files=(*done, file),
            measured=measured,
        )

    def log_tail(self) -> str:
        """The end of what its tests printed."""
        return self._log.read_text(errors="replace")[-2000:]


def adopt_orphans() -> None:
    """Become the parent of processes that tests leave behind, which `follow` ends."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def follow(forks: Sequence[Fork]) -> list[tuple[Fork, Outcome]]:
    """Watch the forks until at least one ended; those that did, and how."""
    running = {fork.pid: fork for fork in forks}
    ended: list[tuple[Fork, Outcome]] = []
    looked = time.monotonic()
    while not ended:
        time.sleep(0.1)
        while running and (found := os.wait4(-1, os.WNOHANG))[0]:
            pid, status, used = found
            if (fork := running.pop(pid, None)) is not None:
                ended.append((fork, fork.outcome(status, used.ru_utime + used.ru_stime)))
        if time.monotonic() - looked >= 1 or ended:
            looked, processes = time.monotonic(), _processes()
            for fork in running.values():
                fork.watch(processes)
            for pid, process in processes.items():
                if process.parent == os.getpid() and pid not in running:  # left behind
                    _kill(pid)
    return ended


def _processes() -> dict[int, _Process]:
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            values = (folder / "stat").read_text().rpartition(")")[2].split()
            states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in (folder / "task").iterdir()]
        except OSError:  # it ended
            continue
        wants = any(state in "RDT" for state in states)
        found[int(folder.name)] = _Process(int(values[1]), wants, sum(map(int, values[11:15])), int(values[21]))
    return found


def _tree(root: int, processes: dict[int, _Process]) -> list[int]:
    """A process and those below it."""
    below: dict[int, list[int]] = defaultdict(list)
    for pid, process in processes.items():
        below[process.parent].append(pid)
    found, edge = [], [root] if root in processes else []
    while edge:
        pid = edge.pop()
        found.append(pid)
        edge += below[pid]
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
