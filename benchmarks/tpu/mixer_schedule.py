"""Compare the schedules of the kernels of latent attention and of recurrent mixers with the roofline. Needs no TPU.

    python benchmarks/tpu/mixer_schedule.py [--chip v6e ...] [CASE ...]

As `kernel_schedule.py` does for attention: cycles are bundles issued, memory the bytes of the kernel's DMAs over the
chip's bandwidth. `of HBM` is the share of the kernel's least time that the bytes of cache and state alone take, with
the first fetch charged 2 us: bytes as stored for latents (a token's 576 channels take 640), and without that padding.
The small kernels that complete a step's words before are included, with 2 us each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from kernel_schedule import DMA_LATENCY_S, PAGES, Case, batch_of

CONTEXT = 1024
LATENT = {f"latent decode {heads}": (heads, Case.decode(64, CONTEXT)) for heads in (2, 16, 128)} | {
    f"latent prefill {heads}": (heads, Case.prefill(2048)) for heads in (2, 16)
}
EXPANDED = {"expanded prefill 2": (2, Case.prefill(2048))}
SELECTED = {
    f"{kind} {heads}": (kind, heads, Case.decode(16, 8192))
    for kind, heads in (("index decode", 64), ("selected decode", 16), ("selected decode", 128))
} | {
    "index prefill 64": ("index prefill", 64, Case.prefill(4096)),
    "selected prefill 16": ("selected prefill", 16, Case.prefill(4096)),
}
"""Sparse attention: selection of 2048 tokens, and attention to them."""
DELTA = {
    "delta decode 4": (2, 4, Case.decode(64, CONTEXT)),
    "delta decode 32": (16, 32, Case.decode(64, CONTEXT)),
    "delta prefill 4": (2, 4, Case.prefill(2048)),
}


RECURRENCES = {
    "mamba2 decode": ("mamba2-decode", Case.decode(64, CONTEXT)),
    "mamba2 decode, all heads": ("mamba2-decode-whole", Case.decode(64, CONTEXT)),
    "mamba2 prefill": ("mamba2-mixed", Case.prefill(2048)),
    "lightning decode": ("lightning-decode", Case.decode(64, CONTEXT)),
    "lightning prefill": ("lightning-mixed", Case.prefill(2048)),
    "mamba decode": ("mamba-decode", Case.decode(64, CONTEXT)),
    "mamba prefill": ("mamba-mixed", Case.prefill(2048)),
    "kda decode": ("kda-decode", Case.decode(64, CONTEXT)),
    "kda prefill": ("kda-mixed", Case.prefill(2048)),
}
"""Names of shapes in `aot/shapes/linear_recurrence.py`."""


def measure(chip: str, name: str) -> dict[str, Any]:
    """Return the figures of one case, compiled in a process whose libtpu dumps. Raise RuntimeError."""
    dump = Path(tempfile.mkdtemp(prefix="llo-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost"}
    command = [sys.executable, __file__, "--worker", json.dumps([str(dump), chip, name])]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    finally:
        shutil.rmtree(dump, ignore_errors=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def latent(dump: Path, chip_name: str, heads: int, case: Case) -> dict[str, Any]:
    """Compile one variant of latent attention and count."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from bundles import Listing

    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.latent_attention.layout import LatentLayout, load_latents
    from pagoda.kernels_pallas.latent_attention.write import read_partners, write_latents
    from pagoda.kernels_pallas.ragged_paged_attention import call
    from pagoda.kernels_pallas.ragged_paged_attention.plan import choose_block_sizes, make_knobs

    sharding, chip, layout = one_chip(chip_name), CHIPS[chip_name], LatentLayout(512, 64, "bfloat16", 128)
    batch, decode, knobs = batch_of(case), case.decodes, make_knobs(1.0)
    rows = len(case.seqs) if decode else sum(new for new, _ in case.seqs)

    def run(cache: Any, q: Any, new: Any, batch: Any) -> Any:
        partners = read_partners(cache, jnp.int32(0), batch, rows, layout, interpret=False)
        cache, partners = jax.lax.optimization_barrier((cache, partners))
        if not decode:
            cache, new = write_latents(new, cache, jnp.int32(0), batch, layout, interpret=False), None
        options: dict[str, Any] = {"layout": layout, "load": load_latents, "interpret": False, "chip": chip}
        dtype = layout.compute_dtype
        out = call.variant(q, new, cache, jnp.int32(0), batch, knobs, decode=decode, out_dtype=dtype, **options)
        return *out, partners

    def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    arguments = (
        shape(layout.shape(4, PAGES), layout.word_dtype),
        shape((rows, 1, heads, layout.width), layout.compute_dtype),
        shape((layout.rows_per_token, rows, 128), layout.word_dtype),
        jax.tree.map(lambda x: shape(x.shape, x.dtype), batch),
    )
    jax.jit(run, donate_argnums=0).lower(*arguments).compile()
    blocks = choose_block_sizes(chip, layout, heads, batch.page_table.shape[1], rows, decode=decode)
    tiles = -(-rows // blocks.queries)
    scalars, count = call.scalar_arguments(jnp.int32(0), batch, knobs, blocks.queries, tiles, decode=decode)
    listing = Listing(dump, f"attention_{'decode' if decode else 'mixed'}")
    operands = [np.asarray(x) for x in (count, *vars(scalars).values())]
    read = sum(new + before for new, before in case.seqs) if decode else rows
    stored = read * layout.bytes_per_page // layout.page_size
    flops = 2 * case.pairs * heads * (layout.channels + layout.rank)
    before = [np.zeros(1, np.int32), *(np.asarray(x) for x in (batch.query_start, batch.kv_len, batch.page_table))]
    before += [np.asarray(batch.counts)]
    names = ["latent_partners", *([] if decode else ["latent_write"])]
    extra = sum(Listing(dump, name).run(before).cycles for name in names)
    return figures(listing, operands, stored, read * layout.channels * 2, flops, extra, len(names))


def expanded(dump: Path, chip_name: str, heads: int, case: Case) -> dict[str, Any]:
    """Compile the attention of expanded heads over their scratch cache and count; the projections are XLA's."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from bundles import Listing

    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.latent_attention.expanded import ExpandedHeads
    from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
    from pagoda.kernels_pallas.ragged_paged_attention import call
    from pagoda.kernels_pallas.ragged_paged_attention.plan import choose_block_sizes, make_knobs

    shapes = ExpandedHeads(heads, 128, 64, 128)
    sharding, chip, layout = (
        one_chip(chip_name),
        CHIPS[chip_name],
        shapes.layout(LatentLayout(512, 64, "bfloat16", 128)),
    )
    batch, knobs, rows = batch_of(case), make_knobs(1.0), sum(new for new, _ in case.seqs)

    def run(cache: Any, q: Any, batch: Any) -> Any:
        options: dict[str, Any] = {"layout": layout, "interpret": False, "chip": chip, "out_dtype": jnp.bfloat16}
        return call.variant(q, None, cache, jnp.int32(0), batch, knobs, decode=False, **options)

    def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    cache = shape(layout.shape(1, rows // 128), layout.word_dtype)
    scalars = jax.tree.map(lambda x: shape(x.shape, x.dtype), batch)
    q = shape((rows, layout.lane_heads, 1, layout.width), layout.compute_dtype)
    jax.jit(run, donate_argnums=0).lower(cache, q, scalars).compile()
    blocks = choose_block_sizes(chip, layout, 1, batch.page_table.shape[1], rows, decode=False)
    tiles = -(-rows // blocks.queries)
    arguments, count = call.scalar_arguments(jnp.int32(0), batch, knobs, blocks.queries, tiles, decode=False)
    operands = [np.asarray(x) for x in (count, *vars(arguments).values())]
    stored = rows * layout.bytes_per_page // layout.page_size
    flops = 2 * case.pairs * heads * (shapes.nope_dim + shapes.rope_dim + shapes.value_dim)
    return figures(Listing(dump, "attention_mixed"), operands, stored, rows * heads * 320 * 2, flops)


def selected(dump: Path, chip_name: str, kind: str, heads: int, case: Case) -> dict[str, Any]:
    """Compile one kernel of sparse attention and count; flops of all pairs, those not selected included."""
    from dataclasses import replace

    import jax.numpy as jnp
    import numpy as np
    from bundles import Listing

    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.benchmarks.tpu.aot.shapes.selected_attention import SelectedAttentionArgs
    from pagoda.benchmarks.tpu.aot.shapes.token_selection import TokenSelectionArgs
    from pagoda.kernels_pallas.chips import CHIPS
    from pagoda.kernels_pallas.ragged_paged_attention import call
    from pagoda.kernels_pallas.ragged_paged_attention.plan import make_knobs
    from pagoda.kernels_pallas.token_selection.marks import DECODE_TILE, MIXED_TILE

    batch, decode, sharding = batch_of(case), case.decodes, one_chip(chip_name)
    tokens, (seqs, pages) = sum(new for new, _ in case.seqs), batch.page_table.shape
    index, context = kind.startswith("index"), pages * 128
    made: Any = (TokenSelectionArgs if index else SelectedAttentionArgs)(tokens, seqs, heads, context=context)
    args = replace(made, decode_only=decode, pages=PAGES)
    args.function(CHIPS[chip_name]).lower(*args.arguments(sharding)).compile()
    size = DECODE_TILE if decode else MIXED_TILE
    scalars, count = call.scalar_arguments(
        jnp.int32(0), batch, make_knobs(1.0), size, -(-tokens // size), decode=decode
    )
    name = f"{'token_selection' if index else 'selected_attention'}_{'decode' if decode else 'mixed'}"
    operands = [np.asarray(x) for x in (count, *vars(scalars).values())]
    read = sum(new + before for new, before in case.seqs) if decode else tokens
    layout = args.layout
    per_pair = layout.channels if index else layout.channels + layout.rank
    stored = read * layout.bytes_per_page // layout.page_size
    return figures(Listing(dump, name), operands, stored, read * layout.channels * 2, 2 * case.pairs * heads * per_pair)


def delta(dump: Path, chip_name: str, key_heads: int, heads: int, case: Case) -> dict[str, Any]:
    """Compile one gated delta kernel and count."""
    import jax
    from bundles import Listing

    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.benchmarks.tpu.aot.shapes.gated_delta import GatedDeltaArgs
    from pagoda.kernels_pallas.gated_delta import kernel

    decode, seqs = case.decodes, len(case.seqs)
    tokens = seqs if decode else sum(new for new, _ in case.seqs)
    args = GatedDeltaArgs(tokens, seqs, key_heads, heads)
    function = kernel.decode if decode else partial(kernel.mixed, exact=False)

    def run(states: Any, inputs: Any, layer: Any, batch: Any) -> Any:
        return function(inputs, states, layer=layer, batch=batch, interpret=False)

    jax.jit(run, donate_argnums=0).lower(*args.arguments(one_chip(chip_name))).compile()
    state = 4 * heads * args.dim**2
    operands = state_operands(case, tokens, kernel.TILE, state)
    moved = 2 * seqs * state + (0 if decode else 4 * tokens * args.dim * (2 * key_heads + 2 * heads))
    flops = 6 * tokens * heads * args.dim**2
    return figures(Listing(dump, f"gated_delta_{'decode' if decode else 'mixed'}"), operands, moved, moved, flops)


def state_operands(case: Case, tokens: int, tile: int, state_bytes: int) -> list[Any]:
    """Return the scalar operands of a kernel with recurrent state. state_bytes: of one sequence."""
    import jax.numpy as jnp
    import numpy as np

    from pagoda.kernels_pallas.recurrent_state import RecurrentBatch, group_size, tile_visits

    seqs = len(case.seqs)
    starts = np.concatenate([[0], np.cumsum([new for new, _ in case.seqs])]).astype(np.int32)
    first = np.array([before == 0 for _, before in case.seqs])
    blocks, layer = np.arange(1, seqs + 1, dtype=np.int32), np.zeros(1, np.int32)
    counts = np.array([seqs if case.decodes else 0, seqs], np.int32)
    if case.decodes:
        return [
            np.array([-(-seqs // group_size(seqs, state_bytes))]),
            layer,
            counts[:1],
            blocks,
            first.astype(np.int32),
        ]
    visits, count = tile_visits(RecurrentBatch(*map(jnp.asarray, (starts, blocks, first, counts))), tokens, tile)
    return [np.asarray(count), layer, *(np.asarray(x) for x in vars(visits).values())]


def recurrence(dump: Path, chip_name: str, shape: str, case: Case) -> dict[str, Any]:
    """Compile one kernel of a linear recurrence and count."""
    from dataclasses import replace
    from math import prod

    import jax
    from bundles import Listing

    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.benchmarks.tpu.aot.shapes.linear_recurrence import SPECS
    from pagoda.kernels_pallas.linear_recurrence import kernel

    decode, seqs = case.decodes, len(case.seqs)
    tokens = seqs if decode else sum(new for new, _ in case.seqs)
    args = replace(SPECS[shape], tokens=tokens, seqs=seqs)
    function = kernel.decode if decode else kernel.mixed

    def run(states: Any, inputs: Any, layer: Any, batch: Any) -> Any:
        return function(args.rule, inputs, states, layer=layer, batch=batch, interpret=False)

    jax.jit(run, donate_argnums=0).lower(*args.arguments(one_chip(chip_name))).compile()
    state = args.slots * args.rows * args.width
    keys, values, _ = args.input_shapes
    moved = 4 * (2 * seqs * state + (0 if decode else sum(map(prod, (*keys, *values, values[0])))))
    flops = args.rule.flops * tokens * state
    listing = Listing(dump, f"{args.rule.name}_{'decode' if decode else 'mixed'}")
    return figures(listing, state_operands(case, tokens, args.rule.tile, 4 * state), moved, moved, flops)


def figures(
    listing: Any, operands: list[Any], stored: int, useful: int, flops: int, extra: int = 0, calls: int = 0
) -> dict[str, Any]:
    """Execute the schedule on the scalar operands and return the figures.

    `extra`: cycles of `calls` kernels that run before it and only move words, each with one latency of its own.
    """
    trace = listing.run(operands)
    resident = sum(size for number, size in listing.in_vmem.items() if number >= len(operands))
    hbm = sum(size for way, size in trace.moved.items() if "hbm" in way) + resident
    spilled = trace.use(listing, "FILL") + trace.use(listing, "SPILL")
    return {
        "cycles": trace.cycles, "hbm_bytes": hbm, "stored": stored, "useful": useful, "flops": flops, "spill": spilled,
        "extra": extra, "calls": calls,
    }  # fmt: skip


def worker(dump: str, chip: str, name: str) -> dict[str, Any]:
    """Measure a case in this process."""
    if name in RECURRENCES:
        return recurrence(Path(dump), chip, *RECURRENCES[name])
    if name in SELECTED:
        return selected(Path(dump), chip, *SELECTED[name])
    if name in EXPANDED:
        return expanded(Path(dump), chip, *EXPANDED[name])
    return latent(Path(dump), chip, *LATENT[name]) if name in LATENT else delta(Path(dump), chip, *DELTA[name])


def row(chip_name: str, name: str) -> dict[str, Any]:
    """Return one row: the call against the rooflines of one core."""
    from pagoda.kernels_pallas.chips import CHIPS

    chip, each = CHIPS[chip_name], measure(chip_name, name)
    seconds = max(each["cycles"] / chip.clock_hz, each["hbm_bytes"] / chip.hbm_bandwidth) + DMA_LATENCY_S
    seconds += each["extra"] / chip.clock_hz + each["calls"] * DMA_LATENCY_S
    return {
        "case": name,
        "cycles": each["cycles"],
        "HBM MB": round(each["hbm_bytes"] / 1e6, 2),
        "microseconds": round(seconds * 1e6, 1),
        "of HBM": round(each["stored"] / chip.hbm_bandwidth / seconds, 3),
        "of HBM without padding": round(each["useful"] / chip.hbm_bandwidth / seconds, 3),
        "of MXU": round(each["flops"] / chip.peak_flops / seconds, 3),
        "words spilled or filled per cycle": round(each["spill"] / each["cycles"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=", ".join([*LATENT, *EXPANDED, *SELECTED, *DELTA, *RECURRENCES]))
    parser.add_argument("--chip", nargs="*", default=["v6e"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(*json.loads(args.worker))))
        return
    for chip in args.chip:
        for name in args.cases or [*LATENT, *EXPANDED, *SELECTED, *DELTA, *RECURRENCES]:
            print(f"{chip}: " + ", ".join(f"{key} {value}" for key, value in row(chip, name).items()), flush=True)


if __name__ == "__main__":
    main()
