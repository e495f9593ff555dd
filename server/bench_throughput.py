"""`pagoda bench throughput`: requests and tokens per second of an engine that has all its requests at once."""

from __future__ import annotations

import argparse
import time

from pagoda.server.bench_load import (
    add_load_arguments,
    check_positive,
    random_prompts,
    sampling_params,
    start_llm,
    write_results,
)
from pagoda.server.flags import FlagParser


def add_arguments(parser: FlagParser) -> None:
    """Flags of the command."""
    add_load_arguments(parser, input_len=1024, output_len=128)
    parser.add_argument("--num-prompts", type=int, default=1000, help="Number of requests.")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    check_positive(args, "input_len", "output_len", "n", "num_prompts")
    llm = start_llm(args)
    try:
        prompts = random_prompts(llm, args.num_prompts, args.input_len, llm.llm_engine.config.model.seed)
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling_params(args))
        elapsed = time.perf_counter() - began
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
    write_results(
        args.output_json,
        {
            "elapsed_time": elapsed,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / elapsed,
            "tokens_per_second": total / elapsed,
            "output_tokens_per_second": output_tokens / elapsed,
        },
    )
    return 0
