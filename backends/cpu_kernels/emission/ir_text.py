"""Text of LLVM IR: a function under construction, with fresh names and counted loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

ENTRY: Final = "entry"


class Function:
    """The body of one function. Methods append an instruction and return the name of its result."""

    def __init__(self, signature: str, attributes: str = "") -> None:
        """`signature`: of the definition, as `void @name(ptr %x)`."""
        self._head = f"define {signature} {attributes} {{"
        self._lines = [f"{ENTRY}:"]
        self._block = ENTRY
        self._count = 0

    @property
    def text(self) -> str:
        return "\n".join([self._head, *self._lines, "}"])

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def let(self, instruction: str) -> str:
        """Append an instruction that has a result."""
        name = f"%{self._fresh()}"
        self._lines.append(f"  {name} = {instruction}")
        return name

    def do(self, instruction: str) -> None:
        """Append an instruction without a result."""
        self._lines.append(f"  {instruction}")

    def label(self, name: str) -> None:
        """Begin a block."""
        self._lines.append(f"{name}:")
        self._block = name

    def at(self, pointer: str, offset: str | int) -> str:
        """Return a pointer this many bytes further."""
        return pointer if offset == 0 else self.let(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def load(self, kind: str, pointer: str, align: int = 1) -> str:
        return self.let(f"load {kind}, ptr {pointer}, align {align}")

    def store(self, kind: str, value: str, pointer: str, align: int = 1) -> None:
        self.do(f"store {kind} {value}, ptr {pointer}, align {align}")

    def splat(self, kind: str, value: str, lanes: int) -> str:
        """Return a vector of copies of a scalar."""
        one = self.let(f"insertelement <{lanes} x {kind}> poison, {kind} {value}, i32 0")
        return self.let(
            f"shufflevector <{lanes} x {kind}> {one}, <{lanes} x {kind}> poison, <{lanes} x i32> zeroinitializer"
        )

    def loop(
        self,
        begin: str,
        end: str,
        body: Callable[[str, Sequence[str]], Sequence[str]],
        carried: Sequence[tuple[str, str]] = (),
        step: int = 1,
    ) -> list[str]:
        """Run `body(index, values)` for begin <= index < end and return the last values. `carried`: (type, first)."""
        name = self._fresh()
        before = self._block
        kinds = [kind for kind, _ in carried]
        index = f"%{name}.i"
        values = [f"%{name}.{number}" for number in range(len(carried))]
        self.do(f"br label %{name}.head")
        self.label(f"{name}.head")
        place = len(self._lines)
        self.do(f"%{name}.more = icmp slt i64 {index}, {end}")
        self.do(f"br i1 %{name}.more, label %{name}.body, label %{name}.end")
        self.label(f"{name}.body")
        after = body(index, values)
        self.do(f"%{name}.next = add i64 {index}, {step}")
        self.do(f"br label %{name}.head")
        phis = [(index, "i64", begin, f"%{name}.next")]
        phis += [(value, kind, first, last) for value, kind, (_, first), last in zip(values, kinds, carried, after)]
        self._lines[place:place] = [
            f"  {value} = phi {kind} [ {first}, %{before} ], [ {last}, %{self._block} ]"
            for value, kind, first, last in phis
        ]
        self.label(f"{name}.end")
        return values

    def least(self, a: str, b: str) -> str:
        """Return the smaller of two i64."""
        return self.let(f"select i1 {self.let(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")

    def claim(self, counter: str, count: str, body: Callable[[str], None]) -> None:
        """Run `body(number)` for numbers below `count` that no other thread has taken from the counter."""
        name = self._fresh()
        self.do(f"br label %{name}.head")
        self.label(f"{name}.head")
        number = self.let(f"atomicrmw add ptr {counter}, i64 1 monotonic")
        more = self.let(f"icmp slt i64 {number}, {count}")
        self.do(f"br i1 {more}, label %{name}.body, label %{name}.end")
        self.label(f"{name}.body")
        body(number)
        self.do(f"br label %{name}.head")
        self.label(f"{name}.end")

    def wait(self, counter: str, count: str, pause: str) -> None:
        """Wait until other threads have counted up to `count`. `pause`: a function called meanwhile."""
        name = self._fresh()
        self.do(f"br label %{name}.head")
        self.label(f"{name}.head")
        reached = self.let(f"load atomic i64, ptr {counter} acquire, align 8")
        self.do(f"br i1 {self.let(f'icmp sge i64 {reached}, {count}')}, label %{name}.end, label %{name}.pause")
        self.label(f"{name}.pause")
        self.do(f"call void @{pause}()")
        self.do(f"br label %{name}.head")
        self.label(f"{name}.end")
