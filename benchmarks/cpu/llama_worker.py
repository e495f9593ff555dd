"""llama.cpp behind stdin and stdout, with the protocol of offline_worker.py. For an environment with llama-cpp-python.

usage: python llama_worker.py llama MODEL.gguf DTYPE

All sequences of a request line are prefilled and then decoded in one batch per step, greedily, by llama.cpp's C API;
numpy finds the largest logit.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time

import llama_cpp as lib
import numpy as np
from offline_worker import busy_process

SEQUENCES, CONTEXT = 64, 1120


class Engine:
    """A model with room for 64 sequences."""

    def __init__(self, path: str) -> None:
        lib.llama_backend_init()
        lib.llama_log_set(QUIET, None)
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = SEQUENCES * CONTEXT, SEQUENCES
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = lib.llama_init_from_model(self.model, params)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(2048, 0, 1)

    def generate(self, prompts: list[list[int]], outputs: int) -> list[list[int]]:
        """Return `outputs` tokens of each prompt."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        answers = []
        for sequence, prompt in enumerate(prompts):
            tokens = [(token, at, sequence, at + 1 == len(prompt)) for at, token in enumerate(prompt)]
            answers.append([self.decode(tokens)[0]])
        for step in range(outputs - 1):
            rows = [(answer[-1], len(prompts[n]) + step, n, True) for n, answer in enumerate(answers)]
            for answer, token in zip(answers, self.decode(rows)):
                answer.append(token)
        return answers

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run rows of token, position, sequence, whether it is sampled; return the sampled tokens."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, sampled) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sequence, sampled
        if lib.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        wanted = [index for index, row in enumerate(rows) if row[3]]
        logits = np.ctypeslib.as_array(lib.llama_get_logits(self.context), (len(wanted), self.vocab))
        return logits.argmax(-1).tolist()


@lib.llama_log_callback
def QUIET(level, text, data):  # noqa: N802
    pass


def main() -> None:
    _, path, _ = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(path)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        requests, inputs, outputs, shared, busy = map(int, line.split())
        prefix = [random.randrange(100, 40_000) for _ in range(shared)]
        prompts = [prefix + [random.randrange(100, 40_000) for _ in range(inputs - shared)] for _ in range(requests)]
        with busy_process() if busy else contextlib.nullcontext():
            begin = time.perf_counter()
            done = engine.generate(prompts, outputs)
            seconds = time.perf_counter() - begin
        assert sum(map(len, done)) == requests * outputs
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
