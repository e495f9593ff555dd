"""The roofline table of the guide matches the stored results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TABLE = runpy.run_path(str(ROOT / "benchmarks" / "tpu" / "table.py"))


def test_the_guide_shows_the_results() -> None:
    page = TABLE["PAGE"].read_text()
    assert TABLE["with_table"](page, json.loads(TABLE["RESULTS"].read_text())) == page


def test_a_line_has_both_schedules_and_the_roofline() -> None:
    row = {
        "program": "decode 8 rows, 8 pages",
        "xla_cycles": 1_234_567,
        "kernel_cycles": 89_000,
        "exchange_seconds": 5e-6,
        "bytes": 2.5e9,
        "flops": 4e12,
        "seconds": 2e-3,
        "roofline_seconds": 1.5e-3,
        "share": 0.75,
        "bound_by": "HBM",
    }
    assert TABLE["line"](row) == "| decode 8 rows | 1235 | 89 | 5 | 2.50 | 4.000 | 2000 | 1500 | 75% | HBM |"
