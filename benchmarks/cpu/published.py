"""Predict throughput that others have published, by rooflines and the production scheduler.

usage: python benchmarks/cpu/published.py [--case NAME ...] [--output FILE.json]

All requests arrive at once, unless a case limits how many are served at a time; lengths are fixed. Limits are those
that were published with a case, as far as they were. Output: the published figure, the prediction and their ratio.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagoda.backends.simulated.backend import create
from pagoda.common.backend import BackendOptions, ParallelSizes
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.workload.drive import TimedRequest, VirtualClock, drive
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.quantization.on_the_fly import schemes_on_the_fly

MODELS: Final = Path(__file__).parents[2] / "tests" / "data" / "models"
LLAMA_70B: Final = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN25_7B: Final = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "head_dim": 128,
}


@dataclass(frozen=True)
class Case:
    """A published figure."""

    source: str
    model: str
    hardware: str
    devices: int
    lengths: tuple[int, int]
    published: float
    unit: str  # requests/s, output tokens/s, or s
    requests: int = 400
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the model's config
    seqs: int = 256
    tokens: int = 8192
    quantization: str | None = None
    kv_cache: str = "auto"
    concurrency: int | None = None


CASES: Final = {
    "qwen3-8b-h200-flashinfer": Case("SGLang, FlashInfer", "qwen3-8b", "h200", 1, (1024, 1024), 30.85, "s", 256),
    "qwen3-8b-h200-fa3": Case("SGLang, FA3", "qwen3-8b", "h200", 1, (1024, 1024), 34.7, "s", 256),
    "qwen3-8b-h200-triton": Case("SGLang, Triton", "qwen3-8b", "h200", 1, (1024, 1024), 36.9, "s", 256),
    "llama-8b-v6e": Case(
        "tpu-inference PR 1820", "llama-3.1-8b", "v6e", 1, (1800, 128), 14.64, "requests/s", 1000, tokens=1024
    ),
    "qwen2.5-7b-v6e": Case(
        "tpu-inference PR 470", "qwen3-8b", "v6e", 1, (1800, 128), 15.77, "requests/s", 1000, QWEN25_7B, tokens=1024
    ),
    "llama-70b-v6e-8": Case(
        "tpu-inference PR 470", "llama-3.1-8b", "v6e", 8, (1800, 128), 7.65, "requests/s", 400, LLAMA_70B, tokens=1024
    ),
    "llama-70b-v6e-8-c64": Case(
        "tpu-recipes", "llama-3.1-8b", "v6e", 8, (1000, 1000), 2494.8, "output tokens/s", 192, LLAMA_70B, concurrency=64
    ),
    "llama-8b-fp8-h100": Case(
        *("TensorRT-LLM 1.0", "llama-3.1-8b", "h100", 1, (1000, 1000), 15220, "output tokens/s", 1500),
        quantization="fp8",
        kv_cache="fp8",
        seqs=1024,
    ),
    "llama-8b-fp8-h200": Case(
        *("TensorRT-LLM 1.0", "llama-3.1-8b", "h200", 1, (1000, 1000), 17744, "output tokens/s", 1500),
        quantization="fp8",
        kv_cache="fp8",
        seqs=1024,
    ),
    "llama-8b-fp8-h100-long": Case(
        *("TensorRT-LLM 1.0", "llama-3.1-8b", "h100", 1, (2048, 128), 3450, "output tokens/s", 1000),
        quantization="fp8",
        kv_cache="fp8",
        seqs=1024,
    ),
    "qwen3-8b-v6e-4": Case(
        "sglang-jax", "qwen3-8b", "v6e", 4, (1024, 1024), 7571.8, "output tokens/s", 512, concurrency=256
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.case:
        case = CASES[name]
        predicted = predict(case)
        faster = case.published / predicted if case.unit == "s" else predicted / case.published
        rows.append({"case": name, **vars(case), "predicted": predicted, "speed / published": faster})
        print(f"{name:<28}{case.published:>10.2f}{predicted:>10.2f} {case.unit:<16}{faster:>6.0%}", flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(rows, indent=1, default=dict) + "\n")


def make_options(case: Case) -> BackendOptions:
    config = json.loads((MODELS / case.model / "config.json").read_text()) | case.changes
    if case.changes.get("model_type") == "qwen2":
        del config["attention_bias"]
    spec, _ = spec_from_config(config)
    block = 128 if case.hardware.startswith("v") else 16
    return BackendOptions(
        spec=spec,
        limits=Limits(
            max_model_len=-(-sum(case.lengths) // block) * block,
            max_num_batched_tokens=case.tokens,
            max_num_seqs=case.seqs,
            block_size=block,
            prefix_caching=False,
        ),
        layout=kv_layout(spec, block),
        cache=CacheConfig(cache_dtype=case.kv_cache, gpu_memory_utilization=0.9),  # type: ignore[arg-type]
        dtype="bfloat16",
        parallel=ParallelSizes(tensor=case.devices),
        schemes={} if case.quantization is None else schemes_on_the_fly(case.quantization, params(spec)),
        simulation=SimulationConfig(hardware=case.hardware),
    )


def predict(case: Case) -> float:
    """Return the figure in the case's unit."""
    options, clock = make_options(case), VirtualClock()
    backend = create(options, clock)
    core = generation_core(backend, options.layout, options.limits, backend.plan_memory().num_blocks)
    run = drive(core, [request(case, index) for index in range(case.requests)], clock, max_concurrency=case.concurrency)
    match case.unit:
        case "s":
            return run.seconds
        case "requests/s":
            return case.requests / run.seconds
        case _:
            return case.requests * case.lengths[1] / run.seconds


def request(case: Case, index: int) -> TimedRequest:
    tokens = np.random.default_rng(index).integers(0, 100_000, case.lengths[0]).tolist()
    return TimedRequest(
        0.0,
        EngineRequest(
            request_id=str(index), prompt_token_ids=tokens, rules=SamplingRules(), max_tokens=case.lengths[1]
        ),
    )


if __name__ == "__main__":
    main()
