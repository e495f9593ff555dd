"""Make small bugs in the engine's core, one at a time, and count how many the nearest test files catch.

    python tools/mutate.py                        60 mutants, chosen by seed, evenly over TARGETS
    python tools/mutate.py --seed 7 --count 20    others
    python tools/mutate.py --list                 print the chosen mutants without running tests

Each mutant changes one operator, constant, condition or statement of one file in a copy of the checkout. It is caught
when a test of its target fails. Prints every survivor; exit status 1 if fewer than `--at-least` are caught.
Mutants in tools/equivalent_mutants.txt cannot change behaviour and are never chosen.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Target:
    """Files of one subject and the test files nearest to them, the fastest first."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()  # mutate these alone; (): everything


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: `old` at a position of `path` becomes `new`. Lines count from 1, columns from 0 in UTF-8 bytes."""

    target: Target
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    new: str
    function: str  # that it is in, "" outside of functions

    def apply(self, source: bytes) -> bytes:
        """The file's content with the bug."""
        lines = source.splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        return source[:start] + self.new.encode() + source[end:]

    def describe(self) -> str:
        """`path function: old line -> new line`."""
        source = (ROOT / self.path).read_bytes()
        before, after = (text.splitlines()[self.line - 1].decode().strip() for text in (source, self.apply(source)))
        return f"{f'{self.path} {self.function}'.strip()}: {before} -> {after}"


TARGETS: Final = (
    Target(
        "scheduler",
        ("common/engine/scheduler.py", "common/engine/request.py", "common/engine/speculative/proposer.py"),
        (
            "tests/common/engine/test_waiting.py",
            "tests/common/engine/test_batch_state.py",
            "tests/common/engine/test_results.py",
            "tests/common/engine/test_scheduler.py",
            "tests/common/engine/test_core.py",
            "tests/common/engine/test_drafts.py",
            "tests/common/engine/structured_output/test_compiler.py",
            "tests/common/engine/test_engine_properties.py",
        ),
    ),
    Target(
        "KV manager",
        ("common/engine/kv_cache/manager.py", "common/engine/kv_cache/spec.py"),
        ("tests/common/engine/kv_cache", "tests/common/engine/test_scheduler.py"),
    ),
    Target(
        "block pool",
        ("common/engine/kv_cache/block_pool.py",),
        ("tests/common/engine/kv_cache",),
    ),
    Target(
        "hashing",
        ("common/engine/kv_cache/manager.py", "common/engine/request.py"),
        ("tests/common/engine/kv_cache/test_hashing.py",),
        ("root_digest", "page_digest", "extend_hashes", "page_bytes", "token_bytes", "embeds_of", "_embed_rows"),
    ),
    Target(
        "sampling",
        ("common/engine/sampling.py", "common/engine/sampling_state.py"),
        (
            "tests/common/engine/test_sampling.py",
            "tests/common/engine/test_sampling_state.py",
            "tests/common/engine/test_logit_edits.py",
            "tests/backends/reference/test_sampler.py",
            "tests/backends/torch_cuda/test_sampler.py",
        ),
    ),
    Target(
        "reference sampler",
        ("backends/reference/sampling.py",),
        ("tests/backends/reference/test_sampler.py", "tests/backends/test_drafts.py"),
    ),
    Target(
        "output processing",
        ("server/processing/output_processor.py",),
        (
            "tests/common/engine/test_results.py",
            "tests/common/engine/test_core.py",
            "tests/server/processing/test_output_processor.py",
        ),
    ),
    Target(
        "parsers",
        (
            "server/parsers/parser.py",
            "server/parsers/output_parser.py",
            "server/parsers/reasoning/formats.py",
            "server/parsers/tool/scanner.py",
            "server/parsers/tool/json_text.py",
            "server/parsers/tool/formats/xml_calls.py",
        ),
        (
            "tests/server/parsers/test_delimiters.py",
            "tests/server/parsers/test_blocks.py",
            "tests/server/parsers/test_output_parser.py",
            "tests/server/parsers/test_attribution.py",
            "tests/server/parsers/test_chain.py",
            "tests/server/parsers/tool/test_scanner.py",
            "tests/server/parsers/tool/test_json_text.py",
            "tests/server/parsers/test_reasoning.py",
            "tests/server/parsers/tool",
        ),
    ),
)

