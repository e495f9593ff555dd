"""Products of bfloat16 matrices with float32 sums by matrix tiles, for processors with AMX.

Weights [out, in] are packed as panels of 16 outputs: of each pair of inputs, the pairs of all outputs of the panel. A
task is up to two units, see UNITS, times a block of rows that stays in the second cache. 32 rows at a time are
multiplied with one unit, as two tiles by two; 16 rows or fewer with both units, since four sums hide how long each
product takes. A row's sums have one order, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from pagoda.backends.cpu_kernels.emission.emit import F32, I64, LANES
from pagoda.backends.cpu_kernels.emission.jit import Kernel
from pagoda.backends.cpu_kernels.emission.tiles import SIDE, TileRegisters, available
from pagoda.backends.cpu_kernels.products.panels import COLUMNS, PanelProduct
from pagoda.backends.cpu_kernels.rows import activated

UNITS: Final = 2
"""Units of a task. A unit is two panels: consecutive ones, or gates and what they are multiplied with."""

_INPUTS: Final = 2 * SIDE
_BLOCK: Final = 2 * SIDE
_AHEAD: Final = 4
"""Cache lines of each of the next two panels that a step of inputs asks for."""

_CACHED_BYTES: Final = 1 << 20
"""Of x, in a task's block of rows: half of the second cache."""


def supported(width: int) -> bool:
    """Return whether the processor has tiles and a row of x is whole tiles."""
    return width % _INPUTS == 0 and available("amx-bf16")


