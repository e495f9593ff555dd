"""Facts about TPU generations. A kernel takes them as an argument and never reads the running machine, so that it
compiles for any chip on any machine.

Figures per TensorCore. Sources: jax/_src/pallas/mosaic/tpu_info.py (Apache-2.0); Google Cloud's system pages for TPU
v5e, v5p, v6e and 7x; links: "How to Scale Your Model", chapter on TPUs. `flops_per_cycle` follows from XLA:TPU's own
estimate of a 4096^3 matmul (126,898 FLOP per cycle for v5e, 252,216 for both cores of v5p, 455,675 for v6e), rounded up
to what the units could do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True)
class ChipInfo:
    """One TPU generation. Bandwidth in bytes/s, peak in FLOP/s (bf16), memory in bytes; all per core."""

    name: str
    cores: int  # TensorCores behind one jax device
    vmem_bytes: int
    smem_bytes: int
    hbm_bytes: int
    hbm_bandwidth: float
    peak_flops: float
    flops_per_cycle: int
    link_bandwidth: float  # bytes/s of one link to a neighbour, in one direction; of the device
    int8: bool = True  # matrix units support int8; v7x does not
    # dtype with 4 exponent bits that the matrix units take as weights
    float8: Literal["float8_e4m3fn", "float8_e4m3b11fnuz"] = "float8_e4m3b11fnuz"
    multiplies_float8: bool = False  # they multiply it by itself, faster than bfloat16
    tall_tiles: bool = False  # XLA prefers 16 rows to 8 in tiles of 16-bit arrays
    # XLA sums over devices on the sparse cores while the matrix units work; other chips than v6e were not tried
    sums_on_sparse_cores: bool = False
    packed_bfloat16: bool = True  # vector units compute with two bfloat16 numbers in a word
    matrix_width: int = 256  # rows and columns of a matrix unit

    @property
    def clock_hz(self) -> float:
        """Return the clock rate of the matrix units, in Hz."""
        return self.peak_flops / self.flops_per_cycle


CHIPS: dict[str, ChipInfo] = {
    chip.name: chip
    for chip in (
        ChipInfo(
            name="v5e",
            cores=1,
            vmem_bytes=128 * MIB,
            smem_bytes=MIB,
            hbm_bytes=17_200_000_000,
            hbm_bandwidth=8.20e11,
            peak_flops=1.97e14,
            flops_per_cycle=131_072,
            link_bandwidth=4.5e10,
            packed_bfloat16=False,
            matrix_width=128,
        ),
        ChipInfo(
            name="v5p",
            cores=2,
            vmem_bytes=64 * MIB,
            smem_bytes=MIB,
            hbm_bytes=51_300_000_000,
            hbm_bandwidth=1.23e12,
            peak_flops=2.29e14,
            flops_per_cycle=131_072,
            link_bandwidth=9e10,
            packed_bfloat16=False,
            matrix_width=128,
        ),
        ChipInfo(
            name="v6e",
            cores=1,
            vmem_bytes=128 * MIB,
            smem_bytes=MIB,
            hbm_bytes=34_400_000_000,
            hbm_bandwidth=1.64e12,
            peak_flops=9.20e14,
            flops_per_cycle=524_288,
            link_bandwidth=9e10,
            sums_on_sparse_cores=True,
        ),
        ChipInfo(
            name="v7x",
            cores=1,
            vmem_bytes=64 * MIB,
            smem_bytes=MIB,
            hbm_bytes=103_000_000_000,
            hbm_bandwidth=3.70e12,
            peak_flops=1.155e15,
            flops_per_cycle=524_288,
            link_bandwidth=9e10,
            int8=False,
            float8="float8_e4m3fn",
            multiplies_float8=True,
            tall_tiles=True,
        ),
    )
}

_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
}


def chip_of(device_kind: str) -> ChipInfo:
    """Return the entry for jax's `device.device_kind`. Raise ValueError for an unknown chip."""
    if device_kind not in _KINDS:
        raise ValueError(f"unknown chip {device_kind!r}; known: {', '.join(_KINDS)}")
    return CHIPS[_KINDS[device_kind]]
