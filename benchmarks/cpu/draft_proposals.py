"""CPU time of proposing drafts: microseconds per step, for many sequences with long prompts.

    python benchmarks/cpu/draft_proposals.py --rows 256 --prompt 8192

Texts are drawn from a small vocabulary with repeated passages, so that suffixes occur and chains have several links.
The first step indexes all prompts; of the others the median is reported. Every sequence gets `--accepted` + 1 tokens
per step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from pagoda.common.engine.speculative.ngram import NgramProposer
from pagoda.common.engine.speculative.proposer import DraftContext, PaddedGuesses, Proposer
from pagoda.common.engine.speculative.suffix import SuffixProposer

PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "ngram 2..5": lambda: NgramProposer(2, 5),
    "ngram 5..5": lambda: NgramProposer(5, 5),
    "suffix": lambda: SuffixProposer(24, 10_000, 1.0, 0.1),
}


def text(rng: np.random.Generator, passages: list[np.ndarray], length: int) -> np.ndarray:
    """Return `length` tokens: passages with noise between them."""
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < length:
        parts += [passages[rng.integers(len(passages))], rng.integers(0, 5000, rng.integers(1, 20), np.int32)]
    return np.concatenate(parts)[:length].astype(np.int32)


def measure(make: Callable[[], Proposer], rows: int, prompt: int, steps: int, accepted: int) -> dict[str, float]:
    """Return the figures of one proposer."""
    rng = np.random.default_rng(0)
    passages = [rng.integers(0, 5000, rng.integers(10, 60), np.int32) for _ in range(200)]
    proposer = make()
    for number in range(100):  # past answers
        proposer.finish(f"past {number}", text(rng, passages, 400).tolist())
    prompts = [text(rng, passages, prompt) for _ in range(rows)]
    answers = [text(rng, passages, (steps + 2) * (accepted + 1)).tolist() for _ in range(rows)]
    outputs: list[list[int]] = [[] for _ in range(rows)]
    times, proposed = [], 0
    for step in range(steps + 1):
        for own, answer in zip(outputs, answers):
            own += answer[step * (accepted + 1) : (step + 1) * (accepted + 1)]
        contexts = [DraftContext(str(row), prompts[row], outputs[row], [], 7) for row in range(rows)]
        begin = time.thread_time()
        proposals = proposer.propose(contexts)
        times.append(time.thread_time() - begin)
        some = proposals.counts > 0 if isinstance(proposals, PaddedGuesses) else map(bool, proposals)
        proposed += sum(some) if step else 0
    begin = time.thread_time()
    for row in range(rows):
        proposer.finish(str(row), outputs[row])
    finish = (time.thread_time() - begin) / rows
    return {
        "first_us_per_sequence": round(times[0] / rows * 1e6, 1),
        "step_us": round(float(np.median(times[1:])) * 1e6, 1),
        "least_step_us": round(min(times[1:]) * 1e6, 1),
        "finish_us_per_sequence": round(finish * 1e6, 1),
        "proposals_per_step": round(float(proposed / steps), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accepted", type=int, default=1, help="drafts accepted per step")
    args = parser.parse_args()
    for name, make in PROPOSERS.items():
        print(json.dumps({"proposer": name, **measure(make, args.rows, args.prompt, args.steps, args.accepted)}))


if __name__ == "__main__":
    main()
