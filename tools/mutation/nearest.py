"""Which test files are near a file of the product: those that import it, directly or through other files."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import log, sqrt
from pathlib import Path
from typing import Final

PRODUCT: Final = ("common", "backends", "kernels_pallas", "server", "benchmarks")
UNRECORDED: Final = 4.0
"""Units of processor time that a test file without a record is taken to need."""


def recorded_units(path: Path) -> dict[str, float]:
    """Test file -> units of processor time, from the table of budgets (`support.suite.budgets`); {} without one."""
    table = json.loads(path.read_text(encoding="utf-8"))["files"] if path.is_file() else {}
    return {f"tests/{name}": float(units) for name, units in table.items()}


class Imports:
    """The imports among the files below `root`: product, tests, what supports the tests, tools.

    Names in strings count as imports when they name a module, since registries import by name. What a package imports
    only to offer it counts as imported from where it is defined.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def tests(self, path: str, units: Mapping[str, float], place: str = "") -> list[str]:
        """The test files that reach `path`: first those that have its name, then those that import it themselves.

        The others, and each of these groups in itself, by the rare words that they share with the file, those in
        `place` (a line of it, say) four times, for each import in between and for the units that they cost.
        """
        distances, own, emphasised = self._distances(path), _words((self.root / path).read_text()), _words(place)

        def worth(name: str) -> float:
            words = self._words[name]
            shared = sum(self._rarity[word] * (4 if word in emphasised else 1) for word in words & own)
            return shared / sqrt(len(words) + 1) / distances[name] / (10 + units.get(name, UNRECORDED))

        found = sorted(name for name in distances if _is_test(name))
        return sorted(found, key=lambda name: (not _has_name_of(name, path), distances[name] > 1, -worth(name)))

    @cached_property
    def _words(self) -> dict[str, set[str]]:
        """Test file -> the words in it."""
        return {path: _words((self.root / path).read_text()) for path in self.modules.values() if _is_test(path)}

    @cached_property
    def _rarity(self) -> dict[str, float]:
        """Word -> more, the fewer test files have it."""
        counts = Counter(word for words in self._words.values() for word in words)
        return {word: log(len(self._words) / count) for word, count in counts.items()}

    def _distances(self, path: str) -> dict[str, int]:
        """File -> number of imports between it and `path`."""
        distances, edge = {path: 0}, [path]
        while edge:
            further = sorted({user for name in edge for user in self._users[name]} - distances.keys())
            distances |= dict.fromkeys(further, distances[edge[0]] + 1)
            edge = further
        return distances

    @cached_property
    def modules(self) -> dict[str, str]:
        """Module name -> file."""
        tops = [("pagoda.", top) for top in PRODUCT] + [("", "tests"), ("", "tools")]
        found = {"pagoda": "__init__.py"}
        for prefix, top in tops:
            base = self.root if prefix else self.root / top
            for path in sorted((self.root / top).rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found.setdefault(f"{prefix}{name}", path.relative_to(self.root).as_posix())
        return found

    @cached_property
    def _syntax(self) -> dict[str, ast.Module]:
        return {path: ast.parse((self.root / path).read_bytes()) for path in self.modules.values()}

    @cached_property
    def _users(self) -> dict[str, set[str]]:
        """File -> those that import it."""
        users: dict[str, set[str]] = defaultdict(set)
        for name, path in self.modules.items():
            for imported in {*self._imported(name, path)} - {path}:
                users[imported].add(path)
        return users

    @cached_property
    def _endings(self) -> dict[str, set[str]]:
        """End of a module's name, of two parts or more -> files."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, path in self.modules.items():
            parts = name.split(".")
            for start in range(len(parts) - 1):
                found[".".join(parts[start:])].add(path)
        return found

    @cached_property
    def _offered(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Package -> name that its __init__.py imports -> module and name there."""
        return {
            name: {
                alias.asname or alias.name: (self._base(name, path, node), alias.name)
                for node in self._syntax[path].body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for name, path in self.modules.items()
            if path.endswith("__init__.py")
        }

    def _imported(self, name: str, path: str) -> Iterator[str]:
        """The files that a module imports."""
        nodes = [*_executed(self._syntax[path])]
        below = self._below(name) if any(_imports_by_name(node) for node in nodes) else {}
        for node in nodes:
            match node:
                case ast.Import(names=names):
                    yield from (self.modules[alias.name] for alias in names if alias.name in self.modules)
                case ast.ImportFrom(names=names):
                    base = self._base(name, path, node)
                    yield from (found for alias in names if (found := self._defined(base, alias.name)))
                case ast.Constant(value=str(text)) if (ending := text.strip(".")) in self._endings:
                    yield from self._named(ending, path)
                case ast.Constant(value=str(text)) if text in below:
                    yield below[text]
        if _is_test(path):
            above = [folder.as_posix() for folder in Path(path).parents if folder.name]
            yield from (found for folder in above if (found := f"{folder}/conftest.py") in self._syntax)

    def _named(self, ending: str, path: str) -> set[str]:
        """The file that a string in `path` names: one below its folder, or the only one."""
        found = self._endings[ending]
        near = {each for each in found if Path(path).parent in Path(each).parents}
        return next((each for each in (near, found) if len(each) == 1), set())

    def _below(self, name: str) -> dict[str, str]:
        """Last part of a module's name -> file, of the modules below the package of module `name`."""
        package = name.rpartition(".")[0]
        return {module.rpartition(".")[2]: path for module, path in self.modules.items() if module.startswith(package)}

    def _base(self, name: str, path: str, node: ast.ImportFrom) -> str:
        """The absolute name of the module that is imported from."""
        if not node.level:
            return node.module or ""
        parts = name.split(".")
        package = parts if path.endswith("__init__.py") else parts[:-1]
        kept = package[: len(package) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _defined(self, module: str, name: str, depth: int = 0) -> str | None:
        """The file of `name` in `module`: a module itself, or the file that defines it."""
        if f"{module}.{name}" in self.modules:
            return self.modules[f"{module}.{name}"]
        if depth < 5 and name in self._offered.get(module, {}):
            return self._defined(*self._offered[module][name], depth + 1) or self.modules[module]
        return self.modules.get(module)


def within(files: Sequence[str], units: Mapping[str, float], budget: float) -> list[str]:
    """Those of the files, in their order, whose units together are within the budget."""
    kept, left = [], budget
    for name in files:
        if (cost := units.get(name, UNRECORDED)) <= left:
            kept.append(name)
            left -= cost
    return kept


def _has_name_of(test: str, path: str) -> bool:
    """Return whether a test file stands where the tests of a file of the product, or of its package, are looked for."""
    file = Path(path).parent if Path(path).name == "__init__.py" else Path(path).with_suffix("")
    return Path(test).parent == "tests" / file.parent and Path(test).name.startswith(f"test_{file.name}")


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _executed(node)


def _imports_by_name(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "import_module") or (
        isinstance(node, ast.Attribute) and node.attr == "import_module"
    )


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_")


def _words(text: str) -> set[str]:
    """Identifiers and words of four letters or more; flags as the names of their fields."""
    return {word.strip("_") for word in re.findall(r"[A-Za-z]\w{3,}", text.replace("-", "_"))}
