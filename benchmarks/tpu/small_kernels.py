"""Compare the small TPU kernels with XLA's code for the same functions, by the TPU compiler's schedule. Needs no TPU.

    python benchmarks/tpu/small_kernels.py [--chip v6e] [--json FILE]

XLA: the sum of the cycles that the compiler estimates for each operation of the reference. Kernel: the VLIW bundles it
issues, counted by executing the scalar instructions of its schedule (see bundles.py):

- top_k_top_p: the number of passes of each search is measured by running the kernel on random logits in Pallas'
  interpreter; the schedule then runs with these numbers. For fewer rows than measured: the mean over all batches.
- grouped_matmul: the schedule runs on the visits of tokens that choose experts uniformly at random. XLA is charged for
  the bytes it moves: in a scan over layers it copies the weights of every expert out of the stack (temporary bytes,
  written and read) and then multiplies by those with tokens. Its estimate for the dot itself is not used, because it
  contradicts the bundles of the same dot.
- quantised weights (--quantized): a dense matrix 4096 x 14336, against its numbers and scales at HBM bandwidth.

A bundle is a cycle; stalls are not included. Memory cycles: bytes moved by DMAs over the chip's bandwidth. The dump
flags are undocumented; without a dump the program stops with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from bundles import Listing, Trace

VOCAB = 128_256
ROWS = (8, 64, 256)
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.7
SEARCHES = ("peaks", "top_k", "top_p")


def compiled(dump: Path, case: Any, chip: Any, sharding: Any, kernel: str) -> tuple[Listing, float]:
    """Compile a kernel; return its bundles and the MiB of VMEM it uses."""
    from pagoda.benchmarks.tpu.aot.compiler import facts

    for file in dump.glob("*"):
        file.unlink()
    program = case.function(chip).lower(*case.arguments(sharding)).compile()
    return Listing(dump, kernel), facts(program).vmem / (1 << 20)


def memory_cycles(listing: Listing, trace: Trace, scalars: int, chip: Any) -> float:
    """Return the cycles of all bytes between HBM and VMEM. Operands in VMEM, except the first `scalars`, move once."""
    moved = sum(size for way, size in trace.moved.items() if "hbm" in way)
    resident = sum(size for number, size in listing.in_vmem.items() if number >= scalars)
    return (moved + resident) / chip.hbm_bandwidth * chip.clock_hz


def report(title: str, figures: dict[str, float]) -> dict:
    """Print one kernel's figures."""
    print(f"\n{title}")
    for name, value in figures.items():
        print(f"  {name:46s} {f'{value:,.3f}'.rstrip('0').rstrip('.')}", flush=True)
    return {"title": title, **figures}


