"""Results of a scenario: measured values with their bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Options:
    """What a run was asked for."""

    model: str
    minutes: float  # duration of the overload
    soak_minutes: float
    cases: int  # hostile requests
    mutants: int  # mutated headers of each format
    log_folder: str  # the servers' logs
    match: str = ""  # only bombs whose row has this text
    pause: float = 0.0  # mean seconds between two requests of a client of the soak


@dataclass(frozen=True)
class Check:
    """One requirement. `value` is shown as it is."""

    name: str
    value: Any
    bound: str
    passed: bool


@dataclass
class Report:
    """What a scenario measured. It passes if it has checks and all of them hold."""

    row: str
    checks: list[Check] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all requirements hold."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def at_most(self, name: str, value: float, bound: float, unit: str = "s") -> None:
        """Require `value` <= `bound`."""
        self.checks.append(Check(name, f"{value:.2f} {unit}", f"<= {bound:g} {unit}", value <= bound))

    def require(self, name: str, passed: bool, value: Any = "") -> None:
        """Require a condition; `value` explains it."""
        self.checks.append(Check(name, value if value != "" else passed, "holds", passed))

    def fail(self, error: BaseException) -> None:
        """Record that the scenario could not be carried out."""
        self.checks.append(Check("carried out", f"{type(error).__name__}: {error}"[:300], "holds", False))

    def text(self) -> str:
        """Return the row and its checks, one a line."""
        lines = [f"{'PASS' if self.passed else 'FAIL'}  {self.row}"]
        lines += [
            f"    {'ok  ' if each.passed else 'MISS'} {each.name}: {each.value} ({each.bound})" for each in self.checks
        ]
        lines += [f"    note {name}: {json.dumps(value)[:300]}" for name, value in self.notes.items()]
        return "\n".join(lines)


Scenario = Callable[[Options], Iterable[Report]]
"""Carry out one row of the table and return its reports, one or several."""
