"""What the small TPU kernels cost beside what XLA makes of the same, by the TPU compiler's schedule. No TPU.

    python benchmarks/tpu_small_kernels.py [--chip v6e] [--json FILE]

XLA's side is the sum of the cycles that the compiler estimates for each operation of the reference. The kernel's side
is the VLIW bundles of each of its loops times how often the loop runs (see tpu_kernel_schedule.py, which reads them):

- top_k_top_p: passes are counted by running the kernel's own search on random logits, in Pallas' interpreter.
- grouped_matmul: visits are counted for tokens that choose experts evenly at random. XLA's side is what it moves: in a
  scan over layers it copies the weights of every expert out of the stack (temporary bytes, written and read) and only
  then multiplies by those that have tokens. Its estimate for the product itself is not used: it contradicts the bundles
  of the same product.

A bundle is a cycle; stalls are not seen. Cycles of the memory are the bytes read over the chip's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tpu_kernel_schedule import loops, report

VOCAB = 128_256
ROWS = (8, 64, 256)
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.7


def passes() -> dict[str, float]:
    """How often the three searches measure, per block of rows: logits as a bfloat16 model of this vocabulary has."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pagoda.kernels_pallas.top_k_top_p import kernel as module
    from pagoda.kernels_pallas.top_k_top_p import top_k_top_p

    seen: Counter[str] = Counter()
    names = iter(("peaks", "top_k", "top_p"))
    search = module.search

    def counted(measure, *rest):
        name = next(names)

        def noted(t):
            jax.debug.callback(lambda: seen.update([name]))
            return measure(t)

        return search(noted, *rest)

    rows = 64
    normal = np.random.default_rng(0).standard_normal((rows, VOCAB)).astype(np.float32) * 3
    logits = jnp.asarray(normal).astype(jnp.bfloat16).astype(jnp.float32)
    rules = (jnp.full(rows, TEMPERATURE), jnp.full(rows, TOP_K), jnp.full(rows, TOP_P), jnp.zeros(rows))
    module.search = counted
    try:
        jax.block_until_ready(top_k_top_p(logits, *rules, interpret=True))
        jax.effects_barrier()
    finally:
        module.search = search
    return {name: count / (rows / module.ROWS) for name, count in seen.items()}


def thresholds(chip_name: str, dump: Path) -> list[dict]:
    """Kernel and reference of top-k and top-p."""
    import jax

    from pagoda.backends.jax_tpu.schedule import read_schedule
    from pagoda.kernels_pallas.aot import facts, one_chip
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.top_k_top_p.arg_specs import SPECS, ArgSpec
    from pagoda.kernels_pallas.top_k_top_p.kernel import CHUNK, UNROLL
    from pagoda.kernels_pallas.top_k_top_p.kernel import ROWS as BLOCK
    from pagoda.kernels_pallas.top_k_top_p.reference import reference

    chip, place = CHIPS[chip_name], one_chip(chip_name)
    case: ArgSpec = SPECS["r256-v128k"]
    compiled = case.function(chip).lower(*case.arguments(place)).compile()
    found = loops(dump, "top_k_top_p")
    if [loop.depth for loop in found] != [0, 1, 2, 2, 2, 2, 3, 2, 2, 3]:
        sys.exit("the kernel's loops are not those that this program knows")
    straight, grid, peaks, among, count, k_turn, k_pass, weigh, p_turn, p_pass = (loop.bundles for loop in found)
    turns, often = VOCAB // CHUNK / UNROLL, passes()
    block = straight + grid + turns * (peaks + count + weigh) + often["peaks"] * among
    block += often["top_k"] * (k_turn + turns * k_pass) + often["top_p"] * (p_turn + turns * p_pass)
    results = []
    for rows in ROWS:
        lowered = jax.jit(reference).lower(*ArgSpec(rows, VOCAB).arguments(place))
        schedule = read_schedule(lowered.compile().as_text() or "")
        load = BLOCK * VOCAB * 4 / chip.hbm_bandwidth * chip.clock_hz
        ours = load + rows / BLOCK * max(block, load)
        title = f"top_k_top_p: {rows} rows of {VOCAB} logits on {chip_name}, top-k {TOP_K}, top-p {TOP_P}"
        figures = {
            "kernel: cycles of the core": rows / BLOCK * block,
            "kernel: cycles of the memory": rows / BLOCK * load,
            "kernel: microseconds": ours / chip.clock_hz * 1e6,
            "XLA: cycles": float(schedule.cycles),
            "XLA: microseconds": schedule.cycles / chip.clock_hz * 1e6,
            "XLA / kernel": schedule.cycles / ours,
            "bundles of a pass": turns * k_pass,
            "passes for top-k, of a block": 1 + often["top_k"],
            "passes for top-p, of a block": 1 + often["top_p"],
            "VMEM, MiB": facts(compiled).vmem / (1 << 20),
        }
        results.append(report(title, figures))
    return results


