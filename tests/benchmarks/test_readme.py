"""The README's figures: those of the newest files, with the kind of processor that each was measured on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402

README = ROOT / "README.md"


def result(bf16: bool, date: str = "2026-01-02", **parts: Any) -> dict[str, Any]:
    machine = {"bf16_instructions": bf16, "date": date, "commit": "c", "cpu": "chip ", "cores": 2, "torch": "2"}
    return {"machine": machine, **parts}


def beside(ours: float, theirs: float) -> dict[str, Any]:
    ratios = {"vllm": {"median": round(ours / theirs, 2)}, "transformers": {"median": 4.0}}
    engines = {"pagoda": {"median": ours}, "vllm": {"median": theirs}, "transformers": {"median": ours / 4}}
    return {"single_stream_128_128": engines | {"ratios": ratios}}


def test_the_table_is_current() -> None:
    text = README.read_text()
    assert readme.with_table(text) == text, "run python benchmarks/readme.py --table"


def test_each_row_names_its_processor_kind() -> None:
    with_bf16, without = result(True, offline=beside(7.0, 10.0)), result(False, offline=beside(30.0, 10.0))
    table = readme.table({"new.json": with_bf16, "old.json": without | {"startup": {"median": 6}}})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    assert rows[0][-1] == "bfloat16 instructions"
    assert [(row[1], row[2], row[-1]) for row in rows[2:]] == [
        ("30.0", "10.0 (x 3.0)", "without"),
        ("7.0", "10.0 (x 0.7)", "with"),
        ("6 s", "", "without"),
    ]
    assert (rows[3][3], rows[3][4]) == ("1.75 (x 4.0)", "not measured")
    for name, kind in (("new.json", "with"), ("old.json", "without")):
        assert f"processor **{kind} bfloat16 instructions**" in table
        assert f"(benchmarks/results/{name})" in table
    assert "not in this table" not in table


@pytest.mark.parametrize("bf16", [True, False])
def test_an_unmeasured_processor_kind_is_named(bf16: bool) -> None:
    table = readme.table({"a.json": result(bf16, offline=beside(30.0, 10.0))})
    assert "not in this table yet" in table
    assert f"processor\n{'without' if bf16 else 'with'} them" in table


def test_a_newer_file_replaces_the_rows_that_it_has() -> None:
    old = result(False, "2026-01-01", offline=beside(1.0, 1.0), install={"base_install_mb": 5})
    table = readme.table({"b.json": result(False, "2026-01-02", offline=beside(2.0, 1.0)), "a.json": old})
    assert "| 2.0 | 1.0 (x 2.0) |" in table
    assert "| 1.0 | 1.0 (" not in table
    assert "| 5 MB |" in table
