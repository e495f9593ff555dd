"""The mutants that tools/mutate.py makes and chooses, and what it does with the tests near them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mutate
import pytest
from mutate import ROOT, equivalent_mutants
from mutation.mutants import Name, Source, Sources, Target, choose
from mutation.targets import BREADTH, ENGINE, SETS, missing, unknown

SOURCE = '''"""Docstring 1."""
from a import b


def f(x: int = 1) -> int:
    if x < 2 and not b:
        raise ValueError(3)
    b.append(x)
    x += 4
    return max(x, 5) - 6


async def g() -> bool:
    assert 7
    return True
'''


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(ROOT)


def test_every_file_function_and_equivalent_mutant_exists(sources: Sources) -> None:
    targets = [target for each in SETS for target in each.targets]
    assert missing(sources, targets) == []
    assert unknown(sources, targets, equivalent_mutants()) == []


def test_missing_paths_are_named(sources: Sources) -> None:
    target = Target("parsers", ("server/gone/*.py", "server/parsers/parser.py"), ("_text", "gone"), ("tests/gone.py",))
    gone = ["parsers: server/gone/*.py", "parsers: tests/gone.py", "parsers: function gone"]
    assert missing(sources, [target]) == gone
    known = "server/parsers/parser.py _text: gone -> pass"
    assert unknown(sources, [target], frozenset([known])) == [known]


def test_the_script_stops_when_a_path_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, sources: Sources
) -> None:
    monkeypatch.setattr("sys.argv", ["mutate.py", "--list"])
    monkeypatch.setattr(mutate, "missing", lambda *_: ["parsers: server/gone.py"])
    assert mutate._run(mutate.arguments(), [tmp_path], sources) == 2
    assert "parsers: server/gone.py" in capsys.readouterr().err


def test_mutants_of_a_file() -> None:
    source = Source("m.py", SOURCE.encode())
    assert sorted(mutant.name.describe().removeprefix("m.py ") for mutant in source.mutants) == sorted(
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


def test_only_the_named_functions_are_mutated() -> None:
    (mutant,) = Source("m.py", SOURCE.encode()).mutants_in(["g"])
    assert mutant.name == Name("m.py", "g", "return True", "return False", 0)
    assert mutant.apply(SOURCE.encode()).decode() == SOURCE.replace("True", "False")


def test_a_mutant_is_found_by_its_text_after_lines_moved(tmp_path: Path) -> None:
    twice = "def f(a):\n    a = a + 1\n    a = a + 1\n    return a\n"
    (tmp_path / "m.py").write_text(twice)
    second = Name("m.py", "f", "a = a + 1", "a = a - 1", 1)
    (tmp_path / "later.py").write_text(f"import os\n\n\n{twice}")
    mutant = Sources(tmp_path).find(Name("later.py", *(second.function, second.before, second.after, second.nth)))
    assert mutant is not None
    assert mutant.line == 6
    assert Sources(tmp_path).find(second) is not None
    assert Sources(tmp_path).find(Name("m.py", "f", "a = a + 2", "pass", 0)) is None
    assert Sources(tmp_path).find(Name("gone.py", "f", "a = a + 1", "a = a - 1", 0)) is None


@pytest.mark.parametrize("targets", [ENGINE.targets, BREADTH.targets], ids=["engine", "breadth"])
def test_the_choice_is_by_seed_and_even_over_the_targets(sources: Sources, targets: tuple[Target, ...]) -> None:
    without = equivalent_mutants()
    chosen = choose(sources, targets, 60, 0, without)
    assert choose(sources, targets, 60, 0, without) == chosen != choose(sources, targets, 60, 1, without)
    assert len({(mutant.name.path, mutant.line) for _, mutant in chosen}) == 60
    names = [target.name for target, _ in chosen]
    assert {names.count(target.name) for target in targets} <= {60 // len(targets), -(-60 // len(targets))}
    assert not {mutant.name.describe() for _, mutant in chosen} & without


def test_a_mutant_that_is_left_out_changes_no_other_choice(sources: Sources) -> None:
    chosen = choose(sources, ENGINE.targets, 30, 3)
    out = chosen[4][1]
    other = choose(sources, ENGINE.targets, 30, 3, frozenset([out.name.describe()]))
    assert len(other) == 30
    assert len({mutant.name for _, mutant in other} & {mutant.name for _, mutant in chosen}) == 29


SUMS = """
def total(values):
    result, left = 0, list(values)
    while left:
        result += left.pop()
    return result


