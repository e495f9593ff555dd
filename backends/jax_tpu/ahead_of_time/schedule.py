"""The TPU compiler's schedule of a program, read from its text, and the time of what it has no estimate for.

Fusions carry `estimated_cycles` in their backend_config. Loop bodies are multiplied by their trip count. No estimate
have exchanges between devices, Pallas kernels, gathers, scatters, sorts and updates in place; they are charged by
their shapes:

- an exchange by the links of a ring, in whose two directions one half of the array travels each, and by the latency of
  its hops. Exchanges use the links one after the other, in the order of their starts. The core waits for what is left
  of an asynchronous one at its end, of another one at once; a loop's body ends after all that it began. XLA has three
  kinds of asynchronous ones: operations ending in -start and -done, calls on the sparse core (async-start), and chains
  of fusions that send while they multiply, which begin and end with the custom calls AsyncCollectiveStart and -Done.
  Kernels and inner loops between start and end hide nothing, for want of an estimate at that place;
- a kernel by the FLOP and bytes of its `pl.CostEstimate`; attention and recurrent mixers by those of the batch instead
  (`roofline.py`);
- rows of a gather, scatter or update in place by pieces of a tile's row, 128 numbers, that are apart in memory;
  scalars of a gather or scatter by cycles each.

The last two rates are assumptions, for the devices have not been measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Final, TypeAlias

from pagoda.kernels_pallas.chips import ChipInfo

_UNKNOWN: Final = 1 << 62
"""Estimates of at least this value mean that the compiler has no estimate."""

HOP_S: Final = 1e-6  # from one device to the next ("How to Scale Your Model", chapter on TPUs)
KERNEL_START_S: Final = 2e-6
"""The wait of a kernel for its first fetch."""

PIECE_BYTES: Final = 1024
"""Assumed: a piece of a row that is apart in memory takes as long as this many bytes of a long transfer."""

SCALAR_CYCLES: Final = 3
"""Assumed, of each scalar that is gathered or scattered: XLA has no estimate, and it was not derived from a schedule.
Chosen so that penalties by two scatters over the vocabulary per row take 7.7 ms with 256 rows on a v6e."""

_SORT_CYCLES: Final = 10
"""Assumed: of each stage of a bitonic sort of a register's 1024 numbers."""

VECTOR_FLOPS_PER_CYCLE: Final = 4096
"""Of a core's vector unit: four operations on 1024 numbers."""

_VECTOR_KERNELS: Final = ("top_k_top_p", "token_selection", "block_scores")
"""Kernels whose FLOP are the vector unit's."""

