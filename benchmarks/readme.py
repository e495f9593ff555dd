"""Regenerates the figures of the README: runs the benchmarks in turn and writes one JSON file and one Markdown table.

usage: python readme.py --model MODEL.gguf [--peer-python VENV/bin/python --peer-model FOLDER] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(script: str, *args: str) -> dict:
    """The JSON object that a benchmark prints as its last line."""
    done = subprocess.run([sys.executable, str(HERE / script), *args], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def machine() -> dict:
    """What the figures depend on."""
    info = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in info.items()}
    commit = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "cpu": facts.get("model name", "?"),
        "cores": len(os.sched_getaffinity(0)),
        "bf16_instructions": any(name in facts.get("flags", "") for name in ("avx512_bf16", "amx_bf16")),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-model")
    parser.add_argument("--only", nargs="*", default=["offline", "startup", "scheduler", "install"])
    args = parser.parse_args()
    peer = [f"--{k.replace('_', '-')}={v}" for k in ("peer_python", "peer_model") if (v := getattr(args, k))]
    results: dict = {"machine": machine()}
    if "offline" in args.only:
        results["offline"] = run("offline.py", "--model", args.model, *peer)
    if "startup" in args.only:
        results["startup"] = run("startup.py", "--model", args.model)
    if "scheduler" in args.only:
        results["scheduler"] = run("scheduler_cost.py")
    if "install" in args.only:
        results["install"] = run("install_size.py")
    path = HERE / "results" / f"{results['machine']['date']}-{results['machine']['commit']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
