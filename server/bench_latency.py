"""`pagoda bench latency`: how long one batch of requests takes, end to end, over many repetitions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from tqdm import tqdm

from pagoda.server.bench_load import (
    add_load_arguments,
    check_positive,
    random_prompts,
    sampling_params,
    start_llm,
    write_results,
)
from pagoda.server.flags import FlagParser

PERCENTAGES: Final = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: FlagParser) -> None:
    """Flags of the command."""
    add_load_arguments(parser, input_len=32, output_len=128)
    parser.add_argument("--batch-size", type=int, default=8, help="Prompts in a batch.")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="Batches before measuring.")
    parser.add_argument("--num-iters", type=int, default=30, help="Measured batches.")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    check_positive(args, "input_len", "output_len", "n", "batch_size", "num_iters")
    llm = start_llm(args)
    params = sampling_params(args)
    try:
        prompts = random_prompts(llm, args.batch_size, args.input_len, llm.llm_engine.config.model.seed)

        def batch() -> float:
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            llm.reset_prefix_cache()
            return time.perf_counter() - began

        _repeat(batch, args.num_iters_warmup, "Warmup iterations")
        latencies = _repeat(batch, args.num_iters, "Bench iterations")
    finally:
        llm.shutdown()
    percentiles = dict(zip(PERCENTAGES, np.percentile(latencies, PERCENTAGES).tolist()))
    mean = float(np.mean(latencies))
    print(f"Avg latency: {mean} seconds")
    for percentage, value in percentiles.items():
        print(f"{percentage}% percentile latency: {value} seconds")
    write_results(args.output_json, {"avg_latency": mean, "latencies": latencies, "percentiles": percentiles})
    return 0


def _repeat(batch: Callable[[], float], times: int, label: str) -> list[float]:
    return [batch() for _ in tqdm(range(times), desc=label)]
