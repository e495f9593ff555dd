"""Make small bugs in the product, one at a time, and count how many the tests near them catch.

    python tools/mutate.py                             60 mutants of the engine's core, chosen by seed
    python tools/mutate.py --set breadth               60 in kernels, families, weights, LoRA, drafts, HTTP, settings
    python tools/mutate.py --seed 7 --count 20         others
    python tools/mutate.py --list                      print the chosen mutants without running tests
    python tools/mutate.py --files 'common/text/*.py'  10 mutants of these files; with --marker slow_matrix by the
                                                       tests that `make test` leaves out
    python tools/mutate.py --json FILE                 write each result to FILE; continues where FILE ends
    python tools/mutate.py --from FILE                 the mutants of FILE again, found by the text of their lines
    python tools/mutate.py --revision COMMIT           mutate and test that commit in place of the working tree

Each mutant changes one operator, constant, condition or statement of one file in a copy of the checkout. The test files
that import the file run in turn, those of its target first, then the nearest, those of `make test` alone, until one
fails or 60 units of processor time are used up (`--budget`; `tests/data/budgets.json` says what each needs, in the same
units). A test that fails or hangs counts only if its file passes without the mutant. Exit status 1 if fewer than
`--at-least` are caught.
Mutants in tools/equivalent_mutants.txt cannot change behaviour and are never chosen.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for support

from mutation import child, forks  # noqa: E402
from mutation.child import Work  # noqa: E402
from mutation.forks import Fork, Outcome  # noqa: E402
from mutation.mutants import Mutant, Name, Sources, Target, choose  # noqa: E402
from mutation.nearest import Imports, recorded_units, within  # noqa: E402
from mutation.targets import SETS, Set, missing, unknown  # noqa: E402

PRELOADED: Final = (
    *("numpy", "torch", "triton", "transformers", "tokenizers", "safetensors.torch", "hypothesis"),
    *("fastapi", "uvicorn", "pydantic", "openai", "msgspec"),
)


def equivalent_mutants() -> frozenset[str]:
    """Descriptions of mutants that cannot change behaviour."""
    lines = (ROOT / "tools" / "equivalent_mutants.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@dataclass(frozen=True, slots=True)
class Chosen:
    """A mutant to judge."""

    target: str
    name: Name


@dataclass(frozen=True, slots=True)
class Result:
    """Whether a mutant was caught: `caught`, `survived`, or `gone` where its line is no longer."""

    target: str
    mutant: Name
    outcome: str
    how: str = ""
    by: str = ""
    units: float = 0.0
    files: int = 0


@dataclass(slots=True)
class Report:
    """All results, and where they are written."""

    about: dict[str, Any]
    path: Path | None
    results: dict[Name, Result] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)  # test files that fail without a mutant
    measured: dict[str, float] = field(default_factory=dict)  # test file without a record -> units of processor time

    def read(self) -> None:
        """Take over what the file has. Raises ValueError if it is of another run."""
        if self.path is None or not self.path.is_file():
            return
        stored = json.loads(self.path.read_text(encoding="utf-8"))
        if other := [key for key in ("commit", "marker", "budget") if stored[key] != self.about[key]]:
            raise ValueError(f"{self.path} is of another {', '.join(other)}: name another file")
        self.failing = set(stored["tests that fail without a mutant"])
        self.measured = stored["units of tests without a record"]
        for row in stored["mutants"]:
            result = Result(**(row | {"mutant": Name(**row["mutant"])}))
            self.results[result.mutant] = result

    def write(self, chosen: Sequence[Chosen]) -> None:
        """The results of the chosen mutants."""
        if self.path is None:
            return
        known = [self.results[each.name] for each in chosen if each.name in self.results]
        whole = self.about | {
            "chosen": len(chosen),
            "caught": sum(result.outcome == "caught" for result in known),
            "survived": sum(result.outcome == "survived" for result in known),
            "gone": sum(result.outcome == "gone" for result in known),
            "tests that fail without a mutant": sorted(self.failing),
            "units of tests without a record": dict(sorted(self.measured.items())),
            "mutants": [asdict(result) for result in known],
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


@dataclass(frozen=True, slots=True)
class Run:
    """Tests to run with a mutant, or without one, for at most `budget` units of processor time."""

    mutant: Mutant | None
    tests: tuple[str, ...]
    budget: float


class Judge:
    """Decides for each mutant which tests run, and what follows."""

    def __init__(self, root: Path, sources: Sources, report: Report, units: dict[str, float], budget: float) -> None:
        self._imports, self._sources, self._report = Imports(root), sources, report
        self._recorded, self._budget = units, budget
        self._good: set[str] = set()  # test files that pass without a mutant

    def judge(self, chosen: Chosen) -> Generator[Run, Outcome, Result]:
        """Yields what to run and is sent how it ended; the result."""
        mutant = self._sources.find(chosen.name)
        if mutant is None:
            return Result(chosen.target, chosen.name, "gone")
        units, passed = 0.0, list[str]()
        while units < self._budget and (tests := self._tests(chosen, passed)):
            outcome = yield Run(mutant, tests, self._budget - units)
            units += outcome.units
            passed += [name for name in outcome.files if name != outcome.file]
            self._learn(outcome)
            if outcome.passed:
                continue
            if outcome.file not in self._good:
                without = yield Run(None, (outcome.file,), self._budget)
                (self._good if without.passed else self._report.failing).add(outcome.file)
            if outcome.file in self._good:
                return Result(
                    chosen.target, chosen.name, "caught", outcome.how, outcome.test, round(units, 1), len(passed) + 1
                )
        return Result(chosen.target, chosen.name, "survived", units=round(units, 1), files=len(passed))

    def _tests(self, chosen: Chosen, passed: Sequence[str]) -> tuple[str, ...]:
        """The test files of a mutant's target and those near it, within the budget, that have not run yet."""
        name, units = chosen.name, self._report.measured | self._recorded
        first = next((target.tests for each in SETS for target in each.targets if target.name == chosen.target), ())
        near = self._imports.tests(name.path, units, f"{name.function} {name.before}")
        near = [test for test in dict.fromkeys([*first, *near]) if test not in self._report.failing]
        return tuple(test for test in within(near, units, self._budget) if test not in passed)

    def _learn(self, outcome: Outcome) -> None:
        """What files without a record need: a file that was cut off at the budget needs more than that."""
        for name, units in outcome.measured.items():
            if name not in self._recorded:
                self._report.measured[name] = max(units, self._report.measured.get(name, 0))


