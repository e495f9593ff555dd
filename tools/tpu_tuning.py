"""Search the block sizes of the TPU attention kernel by the compiler's schedule, and write them into its tuning.json.

usage: python tools/tpu_tuning.py [--chip v6e ...] [--heads 32,8,128 ...] [--dtype bfloat16 ...] [--limit N]

Needs libtpu and no TPU. Per chip, head shape (query heads, KV heads, head dim of one device), type of the cache and
variant (decode, mixed), the formula's block sizes are the start; one size after the other is varied, and the best value
kept. A candidate's time is the longer of its bundles and its bytes over one batch (benchmarks/tpu/kernel_schedule.py).
Block sizes that are not at least --gain faster than the formula's are not used: then the formula's are written, which
also records that these heads were searched.

Results are appended to --results as they come, and read from there by the next run, unless the kernel or the compiler
has changed. --limit: largest number of compilations of a run; the next run continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeAlias

from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.ragged_paged_attention import plan
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout

ROOT: Final = Path(__file__).resolve().parents[1]
KERNEL: Final = ROOT / "kernels_pallas" / "ragged_paged_attention"
RESULTS: Final = ROOT / "build" / "tpu-tuning.jsonl"
PAGE: Final = 128
HEADS: Final = ("32,8,128", "8,1,128", "64,8,128", "16,8,128", "32,8,64", "16,8,256", "4,1,128", "8,2,128", "16,2,128")
DTYPES: Final = ("bfloat16", "float8_e4m3fn")

# (new tokens, tokens before) of each sequence.
DECODE_BATCH: Final = tuple((1, context - 1) for context in (1024, 2048, 384, 1000) for _ in range(16))
MIXED_BATCH: Final = ((1024, 0), (512, 1536), (300, 0), (212, 0))

DECODE_AXES: Final = {"tokens": (256, 512, 1024), "heads": (2, 4, 8), "fetch": (1024, 2048), "queries": (4, 8, 16)}
MIXED_AXES: Final = {"tokens": (128, 256, 512), "heads": (2, 4, 8), "fetch": (512, 1024, 2048)}
MIXED_ROWS: Final = (512, 1024, 2048)  # query rows of a lane head in a tile; its queries follow


ROUNDS: Final = 2  # over the block sizes: the second one meets combinations that the first did not


class CandidateError(Exception):
    """The compiler refuses a candidate."""


class UnreadableError(CandidateError):
    """The candidate compiles, but the counter cannot read its schedule."""


@dataclass(frozen=True)
class Problem:
    """A variant of the kernel on a chip, for the heads of one device."""

    chip: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    decode: bool

    @property
    def layout(self) -> PagedKvLayout:
        """Return the layout of its cache."""
        return PagedKvLayout(self.kv_heads, self.head_dim, self.dtype, PAGE)

    @property
    def group_rows(self) -> int:
        """Return the query rows of a lane head per token."""
        return self.heads // self.kv_heads * self.layout.heads_per_row

    @property
    def key(self) -> str:
        """Return the key of tuning.json."""
        return plan.tuning_key(CHIPS[self.chip], self.layout, self.group_rows, decode=self.decode)

    @property
    def batch(self) -> tuple[tuple[int, int], ...]:
        """Return the batch that candidates are compared on."""
        return DECODE_BATCH if self.decode else MIXED_BATCH

    def formula(self) -> dict[str, int]:
        """Return the block sizes without an entry."""
        return dict(plan.block_formula(self.layout, self.group_rows, decode=self.decode))

    def axes(self) -> dict[str, tuple[int, ...]]:
        """Return the values to try of each block size, those that matter most first."""
        if self.decode:
            return dict(DECODE_AXES)
        queries = {max(16, 1 << (rows // self.group_rows).bit_length() - 1) for rows in MIXED_ROWS}
        return {**MIXED_AXES, "queries": tuple(sorted(queries))}

    def fitted(self, settings: plan.Settings) -> plan.AttentionBlockSizes:
        """Return the block sizes that the kernel uses: candidates that give the same are the same."""
        pages = max(-(-(new + before) // PAGE) for new, before in self.batch)
        tokens = len(self.batch) if self.decode else sum(new for new, _ in self.batch)
        return plan.fit_blocks(settings, self.layout, self.group_rows, pages, tokens, decode=self.decode)


@dataclass(frozen=True)
class Figures:
    """Cycles of the core for a candidate's bundles, and of the memory for its bytes."""

    core: float
    memory: float

    @property
    def cycles(self) -> float:
        """Return the longer of both."""
        return max(self.core, self.memory)


