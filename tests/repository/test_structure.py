"""The limits of the counts that tools/structure.py prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
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
