"""The limits of the counts that tools/structure.py prints."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lint_calls import LISTS, findings, problems
from structure import ROOT, Tree
from trace_request import CARRIERS_IN, CARRIERS_OUT


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


def test_no_import_circles(tree: Tree) -> None:
    assert tree.circles() == []


def test_no_class_name_is_used_twice(tree: Tree) -> None:
    assert tree.duplicate_classes() == {}


def test_small_files_with_one_importer_are_inside_it(tree: Tree) -> None:
    assert tree.small_files() == []


def test_the_types_that_carry_a_request_exist(tree: Tree) -> None:
    assert {*CARRIERS_IN, *CARRIERS_OUT} <= tree.classes.keys()


def test_a_chat_request_enters_at_most_25_files() -> None:
    command = (sys.executable, "-P", str(ROOT / "tools" / "trace_request.py"))
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count = re.search(r"^files of one chat request +(\d+)$", printed, re.MULTILINE)
    assert count is not None
    assert 15 < int(count[1]) <= 25


LARGEST_FOLDER = 14
"""Entries of a folder, `__init__.py` apart."""

LONGEST_FILE = 922
LONG_FUNCTION = 29
"""Statements that 99 of 100 functions do not exceed. Not lines: named arguments stand on a line each."""

LONG_FUNCTIONS = 84
LONGEST_FUNCTION = 122


def test_folders_have_at_most_14_entries() -> None:
    entries: dict[str, set[str]] = {}
    for path in tracked("common", "server", "backends", "kernels_pallas", "tests"):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            entries.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    code = {folder: names - {"__init__.py"} for folder, names in entries.items() if not folder.startswith("tests/data")}
    assert len(code) > 100
    assert {folder: len(names) for folder, names in code.items() if len(names) > LARGEST_FOLDER} == {}


def test_no_file_and_no_function_gets_longer(tree: Tree) -> None:
    assert max(tree.lines.values()) <= LONGEST_FILE
    lengths = [
        sum(isinstance(part, ast.stmt) for part in ast.walk(node)) - 1
        for syntax in tree.syntax.values()
        for node in ast.walk(syntax)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert max(lengths) <= LONGEST_FUNCTION
    assert sum(length > LONG_FUNCTION for length in lengths) <= LONG_FUNCTIONS


def tracked(*folders: str) -> list[str]:
    """The files of these folders that git knows, or all that are there in a copy without git."""
    command = ("git", "-C", str(ROOT), "ls-files", *folders)
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return listed.stdout.splitlines()
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts]


def test_calls_and_assignments_hide_no_number(tree: Tree) -> None:
    found = list(findings({tree.relative(name): syntax for name, syntax in tree.syntax.items()}))
    assert problems(found, json.loads(LISTS.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("splat", "launch(*values)"),
        ("splat", "kernel[grid](*values)"),
        ("dictionary", "launch(**{'x': 1})"),
        ("pair", "a, b = x, y"),
    ],
)
def test_the_lint_finds_what_hides_a_number(rule: str, line: str) -> None:
    source = f"def launch(x, y, z): ...\ndef gather(*x): ...\ngather(*values)\na, b = b, a\n{line}\n"
    assert [(finding.rule, finding.line) for finding in findings({"x.py": ast.parse(source)})] == [(rule, 5)]
    found = list(findings({"x.py": ast.parse(source)}))
    assert len(problems(found, {})) == 1
    assert problems(found, {rule: {"x.py": 1}}) == []
    assert problems([], {rule: {"x.py": 1}}) == [f"x.py: {rule}: 0 are left of 1; run tools/lint_calls.py --write"]


def test_the_counts_see_circles_duplicates_and_small_files(tmp_path: Path) -> None:
    sources = {
        "__init__.py": "",
        "common/__init__.py": "",
        "common/a.py": "from pagoda.common import b\n\n\nclass Same:\n    pass\n",
        "common/b.py": "class Same:\n    pass\n\n\ndef f() -> None:\n    from pagoda.common.a import Same\n",
        "common/c.py": "from pagoda.common import d\n",
        "common/d.py": "",
        "common/e.py": "def f() -> None:\n    from pagoda.common import lazy\n",
        "common/lazy.py": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tree = Tree(tmp_path)
    assert tree.circles() == [["pagoda.common.a", "pagoda.common.b"]]
    assert tree.duplicate_classes() == {"Same": ["common/a.py", "common/b.py"]}
    assert tree.small_files() == [("common/b.py", 6, "common/a.py"), ("common/d.py", 0, "common/c.py")]