def products(chip_name: str, dump: Path) -> list[dict]:
    """Kernel and XLA's ragged product, for the two products of a layer of experts."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pagoda.kernels_pallas.aot import facts, one_chip
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.grouped_matmul.arg_specs import SPECS
    from pagoda.kernels_pallas.grouped_matmul.blocks import choose
    from pagoda.kernels_pallas.grouped_matmul.visits import visits

    def scanned(rows, stack, sizes):  # in the layout that suits XLA best: one product for all parts
        def one(carry, weights):
            return carry + jax.lax.ragged_dot(carry, weights, sizes).sum().astype(carry.dtype), None

        return jax.lax.scan(one, rows, stack)[0]

    chip, place, results = CHIPS[chip_name], one_chip(chip_name), []
    for name, case in SPECS.items():
        if "-t" not in name:
            continue
        for file in dump.glob("*"):
            file.unlink()
        rows, stack, _, sizes = arguments = case.arguments(place)
        wide = (case.layers, case.groups, case.inner, case.parts * case.outer)
        best = jax.ShapeDtypeStruct(wide, stack.dtype, sharding=place)
        compiled = case.function(chip).lower(*arguments).compile()
        found = loops(dump, "grouped_matmul")
        blocks = choose(chip, case.rows, case.groups, case.inner, case.outer, 2)
        units = blocks.columns // blocks.unit
        deep = [loop for loop in found if loop.depth == 3]
        visit = found[1].bundles + units * sum(loop.bundles for loop in found if loop.depth == 2)
        visit += units * (case.inner // blocks.depth - 1) * sum(loop.bundles for loop in deep)
        tokens = int(name.rpartition("-t")[2])
        rng = np.random.default_rng(0)
        chosen = [rng.permutation(case.groups)[: case.rows // tokens] for _ in range(tokens)]
        counts = np.bincount(np.concatenate(chosen), minlength=case.groups)
        live = int(visits(jnp.asarray(counts), case.rows, blocks.rows)[1])
        columns = case.parts * case.outer // blocks.columns
        matrix = 2 * case.parts * case.inner * case.outer
        hit = int((counts > 0).sum()) * matrix
        read = columns * case.rows * case.inner * 2 if case.rows > blocks.rows else case.rows * case.inner * 2
        per_byte = chip.clock_hz / chip.hbm_bandwidth
        core, memory = columns * live * visit, (hit + read) * per_byte
        first = 2 * case.inner * blocks.columns * per_byte
        ours = max(core, memory) + first
        copied = jax.jit(scanned).lower(rows, best, sizes).compile().memory_analysis().temp_size_in_bytes
        theirs = (2 * copied + hit) * per_byte
        figures = {
            "experts with tokens": float((counts > 0).sum()),
            "visits": float(live),
            "kernel: cycles of the core": float(core),
            "kernel: cycles of the memory": memory,
            "kernel: microseconds": ours / chip.clock_hz * 1e6,
            "kernel: share of the bound by bytes and FLOP": max(
                hit * per_byte, 2 * case.rows * case.parts * case.inner * case.outer / chip.flops_per_cycle
            )
            / ours,
            "XLA: MB copied": copied / 1e6,
            "XLA: microseconds of its bytes alone": theirs / chip.clock_hz * 1e6,
            "XLA / kernel, at least": theirs / ours,
            "VMEM, MiB": facts(compiled).vmem / (1 << 20),
        }
        results.append(report(f"grouped_matmul {name} on {chip_name}, {blocks}", figures))
    return results


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v6e")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    dump = Path(tempfile.mkdtemp(prefix="llo-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    os.environ["LIBTPU_INIT_ARGS"] = flags  # before jax loads libtpu
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        found = thresholds(args.chip, dump) + products(args.chip, dump)
    finally:
        shutil.rmtree(dump, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
