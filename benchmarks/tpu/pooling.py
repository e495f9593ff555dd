"""Compare the TPU compiler's schedule of pooling steps with the chip's roofline. Needs no TPU.

usage: python benchmarks/tpu/pooling.py [--model NAME ...] [--topology NAME ...] [--tokens N ...] [--output FILE.json]

One row per program: the cycles XLA estimates for its operations (bidirectional attention loops counted for prompts of
256 tokens), the minimum time of the attention kernel for the same prompts, the step's roofline, and the compiler's
memory figures. `share_of_mxu` is the time of the FLOP at the chip's peak over the total time. Rows of other programs in
the file are preserved.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.ahead_of_time.report import estimated_cycles
from pagoda.backends.jax_tpu.execution.program_sets import PoolProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Pool
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.nested.pooler import PoolerConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.models.registry import pooling_spec

MODELS: dict[str, dict[str, Any]] = {
    "all-MiniLM-L6": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
    },
    "Qwen3-Embedding-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151669,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--topology", nargs="*", default=["v5e:1x1", "v6e:1x1"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[2048, 8192])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    rows: dict[str, Any] = {}
    if args.output is not None and args.output.exists():
        before = json.loads(args.output.read_text())
        rows = before["rows"] if before["versions"] == versions else {}
    for name in args.model:
        for topology in args.topology:
            for tokens in args.tokens:
                row = rows[f"{name}, {topology}, {tokens} tokens"] = measure(MODELS[name], topology, tokens)
                print(f"{name:<22}{topology:<9}{json.dumps(row)}", flush=True)
                if args.output is not None:
                    args.output.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


def measure(config: dict[str, Any], topology: str, tokens: int) -> dict[str, Any]:
    """Measure the program with per-prompt outputs, for at most 256 prompts of at most 512 tokens."""
    spec, _ = pooling_spec(config, "embed", None, PoolerConfig())
    limits = Limits(max_model_len=512, max_num_batched_tokens=tokens, max_num_seqs=256, block_size=128)
    target = find_target(topology)
    assert target.chip is not None, "a TPU's topology"
    program_set = PoolProgramSet(model_for(target, spec, limits, kv_layout(spec, 128), "bfloat16", 1), limits)
    (program,) = compile_programs(program_set, [Pool(program_set.shape_for(tokens, of_tokens=False))])
    cycles, chip, cost = estimated_cycles(program), target.chip, program.cost
    assert cycles is not None, "the compiler has no estimate for an operation"
    seconds = cycles / chip.clock_hz + cost.kernel_seconds(chip)
    return {
        "program": program.key.label,
        "xla_cycles": cycles,
        "kernel_seconds_bound": cost.kernel_seconds(chip),
        "bytes": cost.bytes + cost.kernel_bytes,
        "flops": cost.flops + cost.kernel_flops,
        "seconds": seconds,
        "roofline_seconds": cost.seconds(chip),
        "share_of_mxu": cost.compute_seconds(chip) / seconds,
        "temporary_bytes": program.memory.temporary,
        "code_bytes": program.memory.code,
    }


if __name__ == "__main__":
    main()