def task_rows(width: int) -> int:
    """Return the rows of a task."""
    return max(1, _CACHED_BYTES // (2 * width) // _BLOCK) * _BLOCK


def tasks(width: int, rows: int, units: int) -> int:
    """Return the number of tasks of a product."""
    return -(-rows // task_rows(width)) * -(-units // UNITS)


@cache
def tile_product_kernel(width: int, *, bfloat16: bool, bias: bool) -> Kernel:
    """Return the kernel of x [T, in] times the transposed weight, rounded to bfloat16 or in float32.

    Arguments: rows, x and its row stride, panels, results [T, out padded], their row stride, bias float32 [out padded],
    number of units. Tasks: blocks of `task_rows` rows, times pairs of units.
    """
    return Kernel(_TileProduct(width, bfloat16, bias).e.module)


@cache
def gated_product_kernel(width: int, activation: str, *, bias: bool) -> Kernel:
    """Return the kernel of act(gate) * up in bfloat16 [T, F]. The weight [2F, in] has those of gate, then those of up.

    F is a multiple of 16. Arguments: as of `tile_product_kernel`.
    """
    return Kernel(_GatedProduct(width, activation, bias).e.module)


class _TileProduct(PanelProduct):
    def __init__(self, width: int, bfloat16: bool, bias: bool) -> None:
        super().__init__(width, bfloat16, bias)
        e = self.e
        self.units = units = e.argument(7)
        self.tiles = TileRegisters(e)
        self.sums = e.variable(F32, _BLOCK * _BLOCK)
        self.row_before = e.variable(I64)  # of the sums that are not written yet
        self.unit_before = e.variable(I64)
        pairs, _ = e.divmod(e.add(units, UNITS - 1), UNITS)
        with e.tasks(before_return=self.tiles.release) as task:
            block, pair = e.divmod(task, pairs)
            begin = e.mul(block, task_rows(width))
            unit = e.mul(pair, UNITS)
            self._task(begin, e.least(e.add(begin, task_rows(width)), self.count), unit)

    def _task(self, begin: Any, end: Any, unit: Any) -> None:
        e = self.e
        last_unit = e.least(e.add(unit, UNITS), self.units)
        whole = e.add(begin, e.mul(e.divmod(e.builder.sub(end, begin), _BLOCK)[0], _BLOCK))
        rest = e.builder.sub(end, whole)
        few = e.builder.icmp_signed("<=", rest, e.integer(SIDE))
        with e.builder.if_then(e.builder.icmp_signed("<", begin, whole)):
            self._configure(SIDE)
            self._whole_blocks(begin, whole, unit, last_unit)
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.integer(0))), e.builder.if_else(few) as (less, more):
            with less:
                self.tiles.configure([rest] * 5 + [SIDE] * 3)
                self._flat(whole, rest, unit, last_unit)
            with more:
                self._configure(e.add(rest, -SIDE))
                with e.loop(unit, last_unit) as number:
                    self._square(whole, number, lambda step: None)
                    self._write(whole, number, rest)

    def _whole_blocks(self, begin: Any, end: Any, unit: Any, last: Any) -> None:
        """Multiply blocks of 32 rows. The results of each are written while the next is multiplied.

        The first block's place takes numbers without a meaning until then.
        """
        e = self.e
        e.builder.store(begin, self.row_before)
        e.builder.store(unit, self.unit_before)
        steps = self.width // _INPUTS
        per_step = -(-_BLOCK // steps)
        with e.loop(unit, last) as number, e.loop(begin, end, _BLOCK) as row:
            first = e.builder.load(self.row_before)
            written = e.builder.load(self.unit_before)
            ahead = e.mul(e.divmod(e.builder.sub(row, begin), _BLOCK)[0], steps * _AHEAD)

            def beside(
                step: Any, first: Any = first, written: Any = written, ahead: Any = ahead, number: Any = number
            ) -> None:
                for part in range(per_step):
                    self._write_row(first, written, e.least(e.add(e.mul(step, per_step), part), _BLOCK - 1))
                self._fetch(e.add(number, 1), e.add(ahead, e.mul(step, _AHEAD)))

            self._square(row, number, beside)
            e.builder.store(row, self.row_before)
            e.builder.store(number, self.unit_before)
        self._write(e.builder.load(self.row_before), e.builder.load(self.unit_before), _BLOCK)

    def _fetch(self, unit: Any, line: Any) -> None:
        """Ask for some lines of both panels of a unit, if they have them."""
        e = self.e
        with e.builder.if_then(e.builder.icmp_signed("<", line, e.integer(self.width // 2))):
            for part in range(2):
                start = e.add(e.mul(self._panel(unit, part), self.width * SIDE), e.mul(line, _INPUTS))
                for number in range(_AHEAD):
                    e.prefetch(e.at(self.panels, e.add(start, number * _INPUTS)))

    def _configure(self, second: Any) -> None:
        """Set tiles for two by two: `second` rows in the lower ones."""
        self.tiles.configure([SIDE, SIDE, second, second, SIDE, second, SIDE, SIDE])

    def _square(self, row: Any, unit: Any, beside: Callable[[Any], None]) -> None:
        """Store the sums of up to 32 rows with one unit. `beside`: builds what else each step does."""
        e = self.e
        tiles = self.tiles
        for register in range(4):
            tiles.zero(register)
        with e.loop(0, self.width // _INPUTS) as step:
            for part in range(2):
                self._load_rows(4 + part, e.add(row, part * SIDE), step)
                self._load_weights(6 + part, unit, part, step)
            for register in range(4):
                tiles.add_products(register, 4 + register // 2, 6 + register % 2)
            beside(step)
        for register in range(4):
            self._keep(register, register // 2, register % 2)

    def _flat(self, row: Any, rows: Any, unit: Any, last: Any) -> None:
        """Multiply up to 16 rows with one or two units."""
        e = self.e
        two = e.builder.icmp_signed(">", e.builder.sub(last, unit), e.integer(1))
        with e.builder.if_else(two) as (both, single):
            with both:
                self._flat_units(row, rows, [unit, e.add(unit, 1)])
            with single:
                self._flat_units(row, rows, [unit])

    def _flat_units(self, row: Any, rows: Any, units: Sequence[Any]) -> None:
        e = self.e
        tiles = self.tiles
        for register in range(2 * len(units)):
            tiles.zero(register)
        with e.loop(0, self.width // _INPUTS) as step:
            self._load_rows(4, row, step)
            for register in range(2 * len(units)):
                weights = 5 + register % 3
                self._load_weights(weights, units[register // 2], register % 2, step)
                tiles.add_products(register, 4, weights)
        for number, unit in enumerate(units):
            for part in range(2):
                self._keep(2 * number + part, 0, part)
            self._write(row, unit, rows)

    def _load_rows(self, register: int, row: Any, step: Any) -> None:
        e = self.e
        place = e.at(self.x, e.add(e.mul(row, self.stride), e.mul(step, _INPUTS)))
        self.tiles.load(register, place, e.mul(self.stride, 2), once=True)

    def _load_weights(self, register: int, unit: Any, part: int, step: Any) -> None:
        """Load the weights of one of a unit's panels."""
        e = self.e
        inputs = e.add(e.mul(self._panel(unit, part), self.width), e.mul(step, _INPUTS))
        self.tiles.load(register, e.at(self.panels, e.mul(inputs, SIDE)), 4 * SIDE)

    def _panel(self, unit: Any, part: int) -> Any:
        """Return the first or second panel of a unit."""
        return self.e.add(self.e.mul(unit, 2), part)

    def _keep(self, register: int, lower: int, right: int) -> None:
        """Store a tile of sums in its quarter of a block of rows and outputs."""
        self.tiles.store(register, self.e.at(self.sums, (lower * COLUMNS + right) * SIDE), 4 * COLUMNS)

    def _write(self, first: Any, unit: Any, rows: Any) -> None:
        """Write results from a block of sums."""
        with self.e.loop(0, rows) as row:
            self._write_row(first, unit, row)

    def _write_row(self, first: Any, unit: Any, row: Any) -> None:
        e = self.e
        start = e.add(e.mul(e.add(first, row), self.out_stride), e.mul(unit, COLUMNS))
        for part in range(2):
            value = self._sums(unit, part, row)
            e.store(value, self.out, e.add(start, part * LANES))

    def _sums(self, unit: Any, part: int, row: Any) -> Any:
        """Return 16 sums of a row with their bias."""
        e = self.e
        value = e.load(self.sums, e.add(e.mul(row, COLUMNS), part * LANES))
        return self.biased(value, e.mul(self._panel(unit, part), SIDE))


class _GatedProduct(_TileProduct):
    """A unit is a panel of gates, and the panel of what they are multiplied with."""

    def __init__(self, width: int, activation: str, bias: bool) -> None:
        self.activation = activation
        super().__init__(width, True, bias)

    def _panel(self, unit: Any, part: int) -> Any:
        return self.e.add(unit, self.units) if part else unit

    def _write_row(self, first: Any, unit: Any, row: Any) -> None:
        e = self.e
        gate, up = (self._sums(unit, part, row) for part in range(2))
        place = e.add(e.mul(e.add(first, row), self.out_stride), e.mul(unit, LANES))
        e.store(e.builder.fmul(activated(e, self.activation, gate), up), self.out, place)
