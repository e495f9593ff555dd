"""Print how the product is structured: files, lines, import circles, small files, class names, one request's path.

    python tools/structure.py                 the static counts
    python tools/trace_request.py             the files, functions and types of one chat request

`tests/repository/test_structure.py` holds the counts that have a limit.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PRODUCT: Final = ("common", "backends", "kernels_pallas", "server")
SMALL: Final = 80
"""Lines below which a file with one importer belongs inside that importer, unless REASONS has it."""

REASONS: Final[Mapping[str, str]] = {
    "common/models/families/": "a file per kind of block",
    "common/models/mixers/": "a file per kind of mixer",
    "common/weights/quantization/layouts/": "a file per layout",
    "common/weights/quantization/methods/": "a file per quant_method",
    "backends/reference/model/": "a file per mixer",
    "backends/torch_cuda/kernels/": "a folder per kernel",
    "backends/torch_cuda/model/mixers/": "a file per kind of mixer",
    "backends/torch_cuda/parallel/ranks.py": "the registry loads it, without torch",
    "backends/jax_tpu/model/": "a file per kind of mixer",
    "common/engine/speculative/": "a file per method",
    "kernels_pallas/": "a folder per kernel",
    "server/api/openai/": "a file per endpoint",
    "server/api/admin/": "a file per endpoint",
}
"""Path prefix -> why small files with one importer are kept there. Files imported only inside functions need no reason:
they keep an optional or slow import away from start-up."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a product module. `lazy`: inside a function, or for type checkers only."""

    importer: str
    imported: str
    lazy: bool


@dataclass(frozen=True)
class Tree:
    """The product's source below `root`."""

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """Module name -> file."""
        paths = [
            self.root / "__init__.py",
            *(path for top in PRODUCT for path in sorted((self.root / top).rglob("*.py"))),
        ]
        return {self._name(path): path for path in paths}

    @cached_property
    def syntax(self) -> dict[str, ast.Module]:
        """Module name -> its syntax tree."""
        return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.files.items()}

    @cached_property
    def lines(self) -> dict[str, int]:
        """Module name -> number of lines."""
        return {name: path.read_text(encoding="utf-8").count("\n") for name, path in self.files.items()}

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of a product module by another."""
        return [each for name, tree in self.syntax.items() for each in self._imports(name, tree.body, lazy=False)]

    def relative(self, name: str) -> str:
        """The module's path below the root."""
        return self.files[name].relative_to(self.root).as_posix()

    def circles(self) -> list[list[str]]:
        """Groups of modules that import each other, lazy imports included: strongly connected components.

        The root package is left out: it imports public names when they are first used, and modules read its version.
        """
        graph = defaultdict(set)
        for each in self.imports:
            if "pagoda" not in (each.importer, each.imported):
                graph[each.importer].add(each.imported)
        return [sorted(group) for group in _components(self.files, graph) if len(group) > 1]

    @cached_property
    def classes(self) -> dict[str, list[str]]:
        """Class name -> the files that define it."""
        files: dict[str, list[str]] = defaultdict(list)
        for name, tree in self.syntax.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(self.relative(name))
        return dict(sorted(files.items()))

    def duplicate_classes(self) -> dict[str, list[str]]:
        """Class name -> the files that define it, where they are several."""
        return {name: files for name, files in self.classes.items() if len(files) > 1}

    def small_files(self) -> list[tuple[str, int, str]]:
        """(path, lines, importer) of each file below SMALL that one module imports, at its top, without a reason."""
        importers = defaultdict(list)
        for each in self.imports:
            importers[each.imported].append(each)
        rows = []
        for name, uses in importers.items():
            path, by = self.relative(name), {each.importer for each in uses}
            excused = path.startswith(tuple(REASONS)) or path.endswith("__init__.py") or all(each.lazy for each in uses)
            if len(by) == 1 and self.lines[name] < SMALL and not excused:
                rows.append((path, self.lines[name], self.relative(by.pop())))
        return sorted(rows)

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(("pagoda", *(parts[:-1] if parts[-1] == "__init__" else parts)))

    def _imports(self, importer: str, body: list[ast.stmt], lazy: bool) -> Iterator[Import]:
        for node in body:
            for name in self._targets(node):
                if name != importer:
                    yield Import(importer, name, lazy)
            deeper = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)
            for field in ("body", "orelse", "finalbody"):
                yield from self._imports(importer, getattr(node, field, None) or [], deeper)
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from self._imports(importer, part.body, deeper)

    def _targets(self, node: ast.stmt) -> Iterator[str]:
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases if alias.name in self.files)
            case ast.ImportFrom(module=str(module), names=aliases):
                for alias in aliases:
                    inner = f"{module}.{alias.name}"
                    if inner in self.files or module in self.files:
                        yield inner if inner in self.files else module


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _components(nodes: Mapping[str, Path], graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Strongly connected components, by Kosaraju's algorithm."""
    order: list[str] = []
    seen: set[str] = set()
    for node in nodes:
        order += _postorder(node, graph, seen)
    reverse = defaultdict(set)
    for node, nexts in graph.items():
        for each in nexts:
            reverse[each].add(node)
    seen = set()
    return [set(_postorder(node, reverse, seen)) for node in reversed(order) if node not in seen]


def _postorder(start: str, graph: Mapping[str, set[str]], seen: set[str]) -> list[str]:
    order: list[str] = []
    stack = [(start, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(each, False) for each in graph.get(node, ()) if each not in seen]
    return order


def main() -> int:
    """Print the counts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to count")
    args = parser.parse_args()
    tree = Tree(args.root.resolve())
    circles, duplicates, small = tree.circles(), tree.duplicate_classes(), tree.small_files()
    print(f"product files                     {len(tree.files)}")
    print(f"product lines                     {sum(tree.lines.values())}")
    print(f"import circles                    {len(circles)}")
    print(f"class names used twice            {len(duplicates)}")
    print(f"small files with one importer     {len(small)}")
    for circle in circles:
        print(f"  circle: {', '.join(circle)}")
    for name, files in duplicates.items():
        print(f"  class {name}: {', '.join(files)}")
    for path, lines, importer in small:
        print(f"  {path} ({lines} lines) <- {importer}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
