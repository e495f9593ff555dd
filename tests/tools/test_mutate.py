"""The mutants that tools/mutate.py makes, and the paths that it names."""

from __future__ import annotations

from pathlib import Path

import mutate
import pytest
from mutate import EQUIVALENT, Target, choose, missing_paths, mutants, unknown_equivalents

SOURCE = '''"""Docstring 1."""
from a import b


def f(x: int = 1) -> int:
    if x < 2 and not b:
        raise ValueError(3)
    b.append(x)
    x += 4
    return max(x, 5) - 6


def g() -> bool:
    assert 7
    return True
'''


def texts(monkeypatch: pytest.MonkeyPatch, folder: Path, functions: tuple[str, ...] = ()) -> list[str]:
    monkeypatch.setattr(mutate, "ROOT", folder)
    (folder / "m.py").write_text(SOURCE)
    made = mutants(Target("t", ("m.py",), (), functions), "m.py")
    return [mutant.describe().removeprefix("m.py ") for mutant in made]


def test_every_file_function_test_and_equivalent_mutant_exists() -> None:
    assert missing_paths() == []
    assert unknown_equivalents() == []


def test_missing_paths_are_named() -> None:
    target = Target("parsers", ("server/gone.py", "server/parsers/parser.py"), ("tests/gone.py",), ("_text", "gone"))
    assert missing_paths([target]) == ["parsers: server/gone.py", "parsers: tests/gone.py", "parsers: function gone"]


def test_the_script_stops_when_a_path_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mutate.py", "--list"])
    monkeypatch.setattr(mutate, "missing_paths", lambda: ["parsers: server/gone.py"])
    assert mutate.main() == 2
    assert "parsers: server/gone.py" in capsys.readouterr().err


def test_mutants_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sorted(texts(monkeypatch, tmp_path)) == sorted(
        [
            "f: def f(x: int = 1) -> int: -> def f(x: int = 2) -> int:",
            "f: if x < 2 and not b: -> if (not (x < 2 and not b)):",
            "f: if x < 2 and not b: -> if x < 2 or not b:",
            "f: if x < 2 and not b: -> if x <= 2 and not b:",
            "f: if x < 2 and not b: -> if x < 3 and not b:",
            "f: if x < 2 and not b: -> if x < 2 and b:",
            "f: b.append(x) -> pass",
            "f: x += 4 -> pass",
            "f: x += 4 -> x += 5",
            "f: return max(x, 5) - 6 -> return min(x, 5) - 6",
            "f: return max(x, 5) - 6 -> return max(x, 6) - 6",
            "f: return max(x, 5) - 6 -> return max(x, 5) + 6",
            "f: return max(x, 5) - 6 -> return max(x, 5) - 7",
            "g: return True -> return False",
        ]
    )


def test_only_the_named_functions_are_mutated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert texts(monkeypatch, tmp_path, ("g",)) == ["g: return True -> return False"]


def test_the_choice_is_by_seed_and_even_over_the_targets() -> None:
    chosen = choose(60, 0)
    assert choose(60, 0) == chosen != choose(60, 1)
    assert len({(mutant.path, mutant.line) for mutant in chosen}) == 60
    names = [mutant.target.name for mutant in chosen]
    assert {names.count(target.name) for target in mutate.TARGETS} == {7, 8}
    assert not {mutant.describe() for mutant in chosen} & EQUIVALENT
