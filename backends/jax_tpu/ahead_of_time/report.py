"""The report of `pagoda compile`: one row per program, the memory budget, and the limits that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jax

from pagoda.backends.jax_tpu.ahead_of_time.bundle import save_bundle
from pagoda.backends.jax_tpu.ahead_of_time.schedule import Schedule
from pagoda.backends.jax_tpu.ahead_of_time.topology import Target
from pagoda.backends.jax_tpu.execution.program_kind import ProgramKind
from pagoda.backends.jax_tpu.execution.program_sets import PoolProgramSet
from pagoda.backends.jax_tpu.execution.programs import ProgramSet, blocks_of
from pagoda.backends.jax_tpu.hosts import libtpu_mismatch
from pagoda.backends.jax_tpu.memory.plan import GIB, Budget, ProgramMemory
from pagoda.backends.jax_tpu.model.roofline import PROMPT, RooflineCost
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.kernels_pallas.chips import ChipInfo

_HEADINGS: Final = ("program", "compiled", "HBM temp", "cycles", "kernels", "links", "time", "roofline", "bound by")
_NONE = "-"


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled program with its estimated cost."""

    key: ProgramKind
    seconds: float  # spent compiling
    memory: ProgramMemory
    cost: RooflineCost
    schedule: Schedule | None  # None: the compiler wrote no schedule (CPU)
    executable: jax.stages.Compiled


@dataclass(frozen=True, slots=True)
class Report:
    """All compiled programs, in the order of `program_set`, and the memory budget."""

    target: Target
    program_set: ProgramSet[Any]
    limits: Limits
    programs: tuple[CompiledProgram, ...]
    budget: Budget
    seconds: float  # wall-clock time of the whole compilation

    def __str__(self) -> str:
        return report_text(self)

    def as_json(self) -> dict[str, Any]:
        """Return rows and budget as JSON-serialisable data; times in seconds, sizes in bytes."""
        return {
            "topology": self.target.name,
            "tensor_parallel_size": self.program_set.model.tensor,
            "data_parallel_size": self.program_set.model.shards,
            "seconds": self.seconds,
            "clock_hz": None if self.target.chip is None else self.target.chip.clock_hz,
            "programs": [_as_json(program, self) for program in self.programs],
            "budget": asdict(self.budget),
        }

    def save(self, folder: Path) -> str:
        """Write the programs as a bundle and return a one-line summary. Raise ConfigError if that fails."""
        programs = ((program.key, program.executable) for program in self.programs)
        return save_bundle(self.program_set, self.limits, programs, folder)


