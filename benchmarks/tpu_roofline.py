"""What the TPU compiler's schedule says of a step, against the chip's roofline: no TPU is needed, nothing is timed.

usage: python benchmarks/tpu_roofline.py [--all] [--case NAME ...] [--output FILE.json]

Per program: cycles that the compiler estimates for all XLA operations (loops as often as they run), the necessary
bytes and FLOP of the step (backends/jax_tpu/needs.py), and the least time these take on the chip. The attention kernel
carries no estimate; it counts with its own necessary bytes and FLOP at the chip's peak divided by the share that
tpu_kernel_schedule.py found for its schedule (--decode-share, --prefill-share; 1: at its roofline). Decode: every row
has --context tokens. Prefill: new prompts of 1024 tokens. The same on every machine with the same jax and libtpu.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from pagoda.backends.jax_tpu.ahead import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.catalogue import Catalogue, Forward
from pagoda.backends.jax_tpu.needs import Load, need
from pagoda.backends.jax_tpu.report import estimated_cycles, key_name
from pagoda.backends.jax_tpu.shapes import StepShapes
from pagoda.backends.jax_tpu.step_input import StepShape
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_spec import kv_layout
from pagoda.common.models.registry import spec_from_config

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
    "70b-v6e-8": Case("70b", "v6e:2x4", 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--all", action="store_true", help="every bucket, not 64 rows and 2048 tokens only")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each decoding row")
    parser.add_argument("--decode-share", type=float, default=1.0)
    parser.add_argument("--prefill-share", type=float, default=1.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = {name: measure(CASES[name], args) for name in args.case}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    settings = {key: getattr(args, key) for key in ("context", "decode_share", "prefill_share")}
    if args.output is not None:
        args.output.write_text(json.dumps({"versions": versions, **settings, "cases": found}, indent=1) + "\n")


def measure(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per program of the case."""
    target = find_target(case.topology)
    spec, _ = spec_from_config({**LLAMA, **SIZES[case.size], "torch_dtype": "bfloat16"})
    limits = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256, block_size=PAGE)
    model = model_for(target, spec, limits, kv_layout(spec, PAGE), "bfloat16", case.devices)
    catalogue = Catalogue(model, StepShapes.of(limits, 1), 1024, limits.max_num_seqs)
    shapes = chosen(catalogue.shapes, args.all)
    print(f"\n{case.size} on {case.devices} x {target.name}")
    print(f"{'program':<38}{'XLA cycles':>12}{'GB':>8}{'TFLOP':>8}{'us':>9}{'roofline us':>13}{'share':>7}  bound by")
    rows = []
    for program in compile_programs(catalogue, [Forward(shape) for shape in shapes]):
        rows.append(row(program, model, target.chip, args))
        r = rows[-1]
        print(
            f"{r['program']:<38}{r['xla_cycles']:>12}{r['bytes'] / 1e9:>8.2f}{r['flops'] / 1e12:>8.3f}"
            f"{r['seconds'] * 1e6:>9.0f}{r['roofline_seconds'] * 1e6:>13.0f}{r['share']:>7.0%}  {r['bound_by']}",
            flush=True,
        )
    return rows


def chosen(shapes: StepShapes, everything: bool) -> list[StepShape]:
    """Shapes with the short page tables: 1024 tokens each."""
    short = [shape for shape in shapes if shape.pages == shapes.pages.sizes[0]]
    if everything:
        return [s for s in short if s.decode_only or s.seqs == shapes.rows.sizes[0]]
    return [s for s in short if (s.decode_only and s.seqs == 64) or (s.tokens == 2048 and s.seqs == 8)]


def row(program: Any, model: Any, chip: Any, args: argparse.Namespace) -> dict[str, Any]:
    shape: StepShape = program.key.shape
    if shape.decode_only:
        load, share = Load(shape.seqs * args.context, shape.seqs * args.context), args.decode_share
    else:
        whole, rest = divmod(shape.tokens, PROMPT)
        pairs = whole * PROMPT * (PROMPT + 1) // 2 + rest * (rest + 1) // 2
        load, share = Load(shape.tokens, pairs), args.prefill_share
    needed = need(model, program.key, load)
    cycles = estimated_cycles(program)
    assert cycles is not None, "the compiler has no estimate for an operation"
    kernel = needed.kernel_seconds(chip) / share
    seconds = cycles / chip.clock_hz + kernel
    return {
        "program": key_name(program.key),
        "xla_cycles": cycles,
        "kernel_seconds": kernel,
        "kernel_calls": dict(program.schedule.kernels),
        "bytes": needed.bytes + needed.kernel_bytes,
        "flops": needed.flops + needed.kernel_flops,
        "seconds": seconds,
        "roofline_seconds": needed.seconds(chip),
        "share": needed.seconds(chip) / seconds,
        "bound_by": "HBM" if needed.memory_seconds(chip) >= needed.compute_seconds(chip) else "MXU",
        "temporary_bytes": program.memory.temporary,
        "code_bytes": program.memory.code,
    }


if __name__ == "__main__":
    main()
