"""The report of `pagoda compile`: one row per program, the memory budget, and the limits that fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import jax

from pagoda.backends.jax_tpu.ahead_of_time.bundle import save_bundle
from pagoda.backends.jax_tpu.ahead_of_time.roofline import PROMPT, Key, RooflineCost
from pagoda.backends.jax_tpu.ahead_of_time.topology import Target
from pagoda.backends.jax_tpu.execution.program_keys import (
    CopyStates,
    Draft,
    Forward,
    ForwardEmbeds,
    LogitsProgram,
    PoolProgramSet,
    RecordDrafts,
    Sample,
    ScorePrompt,
    SetHistoryRow,
    WriteAdapter,
)
from pagoda.backends.jax_tpu.execution.programs import ProgramSet, blocks_of
from pagoda.backends.jax_tpu.execution.step_input import PoolShape
from pagoda.backends.jax_tpu.memory.plan import GIB, Budget, ProgramMemory
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.kernels_pallas.chips import ChipInfo

# Parse the TPU compiler's cycle estimates from scheduled HLO text.
#
# Fusions carry `estimated_cycles` in their backend_config. Loop bodies are multiplied by their trip count. Pallas
# kernels have no estimate; their calls are counted by name.

_UNKNOWN: Final = 1 << 62
"""Estimates of at least this value mean that the compiler has no estimate."""

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%(\S+) \(")
_CYCLES: Final = re.compile(r'"estimated_cycles":"?(\d+)')
_WHILE: Final = re.compile(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)")
_BRANCHES: Final = re.compile(
    r" conditional\(.*(?:branch_computations=\{([^}]*)\}|true_computation=(\S+), false_comp\w+=(\S+?),)"
)
_CALL: Final = re.compile(r" call\(.*to_apply=%([\w.-]+)")
_KERNEL: Final = re.compile(r'%(\S+) = .* custom-call\(.*custom_call_target="tpu_custom_call"')
_TIMES: Final = re.compile(r"%([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
_VMEM: Final = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^]]*?"size":"(\d+)"')
_EXCHANGE: Final = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Totals over one execution of a program."""

    cycles: int  # of all operations with an estimate
    kernels: Counter[str]  # calls of each Pallas kernel
    exchanges: int  # collective operations
    unknown: int  # operations without an estimate
    vmem: int  # bytes of VMEM of the kernel that uses the most


@dataclass(slots=True)
class _Computation:
    # one HLO computation, without those it calls
    cycles: int = 0
    unknown: int = 0
    exchanges: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    whiles: list[tuple[str, str]] = field(default_factory=list)
    branches: list[list[str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    vmem: int = 0


def read_schedule(hlo: str) -> Schedule:
    """Return the totals of a module's text, with the entry computation executed once."""
    computations, entry = _parse(hlo)
    vmem = max((each.vmem for each in computations.values()), default=0)
    return _executed(computations, entry, vmem)


def _executed(computations: dict[str, _Computation], name: str, vmem: int = 0) -> Schedule:
    own = computations[name]
    cycles, unknown, exchanges, kernels = own.cycles, own.unknown, own.exchanges, Counter(own.kernels)
    for times, inner in _called(computations, own):
        cycles += times * inner.cycles
        unknown += inner.unknown
        exchanges += times * inner.exchanges
        kernels.update({kernel: times * calls for kernel, calls in inner.kernels.items()})
    return Schedule(cycles, kernels, exchanges, unknown, vmem)


def _called(computations: dict[str, _Computation], caller: _Computation) -> Iterator[tuple[int, Schedule]]:
    """Yield (trip count, schedule) of each loop, branch and call; of a conditional, its most expensive branch."""
    for condition, body in caller.whiles:
        limits = computations[condition].constants
        yield max(limits, default=1), _executed(computations, body)
    for names in caller.branches:
        yield 1, max((_executed(computations, name) for name in names), key=lambda branch: branch.cycles)
    for name in caller.calls:
        yield 1, _executed(computations, name)


def _parse(hlo: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[2]] = _Computation()
            entry = header[2] if header[1] else entry
        elif line.startswith("  "):
            _add(current, line)
    return computations, entry


def _add(current: _Computation, line: str) -> None:
    if cycles := _CYCLES.search(line):
        known = int(cycles[1]) < _UNKNOWN
        current.cycles += int(cycles[1]) if known else 0
        current.unknown += not known
    if loop := _WHILE.search(line):
        current.whiles.append((loop[1], loop[2]))
    elif branches := _BRANCHES.search(line):
        names = branches[1].split(",") if branches[1] else [branches[2], branches[3]]
        current.branches.append([name.strip().lstrip("%") for name in names])
    elif call := _CALL.search(line):
        current.calls.append(call[1])
    elif kernel := _KERNEL.search(line):
        current.kernels[re.sub(r"[.\d]+$", "", kernel[1])] += 1
        current.vmem = max(current.vmem, *map(int, _VMEM.findall(line)), 0)
    elif _EXCHANGE.search(line):
        current.exchanges += 1
    elif constant := _TIMES.search(line):
        current.constants.append(int(constant[2]))


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
        if isinstance(report.program_set, PoolProgramSet):
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
        case Forward(shape) if shape.adapted:
            return f"{key_name(Forward(replace(shape, adapted=False)))}, adapters"
        case Forward(shape) if shape.decode_only:
            return f"decode {shape.seqs} rows, {shape.pages} pages"
        case Forward(shape):
            drafts = f", {shape.width - 1} drafts" if shape.width > 1 else ""
            return f"step {shape.tokens} tokens, {shape.seqs} rows, {shape.pages} pages{drafts}"
        case Draft(shape):
            return f"{key_name(Forward(shape))}, drafter"
        case ForwardEmbeds(shape):
            return f"{key_name(Forward(shape))}, embeddings"
        case ScorePrompt(tokens, adapted):
            return f"score {tokens} tokens{', adapters' if adapted else ''}"
        case WriteAdapter():
            return "load adapter"
        case Sample(seqs, kind):
            return f"sample {kind} {seqs} rows"
        case LogitsProgram(name, seqs):
            return f"{name} {seqs} rows"
        case CopyStates(pool, count):
            return f"copy {count} states of pool {pool}"
        case SetHistoryRow():
            return "set history row"
        case RecordDrafts(seqs):
            return f"record drafts {seqs} rows"
        case PoolShape(tokens, seqs, _, of_tokens):
            return f"pool {tokens} tokens, " + ("one output per token" if of_tokens else f"{seqs} prompts")


def budget_lines(report: Report) -> Iterator[str]:
    """Yield the memory budget of one device and the limits that fit in it."""
    budget, limits = report.budget, report.limits
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
    budget, blocks = report.budget, blocks_of(report.program_set.facts)
    yield "weights", budget.weights
    if any(blocks):
        yield f"KV cache, {per_pool(blocks)} blocks of {budget.block_size} tokens", budget.kv_cache
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
