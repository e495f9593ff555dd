"""What a step of the reference backend costs: processor time, page faults and parallel regions, with random weights.

usage: python step_profile.py CONFIG.json CASE... [--quantization METHOD] [--threads N] [--steps N]
           [--operations]

CASE: ROWSxCONTEXT (one token of each sequence), pTOKENS (one prompt), mROWSxTOKENS (prompts), sROWSxPREFIXxOWN (one
token of each sequence after a shared prefix). On a busy machine counts and the processor time of one thread tell most.
Regions are counted where a library that wraps GOMP_parallel and exports `long regions(void)` is preloaded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pagoda.backends.registry import load_backend
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import RowStart, StepPlan
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.quantization.on_the_fly import quantized, schemes_on_the_fly

BLOCK, BLOCKS = 32, 2500
GREEDY = SamplingRules(temperature=0.0)


def random_weights(spec):
    rng = np.random.default_rng(0)
    for param in params(spec).values():
        yield param.name, (rng.standard_normal(param.shape) * 0.04 + ("norm" in param.name)).astype(np.float32)


def make_plan(case: str) -> StepPlan:
    numbers = [int(number) for number in case.lstrip("pms").split("x")]
    shared = 0
    if case[0] == "p":
        rows, new, context = 1, numbers[0], 0
    elif case[0] == "m":
        (rows, new), context = numbers, 0
    elif case[0] == "s":
        (rows, shared, own), new = numbers, 1
        context = shared + own
    else:
        (rows, context), new = numbers, 1
    common, pages = shared // BLOCK, -(-(context + new) // BLOCK)
    own_blocks = 1 + common + np.arange(rows * (pages - common)).reshape(rows, -1)
    table = np.concatenate([np.tile(1 + np.arange(common), (rows, 1)), own_blocks], 1)
    tokens = np.random.default_rng(1).integers(0, 1000, rows * new)
    return StepPlan(
        step=0,
        starts=tuple(RowStart(row, np.zeros(1, np.int32), 1, GREEDY) for row in range(rows)),
        rows=np.arange(rows, dtype=np.int32),
        query_start=(np.arange(rows + 1) * new).astype(np.int32),
        context=np.full(rows, context, np.int32),
        token_ids=tokens.astype(np.int32),
        block_tables=(table.astype(np.int32),),
        samples=np.ones(rows, np.bool_),
    )


def measure(run: Callable[[], object], steps: int) -> dict:
    count = getattr(ctypes.CDLL(None), "regions", lambda: 0)
    rows = []
    for _ in range(2):
        run()
    for _ in range(steps):
        before, regions, begin = resource.getrusage(resource.RUSAGE_SELF), count(), time.perf_counter()
        run()
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append(
            (cpu * 1e3, (time.perf_counter() - begin) * 1e3, after.ru_minflt - before.ru_minflt, count() - regions)
        )
    cpu, wall, faults, regions = zip(*rows)
    return {
        "cpu_ms": round(min(cpu), 1),
        "wall_ms": round(min(wall), 1),
        "page_faults": statistics.median(faults),
        "regions": statistics.median(regions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="int8, int4, ...: rounds the random weights")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--operations", action="store_true", help="print the time of each torch operation")
    args = parser.parse_args()
    spec, _ = spec_from_config(json.loads(args.config.read_text()))
    limits = Limits(max_model_len=2048, max_num_batched_tokens=8192, max_num_seqs=256, block_size=BLOCK)
    layout = kv_layout(spec, BLOCK)
    schemes = schemes_on_the_fly(args.quantization, params(spec), head=True) if args.quantization else {}
    options = BackendOptions(
        spec=spec, limits=limits, layout=layout, cache=CacheConfig(), dtype=args.dtype, schemes=schemes
    )
    backend = load_backend("reference").create(options)
    backend.load(quantized(random_weights(spec), schemes))
    backend.init_cache((BLOCKS,))
    if args.threads:
        backend._threads.count = args.threads
    for case in args.cases:
        plan = make_plan(case)
        print(case, json.dumps(measure(lambda plan=plan: backend.execute(plan).result(), args.steps)), flush=True)
        if args.operations:
            with torch.profiler.profile() as profile:
                backend.execute(plan).result()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))
    backend.close()


if __name__ == "__main__":
    main()
