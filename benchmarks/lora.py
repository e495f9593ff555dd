"""LoRA adapters on the reference backend: throughput of mixed batches, 200 adapters over 8 slots, the pause of a load.

    python benchmarks/lora.py MODEL [--results FILE]

MODEL is a Llama-like checkpoint (SmolLM2-135M-Instruct as GGUF). Adapters are random, of rank 16 on all linear modules.
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

from pagoda import SamplingParams
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
RANK, TOKENS, PROMPT = 16, 64, 32
REPEATS = 5


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


def run(llm: LLMEngine, adapters: list[LoRARequest | None], tokens: int = TOKENS) -> tuple[float, dict[str, list[int]]]:
    """Return output tokens per second of one batch, and the answers."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for index, adapter in enumerate(adapters):
        prompt = {"prompt_token_ids": [100 + 7 * index % 500 + position for position in range(PROMPT)]}
        llm.add_request(str(index), prompt, params, lora_request=adapter)
    answers: dict[str, list[int]] = {}
    begin = time.perf_counter()
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - begin
    return sum(map(len, answers.values())) / seconds, answers


def rate(llm: LLMEngine, adapters: list[LoRARequest | None]) -> float:
    """Return the median rate of several runs, after one that warms up."""
    return statistics.median([run(llm, adapters)[0] for _ in range(REPEATS + 1)][1:])


def throughput(model: str, adapters: list[LoRARequest]) -> dict[str, float]:
    """Return tokens per second of batches of 8, and of 1."""
    rates = {}
    plain = engine(model)
    rates["8 sequences, engine without adapters"] = rate(plain, [None] * 8)
    rates["1 sequence, engine without adapters"] = rate(plain, [None])
    llm = engine(model, enable_lora=True, max_loras=8)
    rates["8 sequences, none has an adapter"] = rate(llm, [None] * 8)
    rates["8 sequences, 8 adapters"] = rate(llm, list(adapters[:8]))
    rates["8 sequences, 1 adapter"] = rate(llm, [adapters[0]] * 8)
    rates["8 sequences, 1 of them with an adapter"] = rate(llm, [adapters[0], *[None] * 7])
    rates["1 sequence, none has an adapter"] = rate(llm, [None])
    rates["1 sequence, 1 adapter"] = rate(llm, [adapters[0]])
    return rates


def rotation(model: str, adapters: list[LoRARequest]) -> dict[str, Any]:
    """Return how many of 400 answers, of 200 adapters over 8 slots, are those of the adapter alone."""
    llm = engine(model, enable_lora=True, max_loras=8, max_cpu_loras=16, max_num_seqs=32)
    chosen = [adapters[index % len(adapters)] for index in range(2 * len(adapters))]
    speed, together = run(llm, list(chosen), tokens=8)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    equal = 0
    for index, adapter in enumerate(chosen):
        prompt = {"prompt_token_ids": [100 + 7 * index % 500 + position for position in range(PROMPT)]}
        llm.add_request("alone", prompt, params, lora_request=adapter)
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finished:
                    equal += list(output.outputs[0].token_ids) == together[str(index)]
    return {"answers": len(chosen), "equal to the answer alone": equal, "tokens/s": speed}


def pause(model: str, adapters: list[LoRARequest]) -> dict[str, float]:
    """Return seconds between tokens of a running request, in steps with a load of another adapter and without."""
    llm = engine(model, enable_lora=True, max_loras=2, max_cpu_loras=8)
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    llm.add_request("running", {"prompt_token_ids": [5] * PROMPT}, params, lora_request=adapters[0])
    gaps: dict[str, list[float]] = {"without": [], "prefill without load": [], "prefill with load": []}
    last, count, kind = 0.0, 0, ""
    one = SamplingParams(max_tokens=1, temperature=0)
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.request_id != "running":
                continue
            now = time.perf_counter()
            if last:
                gaps[kind or "without"].append(now - last)
            last, count, kind = now, count + 1, ""
            if count % 10 == 5 and count < 390:
                loads = count % 20 == 5
                kind = "prefill with load" if loads else "prefill without load"
                own = adapters[1 + count // 20] if loads else adapters[0]
                llm.add_lora(own)  # to host memory, in this thread; a server reads it in another
                last = time.perf_counter()
                llm.add_request(f"other{count}", {"prompt_token_ids": [9, 8, 7]}, one, lora_request=own)
    return {
        f"{name}, {which} (ms)": 1000 * value
        for name, values in gaps.items()
        for which, value in (("median", statistics.median(values)), ("longest", max(values)))
    }


def main() -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--results", default="benchmarks/results/lora_cpu.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [write_adapter(Path(scratch) / str(seed), seed) for seed in range(200)]
        adapters = [LoRARequest(f"a{index}", index + 1, folder) for index, folder in enumerate(folders)]
        results: dict[str, Any] = {"load before": os.getloadavg(), "cores": len(os.sched_getaffinity(0))}
        results["pause"] = pause(options.model, adapters)
        results["tokens/s"] = throughput(options.model, adapters)
        results["200 adapters over 8 slots"] = rotation(options.model, adapters)
        results["load after"] = os.getloadavg()
    print(json.dumps(results, indent=1))
    Path(options.results).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
