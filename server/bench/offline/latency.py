"""`pagoda bench latency`: how long one batch of requests takes, end to end, over many repetitions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.config.groups.bench.offline import LatencyConfig
from pagoda.common.config.settings import ResolvedSettings
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.bench.datasets.samples import PromptVocabulary
from pagoda.server.bench.offline.engine import (
    acceptance,
    check_fits,
    check_load,
    need_profiler,
    resolve_load,
    start_llm,
    vocabulary_of,
    write_results,
)
from pagoda.server.bench.report.machine import machine
from pagoda.server.bench.report.table import acceptance_rows
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import Resolved

COMMAND: Final = "bench latency"
PERCENTAGES: Final = (10, 25, 50, 75, 90, 99)


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    load, settings = resolve_load(args, COMMAND, LatencyConfig)
    need_profiler(load.profile, settings)
    return check_load(args, COMMAND, LatencyConfig)


def run(args: argparse.Namespace) -> int:
    """Measure and print the results, or write a trace. Returns 0."""
    load, settings = resolve_load(args, COMMAND, LatencyConfig)
    need_profiler(load.profile, settings)
    llm = start_llm(EngineArgs.from_resolved(settings))
    try:
        check_fits(llm.llm_engine, load.input_len, load.output_len)
        batch = _batch(llm, load, _prompts(vocabulary_of(llm.llm_engine), load, llm.llm_engine.config.model.seed))
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
    write_results(load.output_json, results | drafts | {"machine": machine()})
    return 0


def _prompts(vocabulary: PromptVocabulary, load: LatencyConfig, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": vocabulary.random_ids(rng, load.input_len)} for _ in range(load.batch_size)]


def _batch(llm: LLM, load: LatencyConfig, prompts: list[Any]) -> Callable[[], float]:
    """Return a function that runs the batch and returns its seconds."""
    beams = BeamSearchParams(beam_width=load.n, max_tokens=load.output_len, ignore_eos=True)
    params = SamplingParams(
        n=load.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=load.output_len,
        detokenize=not load.disable_detokenize,
    )

    def batch() -> float:
        began = time.perf_counter()
        if load.use_beam_search:
            llm.beam_search(prompts, beams)
        else:
            llm.generate(prompts, params, use_tqdm=False)
        llm.reset_prefix_cache()
        return time.perf_counter() - began

    return batch


def _repeat(batch: Callable[[], float], times: int, label: str) -> list[float]:
    return [batch() for _ in tqdm(range(times), desc=label)]
