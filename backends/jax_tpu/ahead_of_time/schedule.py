"""Parse the TPU compiler's cycle estimates from scheduled HLO text.

Fusions carry `estimated_cycles` in their backend_config. Loop bodies are multiplied by their trip count. Pallas kernels
have no estimate; their calls are counted by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

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
