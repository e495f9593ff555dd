"""Tables of expected figures: how they are kept, compared with what is measured, and rewritten.

`tests/performance/expected/KIND.json` has the figures of a kind, of which less is better. Each has a value and a
margin: the share by which it may grow before the test fails. `with` says what the figures depend on, such as a
compiler's version: elsewhere they are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "expected"
COMMAND = "make performance-table"


@dataclass(frozen=True)
class Kind:
    """A kind of figures, which a module of this folder measures. `margin`: of a figure that is new in the table."""

    module: str
    margin: float
    needs: str = ""
    """A package without which nothing can be measured."""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.module}.json"

    def measure(self) -> Mapping[str, float]:
        found: Mapping[str, float] = import_module(f"performance.{self.module}").measure()
        return found

    def environment(self) -> Mapping[str, str]:
        found: Mapping[str, str] = import_module(f"performance.{self.module}").environment()
        return found

    def table(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found


KINDS = {
    kind.module: kind
    for kind in (
        Kind("host", 0.01),
        Kind("steps", 0.0),
        Kind("programs", 0.0, needs="flax"),
        Kind("tpu", 0.02, needs="libtpu"),
        Kind("triton", 0.0, needs="triton"),
    )
}


def worsened(table: Mapping[str, Mapping[str, float]], measured: Mapping[str, float]) -> list[str]:
    """A line for each figure that is beyond its margin, is not in the table or was not measured."""
    lines = [f"{name} is not in the table; {COMMAND}" for name in measured.keys() - table.keys()]
    lines += [f"{name} is not measured any more; {COMMAND}" for name in table.keys() - measured.keys()]
    for name in table.keys() & measured.keys():
        value, margin, now = table[name]["value"], table[name]["margin"], measured[name]
        if now > value * (1 + margin) + 1e-9:
            grown = f"{now / value - 1:+.1%}" if value else f"+{now:g}"
            lines.append(f"{name}: {now:g} instead of {value:g} ({grown}, margin {margin:.1%})")
    return sorted(lines)


def write(kind: Kind) -> None:
    """Measure a kind and write its table; figures keep their margins."""
    before = kind.table()["figures"] if kind.path.is_file() else {}
    figures = {
        name: {"value": round(value, 2), "margin": before.get(name, {}).get("margin", kind.margin)}
        for name, value in sorted(kind.measure().items())
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(figure)}" for name, figure in figures.items()]
    text = f'{{"with": {json.dumps(dict(kind.environment()))}, "figures": {{\n' + ",\n".join(lines) + "\n}}\n"
    kind.path.write_text(text)
