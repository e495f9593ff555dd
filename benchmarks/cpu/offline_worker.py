"""One engine behind stdin and stdout, so that two engines can be measured in turn.

usage: python offline_worker.py pagoda|vllm MODEL DTYPE [QUANTIZATION]

Each line "REQUESTS INPUT OUTPUT SHARED BUSY" on stdin runs that many random prompts, of which the first SHARED tokens
are the same, greedy, EOS ignored, and answers with the seconds it took. BUSY: 1 beside a process that computes without
a pause, of the engine's session: a kernel that divides processor time among sessions then divides it among threads. The
module named is the only difference between the engines.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """A process that computes without a pause."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def random_tokens(count: int) -> list[int]:
    return [random.randrange(100, 40_000) for _ in range(count)]


def main() -> None:
    module, model, dtype, *quantization = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints goes to stderr
    engine = importlib.import_module(module)
    extra = {"gpu_memory_utilization": 0.4} if module == "vllm" else {}
    extra |= {"quantization": quantization[0]} if quantization else {}
    llm = engine.LLM(model, dtype=dtype, max_model_len=2048, **extra)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        requests, inputs, outputs, shared, busy = map(int, line.split())
        prefix = random_tokens(shared)
        prompts = [{"prompt_token_ids": prefix + random_tokens(inputs - shared)} for _ in range(requests)]
        params = engine.SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        with busy_process() if busy else contextlib.nullcontext():
            begin = time.perf_counter()
            done = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
        assert sum(len(one.outputs[0].token_ids) for one in done) == requests * outputs
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
