"""Products with quantised weights on the reference backend, beside oneDNN's product with bfloat16 weights.

usage: python quantized_products.py [THREADS] [--rounds 7]

Prints JSON: by matrix and number of rows the microseconds of bfloat16 and, of each scheme, the median over interleaved
rounds of bfloat16's time divided by its own, rounding of activations included. One thread is timed by its processor
time, so that other processes disturb little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from pagoda.backends.reference.model.linear import linear
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.quantized import compiled
from pagoda.backends.reference.model.quantized.groups import grouped
from pagoda.backends.reference.model.quantized.int8 import OnednnLinear
from pagoda.common.weights.quantization.on_the_fly import quantize
from pagoda.common.weights.quantization.schemes import Activations, Int4, Int8

SHAPES = ((576, 576), (960, 576), (3072, 576), (576, 1536), (49152, 576), (4096, 4096))
ROWS = (1, 4, 16, 64, 512)
MOST_WORK = 3e9  # multiplications of one call
NUMERICS = Numerics(torch.bfloat16, torch.bfloat16)
W8A8 = Int8("channel", Activations("int8", "row"))


def products(outputs: int, inputs: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the layers by scheme."""
    dense = np.random.default_rng(0).normal(0, 0.02, (outputs, inputs)).astype(np.float32)
    calls = {"bfloat16": linear(torch.from_numpy(dense).bfloat16(), None, NUMERICS)}
    eight = grouped(quantize(dense, W8A8))
    assert eight is not None
    calls["w8a8 oneDNN"] = OnednnLinear(eight, None, torch.bfloat16)
    if compiled.lanes():
        schemes = {"w8a8": W8A8, "int8 groups of 32": Int8((1, 32)), "int4 offsets, groups of 32": Int4((1, 32))}
        if inputs % 128 == 0:
            schemes["int4 offsets, groups of 128"] = Int4((1, 128))
        calls |= {name: linear(quantize(dense, scheme), None, NUMERICS) for name, scheme in schemes.items()}
    return calls


def seconds(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, clock: Callable[[], float]) -> float:
    call(x)
    repeats, begin = 0, clock()
    while clock() - begin < 0.004 or repeats < 2:
        call(x)
        repeats += 1
    return (clock() - begin) / repeats


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("threads", nargs="?", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    results: dict[str, dict[str, object]] = {}
    for outputs, inputs in SHAPES:
        calls = products(outputs, inputs)
        for rows in ROWS:
            if rows * outputs * inputs > MOST_WORK:
                continue
            x = torch.randn(rows, inputs).bfloat16()
            with torch._C.DisableTorchFunctionSubclass():  # as the backend does
                rounds = [{name: seconds(call, x, clock) for name, call in calls.items()} for _ in range(args.rounds)]
            ratios = {
                name: round(statistics.median(each["bfloat16"] / each[name] for each in rounds), 2)
                for name in calls
                if name != "bfloat16"
            }
            base = round(1e6 * min(each["bfloat16"] for each in rounds), 1)
            results[f"{outputs}x{inputs}, {rows} rows"] = {"bfloat16_us": base, **ratios}
    print(json.dumps({"threads": args.threads, "lanes": compiled.lanes(), "products": results}, indent=1))


if __name__ == "__main__":
    main()