class Slot:
    """A copy of the checkout in which one mutant at a time is tested."""

    def __init__(self, checkout: Path, options: Options) -> None:
        self.checkout, self._options = checkout, options
        self._changed: tuple[Path, bytes, float] | None = None
        self._changes = 0

    def start(self, run: Run) -> Fork:
        """Run the tests with the mutant."""
        if run.mutant is not None:
            path = self.checkout / run.mutant.name.path
            self._changed = path, path.read_bytes(), path.stat().st_mtime
            path.write_bytes(run.mutant.apply(self._changed[1]))
            self._changes += 1  # a time of its own for each: Python tells by it whether a compiled file is up to date
            os.utime(path, (self._changed[2] + self._changes,) * 2)
        work = Work(self.checkout, run.tests, run.budget, self._options.marker, self._options.model)
        return Fork(work, self.checkout.parent)

    def restore(self) -> None:
        """Undo the mutant."""
        if self._changed is not None:
            path, content, written = self._changed
            path.write_bytes(content)
            os.utime(path, (written, written))
        self._changed = None


@dataclass(frozen=True, slots=True)
class Options:
    """How tests run."""

    marker: str | None
    model: Path | None


def run_all(chosen: Sequence[Chosen], slots: Sequence[Slot], judge: Judge, report: Report) -> None:
    """Judge the mutants that have no result yet, one in each slot at a time."""
    left = [each for each in chosen if each.name not in report.results][::-1]
    free, busy = list(slots), dict[Fork, tuple[Slot, Generator[Run, Outcome, Result]]]()

    def advance(slot: Slot, steps: Generator[Run, Outcome, Result], outcome: Outcome | None) -> None:
        try:
            run = steps.send(outcome)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            report.results[end.value.mutant] = end.value
            print(_line(end.value), flush=True)
            free.append(slot)
        else:
            busy[slot.start(run)] = slot, steps

    while left or busy:
        while left and free:
            advance(free.pop(), judge.judge(left.pop()), None)
        for fork, outcome in forks.follow(list(busy)) if busy else ():
            slot, steps = busy.pop(fork)
            slot.restore()
            advance(slot, steps, outcome)
            report.write(chosen)
    report.write(chosen)


def _line(result: Result) -> str:
    what = f"{result.outcome} ({result.target}, {result.units:.0f} units): {result.mutant.describe()}"
    return f"{what}\n    {result.how} {result.by}" if result.by else what


