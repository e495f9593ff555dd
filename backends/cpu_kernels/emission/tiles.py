"""Matrix tiles of the processor (AMX): whether a process may use them, and their instructions in a kernel.

A tile is a register of up to 16 rows of 64 bytes. A product adds A times B to C: A holds 16 rows of 32 bfloat16
numbers, B 16 pairs of inputs of 16 outputs, C 16 x 16 float32 sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.emit import ADDRESS, I8, I16, I64, Emitter
from pagoda.backends.cpu_kernels.emission.jit import has_feature

SIDE: Final = 16
"""Rows of a tile, and 32-bit elements of its rows."""

ROW_BYTES: Final = 64
TILE_BYTES: Final = SIDE * ROW_BYTES
REGISTERS: Final = 8

_CONFIG_BYTES: Final = 64
_PALETTE: Final = 1
_WIDTHS_START: Final = 16
_ROWS_START: Final = 48
"""Where a configuration has the bytes per row (16 bits each) and the rows (8 bits each) of the registers."""

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


@cache
def available(instructions: str) -> bool:
    """Return whether this process may use tiles and these instructions, "amx-bf16" or "amx-int8".

    Linux gives a thread room for tiles only in processes that ask for it; a container's system call filter, or signal
    stacks that are too small, can refuse.
    """
    if not (has_feature("amx-tile") and has_feature(instructions)):
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_ARCH_PRCTL, ctypes.c_long(_REQUEST_PERMISSION), ctypes.c_long(_TILE_DATA)) == 0)


class Tiles:
    """Tile instructions of the function that an emitter builds. Registers are numbered 0 to 7."""

    def __init__(self, emitter: Emitter) -> None:
        self._e = emitter

    def zero(self, register: int) -> None:
        self._do("tilezero", I8(register))

    def load(self, register: int, address: Any, stride: Any, *, once: bool = False) -> None:
        """Load rows that are `stride` bytes apart. `once`: they need not stay in the first cache."""
        self._do("tileloaddt164" if once else "tileloadd64", I8(register), address, self._e.integer(stride))

    def store(self, register: int, address: Any, stride: Any) -> None:
        """Store rows `stride` bytes apart."""
        self._do("tilestored64", I8(register), address, self._e.integer(stride))

    def add_products(self, into: int, a: int, b: int, instruction: str = "tdpbf16ps") -> None:
        """Add products of tiles, of bfloat16 numbers unless another instruction is given."""
        self._do(instruction, I8(into), I8(a), I8(b))

    def _do(self, instruction: str, *values: Any) -> None:
        e = self._e
        untyped = [e.builder.bitcast(v, ADDRESS) if isinstance(v.type, ir.PointerType) else v for v in values]
        e.call(f"llvm.x86.{instruction}", *untyped, result=ir.VoidType())


class TileRegisters(Tiles):
    """The tile instructions of a function that sets the shapes of the registers."""

    def __init__(self, emitter: Emitter, widths: Sequence[int] = (ROW_BYTES,) * REGISTERS) -> None:
        """`widths`: bytes per row of each register."""
        super().__init__(emitter)
        self._config = emitter.variable(I8, _CONFIG_BYTES)
        for start in range(0, _CONFIG_BYTES, 8):
            self._set(start, I64(_PALETTE if start == 0 else 0))
        for register, width in enumerate(widths):
            self._set(_WIDTHS_START + 2 * register, I16(width))

    def _set(self, start: int, value: Any) -> None:
        self._e.builder.store(value, self._e.at(self._config, start, value.type))

    def configure(self, rows: Sequence[Any]) -> None:
        """Set the rows of each register, i64 or int; clears all registers."""
        e = self._e
        for register, count in enumerate(rows):
            self._set(_ROWS_START + register, e.builder.trunc(e.integer(count), I8))
        self._do("ldtilecfg", self._config)

    def release(self) -> None:
        """Free the registers, so that the kernel need not save them when threads change."""
        self._do("tilerelease")
