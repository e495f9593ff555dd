"""`pagoda bench throughput`: requests and tokens per second of an engine that has all its requests at once."""

from __future__ import annotations

import argparse
import time
from typing import Final

from pagoda.common.config.groups.bench import ThroughputConfig
from pagoda.common.config.settings import ResolvedSettings
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

COMMAND: Final = "bench throughput"


def add_arguments(parser: FlagParser) -> None:
    add_load_arguments(parser, COMMAND)


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    return check_load(args, COMMAND, ThroughputConfig)


def run(args: argparse.Namespace) -> int:
    """Measure and print the results. Returns 0."""
    load, settings = resolve_load(args, COMMAND, ThroughputConfig)
    llm = start_llm(EngineArgs.from_resolved(settings))
    try:
        check_fits(llm, load)
        prompts = random_prompts(llm, load.num_prompts, load.input_len, llm.llm_engine.config.model.seed)
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling_params(load))
        elapsed = time.perf_counter() - began
        drafts = acceptance(None, llm.llm_engine.stats.drafts)
    finally:
        llm.shutdown()
    prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    output_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    total = prompt_tokens + output_tokens
    print(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{output_tokens / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    for label, value in acceptance_rows(drafts):
        print(label, f"{value:.2f}" if isinstance(value, float) else value)
    write_results(
        load.output_json,
        {
            "elapsed_time": elapsed,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / elapsed,
            "tokens_per_second": total / elapsed,
            "output_tokens_per_second": output_tokens / elapsed,
            **drafts,
        },
    )
    return 0
