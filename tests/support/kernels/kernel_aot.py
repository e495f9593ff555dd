"""Run as a program: compiles named shapes for named chips with the TPU compiler, prints one JSON line per pair.

`chip/shape` is a shape of the attention kernel, `chip/kernel/shape` of any.
"""

from __future__ import annotations

import importlib
import json
import sys

from pagoda.benchmarks.tpu.aot.compiler import facts, one_chip
from pagoda.kernels_pallas.chips import CHIPS


def main(pairs: list[str]) -> None:
    for pair in pairs:
        chip, *kernel, name = pair.split("/")
        module = f"pagoda.benchmarks.tpu.aot.shapes.{kernel[0] if kernel else 'ragged_paged_attention'}"
        case = importlib.import_module(module).SPECS[name]
        compiled = case.function(CHIPS[chip]).lower(*case.arguments(one_chip(chip))).compile()
        print(json.dumps({"pair": pair, **vars(facts(compiled))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
