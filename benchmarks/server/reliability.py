"""What holds under faults and overload: each row of the table is a scenario against a real server.

usage: python reliability.py MODEL [--only ROW] [--match TEXT] [--minutes 10] [--soak-minutes 30] [--cases 20000]
                             [--mutants 100000] [--pause SECONDS] [--json FILE]

Rows: kill, stop, sigterm, bombs, grammars, sockets, overload, hostile, soak. MODEL: a .gguf file or a folder; the
templates and lists of the bombs suit SmolLM2's vocabulary. `--minutes` is the duration of the overload; without
`--pause` the 16 clients of the soak ask again at once, which keeps the machine busy. Gaps between tokens and waits
include those that other programs on the machine cause: "worst gap before" is that of the same streams before the
fault. With `--mutants 0` no model files are mutated. Exit status: 1 if a row fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from faults.bombs import bombs
from faults.engine import kill, stop, terminate
from faults.grammars import grammars
from faults.hostile import hostile
from faults.load import overload, soak, sockets
from faults.report import Options, Report, Scenario

SCENARIOS: Final[Mapping[str, Scenario]] = {
    "kill": kill,
    "stop": stop,
    "sigterm": terminate,
    "bombs": bombs,
    "grammars": grammars,
    "sockets": sockets,
    "overload": overload,
    "hostile": hostile,
    "soak": soak,
}


def machine() -> dict[str, Any]:
    """Describe the machine, its load and the commit."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    words = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    load = [round(each, 1) for each in os.getloadavg()]
    return {"cpu": cpu, "cores": os.cpu_count(), "load": load, "commit": commit.stdout.strip()}


def run(name: str, options: Options) -> Iterator[Report]:
    """Carry out a scenario. One that cannot be carried out fails."""
    try:
        yield from SCENARIOS[name](options)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        report = Report(name)
        report.fail(error)
        yield report


def main() -> int:
    """Print each row when it has been measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", action="append", choices=SCENARIOS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--soak-minutes", type=float, default=30.0)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--match", default="", help="only bombs whose row contains this text, such as 'item 4'")
    parser.add_argument("--pause", type=float, default=0.0, help="mean seconds between the requests of a soak's client")
    parser.add_argument("--logs", default="/tmp", help="folder for the servers' logs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = Options(
        model=args.model,
        minutes=args.minutes,
        soak_minutes=args.soak_minutes,
        cases=args.cases,
        mutants=args.mutants,
        log_folder=args.logs,
        match=args.match,
        pause=args.pause,
    )
    result: dict[str, Any] = {"machine": machine(), "options": asdict(options), "rows": []}
    failed = False
    for name in args.only or SCENARIOS:
        begin = time.monotonic()
        for report in run(name, options):
            print(report.text(), flush=True)
            failed |= not report.passed
            result["rows"].append({"scenario": name, "passed": report.passed} | asdict(report))
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"      {name}: {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
