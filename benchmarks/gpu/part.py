"""Run parts of a stage in their own process, which confines GPU memory and GPU errors.

usage: python -m pagoda.benchmarks.gpu.part MODULE.FUNCTION ... --device cuda|cpu [--tiny] [--spoil X] [--model FILE]

Protocol, one JSON object per line: writes the machine; reads the numbers to leave out, as PART/NAME, and the
time.monotonic deadline; then writes, for each number, a line before it is measured and a line with the result.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
FAILED = 70
"""Exit status after a number that raised: the process may be unusable, as after a GPU error."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--spoil", type=float, default=0.0)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)  # die with the parent
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the protocol

    def write(**line) -> None:
        print(json.dumps(line), file=lines, flush=True)

    import torch

    from pagoda.benchmarks.gpu.measure import Bench, machine
    from pagoda.benchmarks.gpu.stages import numbers_of

    device = machine(args.device)
    write(machine=device)
    if args.device == "cuda" and device["gpu"] is None:
        return 2
    request = json.loads(sys.stdin.readline())
    bench = Bench.on(args.device, tiny=args.tiny, spoil=args.spoil, model=args.model)
    leave_out = set(request["leave_out"])
    for part in args.parts:
        write(part=part)
        for number in numbers_of(part, bench):
            if f"{part}/{number.name}" in leave_out:
                continue
            if time.monotonic() > request["until"]:
                return 0  # without the last line: unfinished
            write(begin=number.name, seconds=number.seconds)
            began = time.monotonic()
            try:
                result = number.run()
            except Exception:
                write(error=traceback.format_exc()[-4000:])
                return FAILED
            write(result=result | {"took_s": round(time.monotonic() - began, 2)})
            if bench.is_gpu:
                torch.cuda.empty_cache()
    write(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
