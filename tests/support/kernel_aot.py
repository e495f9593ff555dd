"""Run as a program: compiles named shapes for named chips with the TPU compiler, prints one JSON line per pair."""

from __future__ import annotations

import json
import sys

from pagoda.kernels_pallas.aot import facts, one_chip
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.ragged_paged_attention.arg_specs import spec


def main(pairs: list[str]) -> None:
    for pair in pairs:
        chip, name = pair.split("/")
        case = spec(name)
        compiled = case.function(CHIPS[chip]).lower(*case.arguments(one_chip(chip))).compile()
        print(json.dumps({"pair": pair, **vars(facts(compiled))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