Measure: TypeAlias = Callable[[Problem, plan.Settings], Figures]
"""Compile a candidate. Raise CandidateError if the compiler refuses it, UnreadableError if its schedule is unknown."""


def compile_schedule(problem: Problem, settings: plan.Settings) -> Figures:
    """Return the figures of a candidate by the TPU compiler."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "tpu"))
    from kernel_schedule import Case, measure

    chip, pairs = CHIPS[problem.chip], tuple(settings.items())
    heads = problem.heads, problem.kv_heads, Case(problem.batch), problem.head_dim, problem.dtype
    try:
        figures = measure(problem.chip, *heads, settings=pairs)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][:200]
        raise (UnreadableError if "misparsed" in reason else CandidateError)(reason) from error
    return Figures(figures["cycles"], figures["hbm_bytes"] / chip.hbm_bandwidth * chip.clock_hz)


class LimitError(Exception):
    """As many candidates have been compiled as a run may."""


@dataclass
class Results:
    """Finished candidates, in a file that outlives the run."""

    path: Path
    sources: str  # of the kernel and the compiler: candidates of others are not used
    limit: int | None = None
    compiled: int = 0
    failed: int = 0
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            lines = map(json.loads, filter(None, self.path.read_text().splitlines()))
            self._known = {line["candidate"]: line for line in lines if line["sources"] == self.sources}

    def figures(self, problem: Problem, settings: plan.Settings, measure: Measure) -> Figures | None:
        """Return the figures of a candidate, compiled now if they are not known; None if the compiler refuses it.

        Raise UnreadableError if it compiles to a schedule that cannot be read.
        """
        candidate = f"{problem.key} {json.dumps(vars(problem.fitted(settings)))}"
        line = self._known.get(candidate)
        if line is None:
            line = {"candidate": candidate, "sources": self.sources, **self._compile(problem, settings, measure)}
            self._known[candidate] = line
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"  {candidate}: {line.get('error') or round(max(line['core'], line['memory']))}", flush=True)
        if line.get("unreadable"):
            raise UnreadableError(line["error"])
        return Figures(line["core"], line["memory"]) if "error" not in line else None

    def _compile(self, problem: Problem, settings: plan.Settings, measure: Measure) -> dict[str, Any]:
        if self.limit is not None and self.compiled + self.failed >= self.limit:
            raise LimitError
        try:
            figures = measure(problem, settings)
        except CandidateError as error:
            self.failed += 1
            return {"error": str(error), "unreadable": isinstance(error, UnreadableError)}
        self.compiled += 1
        return {"core": figures.core, "memory": figures.memory}


@dataclass(frozen=True)
class Outcome:
    """The settings to use for a problem, and the figures of the formula and of the settings."""

    settings: dict[str, int]
    before: Figures | None  # None: the formula does not compile
    after: Figures


def search(problem: Problem, figures_of: Callable[[plan.Settings], Figures | None], gain: float) -> Outcome | None:
    """Return the best settings, one block size varied after the other; None if nothing compiles.

    Raise UnreadableError if the formula's schedule cannot be read: there is nothing to compare with.
    """
    formula = problem.formula()
    before = figures_of(formula)
    settings, best = formula, before
    for _ in range(ROUNDS):
        for name, values in problem.axes().items():
            for value in values:
                candidate = {**settings, name: value}
                try:
                    figures = figures_of(candidate)
                except UnreadableError:
                    continue
                if figures is not None and (best is None or figures.cycles < best.cycles):
                    settings, best = candidate, figures
    if best is None:
        return None
    if before is not None and best.cycles > (1 - gain) * before.cycles:
        return Outcome(formula, before, before)
    return Outcome(settings, before, best)


def write(table: Path, entries: dict[str, dict[str, int]]) -> None:
    """Write entries into the kernel's table, one per line, in the order of their keys; others are kept."""
    blocks: dict[str, dict[str, int]] = {**json.loads(table.read_text())["blocks"], **entries}
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(blocks.items()))
    table.write_text('{\n  "blocks": {\n' + lines + "\n  }\n}\n")