def announce(done):
    done.set()
    return done.wait()


def unseen(x):
    return x + 1
"""
TEST_SUMS = """
from threading import Event

from pagoda.common.sums import announce, total


def test_total():
    assert total([1, 2]) == 3


def test_announce():
    assert announce(Event())
"""
RUN = """
import sys
import mutate
from mutation import forks
mutate.PRELOADED, forks.TEST_SECONDS, forks.IDLE_SAMPLES = (), 2, 3
sys.exit(mutate.main())
"""


def test_tests_that_fail_or_hang_catch_mutants_unless_they_fail_anyway(tmp_path: Path) -> None:
    root = tmp_path / "pagoda"
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\nmarkers = ["model"]\n',
        "__init__.py": "",
        "common/__init__.py": "",
        "common/sums.py": SUMS,
        "tests/common/test_broken.py": "from pagoda.common import sums\n\n\ndef test_broken():\n    assert not sums\n",
        "tests/test_sums.py": TEST_SUMS,
        "tests/test_far.py": "def test_far():\n    raise AssertionError('imports nothing of the product')\n",
        **{
            path.relative_to(ROOT).as_posix(): path.read_text()
            for path in [
                *(ROOT / "tools" / "mutation").glob("*.py"),
                *(ROOT / "tools" / "mutate.py", ROOT / "tests" / "support" / "suite" / "clock.py"),
            ]
        },
        "tools/equivalent_mutants.txt": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    outcomes = {
        ("total", "result += left.pop()", "pass"): ("caught", "processor time", "tests/test_sums.py::test_total"),
        ("total", "while left:", "while not left:"): ("gone", "", ""),
        ("total", "result, left = 0, list(values)", "result, left = 1, list(values)"): (
            *("caught", "failed"),
            "tests/test_sums.py::test_total",
        ),
        ("announce", "done.set()", "pass"): ("caught", "idle", "tests/test_sums.py::test_announce"),
        ("unseen", "return x + 1", "return x - 1"): ("survived", "", ""),
    }
    names = [dict(zip(("function", "before", "after"), key)) | {"path": "common/sums.py", "nth": 0} for key in outcomes]
    asked, written = tmp_path / "asked.json", tmp_path / "results.json"
    asked.write_text(json.dumps({"mutants": [{"target": "t", "mutant": name} for name in names]}))
    git = ["git", "-c", "user.name=t", "-c", "user.email=t", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(root / "tools")}

    def run() -> tuple[int, str, dict]:
        command = [sys.executable, "-c", RUN, "--revision", "HEAD", "--from", str(asked), "--json", str(written)]
        done = subprocess.run(
            [*command, "--jobs", "1", "--at-least", "3"], cwd=root, env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout, json.loads(written.read_text())

    code, printed, results = run()
    found = {
        (row["mutant"]["function"], row["mutant"]["before"], row["mutant"]["after"]): (
            *(row["outcome"], row["how"]),
            row["by"],
        )
        for row in results["mutants"]
    }
    assert found == outcomes
    assert results["tests that fail without a mutant"] == ["tests/common/test_broken.py"]
    assert (results["caught"], results["survived"], results["gone"]) == (3, 1, 1)
    assert code == 0
    assert "3 of 5 mutants caught" in printed
    assert "survived (t" in printed
    assert (root / "common" / "sums.py").read_text() == SUMS

    results["mutants"] = results["mutants"][:-1]  # a run that was stopped continues
    written.write_text(json.dumps(results))
    code, printed, again = run()
    assert [row["mutant"] for row in again["mutants"]] == names
    assert printed.count("caught (t") == 0
    assert printed.count("survived (t") == 1
