"""Compare the TPU compiler's schedule of a step with the chip's roofline. Needs no TPU; nothing is timed.

usage: python benchmarks/tpu/roofline.py [--all] [--case NAME ...] [--output FILE.json]

Other cases in the output file are preserved if made with the same versions and settings.

Per program: XLA's estimated cycles of all operations (loops counted in full); cycles and bytes of the attention kernel
from its scheduled bundles (kernel_schedule.py, for the same heads and batch); the necessary bytes and FLOP of the step
(backends/jax_tpu/model/roofline.py), and their minimum time on the chip.

A time is a sum, as if nothing overlapped: XLA's cycles; per layer the longer of the kernel's bundles and bytes, plus
2 us for its first fetch; and the embedding rows, read and written at HBM bandwidth, because a v6e gathers them on its
sparse cores, for which XLA has no estimate. Decode: every row has --context tokens. Prefill: new prompts of 1024
tokens, the last one shorter. The cache has as many blocks as in an engine. The figures are the same on every machine
with the same jax and libtpu.

Collectives have no estimate either and are charged as `pagoda compile` does (ahead_of_time/schedule.py): XLA uses a
ring in which the halves of the array travel in both directions, so a link carries (n - 1) / n of it, in 2 (n - 1) hops.
They use the links one after the other; what the schedule computes between start and end of one is deducted. That it
takes bandwidth of the HBM meanwhile is not charged. The roofline covers HBM and MXU only.

A v5p device has two TensorCores. XLA counts cycles in which both work. The kernel's figures are those of one core, with
half of the device's bandwidth: it has half of the KV heads, or all where they cannot be halved, while the other is
idle. The roofline is that of both.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from kernel_schedule import DMA_LATENCY_S, Figures, kernel_cycles
from kernel_schedule import Case as Batch

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.ahead_of_time.report import CompiledProgram, estimated_cycles
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.backends.jax_tpu.memory.plan import plan_blocks
from pagoda.backends.jax_tpu.model.mixers.attention import head_layout
from pagoda.backends.jax_tpu.model.mixers.ops import BatchLoad
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout, per_pool
from pagoda.common.engine.steps.shapes import StepShape, StepShapes
from pagoda.common.models.registry import spec_from_config
from pagoda.kernels_pallas.chips import ChipInfo

PAGE = 128
PROMPT = 1024
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@dataclass(frozen=True)
class Case:
    """A model's shapes on `devices` of a topology."""

    size: str
    topology: str
    devices: int


