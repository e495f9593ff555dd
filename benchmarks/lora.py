"""LoRA adapters on the reference backend: throughput of mixed batches, and what a load costs.

    python benchmarks/lora.py MODEL [--results FILE]

MODEL is a Llama-like checkpoint (SmolLM2-135M-Instruct as GGUF). Adapters are random, of rank 16 on all linear modules.
Processor time is measured beside the clock, and cases take turns, so that ratios are comparable on a machine that
others use, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
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
from pagoda.server.vllm.request_types import LoRARequest

WIDTH, FFN, KV, LAYERS = 576, 1536, 192, 30
SHAPES: Final = {
    **{f"self_attn.{part}_proj": (WIDTH, WIDTH) for part in "qo"},
    **{f"self_attn.{part}_proj": (KV, WIDTH) for part in "kv"},
    **{f"mlp.{part}_proj": (FFN, WIDTH) for part in ("gate", "up")},
    "mlp.down_proj": (WIDTH, FFN),
}
RANK, TOKENS, PROMPT = 16, 24, 32
REPEATS = 5
PAUSES, STEPS = 7, 14
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


def run(llm: LLMEngine, adapters: list[LoRARequest | None]) -> tuple[float, float]:
    """Return output tokens of one batch per second of processor time, and per second."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    for index, adapter in enumerate(adapters):
        prompt = {"prompt_token_ids": [100 + index] * PROMPT}
        llm.add_request(str(index), prompt, params, lora_request=adapter)
    begin, wall, count = time.process_time(), time.perf_counter(), 0
    while llm.has_unfinished_requests():
        count += sum(len(output.outputs[0].token_ids) for output in llm.step() if output.finished)
    return count / (time.process_time() - begin), count / (time.perf_counter() - wall)


def throughput(model: str, adapters: list[LoRARequest]) -> dict[str, dict[str, float]]:
    """Return the median rates of batches of 8 and of 1, and their ratios to the same batch without adapters.

    Cases take turns; a ratio is the median of those of the rounds.
    """
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
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(REPEATS + 1):
        for name, (chosen, used) in cases.items():
            rates[name].append(run(engines[chosen], used))
    results = {}
    for name, rounds in rates.items():
        base = rates[f"{name.split(',')[0]}, engine without adapters"]
        figures = {}
        for index, clock in enumerate(("processor", "clock")):
            own, plain = ([each[index] for each in values[1:]] for values in (rounds, base))
            figures[f"tokens/s, {clock}"] = statistics.median(own)
            figures[f"ratio, {clock}"] = statistics.median(mine / other for mine, other in zip(own, plain))
        results[name] = figures
    return results


def pauses(model: str, adapters: list[LoRARequest]) -> dict[str, Any]:
    """Return what a request whose adapter is in no slot costs those that run: the longest step after it is added.

    Eight sequences generate with four adapters. A ninth is added, in turns of an adapter that was read and loaded
    before, of one whose files are read meanwhile, and of none. Milliseconds, and shares of a usual step.
    """
    llm = engine(model, enable_lora=True, max_loras=5, max_cpu_loras=5)
    core, kinds = llm._core, ("none", "in a slot", "read and loaded")
    longest: dict[str, list[float]] = {kind: [] for kind in kinds}
    usual: list[float] = []
    for number in range(3 * PAUSES):
        kind = kinds[number % 3]
        fresh = LoRARequest(f"fresh{number}", 100 + number, adapters[4 + number % 4].lora_path)
        added = {"none": None, "in a slot": adapters[0], "read and loaded": fresh}[kind]
        for index in range(8):
            _queue(llm, f"{number}-{index}", adapters[index % 4], 40)
        times = [_timed(core.step) for _ in range(STEPS)]
        _queue(llm, f"{number}-ninth", added, 4)
        after = [_timed(core.step) for _ in range(STEPS)]
        usual.append(statistics.median(times[4:]))
        longest[kind].append(max(after))
        while core.has_work:
            core.step()
    step = statistics.median(usual)
    figures: dict[str, Any] = {"usual step": 1000 * step}
    for kind, values in longest.items():
        relative = [value / own for value, own in zip(values, usual[kinds.index(kind) :: 3])]
        figures[f"longest step, ninth request with adapter: {kind}"] = 1000 * statistics.median(values)
        figures[f"the same in usual steps: {kind}"] = statistics.median(relative)
    return figures


def _queue(llm: LLMEngine, request_id: str, adapter: LoRARequest | None, tokens: int) -> None:
    """Add a request to the engine's core, which reads its adapter in a thread, as that of a server does."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    prompt = {"prompt_token_ids": [100 + len(request_id)] * PROMPT}
    known = llm.adapters.adapter(adapter)
    llm._core.add_request(llm.inputs.prepare(request_id, prompt, params, adapter=known).children[0])


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


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
            slots.adapted(lambda x: x, [param.name for param in fused], sizes, fused[0].shape[1], bias=None)
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
        results["pauses of running requests, ms"] = pauses(options.model, adapters)
        print(json.dumps(results, indent=1), flush=True)
        results["throughput"] = throughput(options.model, adapters)
        results["load average after"] = os.getloadavg()
    print(json.dumps(results, indent=1))
    Path(options.results).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
