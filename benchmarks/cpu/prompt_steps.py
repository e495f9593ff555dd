"""Prompt tokens per second by the number of tokens per step, on the `reference` backend.

One JSON line: per number of tokens the rates of interleaved rounds, each of eight random prompts of 512 tokens.

usage: python benchmarks/cpu/prompt_steps.py MODEL [--tokens 256 512 2048] [--rounds 4]
"""

import argparse
import json
import random
import time

from pagoda import LLM, SamplingParams

PROMPTS, LENGTH, TOKEN_IDS = 8, 512, 40_000


def main() -> None:
    """Measure every number of tokens in each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 2048])
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    draw = random.Random(0)
    settings = {"max_num_seqs": 128, "enable_prefix_caching": False, "backend": "reference"}
    engines = {each: LLM(args.model, max_num_batched_tokens=each, **settings) for each in args.tokens}
    rates: dict[int, list[int]] = {each: [] for each in engines}
    for _ in range(args.rounds):
        for tokens, llm in engines.items():
            prompts = [{"prompt_token_ids": [draw.randrange(TOKEN_IDS) for _ in range(LENGTH)]} for _ in range(PROMPTS)]
            begin = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
            rates[tokens].append(round(PROMPTS * LENGTH / (time.perf_counter() - begin)))
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
