"""Parts of a stage, in a process of their own, with which the GPU's memory and its errors end.

usage: python -m pagoda.benchmarks.gpu.part MODULE.FUNCTION ... --device cuda|cpu [--tiny] [--spoil X] [--model FILE]

Says on its first line which machine it is on; reads on one line the numbers to leave out, as PART/NAME, and the second
of time.monotonic at which to stop; then, for each number, one line before it is measured and one with the result.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
FAILED = 70
"""Exit status after a number that raised: the process may be of no use any more, as after an error of the GPU's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--spoil", type=float, default=0.0)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)  # with the script that started it
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**line) -> None:
        print(json.dumps(line), file=lines, flush=True)

    import torch

    from pagoda.benchmarks.gpu.measure import Bench, machine

    here = machine(args.device)
    say(machine=here)
    if args.device == "cuda" and here["gpu"] is None:
        return 2
    asked = json.loads(sys.stdin.readline())
    bench = Bench.on(args.device, tiny=args.tiny, spoil=args.spoil, model=args.model)
    leave_out = set(asked["leave_out"])
    for part in args.parts:
        say(part=part)
        module, _, function = part.rpartition(".")
        for number in getattr(importlib.import_module(f"pagoda.benchmarks.gpu.{module}"), function)(bench):
            if f"{part}/{number.name}" in leave_out:
                continue
            if time.monotonic() > asked["until"]:
                return 0  # without a last line: there is more to do
            say(begin=number.name, seconds=number.seconds)
            began = time.monotonic()
            try:
                found = number.run()
            except Exception:
                say(error=traceback.format_exc()[-4000:])
                return FAILED
            say(found=found | {"took_s": round(time.monotonic() - began, 2)})
            if bench.is_gpu:
                torch.cuda.empty_cache()
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