CASES = {
    "8b-v6e": Case("8b", "v6e:1x1", 1),
    "8b-v5p": Case("8b", "v5p:2x2x1", 1),
    "8b-v7x": Case("8b", "v7x:2x2x1", 1),
    "8b-v5e-4": Case("8b", "v5e:2x2", 4),
    "70b-v6e-8": Case("70b", "v6e:2x4", 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--all", action="store_true", help="every bucket, not 8, 64 and 256 rows, 256 and 2048 tokens only"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens of each decoding row")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    record: dict[str, Any] = {"versions": versions, "context": args.context, "prompt": PROMPT, "cases": {}}
    if args.output is not None and args.output.exists():
        before = json.loads(args.output.read_text())
        if {**before, "cases": {}} == record:
            record = before
    for name in args.case:
        rows = record["cases"][name] = []
        for result in measure(CASES[name], args.context, everything=args.all):
            rows.append(result)
            if args.output is not None:
                args.output.write_text(json.dumps(record, indent=1) + "\n")


def measure(case: Case, context: int, *, everything: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per program of the case."""
    target = find_target(case.topology)
    assert target.chip is not None
    spec, _ = spec_from_config({**LLAMA, **SIZES[case.size]})
    limits = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256, block_size=PAGE)
    model = model_for(target, spec, limits, kv_layout(spec, PAGE), "bfloat16", case.devices)
    blocks = plan_blocks(model, target, limits, CacheConfig(), stated=True)
    program_set = StepProgramSet(model, StepShapes.of(limits, 1), blocks, limits.max_num_seqs)
    keys = [Forward(shape) for shape in chosen(program_set.shapes, everything=everything)]
    print(f"\n{case.size} on {case.devices} x {target.name}, {per_pool(blocks)} blocks of {PAGE} tokens")
    print(
        f"{'program':<34}{'XLA cycles':>12}{'kernel cycles':>15}{'GB':>8}{'TFLOP':>8}{'us':>9}{'roofline us':>13}"
        f"{'share':>7}  bound by"
    )
    for key in keys:
        (program,) = compile_programs(program_set, [key])
        batch = batch_of(key.shape, context)
        r = row(program, model, target.chip, batch, kernel_call(model, target.chip, batch))
        print(
            f"{r['program']:<34}{r['xla_cycles']:>12}{r['kernel_cycles']:>15}{r['bytes'] / 1e9:>8.2f}"
            f"{r['flops'] / 1e12:>8.3f}{r['seconds'] * 1e6:>9.0f}{r['roofline_seconds'] * 1e6:>13.0f}{r['share']:>7.0%}"
            f"  {r['bound_by']}",
            flush=True,
        )
        yield r


def chosen(shapes: StepShapes, *, everything: bool) -> list[StepShape]:
    """Return the shapes to measure: those of decode, and of prompts with few sequences, or some of each."""
    if everything:
        return [s for s in shapes if s.decode_only or s.seqs == shapes.rows.sizes[0]]
    decodes = [s for s in shapes if s.decode_only and s.seqs in (8, 64, 256)]
    return decodes + [s for s in shapes if not s.decode_only and s.seqs == 8 and s.tokens in (256, 2048)]


def batch_of(shape: StepShape, context: int) -> Batch:
    """Return a batch that fills the shape."""
    if shape.decode_only:
        return Batch.decode(shape.seqs, context)
    count, remainder = divmod(shape.tokens, PROMPT)
    return Batch.prefill(*[PROMPT] * count, *[remainder] * bool(remainder))


def kernel_call(model: Model, chip: ChipInfo, batch: Batch) -> Figures:
    """Return the figures of one layer's attention kernel call on one device."""
    mixer = model.spec.layers[0].attention
    heads = head_layout(mixer, model.tensor)
    slots = heads.slots // model.tensor
    return kernel_cycles(chip.name, slots * heads.group, slots, batch, head_dim=mixer.head_dim)


def row(program: CompiledProgram, model: Model, chip: ChipInfo, batch: Batch, call: Figures) -> dict[str, Any]:
    """Return one program's time by the schedules, against the roofline."""
    layers = len(model.spec.layers)
    needed = program.key.cost(model, BatchLoad(sum(new + before for new, before in batch.seqs), batch.pairs))
    cycles = estimated_cycles(program)
    assert cycles is not None, "the compiler has no estimate for an operation"
    kernel = max(call.cycles / chip.clock_hz, call.hbm_bytes / chip.hbm_bandwidth) + DMA_LATENCY_S
    embedding = 2 * program.key.shape.tokens * model.spec.width * model.dtype.itemsize
    assert program.schedule is not None
    exchange = program.schedule.exchange_seconds(chip)
    seconds = cycles / chip.clock_hz + layers * kernel + embedding / (chip.hbm_bandwidth * chip.cores) + exchange
    least = needed.seconds(chip)
    return {
        "program": program.key.label,
        "xla_cycles": cycles,
        "kernel_cycles": layers * call.cycles,
        "kernel_hbm_bytes": layers * call.hbm_bytes,
        "kernel_seconds": layers * kernel,
        "exchange_seconds": exchange,
        "bytes": needed.bytes + needed.kernel_bytes,
        "flops": needed.flops + needed.kernel_flops,
        "seconds": seconds,
        "roofline_seconds": least,
        "share": least / seconds,
        "bound_by": "HBM" if needed.memory_seconds(chip) >= needed.compute_seconds(chip) else "MXU",
        "share_of_hbm": needed.memory_seconds(chip) / seconds,
        "share_of_mxu": needed.compute_seconds(chip) / seconds,
        "temporary_bytes": program.memory.temporary,
        "code_bytes": program.memory.code,
    }


if __name__ == "__main__":
    main()
