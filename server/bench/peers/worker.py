"""One engine behind stdin and stdout, so that several can be measured in turns. Run by the interpreter that has it.

usage: python worker.py ENGINE OPTIONS      (pagoda, vllm, transformers or llama.cpp; OPTIONS: a JSON object)

A line {"prompts": [[ids]], "outputs": [lengths], "busy": false} on stdin generates greedily, end-of-sequence tokens
ignored, and is answered with {"seconds": ..., "tokens": ...}. `busy`: beside a process that computes without a pause,
of the engine's session: a kernel that divides processor time among sessions then divides it among threads. This file
imports nothing of pagoda's unless that is the engine.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], list[int]], int]
"""Generates as many tokens as listed after each prompt; returns their number."""


def offline_engine(module: str, options: dict[str, Any]) -> Generate:
    """pagoda or vLLM, by their common Python API."""
    engine = importlib.import_module(module)
    llm = engine.LLM(**options)

    def generate(prompts: list[list[int]], outputs: list[int]) -> int:
        params = [engine.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in outputs]
        outputs_of_prompts = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs_of_prompts)

    return generate


def transformers_engine(options: dict[str, Any]) -> Generate:
    """transformers' generate: batches of prompts padded on the left, each until its longest output is complete."""
    import torch

    transformers: Any = importlib.import_module("transformers")

    batch_size = options.pop("batch_size")
    compiled = options.pop("compile")
    model_path = Path(options.pop("model"))
    if model_path.suffix == ".gguf":
        options["gguf_file"] = model_path.name
        model_path = model_path.parent
    model = transformers.AutoModelForCausalLM.from_pretrained(str(model_path), **options).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    if compiled:
        model = torch.compile(model)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], outputs: list[int]) -> int:
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            counts = outputs[start : start + batch_size]
            width = max(map(len, batch))
            count = max(counts)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch], device=device)
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=device)
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )
        return sum(outputs)

    return generate


def llama_engine(options: dict[str, Any]) -> Generate:
    """llama.cpp's C API: the sequences of a batch are prefilled one by one, then decoded in one call per step.

    numpy finds the largest logit.
    """
    lib: Any = importlib.import_module("llama_cpp")
    import numpy as np

    path = options.pop("model")
    context = options.pop("max_model_len", 2048)
    sequences = options.pop("max_num_seqs", 64)
    lib.llama_backend_init()
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, None)
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = sequences * context
    params.n_seq_max = sequences
    params.n_batch = 2048
    params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    for name, value in options.items():
        setattr(params, name, value)
    state = lib.llama_init_from_model(model, params)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(2048, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run rows of token, position, sequence, whether it is sampled; return the sampled tokens."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, sampled) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = sampled
        if lib.llama_decode(state, batch):
            raise SystemExit("llama_decode failed")
        count = sum(sampled for *_, sampled in rows)
        if not count:
            return []
        logits = np.ctypeslib.as_array(lib.llama_get_logits(state), (count, vocab))
        return logits.argmax(-1).tolist()

    def generate_some(prompts: list[list[int]], outputs: list[int]) -> int:
        lib.llama_memory_clear(lib.llama_get_memory(state), True)
        last = []
        for sequence, prompt in enumerate(prompts):
            rows = [(token, position, sequence, position + 1 == len(prompt)) for position, token in enumerate(prompt)]
            sampled = [token for start in range(0, len(rows), 2048) for token in decode(rows[start : start + 2048])]
            last.append(sampled[-1])
        for step in range(max(outputs) - 1):
            live = [n for n, count in enumerate(outputs) if step + 1 < count]
            tokens = decode([(last[n], len(prompts[n]) + step, n, True) for n in live])
            for n, token in zip(live, tokens):
                last[n] = token
        return sum(outputs)

    def generate(prompts: list[list[int]], outputs: list[int]) -> int:
        return sum(
            generate_some(prompts[first : first + sequences], outputs[first : first + sequences])
            for first in range(0, len(prompts), sequences)
        )

    return generate


def start(engine: str, options: dict[str, Any]) -> Generate:
    """Load the engine."""
    if engine == "transformers":
        return transformers_engine(options)
    if engine == "llama.cpp":
        return llama_engine(options)
    return offline_engine(engine, options)


def installed_version(engine: str) -> str:
    """Return the version of the engine's package."""
    package = {"llama.cpp": "llama-cpp-python"}.get(engine, engine)
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """A process that computes without a pause."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    engine = sys.argv[1]
    options = json.loads(sys.argv[2])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever the engine prints goes to stderr.
    generate = start(engine, options)
    print(json.dumps({"version": installed_version(engine)}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        with busy_process() if work.get("busy") else contextlib.nullcontext():
            began = time.perf_counter()
            tokens = generate(work["prompts"], work["outputs"])
            seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
