"""`support.suite.rows`: a table as one test, which names every faulty row."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from support.suite.rows import MAX_SHOWN, each_row


def failure(test: Any, **fixtures: Any) -> str:
    with pytest.raises(AssertionError) as error:
        test(**fixtures)
    return str(error.value)


def test_every_faulty_row_is_reported_and_no_other() -> None:
    seen = []

    @each_row("name, value", [("one", 1), ("two", 2), pytest.param("x", 3, id="three"), ("four", None)])
    def table(name: str, value: int) -> None:
        seen.append(name)
        assert value + 1 != 2, name
        with pytest.raises(ZeroDivisionError):
            1 / (value - 3)

    text = failure(table)
    assert seen == ["one", "two", "x", "four"]
    assert text.startswith("3 faulty rows\n[one-1] test_rows.py:")
    assert "[two-2]" in text
    assert "DID NOT RAISE" in text
    assert "[four-None]" in text
    assert "TypeError: unsupported operand" in text
    assert "three" not in text


def test_rows_beyond_those_shown_are_named() -> None:
    @each_row("number", range(MAX_SHOWN + 2))
    def table(number: int) -> None:
        assert number < 0, "message"

    text = failure(table)
    assert text.count("    message\n") == MAX_SHOWN
    assert text.endswith(f"[{MAX_SHOWN}]\n[{MAX_SHOWN + 1}]")


def test_a_table_without_a_fault_passes_and_reads_its_rows_late() -> None:
    rows: list[str] = []

    @each_row("row", lambda: rows)
    def table(row: str) -> None:
        assert row == "a"

    assert failure(table) == "the table has no rows"
    rows.append("a")
    table()


def test_rows_of_rows_are_a_product() -> None:
    @each_row("left", [1, 2])
    @each_row("right", [1, 2], ids=["first", "second"])
    def table(left: int, right: int) -> None:
        assert left == right

    text = failure(table)
    assert text.count("faulty row") == 3
    assert text.index("[1]") < text.index("[second]") < text.index("[2]") < text.index("[first]")


def test_a_row_that_is_skipped_or_marked_is_a_fault() -> None:
    @each_row("row", [1])
    def table(row: int) -> None:
        pytest.skip("no program")

    assert "no program" in failure(table)

    @each_row("row", [pytest.param(1, marks=pytest.mark.model)])
    def marked(row: int) -> None:
        pass

    with pytest.raises(TypeError, match="has no marks"):
        marked()


def test_rows_are_of_the_length_and_parameters_of_the_test() -> None:
    @each_row("one, two", [(1, 2, 3)])
    def table(one: int, two: int) -> None:
        pass

    with pytest.raises(TypeError, match="a value for each of one, two"):
        table()
    with pytest.raises(TypeError, match="no parameters other"):
        each_row("other", [1])(lambda row: None)


def test_rows_that_cannot_be_shown_have_the_name_of_their_type() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    @each_row("row", [deep, 10**5000])
    def table(row: Any) -> None:
        raise AssertionError

    assert failure(table).count("[list]") == failure(table).count("[int]") == 1


def test_a_table_of_coroutines() -> None:
    @each_row("row", [1, 2])
    async def table(row: int) -> None:
        await asyncio.sleep(0)
        assert row == 1

    assert inspect.iscoroutinefunction(table)
    with pytest.raises(AssertionError, match=r"^1 faulty row\n\[2\]"):
        asyncio.run(table())


class Value:
    changed = False


@each_row("row", ["a", "b"])
def test_each_row_has_its_own_fixtures(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capsys.readouterr().out == ""
    assert not Value.changed
    assert list(tmp_path.iterdir()) == []
    (tmp_path / row).touch()
    monkeypatch.setattr(Value, "changed", True)
    print(row)