EQUIVALENT: Final = frozenset(
    line
    for line in (ROOT / "tools" / "equivalent_mutants.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
"""`describe()` of mutants that cannot change behaviour."""

_COMPARISONS: Final = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC: Final = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"}


def mutants(target: Target, path: str) -> Iterator[Mutant]:
    """Every mutant of one file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = source.encode().splitlines(keepends=True)
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]

    def function_at(line: int) -> str:
        around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
        return max(around, key=lambda node: node.lineno).name if around else ""

    def between(left: ast.expr, right: ast.expr, new: str) -> Mutant:
        line, column = left.end_lineno or 0, left.end_col_offset or 0
        return Mutant(target, path, line, column, right.lineno, right.col_offset, f" {new} ", function_at(line))

    def instead(node: ast.expr | ast.stmt, new: str) -> Mutant:
        end, end_column = node.end_lineno or 0, node.end_col_offset or 0
        return Mutant(target, path, node.lineno, node.col_offset, end, end_column, new, function_at(node.lineno))

    def text(node: ast.expr) -> str:
        return ast.get_source_segment(source, node) or ""

    for node in _mutable(tree, target.functions):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                if not _in_parentheses(lines, left, right):
                    yield between(left, right, _COMPARISONS[type(op)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                if not _in_parentheses(lines, left, right):
                    yield between(left, right, _ARITHMETIC[type(op)])
            case ast.BoolOp(op=op, values=[left, right]):
                if not _in_parentheses(lines, left, right):
                    yield between(left, right, "or" if isinstance(op, ast.And) else "and")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield instead(node, text(operand))
            case ast.Constant(value=bool(value)):
                yield instead(node, str(not value))
            case ast.Constant(value=int(value)):
                yield instead(node, str(value + 1))
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                yield instead(node.func, "max" if name == "min" else "min")
            case ast.If(test=test) | ast.IfExp(test=test):
                yield instead(test, f"(not ({text(test)}))")
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield instead(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield instead(node, "pass")


def _mutable(tree: ast.AST, functions: Sequence[str]) -> Iterator[ast.AST]:
    """The nodes to mutate: those in the named functions, or all."""
    if not functions:
        yield from _behaviour(tree)
    for node in ast.walk(tree) if functions else ():
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            yield from _behaviour(node)


def _behaviour(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes below `tree` that decide what the program does: no annotations, docstrings, errors, assertions, imports."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "exc", "msg", "type_comment", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(node, ast.AST):
                yield node
                yield from _behaviour(node)


def _in_parentheses(lines: Sequence[bytes], left: ast.expr, right: ast.expr) -> bool:
    """Whether something besides the operator is between the operands, such as a closing parenthesis or a line's end."""
    if left.end_lineno != right.lineno:
        return True
    between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    return b"(" in between or b")" in between


def choose(count: int, seed: int) -> list[Mutant]:
    """`count` mutants, as many of each target as of the others, at most one per line."""
    draw, chosen = random.Random(seed), []
    taken: set[tuple[str, int]] = set()
    for index, target in enumerate(TARGETS):
        lines: dict[tuple[str, int], list[Mutant]] = {}
        for path in target.files:
            for mutant in mutants(target, path):
                if (path, mutant.line) not in taken and mutant.describe() not in EQUIVALENT:
                    lines.setdefault((path, mutant.line), []).append(mutant)
        wanted = count // len(TARGETS) + (index < count % len(TARGETS))
        picked = draw.sample(sorted(lines), min(wanted, len(lines)))
        taken.update(picked)
        chosen += [draw.choice(lines[line]) for line in picked]
    return chosen


def missing_paths(targets: Sequence[Target] = TARGETS) -> list[str]:
    """The files, functions and tests that targets name and that do not exist, with the target's name."""
    missing = [
        f"{target.name}: {path}"
        for target in targets
        for path in (*target.files, *target.tests)
        if not (ROOT / path).exists()
    ]
    for target in targets:
        files = [ROOT / path for path in target.files if (ROOT / path).is_file()]
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
        defined = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing += [f"{target.name}: function {name}" for name in target.functions if name not in defined]
    return missing


def unknown_equivalents() -> list[str]:
    """The lines of equivalent_mutants.txt that describe no mutant."""
    known = {mutant.describe() for target in TARGETS for path in target.files for mutant in mutants(target, path)}
    return sorted(EQUIVALENT - known)


def run_tests(checkout: Path, tests: Sequence[str], seconds: float) -> bool:
    """Whether the tests pass in this checkout; False after `seconds`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not model",
        *tests,
    ]
    environment = os.environ | {"PYTHONPATH": str(checkout.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    shutil.rmtree(checkout / ".hypothesis", ignore_errors=True)  # examples that failed for other mutants
    try:
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def copy_checkout(folder: Path) -> Path:
    """A copy of the tracked files, importable as `pagoda` from `folder`."""
    checkout = folder / "pagoda"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    return checkout


def main() -> int:
    """Run the mutants; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--at-least", type=int, default=57, help="mutants that must be caught")
    parser.add_argument("--jobs", type=int, default=2, help="checkouts tested at a time")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of one test run; counts as caught")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    args = parser.parse_args()
    if stale := [*missing_paths(), *unknown_equivalents()]:
        print("TARGETS or equivalent_mutants.txt name what does not exist:", *stale, sep="\n  ", file=sys.stderr)
        return 2
    chosen = choose(args.count, args.seed)
    if args.list:
        print(*(mutant.describe() for mutant in chosen), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        checkouts: SimpleQueue[Path] = SimpleQueue()
        for job in range(args.jobs):
            checkouts.put(copy_checkout(Path(folder) / str(job)))

        def passes(target: Target, mutant: Mutant | None) -> bool:
            checkout = checkouts.get()
            try:
                if mutant is None:
                    return run_tests(checkout, target.tests, args.seconds)
                path = checkout / mutant.path
                source = path.read_bytes()
                path.write_bytes(mutant.apply(source))
                try:
                    return run_tests(checkout, target.tests, args.seconds)
                finally:
                    path.write_bytes(source)
            finally:
                checkouts.put(checkout)

        broken = [t.name for t, good in zip(TARGETS, pool.map(lambda t: passes(t, None), TARGETS)) if not good]
        if broken:
            print(f"tests fail without a mutant: {', '.join(broken)}", file=sys.stderr)
            return 2
        caught = 0
        for mutant, survived in zip(chosen, pool.map(lambda m: passes(m.target, m), chosen)):
            caught += not survived
            if survived:
                print(f"survived ({mutant.target.name}): {mutant.describe()}", flush=True)
    print(f"{caught} of {len(chosen)} mutants caught (seed {args.seed})")
    return 0 if caught >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
