"""Find calls and assignments that can hide a wrong number: part of `make lint`.

    python tools/lint_calls.py             report what the lists in tools/lint_calls.json do not allow
    python tools/lint_calls.py --write     shrink the lists to what is there now

Three rules, each with a list of the files that still break it and how often. A count above its list fails, and so does
a list that is longer than it needs to be, so the lists can only shrink.

- splat: `f(*values)` where `f` is a function or class of ours with three parameters or more, or a Triton kernel's
  launch `kernel[grid](*values)`. Swapped values are a silent wrong number. Variadic callees are free.
- dictionary: `f(**{...})`: a dictionary literal as keyword arguments. Neither a reader nor mypy can check its names.
- pair: `a, b = x, y`: two assignments in one statement. Swaps, where a later value reads an earlier target, are free.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from structure import PRODUCT, ROOT

LISTS: Final = Path(__file__).with_suffix(".json")
MANY: Final = 3
"""Parameters from which on a function's arguments are named."""

LIBRARIES: Final = frozenset(
    {"np", "jnp", "jax", "lax", "torch", "F", "tl", "os", "nnx", "pl", "pltpu", "ir", "dist", "asyncio"}
)
"""Names of modules that are not ours: a function of theirs may be called like one of ours."""

VARIADIC: Final = frozenset({"map", "extend", "expand", "shape", "gather", "add", "_add"})
"""Names of ours that methods of arrays and lists have, too, which take any number of arguments."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that breaks a rule."""

    rule: str
    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Signature:
    """The positional parameters of a function or class, `self` apart. `variadic`: it has `*arguments`."""

    parameters: int
    variadic: bool


def signatures(trees: Mapping[str, ast.Module]) -> dict[str, list[Signature]]:
    """Name -> the signatures of our functions, methods and classes of that name."""
    known: dict[str, list[Signature]] = defaultdict(list)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                known[node.name].append(_of_function(node))
            elif isinstance(node, ast.ClassDef):
                known[node.name].append(_of_class(node))
    return known


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    names = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
    is_method = bool(names) and names[0] in ("self", "cls")
    return Signature(len(names) - is_method, node.args.vararg is not None)


def _of_class(node: ast.ClassDef) -> Signature:
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _of_function(member)
    fields = sum(isinstance(member, ast.AnnAssign) for member in node.body)
    return Signature(fields, variadic=False)


def findings(trees: Mapping[str, ast.Module]) -> Iterator[Finding]:
    """Yield every place that breaks a rule. `trees`: path -> syntax tree."""
    known = signatures(trees)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            rules: list[str] = []
            if isinstance(node, ast.Call):
                rules += ["splat"] * _splats(node, known)
                rules += ["dictionary"] * any(_is_unnamed(keyword) for keyword in node.keywords)
            elif isinstance(node, ast.Assign):
                rules += ["pair"] * _is_pair(node)
            for rule in rules:
                yield Finding(rule, path, node.lineno, ast.unparse(node).split("\n")[0][:100])


def _splats(call: ast.Call, known: Mapping[str, list[Signature]]) -> bool:
    if not any(isinstance(argument, ast.Starred) for argument in call.args):
        return False
    callee = call.func
    if isinstance(callee, ast.Subscript):  # kernel[grid](...)
        return True
    if isinstance(callee, ast.Attribute):
        base = callee.value
        if isinstance(base, ast.Name) and base.id in LIBRARIES:
            return False
        name = callee.attr
    elif isinstance(callee, ast.Name):
        name = callee.id
    else:
        return False
    if name in VARIADIC:
        return False
    ours = known.get(name, [])
    return any(one.parameters >= MANY for one in ours) and not any(one.variadic for one in ours)


def _is_unnamed(keyword: ast.keyword) -> bool:
    value = keyword.value
    is_dict = isinstance(value, ast.Dict | ast.DictComp) or (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict"
    )
    return keyword.arg is None and is_dict


def _is_pair(node: ast.Assign) -> bool:
    target = node.targets[0]
    if len(node.targets) != 1 or not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    values = node.value.elts
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *values)):
        return False
    return not any(
        ast.unparse(part) in {ast.unparse(inner) for inner in ast.walk(value)}
        for place, part in enumerate(target.elts)
        for value in values[place + 1 :]
    )


def read(root: Path) -> dict[str, ast.Module]:
    """Path -> syntax tree of the product's files below `root`."""
    paths = [path for top in PRODUCT for path in sorted((root / top).rglob("*.py"))]
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def counts(found: list[Finding]) -> dict[str, dict[str, int]]:
    """Rule -> file -> number of places."""
    tables = {rule: Counter[str]() for rule in ("dictionary", "pair", "splat")}
    for finding in found:
        tables[finding.rule][finding.path] += 1
    return {rule: dict(sorted(table.items())) for rule, table in tables.items()}


def problems(found: list[Finding], allowed: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return what differs from the lists, one line each."""
    lines = []
    for rule, table in counts(found).items():
        listed = allowed.get(rule, {})
        for path in sorted({*table, *listed}):
            count = table.get(path, 0)
            most = listed.get(path, 0)
            if count > most:
                places = [finding for finding in found if (finding.rule, finding.path) == (rule, path)]
                lines += [f"{place.path}:{place.line}: {rule}: {place.text}" for place in places]
            elif count < most:
                lines.append(f"{path}: {rule}: {count} are left of {most}; run tools/lint_calls.py --write")
    return lines


def main() -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the lists; a list that would grow is refused")
    parser.add_argument("--show", action="store_true", help="print every place, allowed or not")
    args = parser.parse_args()
    found = list(findings(read(ROOT)))
    if args.show:
        for place in found:
            print(f"{place.path}:{place.line}: {place.rule}: {place.text}")
    allowed = json.loads(LISTS.read_text(encoding="utf-8")) if LISTS.is_file() else counts(found)
    lines = problems(found, allowed)
    longer = [line for line in lines if "are left of" not in line]
    if args.write and not longer:
        LISTS.write_text(json.dumps(counts(found), indent=1) + "\n", encoding="utf-8")
        lines = []
    totals = ", ".join(f"{rule} {sum(table.values())}" for rule, table in counts(found).items())
    print("\n".join([*lines, f"calls and assignments: {totals}"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
