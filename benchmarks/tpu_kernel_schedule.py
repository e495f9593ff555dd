"""What the TPU compiler's own schedule says of the attention kernel: bound by what, and how near to the roofline.

    python benchmarks/tpu_kernel_schedule.py [--chip v6e] [--shape decode-8kv] [--shape prefill-8kv]

No TPU is needed: libtpu compiles the kernel and writes down its final VLIW bundles. A bundle is issued per cycle, so
bundles of a loop x its trips are the cycles of the core; the bytes that its DMAs must move over the chip's bandwidth
are the cycles of the memory. Loops are recognised by their depth (tile, sequence, block, pass) and by whether they hold
matmuls. Where a body is conditional it is counted as taken, so the count is an upper bound. What the schedule cannot
show: stalls of a full matrix unit or a bank conflict, and DMA latency, for which two microseconds are added.
The flags that write the bundles are undocumented; where no dump appears the program says so and stops.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
DMA_LATENCY_S = 2e-6
CONTEXT = 1024  # tokens of each decode row
PREFILL = 2048  # tokens of the prompt


@dataclass(frozen=True)
class Loop:
    """One loop of a kernel: its depth, the bundles of its own body, whether loops lie inside, use per unit."""

    depth: int
    bundles: int
    inner: bool
    units: dict[str, int]


def loops(dump: Path, kernel: str) -> list[Loop]:
    """The loops of a kernel's final schedule, the straight code around them as depth 0."""
    listing = next(path for path in sorted(dump.glob(f"*{kernel}*-final_bundles.txt")) if "schedule" not in path.name)
    table = next(iter(sorted(dump.glob(f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt"))))
    use = [list(map(int, line.split())) for line in table.read_text().split("UTILIZATION:")[1].strip().splitlines()]
    line = re.compile(r"\s*(?:0x)?([0-9a-f]+)\s*(LB|LH|LE|PB|PF|CT)?:\s*(>*)")
    rows = [(match[2], len(match[3])) for match in map(line.match, listing.read_text().splitlines()) if match]
    found = [Loop(0, sum(depth == 0 for _, depth in rows), True, {})]
    for start, (mark, depth) in enumerate(rows):
        if mark != "LB":
            continue
        stop = start + 1
        while stop < len(rows) and rows[stop][1] >= depth and rows[stop] != ("LB", depth):
            stop += 1
        own = [i for i in range(start, stop) if rows[i][1] == depth]
        units = {unit: sum(use[i][n] for i in own) for n, unit in enumerate(UNITS)}
        found.append(Loop(depth, len(own), len(own) < stop - start, units))
    return found


def report(title: str, figures: dict[str, float | str]) -> dict:
    """Prints one kernel's figures."""
    print(f"\n{title}")
    for name, value in figures.items():
        print(f"  {name:38s} {value if isinstance(value, str) else f'{value:,.3f}'.rstrip('0').rstrip('.')}")
    return {"title": title, **figures}


def decode(found: list[Loop], case, chip, blocks) -> dict:
    """Every row at CONTEXT tokens: cycles of the core against cycles of the memory."""
    rows, layout = case.seqs, case.layout
    pages = CONTEXT // layout.page_size
    trips = {0: 1, 1: rows / blocks.queries, 2: rows, 3: rows * -(-pages // blocks.pages)}
    total, inner = 0.0, [loop for loop in found if loop.units.get("MATMUL")]
    for loop in found:
        if loop in inner:
            total += loop.bundles * rows * (CONTEXT / blocks.tokens) * (layout.lane_heads / blocks.heads)
        elif loop.depth == 3 and not loop.inner:
            total += loop.bundles * rows * layout.lane_heads  # normalise and store, a head at a time
        else:
            total += loop.bundles * trips.get(loop.depth, rows * pages)
    necessary = rows * (pages * layout.bytes_per_page + 2 * 2 * case.heads * layout.head_dim)
    memory = necessary / chip.hbm_bandwidth * chip.clock_hz
    modelled = max(total, memory + total / rows) + DMA_LATENCY_S * chip.clock_hz
    return {
        "bundles of a pass (all heads)": sum(loop.bundles for loop in inner) * layout.lane_heads / blocks.heads,
        "cycles of the core": total,
        "cycles of the memory at peak": memory,
        "core / memory": total / memory,
        "bound by": "HBM" if memory > total else "core",
        "share of the HBM roofline": memory / modelled,
        "microseconds": modelled / chip.clock_hz * 1e6,
    }


def prefill(found: list[Loop], case, chip, blocks) -> dict:
    """One prompt of PREFILL tokens, causal: the inner loop alone, then the kernel with all it does around it."""
    layout, unit = case.layout, blocks.tokens
    tiles = PREFILL // blocks.queries
    pairs = sorted((loop for loop in found if loop.units.get("MATMUL")), key=lambda loop: loop.units["VALU"])[-2:]
    clear = sum(i * blocks.queries // unit for i in range(tiles))
    masked = sum(-(-(i + 1) * blocks.queries // unit) - i * blocks.queries // unit for i in range(tiles))
    half = layout.lane_heads / 2  # a trip takes two (pass, head) pairs
    total = pairs[0].bundles * clear * half + pairs[1].bundles * masked * half
    visits = sum(-(-(i + 1) * blocks.queries // (blocks.pages * layout.page_size)) for i in range(tiles))
    trips = {0: 1, 1: tiles, 2: tiles, 3: visits}
    for loop in found:
        if loop in pairs:
            continue
        if loop.depth == 3 and not loop.inner:
            total += loop.bundles * tiles * layout.lane_heads
        else:
            total += loop.bundles * trips.get(loop.depth, visits * blocks.pages)
    pair_flops = 2 * 4 * blocks.queries * (case.heads // layout.kv_heads) * unit * layout.width
    necessary = 4 * case.heads * layout.head_dim * PREFILL * (PREFILL + 1) / 2
    return {
        "bundles of a pass (two heads)": float(pairs[0].bundles),
        "of it with the causal mask": float(pairs[1].bundles),
        "inner loop, share of the MXU peak": pair_flops / chip.flops_per_cycle / pairs[0].bundles,
        "cycles of the core": total,
        "multiplied / necessary (causal)": (clear + masked) * half * pair_flops / necessary,
        "kernel, share of the MXU peak, multiplied": (clear + masked)
        * half
        * pair_flops
        / chip.flops_per_cycle
        / total,
        "kernel, share of the MXU peak, necessary": necessary / chip.flops_per_cycle / total,
        "microseconds": total / chip.clock_hz * 1e6,
    }


def measure(shape: str, chip_name: str, dump: Path) -> dict:
    """Compiles one named shape with the dump on and reads it."""
    from pagoda.kernels_pallas.aot import facts, one_chip
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.ragged_paged_attention.arg_specs import spec
    from pagoda.kernels_pallas.ragged_paged_attention.blocks import choose

    case, chip = spec(shape), CHIPS[chip_name]
    compiled = case.function(chip).lower(*case.arguments(one_chip(chip_name))).compile()
    kernel = "decode" if case.decode_only else "mixed"
    if not list(dump.glob(f"*{kernel}*-final_bundles.txt")):
        sys.exit("this libtpu wrote no schedule: --xla_jf_dump_llo_text is gone or renamed")
    group = case.heads // case.layout.kv_heads * case.layout.heads_per_row
    pages = -(-case.context // case.layout.page_size)
    rows = case.seqs if case.decode_only else case.tokens
    blocks = choose(chip, case.layout, group, pages, rows, decode=case.decode_only)
    figures = (decode if case.decode_only else prefill)(loops(dump, f"attention_{kernel}"), case, chip, blocks)
    figures["VMEM, MiB"] = facts(compiled).vmem / (1 << 20)
    return report(f"{shape} on {chip_name}, {blocks}", figures)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v6e")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    dump = Path(tempfile.mkdtemp(prefix="llo-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    os.environ["LIBTPU_INIT_ARGS"] = flags  # before jax loads libtpu
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        found = [measure(shape, args.chip, dump) for shape in args.shape or ["decode-8kv", "prefill-8kv"]]
    finally:
        shutil.rmtree(dump, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
