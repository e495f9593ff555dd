"""What a check yields: findings, in words that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagoda.common.config.doctor import DoctorConfig

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `text`: what was found and, unless it is ok, what to do."""

    level: Level
    subject: str
    text: str


Findings: TypeAlias = Iterator[Finding]
Check: TypeAlias = Callable[[DoctorConfig], Findings]