def sources() -> str:
    """Return a digest of the kernel's sources and the versions of the compiler."""
    digest = hashlib.sha256()
    for path in sorted(KERNEL.glob("*.py")):
        digest.update(path.read_bytes())
    versions = [f"{name} {metadata.version(name)}" for name in ("jax", "libtpu")]
    return ", ".join([*versions, digest.hexdigest()[:16]])


def problems(chips: list[str], heads: list[str], dtypes: list[str], variants: list[str]) -> Iterator[Problem]:
    """Yield what to search, heads that give the same matrices once. Raise ValueError for heads that are not three."""
    keys = set()
    for text in heads:
        sizes = [int(size) for size in text.split(",")]
        if len(sizes) != 3 or sizes[0] % sizes[1]:
            raise ValueError(f"heads are QUERY_HEADS,KV_HEADS,HEAD_DIM, such as 32,8,128, not {text!r}")
        for chip in chips:
            for dtype in dtypes:
                for variant in variants:
                    problem = Problem(chip, *sizes, dtype, variant == "decode")
                    if problem.key not in keys:
                        keys.add(problem.key)
                        yield problem


def report(problem: Problem, outcome: Outcome) -> str:
    """Return a line about a finished problem."""
    before = "no schedule" if outcome.before is None else f"{outcome.before.cycles:.0f}"
    after = outcome.after
    bound = "memory" if after.memory >= after.core else "core"
    return f"{problem.key}: {before} -> {after.cycles:.0f} cycles ({bound}), {json.dumps(outcome.settings)}"


def main(
    arguments: list[str] | None = None, measure: Measure = compile_schedule, table: Path = KERNEL / "tuning.json"
) -> int:
    """Run the command line. Return 2 for invalid arguments, 1 if no candidate compiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", nargs="*", choices=list(CHIPS), default=["v6e", "v5e", "v5p", "v7x"])
    parser.add_argument("--heads", nargs="*", default=list(HEADS), help="QUERY_HEADS,KV_HEADS,HEAD_DIM of one device")
    parser.add_argument("--dtype", nargs="*", choices=["bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
    parser.add_argument("--variant", nargs="*", choices=["decode", "mixed"], default=["decode", "mixed"])
    parser.add_argument("--limit", type=int, help="compile at most this many candidates")
    parser.add_argument("--gain", type=float, default=0.02, help="part of the formula's time that an entry must save")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    try:
        wanted = list(problems(args.chip, args.heads, args.dtype or list(DTYPES), args.variant))
    except ValueError as error:
        print(f"tpu_tuning: {error}", file=sys.stderr)
        return 2
    results = Results(args.results, sources(), args.limit)
    usable = 0
    for problem in wanted:
        try:
            outcome = search(problem, partial(results.figures, problem, measure=measure), args.gain)
        except LimitError:
            print(f"tpu_tuning: stopped after {args.limit} candidates; run again to continue")
            break
        except UnreadableError as error:
            print(f"{problem.key}: skipped, the formula's schedule cannot be read: {error}", file=sys.stderr)
            continue
        if outcome is None:
            print(f"{problem.key}: nothing compiles", file=sys.stderr)
            continue
        usable += 1
        write(table, {problem.key: outcome.settings})
        print(report(problem, outcome), flush=True)
    if usable or results.compiled:
        return 0
    print("tpu_tuning: no candidate compiles; the table is unchanged", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
