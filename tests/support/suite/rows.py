"""Tests of static tables: one test that checks every row, and reports all faulty rows together."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
MAX_SHOWN = 20  # faulty rows that are shown with their messages; of further ones only the names are
MAX_LINES = 12  # of a message
MAX_NAME = 80  # characters

Row = tuple[str, dict[str, Any]]
Test = Callable[..., Any]
_PARAM = type(pytest.param())
_FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""What makes a row faulty. A row that is skipped is faulty: a skipped check proves nothing."""


def each_row(
    names: str | Sequence[str],
    rows: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Callable[[Any], object] | Iterable[str] | None = None,
) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, but as one test, which fails with the names and messages of all faulty rows.

    A function given for `rows` is called when the test runs, so that collecting tests does not pay for it. Each row has
    a `tmp_path` and a `monkeypatch` of its own and finds `capsys` and `caplog` empty; other fixtures are those of the
    test. Rows with marks are an error: they need `parametrize`.
    """
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    is_single = isinstance(names, str) and len(split) == 1
    kept = rows if callable(rows) or isinstance(rows, Collection) else list(rows)

    def listed() -> list[Row]:
        given = list(kept() if callable(kept) else kept)
        if not given:
            raise AssertionError("the table has no rows")
        texts = [None] * len(given) if ids is None or callable(ids) else list(ids)
        return [
            _row(split, is_single, each, ids if callable(ids) else text)
            for each, text in zip(given, texts, strict=True)
        ]

    def decorate(test: Test) -> Test:
        is_async = inspect.iscoroutinefunction(test)

        @functools.wraps(test)
        def check(*args: Any, **fixtures: Any) -> None:
            faults = Faults()
            for place, (name, values) in enumerate(listed()):
                with ExitStack() as stack, faults.of(name):
                    test(*args, **_of_one_row(place, fixtures, stack), **values)
            faults.report()

        @functools.wraps(test)
        async def check_async(*args: Any, **fixtures: Any) -> None:
            faults = Faults()
            for place, (name, values) in enumerate(listed()):
                with ExitStack() as stack, faults.of(name):
                    await test(*args, **_of_one_row(place, fixtures, stack), **values)
            faults.report()

        checked: Any = check_async if is_async else check
        checked.__signature__ = _without(inspect.signature(test), split)
        return checked

    return decorate


class Faults:
    """The faulty rows of a table, collected while all rows are checked."""

    def __init__(self) -> None:
        self._found: list[tuple[str, BaseException]] = []

    def of(self, name: str) -> _Check:
        """Return a context whose failure is kept as a fault of the row."""
        return _Check(name, self._found)

    def report(self) -> None:
        """Raise AssertionError if any row was faulty, with the names of all and the messages of the first."""
        if self._found:
            raise AssertionError("\n".join(self._lines())) from self._found[0][1]

    def _lines(self) -> Iterator[str]:
        yield f"{len(self._found)} faulty rows" if len(self._found) > 1 else "1 faulty row"
        for name, error in self._found[:MAX_SHOWN]:
            yield f"[{name}] {_place(error)}"
            yield from (f"    {line}" for line in _message(error))
        yield from (f"[{name}]" for name, _ in self._found[MAX_SHOWN:])


class _Check:
    def __init__(self, name: str, found: list[tuple[str, BaseException]]) -> None:
        self._name, self._found = name, found

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if isinstance(error, _FAILURES):
            self._found.append((self._name, error))
            return True
        return False


def _row(names: Sequence[str], is_single: bool, given: Any, identify: Any) -> Row:
    """The name of a row and its values by parameter. Raises TypeError for a row with marks, or of another length."""
    text = identify if isinstance(identify, str) else None
    if isinstance(given, _PARAM):
        if given.marks:
            raise TypeError(f"{given}: a row of a table has no marks; use pytest.mark.parametrize")
        values, text = given.values, given.id or text
    else:
        values = (given,) if is_single else tuple(given)
    if len(values) != len(names):
        raise TypeError(f"{values!r}: a row has a value for each of {', '.join(names)}")
    if text is None:
        text = "-".join(_text(value, identify) for value in values)
    return str(text)[:MAX_NAME], dict(zip(names, values, strict=True))


def _text(value: Any, identify: Callable[[Any], object] | None) -> str:
    found = identify(value) if identify is not None else None
    if isinstance(found or value, str):
        return str(found or value)
    try:
        return repr(value if found is None else found)[:40]
    except (RecursionError, ValueError):  # deep objects and long numbers are rows, too
        return type(value).__name__


def _of_one_row(place: int, fixtures: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """The fixtures as a test of the row alone would find them."""
    own = dict(fixtures)
    if "monkeypatch" in own:
        own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / str(place)
        own["tmp_path"].mkdir()
    for name in own.keys() & {"capsys", "capfd"}:
        own[name].readouterr()
    if "caplog" in own:
        own["caplog"].clear()
    return own


def _without(signature: inspect.Signature, names: Collection[str]) -> inspect.Signature:
    if missing := set(names) - signature.parameters.keys():
        raise TypeError(f"the test has no parameters {', '.join(sorted(missing))}")
    return signature.replace(parameters=[each for name, each in signature.parameters.items() if name not in names])


def _place(error: BaseException) -> str:
    """File and line of the innermost call in the tests."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if TESTS in Path(each.filename).parents and each.filename != __file__]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}: {last.line}"


def _message(error: BaseException) -> list[str]:
    kind = "" if isinstance(error, AssertionError | pytest.fail.Exception) else f"{type(error).__name__}: "
    lines = (kind + str(error)).splitlines()
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], f"... {len(lines) - MAX_LINES} more lines"]
