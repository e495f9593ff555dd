"""Write which attention backend a GPU run found fastest into the table that `--attention-backend auto` reads.

usage: python tools/attention_table.py RESULTS/peers.json --chip sm_90 [--gain 0.05]

Reads `attention_backends.speeds` of the stage peers (benchmarks/gpu.sh). For each shape of heads and kind of step the
times of all loads are added; a backend of others is written if its sum is at least `--gain` below our own kernel's.
Results that are incomplete, wrong or not of a GPU are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "backends" / "torch_cuda" / "attention_backends" / "measured.json"
PART, OURS = "attention_backends.speeds", "TRITON_ATTN"


def fastest(results: dict[str, Any], gain: float) -> dict[str, dict[str, str]]:
    """Return heads -> kind of step -> backend. Raise ValueError for results that are not to be used."""
    if results["machine"]["device"] != "cuda" or results["tiny"] or results["spoil"]:
        raise ValueError(f"{results['stage']} was not run on a GPU at full size")
    if not results["complete"] or results["failed"] or results["wrong"]:
        raise ValueError(f"{results['stage']} is incomplete, or something failed in it")
    times: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for number in results["numbers"][PART].values():
        if "us" in number:
            times[number["heads"], number["kind"]][number["backend"]][number["load"]] = number["us"]
    chosen: dict[str, dict[str, str]] = defaultdict(dict)
    for (heads, kind), by_backend in times.items():
        loads = by_backend[OURS].keys()  # a backend that refused one of them is no choice
        sums = {name: sum(own.values()) for name, own in by_backend.items() if own.keys() == loads}
        best = min(sums, key=sums.__getitem__)
        chosen[heads][kind] = best if sums[best] <= (1 - gain) * sums[OURS] else OURS
    return dict(chosen)


def main(arguments: list[str] | None = None, table: Path = TABLE) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--chip", required=True, help="the GPU's compute capability, such as sm_90")
    parser.add_argument("--gain", type=float, default=0.05)
    args = parser.parse_args(arguments)
    try:
        chosen = fastest(json.loads(args.results.read_text()), args.gain)
    except (OSError, KeyError, ValueError) as error:
        print(f"attention_table: {args.results}: {error}; run the stage again", file=sys.stderr)
        return 2
    contents: dict[str, dict[str, dict[str, str]]] = json.loads(table.read_text())
    contents[args.chip] = contents.get(args.chip, {}) | chosen
    table.write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n")
    for heads, kinds in chosen.items():
        print(f"{heads}: {', '.join(f'{kind} {name}' for kind, name in kinds.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
