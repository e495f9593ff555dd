"""The report of `pagoda compile`: one row per program, the memory budget, and the limits that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from pagoda.backends.jax_tpu.ahead_of_time.bundle import save_bundle
from pagoda.backends.jax_tpu.ahead_of_time.roofline import PROMPT, Key, RooflineCost
from pagoda.backends.jax_tpu.ahead_of_time.schedule import Schedule
from pagoda.backends.jax_tpu.ahead_of_time.topology import Target
from pagoda.backends.jax_tpu.execution.compile_cache import ProgramSet
from pagoda.backends.jax_tpu.execution.packed_input import PackedShape
from pagoda.backends.jax_tpu.execution.program_keys import (
    Forward,
    ForwardEmbeds,
    LogitsProgram,
    Sample,
    ScorePrompt,
    SetHistoryRow,
)
from pagoda.backends.jax_tpu.memory.budget import Budget, ProgramMemory
from pagoda.backends.jax_tpu.memory.plan import GIB
from pagoda.common.config.engine import Limits
from pagoda.kernels_pallas.chips import ChipInfo

_HEADINGS = ("program", "compiled", "HBM temp", "cycles", "kernel", "time", "roofline", "bound by")
_NONE = "-"


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled program with its estimated cost."""

    key: Key
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
            "programs": [_as_json(program, self.target.chip) for program in self.programs],
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
    if report.target.chip is not None:
        yield "cycles: the compiler's estimate for all operations except the attention kernel, loops counted in full"
        if report.program_set.model.spec.pooler is not None:
            yield f"roofline: the minimum time for prompts of {PROMPT} tokens, as a share of cycles"
            return
        yield "kernel: a lower bound on the attention kernel's cycles, with contexts that fill the cache"
        yield "roofline: the minimum time for the necessary bytes and FLOP, as a share of cycles + kernel"


def _row(program: CompiledProgram, chip: ChipInfo | None) -> tuple[str, ...]:
    temporary = f"{program.memory.temporary / (1 << 20):.1f} MiB"
    start = (key_name(program.key), f"{program.seconds:.1f} s", temporary)
    cycles = estimated_cycles(program)
    if chip is None or cycles is None:
        return (*start, *[_NONE] * 5)
    cost, kernel = program.cost, round(program.cost.kernel_seconds(chip) * chip.clock_hz)
    seconds = (cycles + kernel) / chip.clock_hz
    bound = "HBM" if cost.memory_seconds(chip) >= cost.compute_seconds(chip) else "FLOP"
    share = f"{cost.seconds(chip) / seconds:.0%}" if seconds else _NONE
    return (*start, f"{cycles}", f"{kernel}" if kernel else _NONE, f"{seconds * 1e6:.0f} us", share, bound)


def _as_json(program: CompiledProgram, chip: ChipInfo | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "program": key_name(program.key),
        "compile_seconds": program.seconds,
        "memory": asdict(program.memory),
        "need": asdict(program.cost),
        "cycles": estimated_cycles(program),
    }
    if chip is not None:
        row["kernel_cycles_bound"] = round(program.cost.kernel_seconds(chip) * chip.clock_hz)
        row["roofline_seconds"] = program.cost.seconds(chip)
    return row


def estimated_cycles(program: CompiledProgram) -> int | None:
    """Return the compiler's cycle estimate; None if any operation lacks one."""
    schedule = program.schedule
    return None if schedule is None or schedule.unknown else schedule.cycles


def key_name(key: Key) -> str:
    """Return a readable program name, such as `decode 64 rows, 8 pages`."""
    match key:
        case Forward(shape) if shape.decode_only:
            return f"decode {shape.seqs} rows, {shape.pages} pages"
        case Forward(shape):
            return f"step {shape.tokens} tokens, {shape.seqs} rows, {shape.pages} pages"
        case ForwardEmbeds(shape):
            return f"{key_name(Forward(shape))}, embeddings"
        case ScorePrompt(tokens):
            return f"score {tokens} tokens"
        case Sample(seqs, kind):
            return f"sample {kind} {seqs} rows"
        case LogitsProgram(name, seqs):
            return f"{name} {seqs} rows"
        case SetHistoryRow():
            return "set history row"
        case PackedShape(tokens, seqs, _, of_tokens):
            return f"pool {tokens} tokens, " + ("one output per token" if of_tokens else f"{seqs} prompts")


def budget_lines(report: Report) -> Iterator[str]:
    """Yield the memory budget of one device and the limits that fit in it."""
    budget, limits = report.budget, report.limits
    yield f"memory of one device ({budget.total / GIB:.2f} GiB available, {budget.usable / GIB:.2f} usable)"
    for name, size in _parts(report):
        yield f"  {name:<44}{_size(size):>12}"
    yield f"  {'free' if budget.spare >= 0 else 'missing':<44}{_size(abs(budget.spare)):>12}"
    if report.program_set.model.spec.pooler is not None:
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
    budget, blocks = report.budget, report.program_set.facts["num_blocks"]
    yield "weights", budget.weights
    if blocks:
        yield f"KV cache, {blocks} blocks of {budget.block_size} tokens", budget.kv_cache
        yield "token history of all rows", budget.history
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
