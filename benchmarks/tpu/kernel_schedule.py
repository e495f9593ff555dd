"""Compare the attention kernel's schedule, as compiled for a TPU, with the roofline. Needs no TPU.

    python benchmarks/tpu/kernel_schedule.py [--chip v6e ...] [--output-dir benchmarks/results]

libtpu compiles the kernel and dumps its VLIW bundles; `bundles` executes their scalar instructions on the scalar
operands of a batch. Cycles: bundles issued. Memory: bytes of the kernel's DMAs over the chip's bandwidth. The dump
flags are undocumented; without a dump the program stops with an error.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

DMA_LATENCY_S = 2e-6
PAGE = 128
PAGES = 1024  # of the cache: enough that XLA leaves it in HBM
SEQS = 8
STEP = 256
"""Tokens of every step with --batch-invariant, by default."""


Settings: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Case:
    """A batch: (new tokens, tokens before) of each sequence. Every sequence of one new token is a decode row."""

    seqs: tuple[tuple[int, int], ...]

    @classmethod
    def decode(cls, rows: int, context: int) -> Case:
        """Return `rows` decode sequences of `context` tokens."""
        return cls(((1, context - 1),) * rows)

    @classmethod
    def prefill(cls, *prompts: int) -> Case:
        """Return new prompts of these lengths."""
        return cls(tuple((tokens, 0) for tokens in prompts))

    @property
    def decodes(self) -> bool:
        """True if all sequences are decode rows."""
        return all(new == 1 for new, _ in self.seqs)

    @property
    def pairs(self) -> int:
        """Return the number of unmasked (query, key) pairs."""
        return sum(new * before + new * (new + 1) // 2 for new, before in self.seqs)


class Figures(NamedTuple):
    """Figures of one call on one TensorCore."""

    cycles: int  # bundles issued
    hbm_bytes: int  # between HBM and VMEM


def kernel_cycles(
    chip: str, heads: int, kv_heads: int, case: Case, *, head_dim: int = 128, dtype: str = "bfloat16"
) -> Figures:
    """Return the figures of one call of `ragged_paged_attention` on one device. Takes about 20 s; cached per process.

    chip: v5e, v5p, v6e or v7x. dtype: of the cache, in pages of 128 tokens. libtpu compiles the kernel for the chip in
    a subprocess and dumps the final bundles; their scalar instructions are executed on the batch's scalar operands
    (page table, lengths), which determines every branch and trip count. A batch with prompts runs both variants.
    hbm_bytes: sizes of the executed DMAs, with q, output and new K and V counted once. On devices with two TensorCores
    (v5p) the figures are those of the first one, which has half of the heads if they can be halved, else all. Time on
    the device is at least max(cycles / chip.clock_hz, hbm_bytes / chip.hbm_bandwidth) with half of its bandwidth for
    each core, without the wait for the first fetch (about 2 us) and for busy matrix units.
    Raise RuntimeError if the compiler failed or dumped nothing.
    """
    figures = measure(chip, heads, kv_heads, case, head_dim, dtype)
    return Figures(figures["cycles"], figures["hbm_bytes"])


@functools.cache
def measure(
    chip: str,
    heads: int,
    kv_heads: int,
    case: Case,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    *,
    invariant: bool = False,
    settings: Settings | None = None,
) -> dict:
    """Return all figures of a call by name; see `kernel_cycles`.

    invariant: as with --batch-invariant. settings: block sizes by name in place of those of tuning.json, as pairs; of
    a batch with prompts the mixed variant alone is then counted.
    """
    dump = Path(tempfile.mkdtemp(prefix="llo-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost"}
    request = json.dumps([str(dump), chip, heads, kv_heads, case.seqs, head_dim, dtype, invariant, settings])
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--worker", request], env=environment, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(dump, ignore_errors=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def run_worker(
    dump: str, chip: str, heads: int, kv_heads: int, seqs: Any, head_dim: int, dtype: str, invariant: bool,
    settings: Any,
) -> dict:  # fmt: skip
    """In a process whose libtpu dumps: compile the variants the batch runs and count."""
    from pagoda.kernels_pallas.ragged_paged_attention import plan
    from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout

    if settings is not None:
        fixed = plan.BlockEntry(dict(settings), plan.BlockSource.TUNED)
        plan.block_entry = lambda *_, **__: fixed  # of this process alone
    case = Case(tuple(map(tuple, seqs)))
    layout = PagedKvLayout(kv_heads, head_dim, dtype, PAGE)
    kinds = [False] if invariant else [True] if case.decodes else [True, False]
    if settings is not None:
        kinds = kinds[-1:]
    variants = [variant(Path(dump), chip, heads, layout, case, decode=decode, invariant=invariant) for decode in kinds]
    total = {name: sum(each[name] for each in variants) for name in ("cycles", "hbm_bytes", "mxu", "spill")}
    return total | {name: variants[-1][name] for name in ("blocks", "vmem_mib", "cores")}


def variant(
    dump: Path, chip_name: str, heads: int, layout: Any, case: Case, *, decode: bool, invariant: bool = False
) -> dict:
    """Return the figures of one variant of the kernel over the batch; with `invariant` in a step of STEP tokens."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from bundles import Listing

    from pagoda.benchmarks.tpu.aot.compiler import facts, one_chip
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.ragged_paged_attention import call
    from pagoda.kernels_pallas.ragged_paged_attention.plan import choose_block_sizes, core_layout, make_knobs

    sharding, chip = one_chip(chip_name), CHIPS[chip_name]
    group = heads // layout.kv_heads * layout.heads_per_row
    rows = max(SEQS, len(case.seqs)) if decode else sum(new for new, _ in case.seqs)
    rows = max(rows, STEP) if invariant else rows
    batch = batch_of(case)
    if invariant:
        batch = replace(batch, counts=batch.counts.at[0].set(0))
    pages = batch.page_table.shape[1]
    blocks = choose_block_sizes(chip, layout, group, pages, rows, decode=decode, batch_invariant=invariant)

    def run(cache: Any, q: Any, new: Any, batch: Any) -> Any:
        return call.variant(
            q, new, cache, jnp.int32(0), batch, make_knobs(1.0), decode=decode,
            batch_invariant=invariant, layout=layout, interpret=False, chip=chip, out_dtype=layout.compute_dtype,
        )  # fmt: skip

    def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    arguments = (
        shape(layout.shape(4, PAGES), layout.word_dtype),
        shape((rows, layout.lane_heads, group, layout.width), layout.compute_dtype),
        shape((layout.rows_per_token, rows if invariant else sum(new for new, _ in case.seqs), 128), layout.word_dtype),
        jax.tree.map(lambda x: shape(x.shape, x.dtype), batch),
    )
    compiled = jax.jit(run, donate_argnums=0).lower(*arguments).compile()
    listing = Listing(dump, f"attention_{'decode' if decode else 'mixed'}")
    knobs = make_knobs(1.0)
    tiles = -(-rows // blocks.queries)
    scalars, num_tiles = call.scalar_arguments(jnp.int32(0), batch, knobs, blocks.queries, tiles, decode=decode)
    trace = listing.run([np.asarray(x) for x in (num_tiles, *vars(scalars).values())])
    moved = sum(size for way, size in trace.moved.items() if "hbm" in way)
    resident = sum(size for number, size in listing.in_vmem.items() if number > len(vars(scalars)))
    use = {unit: trace.use(listing, unit) for unit in ("MXU", "FILL", "SPILL")}
    busy = int(num_tiles) > 0
    return {
        "cycles": trace.cycles,
        "hbm_bytes": moved + resident * busy,
        "mxu": use["MXU"],
        "spill": use["FILL"] + use["SPILL"],
        "blocks": asdict(blocks),
        "cores": layout.lane_heads // core_layout(chip, layout).lane_heads,
        "vmem_mib": facts(compiled).vmem / (1 << 20),
    }


def batch_of(case: Case) -> Any:
    """Return the kernel's batch arguments, padded to at least `SEQS` sequences."""
    import jax.numpy as jnp
    import numpy as np

    from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch

    count = len(case.seqs)
    new, before = np.array([*case.seqs, *[(0, 0)] * (SEQS - count)]).T
    lengths = new + before
    table = np.arange(lengths.size * -(-int(lengths.max()) // PAGE)).reshape(lengths.size, -1) % PAGES
    counts = [count if case.decodes else 0, count]
    arrays = np.concatenate([[0], np.cumsum(new)]), lengths, table, np.array(counts)
    return RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in arrays))


CASES = {
    "decode 64 x 1024": Case.decode(64, 1024),
    "prefill 2048": Case.prefill(2048),
    "prefill 2 x 1024": Case.prefill(1024, 1024),
}
HEADS = {"8B": (32, 8), "70B / 8": (8, 1)}
MORE = [("8B", "decode 64 x 1024", "int8"), ("8B", "decode 64 x 1024", "float8_e4m3fn")]


def row(
    chip_name: str, size: str, case_name: str, dtype: str = "bfloat16", *, invariant: bool = False
) -> dict[str, Any]:
    """Return one row of the table: the call against the HBM and MXU rooflines of one core, for its heads."""
    from pagoda.kernels_pallas.chips import CHIPS

    chip, case, (heads, kv_heads) = CHIPS[chip_name], CASES[case_name], HEADS[size]
    figures = measure(chip_name, heads, kv_heads, case, dtype=dtype, invariant=invariant)
    memory = figures["hbm_bytes"] / chip.hbm_bandwidth * chip.clock_hz
    needed = 4 * heads * 128 * case.pairs / (chip.flops_per_cycle * figures["cores"])
    least = max(figures["cycles"], memory) + DMA_LATENCY_S * chip.clock_hz
    return {
        "heads": f"{size}: {heads} on {kv_heads} of 128",
        "case": case_name,
        "cache": dtype,
        "cores": figures["cores"],
        "cycles of the core": figures["cycles"],
        "cycles of the memory at peak": round(memory),
        "cycles of the necessary FLOP at peak": round(needed),
        "bound by": "HBM" if memory > figures["cycles"] else "core",
        "share of the HBM roofline": round(memory / least, 3),
        "share of the MXU roofline": round(needed / least, 3),
        "microseconds": round(least / chip.clock_hz * 1e6, 1),
        "words spilled or filled per cycle": round(figures["spill"] / figures["cycles"], 3),
        "VMEM, MiB": round(figures["vmem_mib"], 2),
        "blocks": figures["blocks"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", nargs="*", default=["v6e", "v5e", "v5p"])
    parser.add_argument("--output-dir", type=Path, help="also write tpu-kernel-CHIP.json there")
    parser.add_argument("--batch-invariant", action="store_true", help="as with that flag; writes no file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(run_worker(*json.loads(args.worker))))
        return
    for chip in args.chip:
        print(f"\n{chip}")
        rows = []
        for case in [(size, name, "bfloat16") for size in HEADS for name in CASES] + MORE:
            rows.append(row(chip, *case, invariant=args.batch_invariant))
            print("  " + ", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        if args.output_dir and not args.batch_invariant:
            from importlib.metadata import version

            versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
            text = json.dumps({"chip": chip, "versions": versions, "rows": rows}, indent=1)
            (args.output_dir / f"tpu-kernel-{chip}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
