"""Measure how long all programs of a model take to compile for a TPU, and to read from the compile cache.

usage: python benchmarks/tpu/compile.py [--topology v6e:1x1] [--output FILE.json]

First start: every program of Llama-3-8B shapes with a server's default limits is lowered, compiled and cached. Second
start: every program is looked up, read and verified, but not loaded onto the (absent) chip. `--topology cpu` includes
loading, on XLA's CPU client and with fewer layers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from roofline import LLAMA, SIZES

from pagoda.backends.jax_tpu.ahead_of_time.compile import find_target, model_for
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.programs import CompileCache, CompiledPrograms
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShapes
from pagoda.common.models.registry import spec_from_config

CPU_LAYERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:1x1")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024, help="a v6e server's default")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    program_set = program_set_for(args)
    with tempfile.TemporaryDirectory(prefix="pagoda-ladder-") as folder:
        cache = CompileCache(Path(folder))
        begin = time.perf_counter()
        report = CompiledPrograms(program_set, cache=cache).prepare()
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        if program_set.model.kernel.use_kernel:
            cached = sum(cache.read(program_set, key) is not None for key in program_set)
        else:
            cached = len(cache.load(program_set, program_set))
        second = time.perf_counter() - begin
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    assert cached == report.programs
    result = {
        "topology": args.topology,
        "limits": [args.max_model_len, args.max_num_batched_tokens, 256],
        "programs": report.programs,
        "first_seconds": first,
        "second_seconds": second,
        "second / first": second / first,
        "bytes": size,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.processor() or platform.machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
    }
    print(json.dumps(result, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def program_set_for(args: argparse.Namespace) -> StepProgramSet:
    target = find_target(args.topology)
    on_tpu = target.chip is not None
    size = SIZES["8b"] if on_tpu else {**SIZES["8b"], "num_hidden_layers": CPU_LAYERS}
    spec, _ = spec_from_config({**LLAMA, **size, "torch_dtype": "bfloat16"})
    limits = Limits(
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=256,
        block_size=128,
    )
    model = model_for(target, spec, limits, kv_layout(spec, 128), "bfloat16", 1)
    return StepProgramSet(model, StepShapes.of(limits, 1, factor=2 if on_tpu else 4), (1024,), limits.max_num_seqs)


if __name__ == "__main__":
    main()
