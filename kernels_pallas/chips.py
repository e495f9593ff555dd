"""What a kernel must know of the chip it is compiled for. It is an argument, never read from the running machine,
so that every kernel compiles for any chip on any machine.

Figures per TensorCore. Source: jax/_src/tpu_info.py (Apache-2.0) and Google Cloud's system pages for TPU v5e, v5p, v6e, 7x.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class ChipInfo:
    """One TPU generation. Bandwidth in bytes/s, peak in FLOP/s (bf16), clock in Hz, memory in bytes; all per core.

    `clock`: what the peak takes at 2 * 4 * 128^2 (v5) or 2 * 4 * 256^2 (v6, v7) FLOP per cycle.
    """

    name: str
    cores: int  # TensorCores behind one jax device
    mxu_width: int
    vmem_bytes: int
    smem_bytes: int
    hbm_bytes: int
    hbm_bandwidth: float
    peak_flops: float
    clock: float


CHIPS: dict[str, ChipInfo] = {
    chip.name: chip
    for chip in (
        ChipInfo("v5e", 1, 128, 128 * MIB, MIB, 17_200_000_000, 8.20e11, 1.97e14, 1.50e9),
        ChipInfo("v5p", 2, 128, 64 * MIB, MIB, 51_300_000_000, 1.23e12, 2.29e14, 1.75e9),
        ChipInfo("v6e", 1, 256, 128 * MIB, MIB, 34_400_000_000, 1.64e12, 9.20e14, 1.75e9),
        ChipInfo("v7x", 1, 256, 64 * MIB, MIB, 103_000_000_000, 3.70e12, 1.155e15, 2.20e9),
    )
}

_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def chip_of(device_kind: str) -> ChipInfo:
    """The table's entry for jax's `device.device_kind`. ValueError, with the known kinds, for any other chip."""
    name = _KINDS.get(device_kind, "v7x" if device_kind.startswith(("TPU7x", "TPU v7")) else device_kind)
    if name not in CHIPS:
        raise ValueError(f"no figures for the chip {device_kind!r}; known: {', '.join(CHIPS)}")
    return CHIPS[name]
