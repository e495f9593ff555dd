"""Which tests tools/mutation/nearest.py takes to be near a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mutation.nearest import Imports, recorded_units, within

FILES = {
    "__init__.py": "",
    "common/__init__.py": "",
    "common/sums.py": "",
    "common/shop/__init__.py": "from pagoda.common.shop.goods import Apple\n",
    "common/shop/goods.py": "from ..sums import total\n",
    "common/shop/lazy.py": "",
    "common/registry.py": 'from importlib import import_module\nNAMES = ["shop.goods"]\nimport_module(NAMES[0])\n',
    "server/__init__.py": "",
    "server/parsers/__init__.py": "",
    "server/parsers/found.py": "import importlib\n\nimportlib.import_module('pagoda.server.parsers.' + 'json_')\n",
    "server/parsers/json_.py": "",
    "tests/conftest.py": "from support.maker import make\n",
    "tests/support/maker.py": "def make():\n    from pagoda.common.shop.lazy import x\n",
    "tests/common/test_sums.py": "from pagoda.common import sums\n",
    "tests/common/test_slow_sums.py": "from pagoda.common.sums import total\n",
    "tests/server/test_sums_elsewhere.py": "import pagoda.common.sums\n",
    "tests/common/test_goods.py": "from pagoda.common.shop import Apple\n",
    "tests/common/test_registry.py": "from pagoda.common.registry import NAMES\n",
    "tests/server/test_found.py": "from pagoda.server.parsers import found\n",
    "tests/server/test_types.py": "import typing\nif typing.TYPE_CHECKING:\n    import pagoda.common.sums\n",
}


@pytest.fixture
def imports(tmp_path: Path) -> Imports:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Imports(tmp_path)


def test_direct_importers_come_first_and_cheap_ones_among_them(imports: Imports) -> None:
    seconds = {"tests/common/test_slow_sums.py": 9.0, "tests/server/test_sums_elsewhere.py": 0.1}
    tests = imports.tests("common/sums.py", seconds)
    assert {*tests[:3]} == {
        *("tests/common/test_sums.py", "tests/common/test_slow_sums.py", "tests/server/test_sums_elsewhere.py")
    }
    assert {*tests[3:]} == {"tests/common/test_goods.py", "tests/common/test_registry.py"}


def test_those_that_speak_of_the_same_come_before_cheaper_ones(imports: Imports) -> None:
    (imports.root / "common" / "sums.py").write_text("def total(discount):\n    return discount\n\n\nvoucher = 1\n")
    (imports.root / "tests" / "server" / "test_sums_elsewhere.py").write_text("import pagoda.common.sums\n# voucher\n")
    slow, elsewhere, plain = (
        *("tests/common/test_slow_sums.py", "tests/server/test_sums_elsewhere.py"),
        "tests/common/test_sums.py",
    )
    assert imports.tests("common/sums.py", {slow: 1.0, elsewhere: 1.0}, "voucher = 1")[:2] == [plain, elsewhere]
    assert imports.tests("common/sums.py", {slow: 1.0, elsewhere: 90.0})[:2] == [plain, slow]


def test_those_that_have_the_name_of_the_file_come_first(imports: Imports) -> None:
    costs = {"tests/common/test_sums.py": 50.0}
    assert imports.tests("common/sums.py", costs)[0] == "tests/common/test_sums.py"
    (imports.root / "common" / "sums").mkdir()
    (imports.root / "common" / "sums.py").rename(imports.root / "common" / "sums" / "__init__.py")
    assert Imports(imports.root).tests("common/sums/__init__.py", costs)[0] == "tests/common/test_sums.py"


def test_a_name_that_a_package_offers_is_imported_from_where_it_is_defined(imports: Imports) -> None:
    assert imports.tests("common/shop/goods.py", {})[0] == "tests/common/test_goods.py"


def test_registries_import_by_name(imports: Imports) -> None:
    assert imports.tests("common/shop/goods.py", {}) == ["tests/common/test_goods.py", "tests/common/test_registry.py"]
    assert imports.tests("server/parsers/json_.py", {}) == ["tests/server/test_found.py"]


def test_what_a_conftest_imports_is_near_all_tests_below_it(imports: Imports) -> None:
    tests = {name for name in FILES if "/test_" in name}
    assert {*imports.tests("common/shop/lazy.py", {})} == tests


def test_files_are_taken_in_order_while_they_fit() -> None:
    seconds = {"a": 30.0, "b": 50.0, "c": 25.0}
    assert within(["a", "b", "c", "unrecorded", "d"], seconds, 60) == ["a", "c", "unrecorded"]


def test_recorded_units_are_optional(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    assert recorded_units(path) == {}
    path.write_text(json.dumps({"unit": "seconds", "files": {"test_a.py": 2, "common/test_b.py": 0.5}}))
    assert recorded_units(path) == {"tests/test_a.py": 2.0, "tests/common/test_b.py": 0.5}