MIXER_KERNELS: Final = ("ragged_paged_attention", "latent_", "selected_attention", "gated_delta")
"""How the names of kernels begin whose cost `JaxMixerOps` states; linear recurrences are `..._mixed`, too."""

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%(\S+) \(")
_INSTRUCTION: Final = re.compile(r"^  (?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\(([^)]*)\)")
_CYCLES: Final = re.compile(r'"estimated_cycles":"?(\d+)')
_WHILE: Final = re.compile(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)")
_BRANCHES: Final = re.compile(
    r" conditional\(.*(?:branch_computations=\{([^}]*)\}|true_computation=(\S+), false_comp\w+=(\S+?),)"
)
_CALL: Final = re.compile(r" call\(.*to_apply=%([\w.-]+)")
_TIMES: Final = re.compile(r"%([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
_VMEM: Final = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^]]*?"size":"(\d+)"')
_COST: Final = re.compile(r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"\d+","bytes_accessed":"(\d+)"')
_EXCHANGE: Final = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start|-done)?$")
_CALLS: Final = re.compile(r" calls=%([\w.-]+)")
_CHAIN: Final = re.compile(r'chain_id="(\w+)"')
_CHAIN_END: Final = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')
_GROUPS: Final = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\])")
_ARRAY: Final = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME: Final = re.compile(r"%([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective operation of a group of devices."""

    kind: str
    bytes: int  # of the whole array: all-gathered, or before it is reduced and scattered
    devices: int

    def seconds(self, chip: ChipInfo) -> float:
        """Return the time on the links of a ring of these devices."""
        others = self.devices - 1
        link = chip.link_bandwidth
        part = self.bytes * others / max(self.devices, 1)
        match self.kind:
            case "all-reduce":
                time = part / link + 2 * others * HOP_S
            case "all-gather" | "reduce-scatter":
                time = part / (2 * link) + others * HOP_S
            case "all-to-all":  # a quarter of the ring on average
                time = part * self.devices / 4 / (2 * link) + others * HOP_S
            case _:
                time = self.bytes / link + HOP_S
        return time


@dataclass(frozen=True, slots=True)
class Begun:
    """The start of an exchange."""

    cycles: int  # of the operations since the event before
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Awaited:
    """The end of an exchange, at which the core waits for it."""

    cycles: int  # of the operations since the event before
    number: int  # of the exchange, in the order of their starts


Timeline: TypeAlias = "tuple[Begun | Awaited, ...]"
"""The exchanges of one computation in the order of its schedule; each is awaited."""


def exposed_seconds(timeline: Timeline, chip: ChipInfo) -> float:
    """Return how long the core waits for exchanges, which use the links one after the other."""
    now = links_free = waited = 0.0
    ends: list[float] = []
    for event in timeline:
        now += event.cycles / chip.clock_hz
        if isinstance(event, Begun):
            links_free = max(now, links_free) + event.exchange.seconds(chip)
            ends.append(links_free)
        else:
            wait = max(ends[event.number] - now, 0.0)
            now = now + wait
            waited = waited + wait
    return waited


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a Pallas kernel, with the estimate that its source states; zeros if it has none."""

    name: str
    flops: int = 0
    bytes: int = 0

    @property
    def is_mixer(self) -> bool:
        """Return whether the kernel belongs to a mixer, whose cost depends on the batch."""
        return self.name.startswith(MIXER_KERNELS) or (
            self.name.endswith("_mixed") and not self.name.startswith(_VECTOR_KERNELS)
        )

    def seconds(self, chip: ChipInfo) -> float:
        """Return the least time for bytes and FLOP, on one core."""
        vector = self.name.startswith(_VECTOR_KERNELS)
        rate = VECTOR_FLOPS_PER_CYCLE * chip.clock_hz if vector else chip.peak_flops
        return max(self.bytes / chip.hbm_bandwidth, self.flops / rate)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Totals over one execution of a program."""

    cycles: int  # of all operations with an estimate
    kernel_calls: Counter[KernelCall]
    timelines: Counter[Timeline]
    pieces: int  # of rows that are gathered, scattered or updated
    scalars: int  # that are gathered or scattered
    data_loops: int  # loops whose trip count depends on data
    unknown: int  # operations without an estimate that no rule charges
    vmem: int  # bytes of VMEM of the kernel that uses the most

    @property
    def kernels(self) -> Counter[str]:
        """Return the calls of each Pallas kernel."""
        calls: Counter[str] = Counter()
        for call, count in self.kernel_calls.items():
            calls[call.name] += count
        return calls

    @property
    def exchanges(self) -> Counter[Exchange]:
        """Return all exchanges, hidden or not."""
        found: Counter[Exchange] = Counter()
        for timeline, count in self.timelines.items():
            for event in timeline:
                if isinstance(event, Begun):
                    found[event.exchange] += count
        return found

    def exchange_seconds(self, chip: ChipInfo) -> float:
        """Return the time of all exchanges that no computation hides."""
        return sum(count * exposed_seconds(timeline, chip) for timeline, count in self.timelines.items())

    def kernel_seconds(self, chip: ChipInfo) -> float:
        """Return the least time of all kernels but those of mixers, and what each call of any waits at its start."""
        own = sum(count * call.seconds(chip) for call, count in self.kernel_calls.items() if not call.is_mixer)
        return own + self.kernel_calls.total() * KERNEL_START_S

    def move_seconds(self, chip: ChipInfo) -> float:
        """Return the assumed time of gathers, scatters and updates in place."""
        scattered = self.pieces * PIECE_BYTES / (chip.hbm_bandwidth * chip.cores)
        return scattered + self.scalars * SCALAR_CYCLES / chip.clock_hz


@dataclass(slots=True)
class _Computation:
    # one HLO computation, without those it calls
    cycles: int = 0
    unknown: int = 0
    pieces: int = 0
    scalars: int = 0
    kernel_calls: Counter[KernelCall] = field(default_factory=Counter)
    whiles: list[tuple[str, str]] = field(default_factory=list)
    branches: list[list[str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    compared: list[str] = field(default_factory=list)  # operands of comparisons
    vmem: int = 0
    shapes: dict[str, str] = field(default_factory=dict)
    events: list[Begun | Awaited] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)  # numbers of exchanges by the name of start or chain
    chain: str | None = None  # of asynchronous fusions this one belongs to
    chain_end: str | None = None  # Start or Done, if this is the chain's first or last one
    timed: int = 0  # cycles at the last event

    def begin(self, name: str, exchange: Exchange) -> None:
        """Add the start of an exchange."""
        self.running[name] = sum(isinstance(event, Begun) for event in self.events)
        self.events.append(Begun(self._since(), exchange))

    def end(self, name: str) -> None:
        """Add the end of an exchange, if it was begun."""
        if name in self.running:
            self.events.append(Awaited(self._since(), self.running.pop(name)))

    @property
    def timeline(self) -> Timeline:
        """Return the events; exchanges whose end is elsewhere end last."""
        left = sorted(self.running.values())
        rest = self.cycles - self.timed
        return (*self.events, *(Awaited(rest * (order == 0), number) for order, number in enumerate(left)))

    def _since(self) -> int:
        passed = self.cycles - self.timed
        self.timed = self.cycles
        return passed

    @property
    def trips(self) -> int | None:
        """Return the trip count of a loop of which this is the condition; None if it depends on data."""
        limits = [self.constants[name] for name in self.compared if name in self.constants]
        return max(limits, default=None)


def read_schedule(hlo: str, data_trips: int = 1) -> Schedule:
    """Return the totals of a module's text, with the entry computation executed once.

    `data_trips`: how often loops run whose trip count depends on data.
    """
    computations, entry = _parse(hlo)
    vmem = max((each.vmem for each in computations.values()), default=0)
    return _executed(computations, entry, data_trips, vmem)


def _executed(computations: dict[str, _Computation], name: str, data_trips: int, vmem: int = 0) -> Schedule:
    own = computations[name]
    cycles = own.cycles
    unknown = own.unknown
    pieces = own.pieces
    scalars = own.scalars
    data_loops = 0
    kernels = Counter(own.kernel_calls)
    timelines = Counter([own.timeline] if own.events else [])
    for times, inner in _called(computations, own, data_trips):
        repeats = data_trips if times is None else times
        data_loops += inner.data_loops + (times is None)
        cycles += repeats * inner.cycles
        pieces += repeats * inner.pieces
        scalars += repeats * inner.scalars
        unknown += inner.unknown
        timelines.update({timeline: repeats * count for timeline, count in inner.timelines.items()})
        kernels.update({kernel: repeats * calls for kernel, calls in inner.kernel_calls.items()})
    return Schedule(cycles, kernels, timelines, pieces, scalars, data_loops, unknown, vmem)


def _called(
    computations: dict[str, _Computation], caller: _Computation, data_trips: int
) -> Iterator[tuple[int | None, Schedule]]:
    """Yield (trip count, schedule) of each loop, branch and call; of a conditional, its most expensive branch."""
    for condition, body in caller.whiles:
        yield computations[condition].trips, _executed(computations, body, data_trips)
    for names in caller.branches:
        branches = (_executed(computations, name, data_trips) for name in names)
        yield 1, max(branches, key=lambda branch: branch.cycles)
    for name in caller.calls:
        yield 1, _executed(computations, name, data_trips)


def _parse(hlo: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry = ""
    current = _Computation()
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[2]] = _Computation()
            entry = header[2] if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            _add(computations, current, line, *instruction.groups())
    return computations, entry


def _add(
    computations: dict[str, _Computation],
    current: _Computation,
    line: str,
    name: str,
    shape: str,
    kind: str,
    operands: str,
) -> None:
    """Add an instruction: what it calls, its estimate, or what it is charged for without one."""
    current.shapes[name] = shape
    cycles = _CYCLES.search(line)
    estimate = int(cycles[1]) if cycles else _UNKNOWN
    if loop := _WHILE.search(line):
        current.whiles.append((loop[1], loop[2]))
    elif branches := _BRANCHES.search(line):
        names = branches[1].split(",") if branches[1] else [branches[2], branches[3]]
        current.branches.append([each.strip().lstrip("%") for each in names])
    elif call := _CALL.search(line):
        current.calls.append(call[1])
    elif kind == "custom-call" and 'custom_call_target="tpu_custom_call"' in line:
        _add_kernel(current, line, name)
    elif _EXCHANGE.match(kind):
        _add_exchange(current, line, name, shape, kind, operands)
    elif end := _CHAIN_END.search(line):
        current.chain_end = end[1]
    elif kind == "async-done":
        for each in _NAME.findall(operands):
            current.end(each)
    elif kind in ("async-start", "fusion") and (called := _CALLS.search(line)):
        _add_called(computations, current, name, kind, called[1])
    elif kind == "compare":
        current.compared += _NAME.findall(operands)
    elif constant := _TIMES.search(line):
        current.constants[constant[1]] = int(constant[2])
    if _EXCHANGE.match(kind):
        pass
    elif estimate < _UNKNOWN:
        current.cycles += estimate
    elif not _add_move(current, name, shape, kind, operands):
        current.unknown += cycles is not None


def _add_kernel(current: _Computation, line: str, name: str) -> None:
    cost = _COST.search(line)
    flops, moved = map(int, cost.groups()) if cost else (0, 0)
    current.kernel_calls[KernelCall(re.sub(r"[.\d]+$", "", name), flops, moved)] += 1
    current.vmem = max(current.vmem, *map(int, _VMEM.findall(line)), 0)


def _add_exchange(current: _Computation, line: str, name: str, shape: str, kind: str, operands: str) -> None:
    collective = kind.removesuffix("-start").removesuffix("-done")
    if chain := _CHAIN.search(line):
        current.chain = chain[1]
    if kind.endswith("-done"):
        for each in _NAME.findall(operands):
            current.end(each)
        return
    sizes = [_bytes(kind=kind, bits=bits, sizes=sizes) for kind, bits, sizes in _ARRAY.findall(shape)]
    groups = _GROUPS.search(line)
    devices = 2
    if groups is not None:
        devices = int(groups[3]) if groups[1] is None else len(groups[1].split(","))
    size = max(sizes, default=0) if kind.endswith("-start") else sum(sizes)
    if collective == "reduce-scatter":
        size *= devices
    if devices < 2:
        return
    current.begin(name, Exchange(collective, size, devices))
    if not kind.endswith("-start"):
        current.end(name)


def _add_called(
    computations: dict[str, _Computation], current: _Computation, name: str, kind: str, called: str
) -> None:
    """Add the exchanges of a call on the sparse core, or of a fusion that may be a part of a chain of them."""
    inner = computations.get(called, _Computation())
    exchanges = _exchanges_of(computations, inner)
    if not exchanges:
        return
    if kind == "async-start":
        for exchange in exchanges:
            current.begin(name, exchange)
        return
    chain = inner.chain or name
    if inner.chain_end == "Done":
        current.end(chain)
    elif chain not in current.running:
        for exchange in exchanges:
            current.begin(chain, exchange)
            if inner.chain_end is None:
                current.end(chain)


def _exchanges_of(computations: dict[str, _Computation], inner: _Computation) -> list[Exchange]:
    """Return the exchanges of a computation and of those that it calls."""
    own = [event.exchange for event in inner.events if isinstance(event, Begun)]
    called = [computations[name] for name in inner.calls if name in computations]
    return own + [exchange for each in called for exchange in _exchanges_of(computations, each)]


def _add_move(current: _Computation, name: str, shape: str, kind: str, operands: str) -> bool:
    """Charge a gather, scatter, sort or update in place that has no estimate. Return whether it is one."""
    arrays = [sizes for _, _, sizes in _ARRAY.findall(shape)]
    if kind == "sort" and arrays:
        sizes = _sizes(arrays[0])
        stages = max(sizes, default=1).bit_length()
        current.cycles += _SORT_CYCLES * stages * (stages + 1) // 2 * -(-prod(sizes) // 1024)
    elif kind in ("fusion", "gather") and "gather" in name and arrays:
        _add_pieces(current, _sizes(arrays[0]))
    elif kind in ("fusion", "scatter", "async-start") and "scatter" in name:
        shapes = [current.shapes.get(each, "") for each in _NAME.findall(operands)]
        moved = [sizes for each in shapes for _, _, sizes in _ARRAY.findall(each)][1:3]
        if moved:
            _add_pieces(current, max(map(_sizes, moved), key=prod))
    elif kind == "dynamic-update-slice":
        _, update, *_ = (current.shapes.get(each, "") for each in _NAME.findall(operands))
        for _, _, sizes in _ARRAY.findall(update):
            current.pieces += -(-prod(_sizes(sizes)) // 128)
    else:
        return False
    return True


def _add_pieces(current: _Computation, sizes: list[int]) -> None:
    if len(sizes) < 2:
        current.scalars += prod(sizes)
    else:
        current.pieces += prod(sizes) // sizes[-1] * -(-sizes[-1] // 128)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def _bytes(kind: str, bits: str, sizes: str) -> int:
    return prod(_sizes(sizes)) * (1 if kind == "pred" else int(bits)) // (1 if kind == "pred" else 8)
