"""Processor time of sampling with temperature on the CPU, with the compiled search for tokens and without.

Logits are normal with 40 higher ones per row, as a language model's are. One thread; medians. The last line is JSON.

usage: python draws.py [--vocab 49152] [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from pagoda.backends.reference import sampling
from pagoda.backends.reference.programs.operators import row_search
from pagoda.backends.reference.sampling import LEAST_BEST, RANDOM_ROWS, RowRules

FILTERS = {"none": (0, 1.0), "top_p 0.9": (0, 0.9), "top_k 50": (50, 1.0), "top_k 20, top_p 0.95": (20, 0.95)}
ROWS = (1, 8, 64, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for count in ROWS:
        for name, (top_k, top_p) in FILTERS.items():
            without, searched = both(args.vocab, count, top_k, top_p)
            times = {"without_ms": timed(without, args.rounds), "with_ms": timed(searched, args.rounds)}
            results[f"{count} rows, filters: {name}"] = times
            print(f"{count:4} rows, filters: {name:22} {times['without_ms']:8.2f} {times['with_ms']:8.2f} ms")
    print(json.dumps(results))


def both(vocab: int, count: int, top_k: int, top_p: float) -> tuple[Callable[[], object], Callable[[], object]]:
    """Draws of the same rows, all of which the search must decide."""
    generator = torch.Generator().manual_seed(count)
    logits = 2 * torch.randn(count, vocab, generator=generator)
    high = torch.randint(0, vocab, (count, 40), generator=generator)
    logits.scatter_(1, high, 8 + 3 * torch.randn(count, 40, generator=generator))
    zeros, ones = torch.zeros(count, dtype=torch.int32), torch.ones(count)
    keys = torch.randint(-(2**31), 2**31, (count,), generator=generator).int()
    rules = RowRules(zeros, zeros, keys, 0.7 * ones, zeros + top_k, top_p * ones, 0 * ones)
    rows, search = torch.arange(count), row_search(vocab)
    assert search is not None, "llvmlite is missing"
    least = torch.full((count,), max(LEAST_BEST, top_k + 1))
    filtered = top_k > 0 or top_p < 1
    draw = sampling.draw_filtered if filtered else sampling.draw

    def searched() -> tuple[torch.Tensor, torch.Tensor]:
        if filtered:
            found = search.best(logits, rows, rules.temperature, least)
            return sampling.draw_filtered_among(logits, rows, rules, found)
        return sampling.draw_among(logits, rows, rules, search.candidates(logits, rows, rules.temperature, keys))

    def without() -> torch.Tensor:
        return torch.cat([draw(logits[part], rules.take(part)) for part in rows.split(RANDOM_ROWS)])

    tokens, decided = searched()
    assert decided.all()
    assert torch.equal(tokens, without())
    return without, searched


def timed(function: Callable[[], object], rounds: int) -> float:
    """Median milliseconds of processor time."""
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    return round(1e3 * statistics.median(seconds), 3)


if __name__ == "__main__":
    main()
