"""tools/suite.py: which parts of `make test-full` are out of date, and what is recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import suite
from suite import Part

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """A repository with a covered file, in which the tool runs."""

    def run(*words: str) -> str:
        names = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(("git", *names, *words), cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    (tmp_path / "covered").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "covered" / "a.py").write_text("1\n")
    run("init", "-q")
    run("add", ".")
    run("commit", "-qm", "x")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "RECORDS", tmp_path / "tests" / "full_suite.json")
    return run


def parts(code: str, *names: str) -> tuple[Part, ...]:
    return tuple(Part(name, ("covered",), (sys.executable, "-c", code)) for name in names)


PASSES = "print('=== 3 passed, 1 warning in 2 s ===')"


def test_a_part_that_passes_is_up_to_date_until_what_it_covers_changes(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "PARTS", parts(PASSES, "one"))
    assert [reason for _, reason in suite.stale(suite.PARTS)] == ["it has not passed yet"]
    assert suite.full(["one"]) == 0
    record = json.loads((tmp_path / "tests" / "full_suite.json").read_text())["one"]
    assert (record["commit"], record["tests"]) == (git("rev-parse", "HEAD").strip(), 3)
    assert suite.stale(suite.PARTS) == []
    (tmp_path / "other.py").write_text("2\n")
    git("add", ".")
    git("commit", "-qm", "other")
    assert suite.stale(suite.PARTS) == []
    (tmp_path / "covered" / "a.py").write_text("2\n")
    assert ["1 of its files" in reason for _, reason in suite.stale(suite.PARTS)] == [True]


def test_a_run_continues_with_the_parts_that_have_not_passed(
    git: Git, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = parts(PASSES, "first")[0], parts("raise SystemExit(3)", "second")[0]
    monkeypatch.setattr(suite, "PARTS", (first, second))
    monkeypatch.setattr(suite.stale, "__defaults__", ((first, second),))
    assert suite.full([]) == 3
    assert list(suite.records()) == ["first"]
    capfd.readouterr()
    assert suite.full([]) == 3
    assert "== second" in (printed := capfd.readouterr().out)
    assert "== first" not in printed


def test_nothing_is_recorded_while_covered_files_have_uncommitted_changes(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "PARTS", parts(PASSES, "one"))
    (tmp_path / "covered" / "new.py").write_text("2\n")
    assert suite.full(["one"]) == 0
    assert suite.records() == {}


def test_a_commit_that_is_not_in_the_history_is_out_of_date(git: Git, tmp_path: Path) -> None:
    (tmp_path / "tests" / "full_suite.json").write_text(json.dumps({"one": {"commit": "f" * 40}}))
    assert [reason for _, reason in suite.stale(parts(PASSES, "one"))] == [
        "it passed at ffffffff, which is not in this checkout's history"
    ]


def test_unknown_parts_are_refused(git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.full(["nonsense"]) == 2
    assert "unknown parts: nonsense; there are: models, " in capsys.readouterr().out


def test_every_part_covers_and_runs_what_exists() -> None:
    root = Path(__file__).resolve().parents[2]
    for part in suite.PARTS:
        assert [path for path in part.covers if not (root / path).exists()] == []
        if part.command[0] == "make":
            assert f"{part.command[1]}:" in (root / "Makefile").read_text()
