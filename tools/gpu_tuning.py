"""Write the settings that GPU trials found fastest into the kernels' tuning.json.

usage: python tools/gpu_tuning.py RESULTS/tune.json [RESULTS/tune_experts.json ...] --chip sm_90 [--gain 0.03]

Reads `best` of the stages tune, tune_mixers and tune_experts (benchmarks/gpu.sh). A key is written if its time is at
least `--gain` below that of the settings in use. Results that are incomplete, wrong or not of a GPU are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[1] / "backends" / "torch_cuda" / "kernels"


def place(key: str) -> tuple[str, str]:
    """Return the kernel's folder and the key in its table, of a key of `best`."""
    folder, _, own = key.rpartition(" ")
    if folder:
        return folder, own
    return ("decode_attention" if "bit_" in key else "prefill_attention"), key


def faster(results: dict[str, Any], gain: float) -> dict[str, dict[str, int]]:
    """Return the settings by key of `best` that gain enough. Raise ValueError for results that are not to be used."""
    machine = results["machine"]
    if machine["device"] != "cuda" or results["tiny"] or results["spoil"]:
        raise ValueError(f"{results['stage']} was not run on a GPU at full size")
    if not results["complete"] or results["failed"] or results["wrong"]:
        raise ValueError(f"{results['stage']} is incomplete, or something failed in it")
    return {key: each["settings"] for key, each in results["best"].items() if each["of_usual"] <= 1 - gain}


def write(table: Path, chip: str, settings: dict[str, dict[str, int]]) -> None:
    """Write a chip's settings into a table, one key per line."""
    contents: dict[str, dict[str, dict[str, int]]] = json.loads(table.read_text())
    contents[chip] = contents.get(chip, {}) | settings
    chips = [f'  "{name}": {{\n{_lines(entries)}\n  }}' for name, entries in sorted(contents.items(), key=_age)]
    table.write_text("{\n" + ",\n".join(chips) + "\n}\n")


def _age(chip: tuple[str, Any]) -> int:
    return int(chip[0].removeprefix("sm_"))


def _lines(entries: dict[str, dict[str, int]]) -> str:
    return ",\n".join(f'    "{key}": {json.dumps(entry)}' for key, entry in entries.items())


def main(arguments: list[str] | None = None, kernels: Path = KERNELS) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--chip", required=True, help="the table's name of the GPU's compute capability, such as sm_90")
    parser.add_argument("--gain", type=float, default=0.03)
    args = parser.parse_args(arguments)
    by_folder: dict[str, dict[str, dict[str, int]]] = {}
    for path in args.results:
        try:
            chosen = faster(json.loads(path.read_text()), args.gain)
        except (OSError, KeyError, ValueError) as error:
            print(f"gpu_tuning: {path}: {error}; run the stage again", file=sys.stderr)
            return 2
        for key, settings in chosen.items():
            folder, own = place(key)
            by_folder.setdefault(folder, {})[own] = settings
    for folder, settings in by_folder.items():
        (table,) = kernels.glob(f"**/{folder}/tuning.json")
        write(table, args.chip, settings)
        print(f"{folder}: {', '.join(settings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