def copy_checkout(checkout: Path, revision: str | None) -> None:
    """The tracked files of the working tree, or of a commit."""
    if revision is not None:
        packed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(checkout, filter="tar")
        return
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_bytes((ROOT / name).read_bytes())


def commit_of(revision: str | None) -> str:
    """What is tested: a commit, with `+` if the working tree differs."""
    named = subprocess.run(
        ["git", "rev-parse", "--short=8", revision or "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    if revision is not None:
        return named
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode
    return f"{named}+" if changed else named


def processor() -> str:
    """The machine's processor, in words."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def chosen_mutants(args: argparse.Namespace, sources: Sources) -> list[Chosen]:
    """Those that the command line asks for."""
    if args.again:
        rows = json.loads(args.again.read_text(encoding="utf-8"))["mutants"]
        return [Chosen(row["target"], Name(**row["mutant"])) for row in rows]
    if args.files:
        sets: tuple[Set, ...] = (Set("files", (Target("files", tuple(args.files)),), 10, 0),)
    else:
        sets = tuple(each for each in SETS if args.set in (each.name, "all"))
    without = equivalent_mutants()
    picked = [m for each in sets for m in choose(sources, each.targets, args.count or each.count, args.seed, without)]
    return [Chosen(target.name, mutant.name) for target, mutant in picked]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("engine", "breadth", "all"), default="engine", help="which targets")
    parser.add_argument("--files", nargs="+", metavar="GLOB", help="files of the product in place of a set")
    parser.add_argument("--count", type=int, help="number of mutants; default: 60 of a set, 10 of files")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--from", dest="again", type=Path, metavar="FILE", help="the mutants of this file of results")
    parser.add_argument("--at-least", type=int, help="mutants that must be caught; default: 57, of breadth 48")
    parser.add_argument("--revision", help="commit to mutate and test; default: the working tree")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results are written")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time")
    parser.add_argument("--budget", type=float, default=60, help="units of processor time of the tests of a mutant")
    parser.add_argument("--budgets", type=Path, metavar="FILE", help="table in place of tests/data/budgets.json")
    parser.add_argument("--marker", help="expression for pytest's -m; default: the tests of `make test`")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    return parser.parse_args()


def main() -> int:
    """Run the mutants; the exit status."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its folder goes
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        checkouts = [Path(folder) / str(job) / "pagoda" for job in range(args.jobs)]
        for checkout in checkouts[: 1 if args.list else args.jobs]:
            copy_checkout(checkout, args.revision)
        sources = Sources(checkouts[0])
        return _run(args, checkouts, sources)


def _run(args: argparse.Namespace, checkouts: list[Path], sources: Sources) -> int:
    targets = [target for each in SETS for target in each.targets]
    stale = [] if args.revision else [*missing(sources, targets), *unknown(sources, targets, equivalent_mutants())]
    if stale:
        print("targets or equivalent_mutants.txt name what does not exist:", *stale, sep="\n  ", file=sys.stderr)
        return 2
    chosen = chosen_mutants(args, sources)
    if args.list:
        print(*(each.name.describe() for each in chosen), sep="\n")
        return 0
    about = {"commit": commit_of(args.revision), "set": args.set, "files": args.files, "seed": args.seed}
    about |= {"marker": args.marker, "budget": args.budget, "processor": processor()}
    report = Report(about, args.json)
    report.read()
    os.environ.update(child.environment())
    empty = checkouts[0].parent / "empty"
    empty.mkdir()
    child.preload(PRELOADED, empty)
    forks.adopt_orphans()
    units = recorded_units(args.budgets or checkouts[0] / "tests" / "data" / "budgets.json")
    model = Path(os.environ.get("PAGODA_TEST_MODEL", ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    options = Options(args.marker, model.resolve() if model.is_file() else None)
    judge = Judge(checkouts[0], sources, report, units, args.budget)
    run_all(chosen, [Slot(checkout, options) for checkout in checkouts], judge, report)
    results = [report.results[each.name] for each in chosen]
    caught = sum(result.outcome == "caught" for result in results)
    wanted = args.at_least
    if wanted is None:
        wanted = 0 if args.files or args.again else sum(e.at_least for e in SETS if args.set in (e.name, "all"))
    print(f"{caught} of {len(results)} mutants caught (seed {args.seed}, commit {about['commit']})")
    if report.failing:
        print("test files that fail without a mutant, left out:", *sorted(report.failing), sep="\n  ")
    return 0 if caught >= wanted else 1


if __name__ == "__main__":
    sys.exit(main())
