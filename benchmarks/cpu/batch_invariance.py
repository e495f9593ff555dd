"""How many prompts get the same tokens alone and in a batch, and what does --batch-invariant cost?

usage: python batch_invariance.py MODEL [--dtype float32 bfloat16] [--backend reference] [--max-tokens 64]
       [--batch-invariant | --cost]

Twenty prompts of several lengths run one by one, then all in one batch, greedy and with a seed each. Prints one JSON
object: for each dtype and kind of sampling, of how many prompts the first 16, 32 and so on tokens were the same, and
after how many tokens the others parted. `--cost`: output tokens per second with and without --batch-invariant instead,
one prompt and all of them, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from pagoda import LLM, SamplingParams
from pagoda.benchmarks.readme import machine

_ROUNDS = 5

PROMPTS = (
    "The future of AI is",
    "Once upon a time, in a village by the sea,",
    "The capital of France is Paris, and the capital of Japan is",
    "To bake bread, you need flour, water, salt and",
    "A list of prime numbers: 2, 3, 5, 7, 11,",
    "def fibonacci(n):\n    ",
    "The most important thing about friendship is",
    "Water boils at 100 degrees because",
    "In 1969, people first walked on the moon. The mission was",
    "My favourite season is autumn, for",
    "The three laws of motion say that",
    "Dear Sir or Madam, I am writing to",
    "Photosynthesis is the process by which",
    "Q: What is the largest planet of the solar system?\nA:",
    "She opened the old wooden box and found",
    "Computers store numbers in binary, which means",
    "The recipe calls for two eggs, but if you have none,",
    "Economists disagree about inflation. Some say",
    "A haiku about snow:\n",
    "The train left the station at noon, and by evening it had",
)


def parted_after(alone: list[int], together: list[int]) -> int | None:
    """Tokens that both begin with; None where they are the same to the end."""
    if alone == together:
        return None
    return next(
        (at for at, pair in enumerate(zip(alone, together)) if pair[0] != pair[1]), min(map(len, (alone, together)))
    )


def compare(llm: LLM, temperature: float, max_tokens: int) -> dict[str, Any]:
    """The prompts one by one and in one batch."""
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=max_tokens, ignore_eos=True)
        for number in range(len(PROMPTS))
    ]

    def tokens(prompts: list[str], params: list[SamplingParams]) -> list[list[int]]:
        return [list(done.outputs[0].token_ids) for done in llm.generate(prompts, params, use_tqdm=False)]

    alone = [tokens([prompt], [one])[0] for prompt, one in zip(PROMPTS, params)]
    together = tokens(list(PROMPTS), params)
    parted = [at for pair in zip(alone, together) if (at := parted_after(*pair)) is not None]
    return {
        "prompts": len(PROMPTS),
        "same_first_tokens": {count: same_first(parted, count) for count in lengths(max_tokens)},
        "parted_after_tokens": sorted(parted),
    }


def lengths(max_tokens: int) -> list[int]:
    """16, 32, 64 and so on up to `max_tokens`, which is the last."""
    return [*(16 << power for power in range(20) if 16 << power < max_tokens), max_tokens]


def same_first(parted: list[int], count: int) -> int:
    """Of all prompts, those whose first `count` tokens are the same."""
    return len(PROMPTS) - sum(at < count for at in parted)


def tokens_per_second(llm: LLM, count: int, max_tokens: int) -> float:
    """Output tokens per second of the first `count` prompts in one batch."""
    begin = time.perf_counter()
    llm.generate(
        list(PROMPTS[:count]), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False
    )
    return count * max_tokens / (time.perf_counter() - begin)


def cost(usual: LLM, invariant: LLM, max_tokens: int) -> dict[str, Any]:
    """Medians of both engines and of their ratio, after a round that warms up."""
    found = {}
    for count in (1, len(PROMPTS)):
        rounds = [[tokens_per_second(llm, count, max_tokens) for llm in (usual, invariant)] for _ in range(_ROUNDS + 1)]
        usual_speeds, invariant_speeds = zip(*rounds[1:])
        found[f"{count} prompts"] = {
            "usual": round(median(usual_speeds), 1),
            "batch_invariant": round(median(invariant_speeds), 1),
            "ratio": round(median(b / a for a, b in rounds[1:]), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--cost", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "model": Path(args.model).name}
    results |= {"backend": args.backend, "max_tokens": args.max_tokens}

    def engine(dtype: str, invariant: bool) -> LLM:
        # Without a prefix cache, or the batch would read what the prompts left behind when they ran alone.
        return LLM(
            args.model,
            dtype=dtype,
            backend=args.backend,
            max_model_len=512,
            enable_prefix_caching=False,
            seed=0,
            batch_invariant=invariant,
        )

    for dtype in args.dtype:
        if args.cost:
            usual, invariant = (engine(dtype, each) for each in (False, True))
            results[dtype] = {"output tokens/s": cost(usual, invariant, args.max_tokens)}
            usual.shutdown()
            invariant.shutdown()
            continue
        results["batch_invariant"], llm = args.batch_invariant, engine(dtype, args.batch_invariant)
        results[dtype] = {
            "greedy": compare(llm, 0.0, args.max_tokens),
            "seeded, temperature 1": compare(llm, 1.0, args.max_tokens),
        }
        llm.shutdown()
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
