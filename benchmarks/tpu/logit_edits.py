"""Print what penalties, bias, bans, masks and sampling cost on a TPU, by the compiler's schedule. Needs no TPU.

usage: python benchmarks/tpu/logit_edits.py [--topology v6e:1x1] [--rows 256] [--output FILE.json]

The programs of an engine with Llama-3-8B's vocabulary, each compiled for the chip; times as in `pagoda compile`: XLA's
estimates, kernels and exchanges, and assumed rates of gathers and scatters (ahead_of_time/schedule.py).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from roofline import LLAMA, SIZES

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.ahead_of_time.report import times_of
from pagoda.backends.jax_tpu.execution.logit_programs import (
    UNMASKED_EDITS,
    CountTokens,
    MaskLogits,
    RankLogprobs,
    Sample,
    SetCounts,
)
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling.state import KINDS
from pagoda.common.engine.steps.shapes import StepShapes
from pagoda.common.models.registry import spec_from_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:1x1")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--edits-only", action="store_true", help="leave out sampling and logprobs, slow to compile")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    target = find_target(args.topology)
    assert target.chip is not None
    spec, _ = spec_from_config({**LLAMA, **SIZES["8b"]})
    limits = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=args.rows, block_size=128)
    model = model_for(target, spec, limits, kv_layout(spec, 128), "bfloat16", 1)
    steps = StepProgramSet(model, StepShapes.of(limits, 1), (600,), args.rows)
    keys: list[Any] = [SetCounts(), CountTokens(args.rows)]
    keys += [MaskLogits(args.rows, rows=count) for count in steps.masked_rows(args.rows)]
    keys += [program(args.rows) for program in UNMASKED_EDITS if program is not RankLogprobs]
    if not args.edits_only:
        keys += [*(Sample(args.rows, kind) for kind in KINDS), RankLogprobs(args.rows)]
    rows = []
    for key in keys:
        (program,) = compile_programs(steps, [key])
        times = times_of(program, target.chip)
        assert times is not None
        row = {
            "program": key.label,
            "us": round(times.total * 1e6, 1),
            "roofline us": round(program.cost.seconds(target.chip) * 1e6, 1),
            "temporary bytes": program.memory.temporary,
            "in place": program.executable.memory_analysis().alias_size_in_bytes > 0,
        }
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if args.output is not None:
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
        record = {"topology": args.topology, "vocabulary": spec.vocab, "versions": versions, "rows": rows}
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