def report_text(report: Report) -> str:
    """Return the report as printed."""
    rows = [_HEADINGS, *(_row(program, report.target.chip) for program in report.programs)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    used = report.program_set.model.mesh.size
    title = f"{len(report.programs)} programs for {report.target.name}, {used} of {len(report.target.devices)} devices"
    return "\n".join([title, "", *lines, "", *legend(report), "", *budget_lines(report)])


def legend(report: Report) -> Iterator[str]:
    """Yield lines that explain the columns."""
    yield f"compiled in {report.seconds:.1f} s"
    if report.target.chip is not None and (mismatch := libtpu_mismatch()):
        yield f"warning: {mismatch}"
    if report.target.chip is not None:
        yield "cycles: the compiler's estimates, loops counted in full, and assumed rates of gathers and scatters"
        pools = isinstance(report.program_set, PoolProgramSet)
        load = f"prompts of {PROMPT} tokens" if pools else "contexts that fill the cache"
        yield f"kernels: a lower bound on the cycles of Pallas kernels, with {load}; links: exchanges between devices"
        yield "roofline: the minimum time for the necessary bytes and FLOP, as a share of cycles + kernels + links"
        if not pools and (untuned := report.program_set.model.untuned_attention):
            yield f"attention kernel: block sizes not tuned for these heads (make tpu-tune): {', '.join(untuned)}"
        if loops := sum(each.schedule.data_loops for each in report.programs if each.schedule is not None):
            yield f"{loops} loops run as often as the batch says; they are counted once per row"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a program on one device."""

    operations: float  # XLA's
    kernels: float  # at least
    exchanges: float

    @property
    def total(self) -> float:
        """Return the sum, as if nothing but asynchronous exchanges overlapped."""
        return self.operations + self.kernels + self.exchanges


def times_of(program: CompiledProgram, chip: ChipInfo) -> Times | None:
    """Return the estimated times of a program; None if an operation can be neither estimated nor charged."""
    cycles = estimated_cycles(program)
    schedule = program.schedule
    if cycles is None or schedule is None:
        return None
    return Times(
        cycles / chip.clock_hz + schedule.move_seconds(chip),
        program.cost.kernel_seconds(chip) + schedule.kernel_seconds(chip),
        schedule.exchange_seconds(chip),
    )


def _row(program: CompiledProgram, chip: ChipInfo | None) -> tuple[str, ...]:
    temporary = f"{program.memory.temporary / (1 << 20):.1f} MiB"
    start = (program.key.label, f"{program.seconds:.1f} s", temporary)
    times = None if chip is None else times_of(program, chip)
    if chip is None or times is None:
        return (*start, *[_NONE] * (len(_HEADINGS) - len(start)))
    cost = program.cost
    clock = chip.clock_hz
    bound = "HBM" if cost.memory_seconds(chip) >= cost.compute_seconds(chip) else "FLOP"
    share = f"{cost.seconds(chip) / times.total:.0%}" if times.total else _NONE
    kernels = f"{times.kernels * clock:.0f}" if times.kernels else _NONE
    links = f"{times.exchanges * 1e6:.0f} us" if times.exchanges else _NONE
    return (*start, f"{times.operations * clock:.0f}", kernels, links, f"{times.total * 1e6:.0f} us", share, bound)


def _as_json(program: CompiledProgram, report: Report) -> dict[str, Any]:
    chip = report.target.chip
    row: dict[str, Any] = {
        "program": program.key.label,
        "compile_seconds": program.seconds,
        "memory": asdict(program.memory),
        "need": asdict(program.cost),
        "cycles": estimated_cycles(program),
    }
    times = None if chip is None else times_of(program, chip)
    if chip is not None and times is not None:
        row["kernel_cycles_bound"] = round(times.kernels * chip.clock_hz)
        row["exchange_seconds"] = times.exchanges
        row["seconds"] = times.total
        row["roofline_seconds"] = program.cost.seconds(chip)
    row |= program.key.json_fields(report.program_set.model.kernel.page_size)
    return row


def estimated_cycles(program: CompiledProgram) -> int | None:
    """Return the compiler's cycle estimate; None if any operation lacks one."""
    schedule = program.schedule
    return None if schedule is None or schedule.unknown else schedule.cycles


def budget_lines(report: Report) -> Iterator[str]:
    """Yield the memory budget of one device and the limits that fit in it."""
    budget = report.budget
    limits = report.limits
    yield f"memory of one device ({budget.total / GIB:.2f} GiB available, {budget.usable / GIB:.2f} usable)"
    for name, size in _parts(report):
        yield f"  {name:<44}{_size(size):>12}"
    yield f"  {'free' if budget.spare >= 0 else 'missing':<44}{_size(abs(budget.spare)):>12}"
    if isinstance(report.program_set, PoolProgramSet):
        if budget.spare < 0:
            yield f"does not fit by {_size(-budget.spare)}: lower --max-num-batched-tokens or --max-model-len"
        return
    lengths = sorted({limits.max_model_len, min(limits.max_model_len, 1024)}, reverse=True)
    yield f"largest --max-model-len that fits with a single sequence: {budget.max_model_len}"
    for length in lengths:
        yield f"largest --max-num-seqs that fits with all sequences {length} tokens long: {budget.max_num_seqs(length)}"
    if budget.spare < 0:
        yield _too_much(budget)


def _parts(report: Report) -> Iterator[tuple[str, int]]:
    budget = report.budget
    blocks = blocks_of(report.program_set.facts)
    yield "weights", budget.weights
    if any(blocks):
        yield f"KV cache, {per_pool(blocks)} blocks of {budget.block_size} tokens", budget.kv_cache
        yield "tokens and token counts of all rows", budget.history
    yield "temporaries of the largest program", budget.temporaries
    yield "outputs of two steps", budget.results
    yield f"code of {len(report.programs)} programs", budget.code


def _too_much(budget: Budget) -> str:
    return (
        f"does not fit by {_size(-budget.spare)}: use --num-gpu-blocks-override {budget.max_blocks}, "
        "or lower --max-num-seqs or --max-num-batched-tokens"
    )


def _size(size: int) -> str:
    return f"{size / GIB:.3f} GiB"
