"""An agent's conversation against a server: cached share of the prompts, and time to first token with and without it.

usage: python benchmarks/server/agent_turns.py [--models qwen3-next llama-gqa ...] [--tokenizer MODEL] [--rounds 3]

The models are those of the parity tests, a few layers of random weights each, with the vocabulary of `--tokenizer`. The
first prompt has 600 tokens (instructions and tools); a turn adds an answer of 40 tokens and the 160 that its tool
returned: 12 turns, 20,400 tokens. `tokens`: prompts are token ids and go on with what was generated. `chat`: messages,
rendered with a template whose generation prompt opens a thought that later prompts do not repeat. Each round has its
own tokens. Prints one JSON line per model and kind of prompt: the share of cached tokens by turn and of all turns, and
the median time to the first token of the turns after the first, in milliseconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

CASES: Final = Path(__file__).parents[2] / "tests" / "data" / "parity" / "cases.jsonl"
MODELS: Final = ("qwen3-next", "nemotron-h", "kimi-linear", "llama-gqa")
SYSTEM: Final = 600
ANSWER: Final = 40
TOOL_RESULT: Final = 160
TURNS: Final = 12
VOCAB: Final = 49152
WORDS: Final = ("alpha", "bravo", "charlie", "delta", "echo", "golf", "hotel", "india", "kilo", "lima", "mike", "papa")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\nLet me look at what the tool returned before I "
    "answer. First of all, the most recent result:\n</think>\n\n{% endif %}"
)


@dataclass
class Turns:
    """What the turns of one conversation took. `first_token`: seconds."""

    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, path: str, body: dict[str, Any], turns: Turns) -> tuple[list[int], str]:
    """Stream an answer of ANSWER tokens. Returns its token ids, if they were asked for, and its text."""
    body |= {
        "max_tokens": ANSWER,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    begin = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(response.read().decode())
    first = 0.0
    ids: list[int] = []
    text = ""
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event["choices"]:
            if not first and (choice.get("token_ids") or choice.get("text") or choice.get("delta", {}).get("content")):
                first = time.perf_counter() - begin
            ids += choice.get("token_ids") or ()
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if usage := event.get("usage"):
            turns.prompt_tokens.append(usage["prompt_tokens"])
            turns.cached_tokens.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    connection.close()
    turns.first_token.append(first)
    return ids, text


def token_turns(port: int, draw: random.Random) -> Turns:
    """The conversation as token ids."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(100, VOCAB) for _ in range(count)]

    turns = Turns()
    history = tokens(SYSTEM)
    for _ in range(TURNS):
        ids, _ = ask(port, "/v1/completions", {"prompt": history, "return_token_ids": True}, turns)
        history = history + ids + tokens(TOOL_RESULT)
    return turns


def chat_turns(port: int, draw: random.Random) -> Turns:
    """The conversation as messages; the words have about a token each."""

    def words(count: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(count))

    turns = Turns()
    messages = [{"role": "system", "content": words(SYSTEM - 40)}, {"role": "user", "content": words(20)}]
    for _ in range(TURNS):
        _, text = ask(port, "/v1/chat/completions", {"messages": messages}, turns)
        messages += [
            {"role": "assistant", "content": text or words(ANSWER)},
            {"role": "tool", "content": words(TOOL_RESULT - 10)},
        ]
    return turns


def write_model(name: str, folder: Path) -> None:
    """Write config.json of a case with VOCAB tokens."""
    cases = map(json.loads, CASES.read_text().splitlines())
    config = next(case["config"] for case in cases if case["name"] == name)
    config |= {"vocab_size": VOCAB, "max_position_embeddings": 8192, "model_max_length": 8192}
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def server(folder: Path, tokenizer: str, *flags: str) -> Iterator[int]:
    """Run a server with random weights; yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "pagoda.server.cli.main", "serve", str(folder), "--load-format", "dummy"]
    command += ["--tokenizer", tokenizer, "--chat-template", TEMPLATE, "--max-model-len", "8192", "--port", str(port)]
    command += ["--block-size", "16", "--reasoning-parser", "none", "--enable-prompt-tokens-details", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}: {' '.join(command)}")
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def measure(name: str, tokenizer: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Run a model's conversations on two servers in turn, with and without prefix cache."""
    kinds = {"tokens": token_turns, "chat": chat_turns}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_model(name, folder)
        with (
            server(folder, tokenizer) as cached,
            server(folder, tokenizer, "--no-enable-prefix-caching") as uncached,
        ):
            for kind, run in kinds.items():
                run(cached, random.Random(rounds))  # warm
                run(uncached, random.Random(rounds))
                pairs = [(run(cached, random.Random(n)), run(uncached, random.Random(n))) for n in range(rounds)]
                last = pairs[-1][0]
                times = [[turn for pair in pairs for turn in pair[side].first_token[1:]] for side in (0, 1)]
                by_turn = [
                    round(hits / total, 3) for hits, total in zip(last.cached_tokens, last.prompt_tokens, strict=True)
                ]
                yield {
                    "model": name,
                    "prompts": kind,
                    "prompt_tokens": sum(last.prompt_tokens),
                    "cached_share": round(sum(last.cached_tokens) / sum(last.prompt_tokens), 4),
                    "cached_share_by_turn": by_turn,
                    "first_token_ms": round(statistics.median(times[0]) * 1e3, 2),
                    "first_token_ms_without_cache": round(statistics.median(times[1]) * 1e3, 2),
                }


def main() -> None:
    """Measure the models one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--tokenizer", default=os.environ.get("PAGODA_TEST_MODEL"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.tokenizer is None:
        parser.error("--tokenizer: name a model with a tokenizer, or set PAGODA_TEST_MODEL")
    for name in args.models:
        for row in measure(name, args.tokenizer, args.rounds):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