def passes() -> list[Counter[str]]:
    """Count the passes of each search in each block of rows, on logits rounded to bfloat16."""
    import jax
    import jax.numpy as jnp

    from pagoda.kernels_pallas.top_k_top_p import kernel as module
    from pagoda.kernels_pallas.top_k_top_p import top_k_top_p

    seen: Counter[str] = Counter()
    names = iter(SEARCHES)
    search = module.search

    def counted(measure, *rest):
        name = next(names)

        def noted(t):
            jax.debug.callback(lambda: seen.update([name]))
            return measure(t)

        return search(noted, *rest)

    rows, counts = module.ROWS, []
    rules = (jnp.full(rows, TEMPERATURE), jnp.full(rows, TOP_K), jnp.full(rows, TOP_P), jnp.zeros(rows))
    call = jax.jit(lambda logits: top_k_top_p(logits, *rules, interpret=True))
    rng = np.random.default_rng(0)
    module.search = counted
    try:
        for _ in range(max(ROWS) // rows):
            normal = rng.standard_normal((rows, VOCAB)).astype(np.float32) * 3
            jax.block_until_ready(call(jnp.asarray(normal).astype(jnp.bfloat16).astype(jnp.float32)))
            jax.effects_barrier()
            counts.append(seen.copy())
            seen.clear()
    finally:
        module.search = search
    return counts


def popped_values(blocks: list[Counter[str]]) -> np.ndarray:
    """Return the values the searches pop from the vector unit (is a row still open?): 1 per pass, then 0."""
    return np.concatenate([[1.0] * block[name] + [0.0] for block in blocks for name in SEARCHES]).astype(np.float32)


def searched(listing: Listing, count: int, measured: list[Counter[str]], chip: Any) -> dict[str, float]:
    """Return figures of the kernel on `count` blocks of rows (mean over all batches) and the cycles of one pass."""
    from pagoda.kernels_pallas.top_k_top_p.kernel import TOP_K as WANTS_K
    from pagoda.kernels_pallas.top_k_top_p.kernel import TOP_P as WANTS_P

    scalars = [np.full(count, WANTS_K + WANTS_P, np.int32), np.arange(count, dtype=np.int32)]
    batches = [measured[i : i + count] for i in range(0, len(measured), count)]
    traces = [listing.run(scalars, popped_values(batch)) for batch in batches]
    figures = {
        "kernel: cycles of the core": fmean(trace.cycles for trace in traces),
        "kernel: cycles of the memory": memory_cycles(listing, traces[0], len(scalars), chip),
    }
    first, *others = batches[0]
    for name, title in (("top_k", "top-k"), ("top_p", "top-p")):
        longer = listing.run(scalars, popped_values([first + Counter([name]), *others]))
        figures[f"cycles of a pass for {title}"] = float(longer.cycles - traces[0].cycles)
        figures[f"passes for {title}, of a block"] = 1 + fmean(block[name] for block in measured)
    return figures


def thresholds(chip_name: str, dump: Path) -> list[dict]:
    """Compare kernel and reference of top-k and top-p."""
    import jax

    from pagoda.backends.jax_tpu.ahead_of_time.schedule import read_schedule
    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.benchmarks.tpu.aot.shapes.top_k_top_p import TopKTopPArgs
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.top_k_top_p import reference
    from pagoda.kernels_pallas.top_k_top_p.kernel import ROWS as BLOCK

    chip, sharding, measured, results = CHIPS[chip_name], one_chip(chip_name), passes(), []
    for rows in ROWS:
        case, count = TopKTopPArgs(rows, VOCAB), rows // BLOCK
        listing, vmem = compiled(dump, case, chip, sharding, "top_k_top_p")
        figures = searched(listing, count, measured, chip)
        core, memory = figures["kernel: cycles of the core"], figures["kernel: cycles of the memory"]
        ours = memory / count + max(core, memory)
        theirs = read_schedule(jax.jit(reference).lower(*case.arguments(sharding)).compile().as_text() or "").cycles
        title = f"top_k_top_p: {rows} rows of {VOCAB} logits on {chip_name}, top-k {TOP_K}, top-p {TOP_P}"
        figures |= {
            "kernel: microseconds": ours / chip.clock_hz * 1e6,
            "XLA: cycles": float(theirs),
            "XLA: microseconds": theirs / chip.clock_hz * 1e6,
            "XLA / kernel": theirs / ours,
            "VMEM, MiB": vmem,
        }
        results.append(report(title, figures))
    return results


def products(chip_name: str, dump: Path) -> list[dict]:
    """Compare kernel and XLA's ragged dot, for the two matmuls of a layer of experts."""
    import jax
    import jax.numpy as jnp

    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.benchmarks.tpu.aot.shapes.grouped_matmul import SPECS
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.grouped_matmul.kernel import choose_block_sizes, visits

    def scanned(rows, stack, sizes):  # in the layout that suits XLA best: one product for all parts
        def one(carry, weights):
            return carry + jax.lax.ragged_dot(carry, weights, sizes).sum().astype(carry.dtype), None

        return jax.lax.scan(one, rows, stack)[0]

    chip, sharding, results = CHIPS[chip_name], one_chip(chip_name), []
    per_byte = chip.clock_hz / chip.hbm_bandwidth
    for name, case in SPECS.items():
        if "-t" not in name:
            continue
        listing, vmem = compiled(dump, case, chip, sharding, "grouped_matmul")
        blocks = choose_block_sizes(chip, case.rows, case.groups, case.inner, case.outer, 2)
        tokens = int(name.rpartition("-t")[2])
        rng = np.random.default_rng(0)
        chosen = [rng.permutation(case.groups)[: case.rows // tokens] for _ in range(tokens)]
        counts = np.bincount(np.concatenate(chosen), minlength=case.groups)
        plan, num_visits = visits(jnp.asarray(counts, jnp.int32), case.rows, blocks.rows)
        layer = np.zeros(1, np.int32)
        scalars = [np.asarray(num_visits), layer, *(np.asarray(x) for x in vars(plan).values())]
        trace = listing.run(scalars)
        memory = memory_cycles(listing, trace, len(scalars), chip)
        hit = int((counts > 0).sum()) * 2 * case.parts * case.inner * case.outer
        first = 2 * case.inner * blocks.columns * per_byte
        ours = max(trace.cycles, memory) + first
        flop = 2 * case.rows * case.parts * case.inner * case.outer
        rows, stack, _, sizes = case.arguments(sharding)
        wide = (case.layers, case.groups, case.inner, case.parts * case.outer)
        best = jax.ShapeDtypeStruct(wide, stack.dtype, sharding=sharding)
        copied = jax.jit(scanned).lower(rows, best, sizes).compile().memory_analysis().temp_size_in_bytes
        theirs = (2 * copied + hit) * per_byte
        figures = {
            "experts with tokens": float((counts > 0).sum()),
            "visits": float(num_visits),
            "kernel: cycles of the core": float(trace.cycles),
            "kernel: cycles of the memory": memory,
            "kernel: microseconds": ours / chip.clock_hz * 1e6,
            "kernel: share of the bound by bytes and FLOP": max(hit * per_byte, flop / chip.flops_per_cycle) / ours,
            "XLA: MB copied": copied / 1e6,
            "XLA: microseconds of its bytes alone": theirs / chip.clock_hz * 1e6,
            "XLA / kernel, at least": theirs / ours,
            "VMEM, MiB": vmem,
        }
        results.append(report(f"grouped_matmul {name} on {chip_name}, {blocks}", figures))
    return results


def quantized(chip_name: str, dump: Path) -> list[dict]:
    """Return figures of products with quantised weights against the bytes of numbers and scales."""
    from dataclasses import replace

    import jax.numpy as jnp

    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.benchmarks.tpu.aot.shapes.grouped_matmul import SPECS
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.grouped_matmul.kernel import choose_block_sizes, for_quantized, visits

    chip, sharding, results = CHIPS[chip_name], one_chip(chip_name), []
    for name, spec in SPECS.items():
        if spec.kind is None:
            continue
        case = replace(spec, kind=chip.float8) if spec.kind.startswith("float8") else spec
        listing, vmem = compiled(dump, case, chip, sharding, "grouped_matmul")
        rows, weights, *_ = case.arguments()
        stored = weights.numbers.dtype.itemsize * weights.numbers.shape[3] / case.inner
        sizes = choose_block_sizes(chip, case.rows, case.groups, case.inner, case.outer, stored)
        blocks = for_quantized(sizes, weights, rows.dtype, chip)
        counts = np.bincount(np.arange(case.rows) % case.groups, minlength=case.groups)
        plan, num_visits = visits(jnp.asarray(counts, jnp.int32), case.rows, blocks.rows)
        layer = np.zeros(1, np.int32)
        scalars = [np.asarray(num_visits), layer, *(np.asarray(x) for x in vars(plan).values())]
        core = listing.run(scalars).cycles
        memory = case.weight_bytes / chip.hbm_bandwidth * chip.clock_hz
        figures = {
            "cycles of the core": float(core),
            "cycles of the weights in HBM": memory,
            "cycles of the matrix units at peak": 2 * case.rows * case.inner * case.outer / chip.flops_per_cycle,
            "share of HBM's rate": memory / max(core, memory),
            "VMEM, MiB": vmem,
        }
        results.append(report(f"grouped_matmul {name} on {chip_name}, {blocks}", figures))
    return results


def commit() -> str:
    """Return the commit of the sources."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v6e")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quantized", action="store_true", help="only products with quantised weights")
    args = parser.parse_args()
    dump = Path(tempfile.mkdtemp(prefix="llo-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    os.environ |= {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost"}  # before jax
    try:
        rows = quantized(args.chip, dump) if args.quantized else thresholds(args.chip, dump) + products(args.chip, dump)
    finally:
        shutil.rmtree(dump, ignore_errors=True)
    if args.json:
        from importlib.metadata import version

        versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
        made = {"date": date.today().isoformat(), "commit": commit(), "chip": args.chip, "versions": versions}
        text = json.dumps({**made, "rows": rows}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
