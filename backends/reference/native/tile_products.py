"""The product of `products.py` by matrix tiles, for processors with AMX.

It reads the same panels. A task is up to two panels times a block of rows that stays in the second cache. 32 rows at a
time are multiplied with one panel, as two tiles by two; 16 rows or fewer with both panels, since four sums hide how
long each product takes. A row's sums have one order, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from pagoda.backends.reference.native.emit import F32, I16, I64, LANES, Emitter
from pagoda.backends.reference.native.jit import Kernel
from pagoda.backends.reference.native.tiles import SIDE, Tiles, available

COLUMNS: Final = 2 * SIDE
"""Outputs of a panel."""

PANELS: Final = 2
"""Panels of a task."""

_INPUTS: Final = 2 * SIDE
_BLOCK: Final = 2 * SIDE
_AHEAD: Final = 8
"""Cache lines of the next panel that are asked for in each step of inputs."""

_CACHED_BYTES: Final = 1 << 20
"""Of x, in a task's block of rows: half of the second cache."""


def supported(width: int) -> bool:
    """Return whether the processor has tiles and a row of x is whole tiles."""
    return width % _INPUTS == 0 and available("amx-bf16")


def task_rows(width: int) -> int:
    """Return the rows of a task."""
    return max(1, _CACHED_BYTES // (2 * width) // _BLOCK) * _BLOCK


@cache
def tile_product_kernel(width: int, *, bfloat16: bool, bias: bool) -> Kernel:
    """Return the kernel of x [T, in] times the transposed weight, rounded to bfloat16 or in float32.

    Arguments: rows, x and its row stride, panels, results [T, out padded], their row stride, bias float32 [out padded],
    number of panels. Tasks: blocks of `task_rows` rows, times pairs of panels.
    """
    return Kernel(_TileProduct(width, bfloat16, bias).e.module)


class _TileProduct:
    def __init__(self, width: int, bfloat16: bool, bias: bool) -> None:
        self.width, self.e = width, Emitter()
        e = self.e
        self.count, self.x, self.stride = e.argument(0), e.pointer(1, I16), e.argument(2)
        self.panels, self.out = e.pointer(3, I16), e.pointer(4, I16 if bfloat16 else F32)
        self.out_stride = e.argument(5)
        self.bias = e.pointer(6, F32) if bias else None
        panels = e.argument(7)
        self.tiles, self.sums = Tiles(e), e.variable(F32, _BLOCK * _BLOCK)
        self.before = [e.variable(I64) for _ in range(2)]  # first row and panel of the sums
        pairs, _ = e.divmod(e.add(panels, PANELS - 1), PANELS)
        with e.tasks(before_return=self.tiles.release) as task:
            block, pair = e.divmod(task, pairs)
            begin, panel = e.mul(block, task_rows(width)), e.mul(pair, PANELS)
            self._task(begin, e.least(e.add(begin, task_rows(width)), self.count), panel, panels)

    def _task(self, begin: Any, end: Any, panel: Any, panels: Any) -> None:
        e = self.e
        last_panel = e.least(e.add(panel, PANELS), panels)
        whole = e.add(begin, e.mul(e.divmod(e.builder.sub(end, begin), _BLOCK)[0], _BLOCK))
        rest = e.builder.sub(end, whole)
        few = e.builder.icmp_signed("<=", rest, e.integer(SIDE))
        with e.builder.if_then(e.builder.icmp_signed("<", begin, whole)):
            self._configure(SIDE)
            self._whole_blocks(begin, whole, panel, last_panel)
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.integer(0))), e.builder.if_else(few) as (less, more):
            with less:
                self.tiles.configure([rest] * 5 + [SIDE] * 3)
                self._flat(whole, rest, panel, last_panel)
            with more:
                self._configure(e.add(rest, -SIDE))
                with e.loop(panel, last_panel) as number:
                    self._square(whole, number, lambda step: None)
                    self._write(whole, number, rest)

    def _whole_blocks(self, begin: Any, end: Any, panel: Any, last: Any) -> None:
        """Multiply blocks of 32 rows. The results of each are written while the next is multiplied.

        The first block's place takes numbers without a meaning until then.
        """
        e = self.e
        before = self.before
        e.builder.store(begin, before[0])
        e.builder.store(panel, before[1])
        steps = self.width // _INPUTS
        per_step = -(-_BLOCK // steps)
        with e.loop(panel, last) as number, e.loop(begin, end, _BLOCK) as row:
            written = [e.builder.load(each) for each in before]
            ahead = e.mul(e.divmod(e.builder.sub(row, begin), _BLOCK)[0], steps * _AHEAD)

            def beside(step: Any, written: Any = written, ahead: Any = ahead, number: Any = number) -> None:
                for part in range(per_step):
                    self._write_row(*written, e.least(e.add(e.mul(step, per_step), part), _BLOCK - 1))
                self._fetch(e.add(number, 1), e.add(ahead, e.mul(step, _AHEAD)))

            self._square(row, number, beside)
            e.builder.store(row, before[0])
            e.builder.store(number, before[1])
        self._write(*(e.builder.load(each) for each in before), _BLOCK)

    def _fetch(self, panel: Any, line: Any) -> None:
        """Ask for some lines of a panel, if it has them."""
        e = self.e
        with e.builder.if_then(e.builder.icmp_signed("<", line, e.integer(self.width))):
            start = e.mul(e.add(e.mul(panel, self.width), line), COLUMNS)
            for number in range(_AHEAD):
                e.prefetch(e.at(self.panels, e.add(start, number * COLUMNS)))

    def _configure(self, second: Any) -> None:
        """Set tiles for two by two: `second` rows in the lower ones."""
        self.tiles.configure([SIDE, SIDE, second, second, SIDE, second, SIDE, SIDE])

    def _square(self, row: Any, panel: Any, beside: Callable[[Any], None]) -> None:
        """Store the sums of up to 32 rows with one panel. `beside`: builds what else each step does."""
        e, tiles = self.e, self.tiles
        for register in range(4):
            tiles.zero(register)
        with e.loop(0, self.width // _INPUTS) as step:
            for part in range(2):
                self._load_rows(4 + part, e.add(row, part * SIDE), step)
                self._load_panel(6 + part, panel, part, step)
            for register in range(4):
                tiles.add_products(register, 4 + register // 2, 6 + register % 2)
            beside(step)
        for register in range(4):
            self._keep(register, register // 2, register % 2)

    def _flat(self, row: Any, rows: Any, panel: Any, last: Any) -> None:
        """Multiply up to 16 rows with one or two panels."""
        e = self.e
        two = e.builder.icmp_signed(">", e.builder.sub(last, panel), e.integer(1))
        with e.builder.if_else(two) as (both, single):
            with both:
                self._flat_panels(row, rows, [panel, e.add(panel, 1)])
            with single:
                self._flat_panels(row, rows, [panel])

    def _flat_panels(self, row: Any, rows: Any, panels: Sequence[Any]) -> None:
        e, tiles = self.e, self.tiles
        for register in range(2 * len(panels)):
            tiles.zero(register)
        with e.loop(0, self.width // _INPUTS) as step:
            self._load_rows(4, row, step)
            for register in range(2 * len(panels)):
                weights = 5 + register % 3
                self._load_panel(weights, panels[register // 2], register % 2, step)
                tiles.add_products(register, 4, weights)
        for number, panel in enumerate(panels):
            for part in range(2):
                self._keep(2 * number + part, 0, part)
            self._write(row, panel, rows)

    def _load_rows(self, register: int, row: Any, step: Any) -> None:
        e = self.e
        place = e.at(self.x, e.add(e.mul(row, self.stride), e.mul(step, _INPUTS)))
        self.tiles.load(register, place, e.mul(self.stride, 2), once=True)

    def _load_panel(self, register: int, panel: Any, part: int, step: Any) -> None:
        """Load the weights of 16 outputs of a panel."""
        e = self.e
        inputs = e.add(e.mul(panel, self.width), e.mul(step, _INPUTS))
        place = e.at(self.panels, e.add(e.mul(inputs, COLUMNS), part * _INPUTS))
        self.tiles.load(register, place, 4 * COLUMNS)

    def _keep(self, register: int, lower: int, right: int) -> None:
        """Store a tile of sums in its quarter of a block of rows and outputs."""
        self.tiles.store(register, self.e.at(self.sums, (lower * COLUMNS + right) * SIDE), 4 * COLUMNS)

    def _write(self, first: Any, panel: Any, rows: Any) -> None:
        """Write results from a block of sums."""
        with self.e.loop(0, rows) as row:
            self._write_row(first, panel, row)

    def _write_row(self, first: Any, panel: Any, row: Any) -> None:
        e = self.e
        start = e.mul(e.add(first, row), self.out_stride)
        for part in range(0, COLUMNS, LANES):
            column = e.add(e.mul(panel, COLUMNS), part)
            value = e.load(self.sums, e.add(e.mul(row, COLUMNS), part))
            value = value if self.bias is None else e.builder.fadd(value, e.load(self.bias, column))
            if self.out.type.pointee == I16:
                e.store_bfloat16(value, self.out, e.add(start, column))
            else:
                e.store(value, self.out, e.add(start, column))
