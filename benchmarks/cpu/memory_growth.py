"""Resident memory of an engine over thousands of plain requests of varied length, in one process.

Prints one JSON line per `--every` requests: resident memory, what Python's allocator holds, threads, descriptors, and
what glibc's malloc has in use and free. A steady engine reaches a plateau within the first lines.

usage: python benchmarks/cpu/memory_growth.py MODEL [--requests 4000] [--every 500] [--longest 1500]
"""

import argparse
import ctypes
import gc
import json
import os
import random
import sys
import time
from pathlib import Path

from pagoda.common.sampling_params import SamplingParams
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.settings.flags import EngineArgs


class MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    ]


def malloc_mb() -> dict[str, float]:
    """What the main arena has in use and free, and what is mapped, in MB; empty without glibc."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return {}
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return {name: round(getattr(info, name) / 1e6, 1) for name in ("used", "free", "hblkhd")}


def resident_mb() -> float:
    """Resident memory that is not a mapped file, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1e3


def main() -> None:
    """Run the requests and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--blocks", type=int, help="KV blocks; default: as many as fit the memory")
    args = parser.parse_args()
    settings = EngineArgs(args.model, max_model_len=args.max_model_len, num_gpu_blocks_override=args.blocks)
    engine = LLMEngine.from_engine_args(settings)
    draw, begin = random.Random(0), time.monotonic()
    started = finished = 0
    while finished < args.requests:
        while started < args.requests and started - finished < args.at_once:
            prompt = [draw.randrange(1000, 5000) for _ in range(draw.randint(1, args.longest))]
            params = SamplingParams(max_tokens=draw.randint(1, 8), ignore_eos=True)
            engine.add_request(str(started), {"prompt_token_ids": prompt}, params)
            started += 1
        before = finished
        finished += sum(output.finished for output in engine.step())
        if finished // args.every != before // args.every:
            line = {
                "requests": finished,
                "seconds": round(time.monotonic() - begin, 1),
                "rss_anon_mb": round(resident_mb(), 1),
                "python_blocks": sys.getallocatedblocks(),
                "objects": len(gc.get_objects()),
                "threads": len(os.listdir("/proc/self/task")),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "malloc": malloc_mb(),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
