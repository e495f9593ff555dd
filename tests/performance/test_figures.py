"""What the product costs, counted, against the committed tables: a growth beyond its margin fails."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from performance.expected import COMMAND, KINDS, worsened


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.tpu_matrix if name == "tpu" else ()) for name in KINDS]
)
def test_nothing_costs_more_than_the_table_says(name: str) -> None:
    kind = KINDS[name]
    if kind.needs and find_spec(kind.needs) is None:
        pytest.skip(f"needs {kind.needs}")
    if not kind.path.is_file():
        pytest.skip(f"{kind.path.name} is not written yet; {COMMAND}")
    table = kind.table()
    if table["with"] != kind.environment():
        pytest.skip(f"the table is of {table['with']}, this is {kind.environment()}; {COMMAND} rewrites it")
    assert not (lines := worsened(table["figures"], kind.measure())), "\n".join(lines)


def test_a_growth_beyond_its_margin_is_told() -> None:
    table = {
        "grown": {"value": 100, "margin": 0.03},
        "within": {"value": 100, "margin": 0.03},
        "less": {"value": 100, "margin": 0.0},
        "from nothing": {"value": 0, "margin": 0.0},
        "gone": {"value": 1, "margin": 0.0},
    }
    assert worsened(table, {"grown": 104, "within": 102.9, "less": 1, "from nothing": 8, "new": 1}) == [
        "from nothing: 8 instead of 0 (+8, margin 0.0%)",
        "gone is not measured any more; make performance-table",
        "grown: 104 instead of 100 (+4.0%, margin 3.0%)",
        "new is not in the table; make performance-table",
    ]
