"""Offline throughput and single-stream speed of pagoda beside other engines in one run, over several cases.

usage: python offline.py --model MODEL [--peer ENGINE[=PYTHON[,MODEL]] ...] [--rounds 3] [--cases all]
           [--quantization METHOD...] [--neighbour]

ENGINE: vllm, transformers or llama.cpp (its MODEL is a GGUF file). The engines run in turns, as those of `pagoda bench
throughput --backend`, which measures one case. Prints one JSON line: the machine, medians, and of each round pagoda's
ratio to the others. `--quantization`: pagoda again, with each of these methods. `--neighbour` runs each case a second
time beside a process that keeps one core busy, and adds what share of the quiet throughput each engine keeps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from operator import truediv

from pagoda.server.bench.peers.compare import (
    EngineSpec,
    EngineWorker,
    EngineWorkload,
    measure,
    weight_bytes,
    workers_of,
)
from pagoda.server.bench.report.machine import machine

CASES = {  # requests, tokens of each prompt, of each answer, and of these prompt tokens those that all share
    "throughput_64x128_128": (64, 128, 128, 0),
    "single_stream_128_128": (1, 128, 128, 0),
    "throughput_8x128_128": (8, 128, 128, 0),
    "throughput_256x128_128": (256, 128, 128, 0),
    "prompts_16x512_16": (16, 512, 16, 0),
    "shared_prefix_32x1024_64": (32, 1024 + 32, 64, 1024),
}
USUAL = ("throughput_64x128_128", "single_stream_128_128")
EXTRA = {"vllm": {"gpu_memory_utilization": 0.4}, "transformers": {"batch_size": 64, "compile": False}}
"""Arguments of an engine's constructor beside model, dtype and context."""


def workload(case: str) -> EngineWorkload:
    """Random prompts of a case."""
    requests, inputs, outputs, shared = CASES[case]
    prefix = random_tokens(shared)
    return EngineWorkload([prefix + random_tokens(inputs - shared) for _ in range(requests)], [outputs] * requests)


def random_tokens(count: int) -> list[int]:
    return [random.randrange(100, 40_000) for _ in range(count)]


def engines(args: argparse.Namespace) -> list[EngineSpec]:
    """pagoda, pagoda quantised, and the peers."""
    common = {"model": args.model, "dtype": args.dtype, "max_model_len": 2048}
    specs = [EngineSpec("pagoda", "pagoda", common)]
    specs += [EngineSpec(f"pagoda {each}", "pagoda", common | {"quantization": each}) for each in args.quantization]
    for peer in args.peer:
        name, _, where = peer.partition("=")
        python, _, model = where.partition(",")
        options = common | EXTRA.get(name, {}) | ({"model": model} if model else {})
        for unknown in {"transformers": ("max_model_len",), "llama.cpp": ("dtype",)}.get(name, ()):
            del options[unknown]
        specs.append(EngineSpec(name, name, options, python or sys.executable))
    return specs


def measure_cases(workers: Sequence[EngineWorker], cases: Sequence[str], rounds: int, neighbour: bool) -> dict:
    results: dict = {}
    for worker in workers:
        worker.run(EngineWorkload([random_tokens(16)] * 2, [8, 8]))
    for case in cases:
        results[case] = measure(workers, workload(case), rounds)
        if neighbour:
            beside = measure(workers, workload(case), rounds, busy=True)
            beside["share_of_quiet"] = {worker.spec.name: kept(results[case], beside, worker) for worker in workers}
            results[f"{case}_beside_a_busy_process"] = beside
        print(json.dumps({case: results[case]}), file=sys.stderr, flush=True)
    return results


def kept(quiet: dict, beside: dict, worker: EngineWorker) -> float:
    """The share of its quiet throughput that an engine has beside a busy process, at the median."""
    name = worker.spec.name
    shares = map(truediv, beside[name]["output_tokens_per_s"], quiet[name]["output_tokens_per_s"])
    return round(statistics.median(shares), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="what pagoda serves")
    parser.add_argument("--peer", nargs="*", default=[], metavar="ENGINE[=PYTHON[,MODEL]]")
    parser.add_argument("--quantization", nargs="*", default=[], help="measure pagoda with these, too")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "all"], default=list(USUAL))
    parser.add_argument("--neighbour", action="store_true", help="measure beside a busy process, too")
    args = parser.parse_args()
    cases = list(CASES) if "all" in args.cases else args.cases
    specs = engines(args)
    with workers_of(specs) as workers:
        facts = {
            "machine": machine(),
            "versions": {worker.spec.name: worker.version for worker in workers},
            "weight_bytes": {spec.name: weight_bytes(str(spec.options["model"])) for spec in specs},
        }
        print(json.dumps(facts | measure_cases(workers, cases, args.rounds, args.neighbour)))


if __name__ == "__main__":
    main()
