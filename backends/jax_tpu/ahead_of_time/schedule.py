"""What the TPU compiler says a program will cost: the cycles it estimates for each scheduled operation.

Read from the scheduled HLO, whose fusions carry `estimated_cycles` in their backend_config. Loops count as often as
they run. Pallas kernels have no estimate there; their calls are counted, by name, for whoever knows their cost.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_UNKNOWN: Final = 1 << 62
"""Estimates from here on mean that the compiler has none."""

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
    """Cycles of all operations with an estimate; how often each kernel is called and devices exchange; how many
    operations the compiler has no estimate for; bytes of VMEM of the kernel that takes most.
    """

    cycles: int
    kernels: Counter[str]
    exchanges: int
    unknown: int
    vmem: int


@dataclass(slots=True)
class _Computation:
    """One computation of the module, itself only."""

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
    """The schedule of a module's text, its entry computation executed once."""
    computations, entry = _parse(hlo)
    vmem = max((each.vmem for each in computations.values()), default=0)
    return _executed(computations, entry, vmem)


def _executed(computations: dict[str, _Computation], name: str, vmem: int = 0) -> Schedule:
    one = computations[name]
    cycles, unknown, exchanges, kernels = one.cycles, one.unknown, one.exchanges, Counter(one.kernels)
    for times, inner in _inner(computations, one):
        cycles += times * inner.cycles
        unknown += inner.unknown
        exchanges += times * inner.exchanges
        kernels.update({kernel: times * calls for kernel, calls in inner.kernels.items()})
    return Schedule(cycles, kernels, exchanges, unknown, vmem)


def _inner(computations: dict[str, _Computation], one: _Computation) -> Iterator[tuple[int, Schedule]]:
    """What a computation executes besides its own operations, and how often."""
    for condition, body in one.whiles:
        limits = computations[condition].constants
        yield max(limits, default=1), _executed(computations, body)
    for names in one.branches:
        yield 1, max((_executed(computations, name) for name in names), key=lambda branch: branch.cycles)
    for name in one.calls:
        yield 1, _executed(computations, name)


def _parse(hlo: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, now = "", _Computation()
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            now = computations[header[2]] = _Computation()
            entry = header[2] if header[1] else entry
        elif line.startswith("  "):
            _add(now, line)
    return computations, entry


def _add(now: _Computation, line: str) -> None:
    if cycles := _CYCLES.search(line):
        known = int(cycles[1]) < _UNKNOWN
        now.cycles += int(cycles[1]) if known else 0
        now.unknown += not known
    if loop := _WHILE.search(line):
        now.whiles.append((loop[1], loop[2]))
    elif branches := _BRANCHES.search(line):
        names = branches[1].split(",") if branches[1] else [branches[2], branches[3]]
        now.branches.append([name.strip().lstrip("%") for name in names])
    elif call := _CALL.search(line):
        now.calls.append(call[1])
    elif kernel := _KERNEL.search(line):
        now.kernels[re.sub(r"[.\d]+$", "", kernel[1])] += 1
        now.vmem = max(now.vmem, *map(int, _VMEM.findall(line)), 0)
    elif _EXCHANGE.search(line):
        now.exchanges += 1
    elif constant := _TIMES.search(line):
        now.constants.append(int(constant[2]))
