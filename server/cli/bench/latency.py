"""`pagoda bench latency`: how long one batch of requests takes, end to end, over many repetitions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from tqdm import tqdm

from pagoda.common.config.groups.bench import LatencyConfig
from pagoda.common.config.settings import ResolvedSettings
from pagoda.common.errors import ConfigError
from pagoda.server.cli.bench.offline import (
    acceptance,
    acceptance_rows,
    add_load_arguments,
    check_fits,
    check_load,
    random_prompts,
    resolve_load,
    sampling_params,
    start_llm,
    write_results,
)
from pagoda.server.settings.flags import EngineArgs, FlagParser
from pagoda.server.settings.resolve import Resolved

COMMAND: Final = "bench latency"
PERCENTAGES: Final = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: FlagParser) -> None:
    add_load_arguments(parser, COMMAND)


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    load, settings = resolve_load(args, COMMAND, LatencyConfig)
    _check_profile(load, settings)
    return check_load(args, COMMAND, LatencyConfig)


def _check_profile(load: LatencyConfig, settings: ResolvedSettings) -> None:
    if load.profile and not settings.values["profiler_config"]:
        raise ConfigError("--profile", "there is no folder for the trace; set --profiler-config, or drop it")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results, or write a trace. Returns 0."""
    load, settings = resolve_load(args, COMMAND, LatencyConfig)
    _check_profile(load, settings)
    llm = start_llm(EngineArgs.from_resolved(settings))
    params = sampling_params(load)
    try:
        check_fits(llm, load)
        prompts = random_prompts(llm, load.batch_size, load.input_len, llm.llm_engine.config.model.seed)

        def batch() -> float:
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            llm.reset_prefix_cache()
            return time.perf_counter() - began

        _repeat(batch, load.num_iters_warmup, "Warmup iterations")
        if load.profile:
            llm.start_profile()
            batch()
            print(f"Trace of one batch: {llm.stop_profile()}")
            return 0
        before = llm.llm_engine.stats.drafts
        latencies = _repeat(batch, load.num_iters, "Bench iterations")
        drafts = acceptance(before, llm.llm_engine.stats.drafts)
    finally:
        llm.shutdown()
    percentiles = dict(zip(PERCENTAGES, np.percentile(latencies, PERCENTAGES).tolist()))
    mean = float(np.mean(latencies))
    print(f"Avg latency: {mean} seconds")
    for percentage, value in percentiles.items():
        print(f"{percentage}% percentile latency: {value} seconds")
    for label, value in acceptance_rows(drafts):
        print(label, f"{value:.2f}" if isinstance(value, float) else value)
    results = {"avg_latency": mean, "latencies": latencies, "percentiles": percentiles}
    write_results(load.output_json, results | drafts)
    return 0


def _repeat(batch: Callable[[], float], times: int, label: str) -> list[float]:
    return [batch() for _ in tqdm(range(times), desc=label)]
