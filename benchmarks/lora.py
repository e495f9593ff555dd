"""LoRA adapters on the reference backend: throughput of mixed batches, and what a load costs.

    python benchmarks/lora.py MODEL [--results FILE]

MODEL is a Llama-like checkpoint (SmolLM2-135M-Instruct as GGUF). Adapters are random, of rank 16 on all linear modules.
Processor time is measured, not the clock: the figures are comparable on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from pagoda import SamplingParams
from pagoda.backends.reference.model.adapters import AdapterMatrices
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.lora.peft import BaseModel, read_adapter
from pagoda.common.weights.lora.weights import LoraOptions, adaptable
from pagoda.common.weights.safetensors import write_safetensors
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.vllm_compat.request_types import LoRARequest

WIDTH, FFN, KV, LAYERS = 576, 1536, 192, 30
SHAPES: Final = {
    **{f"self_attn.{part}_proj": (WIDTH, WIDTH) for part in "qo"},
    **{f"self_attn.{part}_proj": (KV, WIDTH) for part in "kv"},
    **{f"mlp.{part}_proj": (FFN, WIDTH) for part in ("gate", "up")},
    "mlp.down_proj": (WIDTH, FFN),
}
RANK, TOKENS, PROMPT = 16, 24, 32
REPEATS = 3
_FUSED: Final = (("mixers.0.q", "mixers.0.k", "mixers.0.v"), ("mixers.0.o",), ("ffn.gate", "ffn.up"), ("ffn.down",))
"""Parameters that are one layer on the reference backend."""


def write_adapter(folder: Path, seed: int) -> str:
    """Write a random adapter in peft's format and return its folder."""
    numbers, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for name, (rows, columns) in SHAPES.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = numbers.standard_normal((RANK, columns), np.float32) * np.float32(0.02)
            tensors[f"{module}.lora_B.weight"] = numbers.standard_normal((rows, RANK), np.float32) * np.float32(0.02)
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return str(folder)


def engine(model: str, **settings: Any) -> LLMEngine:
    """Return an engine in this process."""
    shared = {"backend": "reference", "max_model_len": 512, "enable_prefix_caching": False, "seed": 1}
    return LLMEngine(EngineArgs(model=model, **shared, **settings).create_engine_config())


def run(llm: LLMEngine, adapters: list[LoRARequest | None]) -> float:
    """Return output tokens per second of processor time of one batch."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    for index, adapter in enumerate(adapters):
        prompt = {"prompt_token_ids": [100 + index] * PROMPT}
        llm.add_request(str(index), prompt, params, lora_request=adapter)
    begin, count = time.process_time(), 0
    while llm.has_unfinished_requests():
        count += sum(len(output.outputs[0].token_ids) for output in llm.step() if output.finished)
    return count / (time.process_time() - begin)


def throughput(model: str, adapters: list[LoRARequest]) -> dict[str, float]:
    """Return the median rates of batches of 8 and of 1; engines take turns."""
    engines = {"engine without adapters": engine(model), "engine": engine(model, enable_lora=True, max_loras=8)}
    cases: dict[str, tuple[str, list[LoRARequest | None]]] = {
        "8 sequences, engine without adapters": ("engine without adapters", [None] * 8),
        "8 sequences, none has an adapter": ("engine", [None] * 8),
        "8 sequences, 1 of them with an adapter": ("engine", [adapters[0], *[None] * 7]),
        "8 sequences, 1 adapter": ("engine", [adapters[0]] * 8),
        "8 sequences, 8 adapters": ("engine", list(adapters[:8])),
        "1 sequence, engine without adapters": ("engine without adapters", [None]),
        "1 sequence, none has an adapter": ("engine", [None]),
        "1 sequence, 1 adapter": ("engine", [adapters[0]]),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(REPEATS + 1):
        for name, (chosen, used) in cases.items():
            rates[name].append(run(engines[chosen], used))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def load_cost(model: str, folder: str) -> dict[str, float]:
    """Return milliseconds of one processor that reading an adapter's files takes, and copying it to a slot."""
    spec, family = spec_from_config(open_checkpoint(model).config())
    matrices = adaptable(spec)
    slots = AdapterMatrices(LoraOptions(8, RANK, "bfloat16"), matrices, Numerics(torch.bfloat16, torch.bfloat16))
    for layer in range(LAYERS):
        for names in (
            ("mixers.0.q", "mixers.0.k", "mixers.0.v"),
            ("mixers.0.o",),
            ("ffn.gate", "ffn.up"),
            ("ffn.down",),
        ):
            fused = [matrices[f"layers.{layer}.{name}"] for name in names]
            sizes = [param.shape[0] for param in fused]
            slots.adapted(lambda x: x, [param.name for param in fused], sizes, fused[0].shape[1])
    base = BaseModel(family.rules, params(spec), matrices, RANK)
    times: dict[str, list[float]] = {"reading": [], "copying": []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for slot in range(6):
        begin = time.thread_time()
        weights = read_adapter(Path(folder), base)
        middle = time.thread_time()
        slots.fill(slot, weights)
        times["reading"].append(middle - begin)
        times["copying"].append(time.thread_time() - middle)
    torch.set_num_threads(threads)
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--results", default="benchmarks/results/lora_cpu.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [write_adapter(Path(scratch) / str(seed), seed) for seed in range(8)]
        adapters = [LoRARequest(f"a{index}", index + 1, folder) for index, folder in enumerate(folders)]
        results: dict[str, Any] = {"load average": os.getloadavg(), "cores": len(os.sched_getaffinity(0))}
        results["processor ms of a load"] = load_cost(options.model, folders[0])
        print(json.dumps(results, indent=1), flush=True)
        results["tokens per processor second"] = throughput(options.model, adapters)
    print(json.dumps(results, indent=1))
    Path(options.results).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
