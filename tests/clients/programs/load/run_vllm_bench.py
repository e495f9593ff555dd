"""`vllm bench serve`: vLLM's own load generator, on both APIs."""

from __future__ import annotations

import json
import os

from checks import MODEL, URL, main
from commands import HOME, works

VLLM = os.environ["PAGODA_VLLM"]
(HOME / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(4)))


def bench(name: str, *words: str) -> None:
    data = ("--dataset-name", "custom", "--dataset-path", str(HOME / "prompts.jsonl"), "--custom-output-len", "16")
    command = (VLLM, "bench", "serve", "--base-url", URL, "--model", MODEL, "--num-prompts", "4")
    works(name, *command, *data, "--skip-tokenizer-init", *words, expect="Failed requests: 0")


bench("completions")
bench("chat", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
main()
