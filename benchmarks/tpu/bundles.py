"""Count the cycles of a TPU kernel by executing the scalar instructions of its final schedule.

libtpu dumps a kernel as VLIW bundles. Which bundles are issued, and how often, depends only on scalar registers, scalar
memory and branches, and these only on the kernel's scalar operands and the values popped from the vector unit. This
module executes the scalar instructions on given operands and values, skips vector and matrix instructions, and counts
bundles: one is issued per cycle. Trip counts and branches are therefore exact.

Not included: stalls on DMA, on busy matrix units and on memory bank conflicts.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

DELAY_SLOTS = 4  # bundles after a branch that are issued whether it is taken or not
SPACE = 20  # log2 of the address space of an operand or an allocation of scalar memory
MAX_ISSUES = 100_000  # per bundle
WORD = (1 << 32) - 1
GRANULE = 32  # bytes

BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s*(?:LB|LH|LE|PB|PF|CT)?\s*:\s*>*\s*\{(.*)\}([^}]*)$")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)  # may run over lines
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
VMEM_OPERAND = re.compile(r"inlined_call_operand\.vmem \[shape: [a-z]+(\d+)\[([\d,]+)\], index: (\d+)")
OP = re.compile(r"%(\w+) = ([a-z][\w.]*)\s*(.*)")
PREDICATE = re.compile(r"\((!?)%\w+_(p\d+)(?:, [^()]*)?\)")
ATOM = re.compile(r"%\w+_([sp]\d+)|#(\w+)|\$?(0x[0-9a-f]+|-?\d+(?:\.\d+(?:e[+-]?\d+)?)?)")


@dataclass(frozen=True)
class Op:
    """One scalar instruction."""

    name: str
    out: str  # destination register
    operands: tuple[tuple[str | int, ...], ...]  # each a sum of registers and constants
    predicate: str | None
    condition: bool  # value of the predicate for which it executes
    text: str


@dataclass
class Trace:
    """The result of an execution."""

    issued: Counter[int] = field(default_factory=Counter)  # bundle -> times issued
    moved: Counter[str] = field(default_factory=Counter)  # direction -> bytes moved by DMA

    @property
    def cycles(self) -> int:
        """Bundles issued."""
        return self.issued.total()

    def use(self, listing: Listing, unit: str) -> int:
        """Instructions of a unit that were issued."""
        column = listing.units.index(unit)
        return sum(count * listing.use[at][column] for at, count in self.issued.items())


class Listing:
    """A kernel's final bundles, read from libtpu's dump. Raise FileNotFoundError if the kernel is not in it."""

    def __init__(self, dump: Path, kernel: str) -> None:
        listing = _one(dump, f"*{kernel}*-final_bundles.txt")
        table = _one(dump, f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt").read_text()
        capacity, use = table.split("UTILIZATION:")
        names = capacity.strip().splitlines()[1].split(",")
        self.units = [name.rpartition(":")[2].strip() for name in names]  # FILL and SPILL: of VLOAD and VSTORE
        self.use = [list(map(int, line.split())) for line in use.strip().splitlines()]
        self.labels: dict[str, int] = {}
        self.symbols: dict[str, int] = {}
        self.in_vmem: dict[int, int] = {}  # operands that XLA named_sharding in VMEM: number -> bytes
        self.bundles: list[tuple[Op, ...]] = []
        text = COMMENT.sub(lambda comment: comment[0].replace("\n", " "), listing.read_text())
        for match in filter(None, map(BUNDLE.match, text.splitlines())):
            self.labels |= {number: len(self.bundles) for number in REGION.findall(match[2])}
            self.bundles.append(tuple(filter(None, map(self._op, match[1].split(";;")))))
            for bits, sizes, number in VMEM_OPERAND.findall(match[1]):
                self.in_vmem[int(number)] = prod(map(int, sizes.split(","))) * int(bits) // 8
        if len(self.use) != len(self.bundles):
            raise RuntimeError(f"{listing.name} cannot be parsed: {len(self.bundles)} of {len(self.use)} bundles read")

    def _op(self, text: str) -> Op | None:
        match = OP.match(text.strip())
        if match is None or match[2].startswith("v"):
            return None
        arguments = match[3]
        predicate = PREDICATE.search(arguments)
        bare = COMMENT.sub("", PREDICATE.sub("", arguments)).replace("]] ", "]], ").strip().strip(",")
        return Op(
            match[2],
            match[1].rpartition("_")[2],
            tuple(self._sum(part) for part in bare.split(",") if part.strip()),
            predicate and predicate[2],
            predicate is None or predicate[1] == "",
            arguments,
        )

    def _sum(self, text: str) -> tuple[str | int, ...]:
        return tuple(
            register or self.address(symbol) if not number else _constant(number)
            for register, symbol, number in ATOM.findall(text)
        )

    def address(self, symbol: str) -> int:
        """The first word of an allocation."""
        return self.symbols.setdefault(symbol, len(self.symbols) + 1 << SPACE) if symbol else 0

    def run(self, operands: Sequence[np.ndarray], popped: np.ndarray | None = None) -> Trace:
        """Execute the kernel on its 32-bit scalar operands, in call order.

        popped: the 32-bit values that the scalar unit pops from the vector unit, in execution order; by default each is
        0. Raise RuntimeError if their number is wrong.
        """
        return _Machine(self, operands, popped).run()


class _Machine:
    """Scalar registers, scalar memory and the program counter."""

    def __init__(self, listing: Listing, operands: Sequence[np.ndarray], popped: np.ndarray | None) -> None:
        self.listing = listing
        self.operands = [_words(x) for x in operands]
        self.popped = None if popped is None else deque(_words(popped).tolist())
        self.registers: dict[str, int] = {}
        self.memory: dict[int, int] = {}
        self.trace = Trace()

    def run(self) -> Trace:
        counter, target, slots = 0, 0, -1
        bundles, issued = self.listing.bundles, self.trace.issued
        while counter < len(bundles):
            issued[counter] += 1
            if issued[counter] > MAX_ISSUES:
                raise RuntimeError(f"bundle {counter} was issued {MAX_ISSUES} times: the schedule was misparsed")
            if bundles[counter]:
                taken = self.step(bundles[counter])
                if taken is not None:
                    target, slots = taken, DELAY_SLOTS + 1
            slots -= 1
            counter = target if slots == 0 else counter + 1
        if self.popped:
            raise RuntimeError(f"the kernel left {len(self.popped)} of the popped values")
        return self.trace

    def step(self, bundle: tuple[Op, ...]) -> int | None:
        """Execute a bundle, reading all operands before writing results. Return the target of a taken branch."""
        written, target = [], None
        for op in bundle:
            on = op.predicate is None or bool(self.registers[op.predicate]) == op.condition
            if op.name == "sbr.rel":
                region = re.search(r"\$region(\d+)", op.text)
                target = self.listing.labels[region[1]] if on and region else target
            elif on:
                result = self.execute(op)
                if result is not None and op.name.startswith("inlined_call_operand"):
                    written.insert(0, (op.out, result))  # if dead, an instruction of the bundle may have its register
                elif result is not None:
                    written.append((op.out, result))
        self.registers.update(written)
        return target

    def value(self, terms: tuple[str | int, ...]) -> int:
        return sum(term if isinstance(term, int) else self.registers.get(term, 0) for term in terms) & WORD

    def execute(self, op: Op) -> int | None:
        name = op.name.split(".")[0]
        if op.name == "spop":
            return self.pop()
        if name in IGNORED:
            return None
        if name == "dma":
            return self.transfer(op)
        if name == "inlined_call_operand":
            number = int(re.search(r"index: (\d+)", op.text)[1])  # type: ignore[index]
            array = self.operands[number] if number < len(self.operands) else None
            return int(array[0]) & WORD if op.text.startswith("<no") else number + 1 << SPACE
        if name == "sld":
            return self.memory.get(self.value(op.operands[0]), 0)
        if name == "sst":
            self.memory[self.value(op.operands[0])] = self.value(op.operands[1])
            return None
        if name == "scalar_select":
            chosen, yes, no = (self.value(x) for x in op.operands)
            return yes if chosen else no
        if name == "scmp":
            kind, of = op.name.split(".")[1:3]
            a, b = (READ[of[0]](self.value(x)) for x in op.operands)
            return int(COMPARE[kind](a, b))
        return ARITHMETIC[name](*(self.value(x) for x in op.operands)) & WORD

    def pop(self) -> int:
        """Return the next value from the vector unit."""
        if self.popped is None:
            return 0
        if not self.popped:
            raise RuntimeError("the kernel pops more values than were given")
        return self.popped.popleft() & WORD

    def transfer(self, op: Op) -> None:
        """Execute a DMA; only data for scalar memory is copied."""
        if "done" in op.name:
            return
        named = {name: self.value(self.listing._sum(x)) for name, x in re.findall(r"/\*(\w+)=\*/([^,]+)", op.text)}
        direction = op.name.split(".")[1]
        if direction == "general" and "hbm-to-hbm" not in op.text:
            direction = "vmem_strided_hbm"  # a block whose parts lie apart; the listing does not say which way
        self.trace.moved[direction] += GRANULE * named["size_in_granules"]
        if direction.endswith("to_smem"):
            source = named.get("vmem", named.get("hbm", 0)) >> SPACE
            number = next(n for n in (source, source >> 4) if 1 <= n <= len(self.operands)) - 1
            for i, x in enumerate(self.operands[number]):
                self.memory[named["smem"] + i] = int(x) & WORD


def _words(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).reshape(-1).view(np.int32)


def _constant(text: str) -> int:
    return int(np.float32(text).view(np.int32)) & WORD if "." in text else int(text, 0)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def _float(x: int) -> float:
    return float(np.uint32(x).view(np.float32))


def _one(dump: Path, pattern: str) -> Path:
    paths = [path for path in sorted(dump.glob(pattern)) if "schedule" not in path.name]
    if not paths:
        raise FileNotFoundError(f"this libtpu wrote no {pattern}: --xla_jf_dump_llo_text was removed or renamed")
    return paths[0]


IGNORED = {"sphi", "int_to_ptr", "sfence", "shalt", "spop", "setrngseed", "strace", "sdelay", "snop"}
READ: dict[str, Callable[[int], float]] = {"s": _signed, "u": int, "f": _float}
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
ARITHMETIC: dict[str, Callable[..., int]] = {
    "sadd": lambda a, b: a + b,
    "ssub": lambda a, b: a - b,
    "smul": lambda a, b: a * b,
    "smulhi": lambda a, b: a * b >> 32,
    "sshll": lambda a, b: a << b,
    "sshrl": lambda a, b: a >> b,
    "sshra": lambda a, b: _signed(a) >> b,
    "sand": lambda a, b: a & b,
    "sor": lambda a, b: a | b,
    "sxor": lambda a, b: a ^ b,
    "smin": lambda a, b: min(_signed(a), _signed(b)),
    "smax": lambda a, b: max(_signed(a), _signed(b)),
    "smov": lambda a: a,
    "scalar_lea": lambda a, b: a + b,
    "pnand": lambda a, b: int(not (a and b)),
    "pand": lambda a, b: int(a and b),
    "por": lambda a, b: int(a or b),
    "pnor": lambda a, b: int(not (a or b)),
    "pneg": lambda a: int(not a),
    "pmov": lambda a: a,
}
