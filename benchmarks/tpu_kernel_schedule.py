"""What the TPU compiler's own schedule says of the attention kernel: bound by what, and how near to the roofline.

    python benchmarks/tpu_kernel_schedule.py [--chip v6e ...] [--output-dir benchmarks/results]

No TPU is needed: libtpu compiles the kernel and writes down its VLIW bundles, `tpu_bundles` runs the scalar side of
them on the scalar operands of a given batch. Cycles: bundles issued. Memory: bytes of the kernel's DMAs over the chip's
bandwidth. The flags that write the bundles are undocumented; where no dump appears the program says so and stops.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

DMA_LATENCY_S = 2e-6
PAGE = 128
PAGES = 1024  # of the cache: enough that XLA leaves it in HBM
SEQS = 8


@dataclass(frozen=True)
class Case:
    """A batch: (new tokens, tokens before) of each sequence. Every sequence of one new token is a decode row."""

    seqs: tuple[tuple[int, int], ...]

    @classmethod
    def decode(cls, rows: int, context: int) -> Case:
        """`rows` sequences whose new token is their `context`-th."""
        return cls(((1, context - 1),) * rows)

    @classmethod
    def prefill(cls, *prompts: int) -> Case:
        """New prompts of so many tokens."""
        return cls(tuple((tokens, 0) for tokens in prompts))

    @property
    def decodes(self) -> bool:
        """Whether there are decode rows only."""
        return all(new == 1 for new, _ in self.seqs)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a token that it may see."""
        return sum(new * before + new * (new + 1) // 2 for new, before in self.seqs)


class Figures(NamedTuple):
    """Of one call: bundles that one core issues, bytes between HBM and VMEM."""

    cycles: int
    hbm_bytes: int


def kernel_cycles(
    chip: str, heads: int, kv_heads: int, case: Case, *, head_dim: int = 128, dtype: str = "bfloat16"
) -> Figures:
    """One call of `ragged_paged_attention` on one device with `heads` query and `kv_heads` KV heads of `head_dim`.

    chip: v5e, v5p or v6e. dtype: of the cache, in pages of 128 tokens. How the figure is made: libtpu compiles the
    kernel for the chip, in a process of its own, and dumps the final bundles; the scalar instructions among them are
    executed on the batch's scalar operands (page table, lengths), which decides every branch and trip count exactly; a
    bundle issued is a cycle. A batch with prompts runs both variants, the decode variant finding no rows. hbm_bytes:
    sizes of the DMAs so executed, q, output and new K and V counted once. Both are for one TensorCore: the kernel uses
    one even where a device has two (v5p). Time on the device is at least max(cycles / chip.clock_hz, hbm_bytes /
    chip.hbm_bandwidth); waiting for the first fetch (about 2 us) and for busy matrix units is not in it.
    RuntimeError: the compiler failed or dumped nothing. Takes about 20 s, remembered within a process.
    """
    found = measure(chip, heads, kv_heads, case, head_dim, dtype)
    return Figures(found["cycles"], found["hbm_bytes"])


@functools.cache
def measure(chip: str, heads: int, kv_heads: int, case: Case, head_dim: int = 128, dtype: str = "bfloat16") -> dict:
    """All that is known of a call, by name; see `kernel_cycles`."""
    dump = Path(tempfile.mkdtemp(prefix="llo-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost"}
    request = json.dumps([str(dump), chip, heads, kv_heads, case.seqs, head_dim, dtype])
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--worker", request], env=environment, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(dump, ignore_errors=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def work(dump: str, chip: str, heads: int, kv_heads: int, seqs: Any, head_dim: int, dtype: str) -> dict:
    """In a process whose libtpu dumps: compiles the variants that the batch runs, and counts."""
    from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout

    case = Case(tuple(map(tuple, seqs)))
    layout = PagedKvLayout(kv_heads, head_dim, dtype, PAGE)
    found = [variant(Path(dump), chip, heads, layout, case, decode=True)]
    if not case.decodes:
        found.append(variant(Path(dump), chip, heads, layout, case, decode=False))
    whole = {name: sum(each[name] for each in found) for name in ("cycles", "hbm_bytes", "mxu", "spill")}
    return whole | {name: found[-1][name] for name in ("blocks", "vmem_mib")}


def variant(dump: Path, chip_name: str, heads: int, layout: Any, case: Case, *, decode: bool) -> dict:
    """One of the kernel's two variants over the batch."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from tpu_bundles import Listing

    from pagoda.kernels_pallas.aot import facts, one_chip
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.ragged_paged_attention import call
    from pagoda.kernels_pallas.ragged_paged_attention.arguments import make_knobs
    from pagoda.kernels_pallas.ragged_paged_attention.plan import choose

    sharding, chip = one_chip(chip_name), CHIPS[chip_name]
    group = heads // layout.kv_heads * layout.heads_per_row
    rows = max(SEQS, len(case.seqs)) if decode else sum(new for new, _ in case.seqs)
    batch = batch_of(case)
    blocks = choose(chip, layout, group, batch.page_table.shape[1], rows, decode=decode)

    def run(cache: Any, q: Any, new: Any, batch: Any) -> Any:
        return call.variant(
            q, new, cache, jnp.int32(0), batch, make_knobs(1.0, None, None, None, None, None), decode=decode,
            layout=layout, interpret=False, chip=chip, out_dtype=layout.compute_dtype,
        )  # fmt: skip

    def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    arguments = (
        shape(layout.shape(4, PAGES), layout.word_dtype),
        shape((rows, layout.lane_heads, group, layout.width), layout.compute_dtype),
        shape((layout.rows_per_token, sum(new for new, _ in case.seqs), 128), layout.word_dtype),
        jax.tree.map(lambda x: shape(x.shape, x.dtype), batch),
    )
    compiled = jax.jit(run, donate_argnums=0).lower(*arguments).compile()
    listing = Listing(dump, f"attention_{'decode' if decode else 'mixed'}")
    knobs = make_knobs(1.0, None, None, None, None, None)
    tiles = -(-rows // blocks.queries)
    scalars, live = call.scalar_arguments(jnp.int32(0), batch, knobs, blocks.queries, tiles, decode=decode)
    trace = listing.run([np.asarray(x) for x in (live, *vars(scalars).values())])
    moved = sum(size for way, size in trace.moved.items() if "hbm" in way)
    resident = sum(size for number, size in listing.in_vmem.items() if number > len(vars(scalars)))
    use = {unit: trace.use(listing, unit) for unit in ("MATMUL", "FILL", "SPILL")}
    busy = int(live) > 0
    return {
        "cycles": trace.cycles,
        "hbm_bytes": moved + resident * busy,
        "mxu": use["MATMUL"],
        "spill": use["FILL"] + use["SPILL"],
        "blocks": asdict(blocks),
        "vmem_mib": facts(compiled).vmem / (1 << 20),
    }


def batch_of(case: Case) -> Any:
    """The batch as the kernel takes it, padded to at least `SEQS` sequences."""
    import jax.numpy as jnp
    import numpy as np

    from pagoda.kernels_pallas.ragged_paged_attention.arguments import RaggedBatch

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


def row(chip_name: str, size: str, case_name: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """One line of the table: the call against both roofs of one core, the kernel's own and the causally necessary."""
    from pagoda.kernels_pallas.chips import CHIPS

    chip, case, (heads, kv_heads) = CHIPS[chip_name], CASES[case_name], HEADS[size]
    found = measure(chip_name, heads, kv_heads, case, dtype=dtype)
    memory = found["hbm_bytes"] / chip.hbm_bandwidth * chip.clock_hz
    needed = 4 * heads * 128 * case.pairs / chip.flops_per_cycle
    least = max(found["cycles"], memory) + DMA_LATENCY_S * chip.clock_hz
    return {
        "heads": f"{size}: {heads} on {kv_heads} of 128",
        "case": case_name,
        "cache": dtype,
        "cycles of the core": found["cycles"],
        "cycles of the memory at peak": round(memory),
        "cycles of the necessary FLOP at peak": round(needed),
        "bound by": "HBM" if memory > found["cycles"] else "core",
        "share of the HBM roofline": round(memory / least, 3),
        "share of the MXU roofline": round(needed / least, 3),
        "microseconds": round(least / chip.clock_hz * 1e6, 1),
        "words spilled or filled per cycle": round(found["spill"] / found["cycles"], 3),
        "VMEM, MiB": round(found["vmem_mib"], 2),
        "blocks": found["blocks"],
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", nargs="*", default=["v6e", "v5e", "v5p"])
    parser.add_argument("--output-dir", type=Path, help="also write tpu-kernel-CHIP.json there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(*json.loads(args.worker))))
        return
    for chip in args.chip:
        print(f"\n{chip}")
        found = []
        for wanted in [(size, case, "bfloat16") for size in HEADS for case in CASES] + MORE:
            found.append(row(chip, *wanted))
            print("  " + ", ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
        if args.output_dir:
            from importlib.metadata import version

            versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
            text = json.dumps({"chip": chip, "versions": versions, "rows": found}, indent=1)
            (args.output_dir / f"tpu-kernel-{chip}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
