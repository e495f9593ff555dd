"""What the TPU compiler's schedule says of a step of a model that pools, against the chip's roofline; needs no TPU.

usage: python benchmarks/tpu_pooling.py [--model NAME ...] [--topology NAME ...] [--tokens N ...] [--output FILE.json]

A row per program: the cycles that XLA estimates for its operations (loops of the attention both ways as often as
prompts of 256 tokens take), the least time of the attention kernel for the same prompts, the roofline of all that the
step must move and compute, and the compiler's memory. `share_of_mxu` is the FLOP at the chip's peak over the time. Rows
of other programs in the file stay.
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
from pagoda.backends.jax_tpu.ahead_of_time.report import estimated_cycles, key_name
from pagoda.backends.jax_tpu.execution.pool_program_keys import PoolCatalogue
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.pooler import PoolerConfig
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
    """The command."""
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
    """The program with an answer for each of at most 256 prompts, none longer than 512 tokens."""
    spec, _ = pooling_spec(config, "embed", None, PoolerConfig())
    limits = Limits(max_model_len=512, max_num_batched_tokens=tokens, max_num_seqs=256, block_size=128)
    target = find_target(topology)
    assert target.chip is not None, "a TPU's topology"
    catalogue = PoolCatalogue(model_for(target, spec, limits, kv_layout(spec, 128), "bfloat16", 1), limits)
    (program,) = compile_programs(catalogue, [catalogue.shape_for(tokens, of_tokens=False)])
    cycles, chip, need = estimated_cycles(program), target.chip, program.need
    assert cycles is not None, "the compiler has no estimate for an operation"
    seconds = cycles / chip.clock_hz + need.kernel_seconds(chip)
    return {
        "program": key_name(program.key),
        "xla_cycles": cycles,
        "kernel_seconds_bound": need.kernel_seconds(chip),
        "bytes": need.bytes + need.kernel_bytes,
        "flops": need.flops + need.kernel_flops,
        "seconds": seconds,
        "roofline_seconds": need.seconds(chip),
        "share_of_mxu": need.compute_seconds(chip) / seconds,
        "temporary_bytes": program.memory.temporary,
        "code_bytes": program.memory.code,
    }


if __name__ == "__main__":
    main()
