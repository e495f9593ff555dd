"""Block sizes of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.kernels_pallas.chips import ChipInfo

LANES = 128
DEPTH = 4096  # a product is unrolled: deeper ones take the compiler long
MIB = 1 << 20


@dataclass(frozen=True)
class Blocks:
    """rows: of a tile; columns: of a matrix held in VMEM; unit, depth: columns and rows of it in one product."""

    rows: int
    columns: int
    unit: int
    depth: int


def choose(chip: ChipInfo, rows: int, groups: int, inner: int, outer: int, itemsize: int) -> Blocks:
    """Blocks for `rows` rows over `groups` matrices [inner, outer]. ValueError where no part of a matrix fits.

    A tile is as tall as a group on average, within bounds: a shorter one leaves the matrix unit waiting for weights, a
    taller one multiplies rows of other groups. Wide blocks of columns, because the rows are read once for each.
    """
    tall = min(256, max(128, _power_of_two(rows // groups)))
    tile = min(tall, -(-rows // 16) * 16)
    room = chip.vmem_bytes // 3 // 2  # two buffers of weights take a third
    fitting = [c for c in range(LANES, outer + 1, LANES) if outer % c == 0 and c * inner * itemsize <= room]
    if not fitting and outer * inner * itemsize > room:
        raise ValueError(f"a matrix of {inner} x {outer} has no part that fits a {chip.name}'s VMEM twice")
    columns = max(fitting, default=outer)
    unit = next((u for u in (256, LANES) if columns % u == 0), columns)
    depth = max((d for d in range(LANES, DEPTH + 1, LANES) if inner % d == 0), default=inner)
    return Blocks(tile, columns, unit, depth)


def _power_of_two(n: int) -> int:
    """The largest that is at most n, at least 1."""
    return 1 << max(n, 1).bit_length() - 1
