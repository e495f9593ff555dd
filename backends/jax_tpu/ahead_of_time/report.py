"""What `pagoda compile` prints: a row per program, the memory budget, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from pagoda.backends.jax_tpu.ahead_of_time.roofline import PROMPT, Key, Need
from pagoda.backends.jax_tpu.ahead_of_time.schedule import Schedule
from pagoda.backends.jax_tpu.ahead_of_time.topology import Target
from pagoda.backends.jax_tpu.execution.compile_cache import ProgramSet
from pagoda.backends.jax_tpu.execution.packed_input import PackedShape
from pagoda.backends.jax_tpu.execution.program_keys import Choose, Forward, ForwardRows, OnLogits, Remember, Score
from pagoda.backends.jax_tpu.memory.budget import Budget, ProgramMemory
from pagoda.backends.jax_tpu.memory.plan import GIB
from pagoda.common.config.engine import Limits
from pagoda.kernels_pallas.chips import ChipInfo

_HEADINGS = ("program", "compiled", "HBM temp", "cycles", "kernel", "time", "roofline", "bound by")
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One program: what compiling it took and what it will take. `schedule` None: the compiler told none (a CPU's)."""

    key: Key
    seconds: float
    memory: ProgramMemory
    need: Need
    schedule: Schedule | None
    executable: jax.stages.Compiled


@dataclass(frozen=True, slots=True)
class Report:
    """All programs, in the catalogue's order, and the memory they leave. `seconds`: of the whole."""

    target: Target
    catalogue: ProgramSet[Any]
    limits: Limits
    programs: tuple[Compiled, ...]
    budget: Budget
    seconds: float

    def __str__(self) -> str:
        return report_text(self)

    def as_json(self) -> dict[str, Any]:
        """Rows and budget as data; times in seconds, sizes in bytes."""
        return {
            "topology": self.target.name,
            "tensor_parallel_size": self.catalogue.model.tensor,
            "data_parallel_size": self.catalogue.model.shards,
            "seconds": self.seconds,
            "programs": [_as_json(program, self.target.chip) for program in self.programs],
            "budget": asdict(self.budget),
        }

    def save(self, folder: Path) -> str:
        """Write the programs as a bundle; one line about it."""
        from pagoda.backends.jax_tpu.ahead_of_time.bundle import save_bundle

        return save_bundle(self, folder)


def report_text(report: Report) -> str:
    """Everything, in lines."""
    rows = [_HEADINGS, *(_row(program, report.target.chip) for program in report.programs)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    used = report.catalogue.model.mesh.size
    title = f"{len(report.programs)} programs for {report.target.name}, {used} of {len(report.target.devices)} devices"
    return "\n".join([title, "", *lines, "", *legend(report), "", *budget_lines(report)])


def legend(report: Report) -> Iterator[str]:
    """What the columns mean."""
    yield f"compiled in {report.seconds:.1f} s"
    if report.target.chip is not None:
        yield "cycles: the compiler's estimate of all operations but the attention kernel, loops as often as they run"
        if report.catalogue.model.spec.pooler is not None:
            yield f"roofline: the least time for prompts of {PROMPT} tokens, as a share of cycles"
            return
        yield "kernel: the cycles that the attention kernel needs at least, with contexts that fill the cache"
        yield "roofline: the least time for the necessary bytes and FLOP, as a share of cycles + kernel"


def _row(program: Compiled, chip: ChipInfo | None) -> tuple[str, ...]:
    temporary = f"{program.memory.temporary / (1 << 20):.1f} MiB"
    start = (key_name(program.key), f"{program.seconds:.1f} s", temporary)
    cycles = estimated_cycles(program)
    if chip is None or cycles is None:
        return (*start, *[_NONE] * 5)
    need, kernel = program.need, round(program.need.kernel_seconds(chip) * chip.clock_hz)
    seconds = (cycles + kernel) / chip.clock_hz
    bound = "HBM" if need.memory_seconds(chip) >= need.compute_seconds(chip) else "FLOP"
    share = f"{need.seconds(chip) / seconds:.0%}" if seconds else _NONE
    return (*start, f"{cycles}", f"{kernel}" if kernel else _NONE, f"{seconds * 1e6:.0f} us", share, bound)


def _as_json(program: Compiled, chip: ChipInfo | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "program": key_name(program.key),
        "compile_seconds": program.seconds,
        "memory": asdict(program.memory),
        "need": asdict(program.need),
        "cycles": estimated_cycles(program),
    }
    if chip is not None:
        found["kernel_cycles_bound"] = round(program.need.kernel_seconds(chip) * chip.clock_hz)
        found["roofline_seconds"] = program.need.seconds(chip)
    return found


def estimated_cycles(program: Compiled) -> int | None:
    """The compiler's cycles; None where it has no estimate for a part."""
    schedule = program.schedule
    return None if schedule is None or schedule.unknown else schedule.cycles


def key_name(key: Key) -> str:
    """A program in words: `decode 64 rows, 8 pages`."""
    match key:
        case Forward(shape) if shape.decode_only:
            return f"decode {shape.seqs} rows, {shape.pages} pages"
        case Forward(shape):
            return f"step {shape.tokens} tokens, {shape.seqs} rows, {shape.pages} pages"
        case ForwardRows(shape):
            return f"{key_name(Forward(shape))}, embeddings"
        case Score(tokens):
            return f"score {tokens} tokens"
        case Choose(seqs, kind):
            return f"choose {kind} {seqs} rows"
        case OnLogits(name, seqs):
            return f"{name} {seqs} rows"
        case Remember():
            return "remember"
        case PackedShape(tokens, seqs, _, of_tokens):
            return f"pool {tokens} tokens, " + ("an answer for each" if of_tokens else f"{seqs} prompts")


def budget_lines(report: Report) -> Iterator[str]:
    """The memory of one device, and what fits in it."""
    budget, limits = report.budget, report.limits
    yield f"memory of one device ({budget.total / GIB:.2f} GiB for programs, {budget.usable / GIB:.2f} to be used)"
    for name, size in _parts(report):
        yield f"  {name:<44}{_size(size):>12}"
    yield f"  {'left' if budget.spare >= 0 else 'missing':<44}{_size(abs(budget.spare)):>12}"
    if report.catalogue.model.spec.pooler is not None:
        if budget.spare < 0:
            yield f"does not fit by {_size(-budget.spare)}: lower --max-num-batched-tokens or --max-model-len"
        return
    lengths = sorted({limits.max_model_len, min(limits.max_model_len, 1024)}, reverse=True)
    yield f"largest --max-model-len that fits, one sequence alone: {budget.max_model_len}"
    for length in lengths:
        yield f"largest --max-num-seqs that fits with all sequences {length} tokens long: {budget.max_num_seqs(length)}"
    if budget.spare < 0:
        yield _too_much(budget)


def _parts(report: Report) -> Iterator[tuple[str, int]]:
    budget, blocks = report.budget, report.catalogue.facts["num_blocks"]
    yield "weights", budget.weights
    if blocks:
        yield f"KV cache, {blocks} blocks of {budget.block_size} tokens", budget.kv_cache
        yield "tokens of all rows", budget.history
    yield "temporaries of the largest program", budget.temporaries
    yield "results of two steps", budget.results
    yield f"{len(report.programs)} programs", budget.code


def _too_much(budget: Budget) -> str:
    return (
        f"does not fit by {_size(-budget.spare)}: use --num-gpu-blocks-override {budget.max_blocks}, "
        "or lower --max-num-seqs or --max-num-batched-tokens"
    )


def _size(size: int) -> str:
    return f"{size / GIB:.3f} GiB"
