"""Regenerates the figures of the README: runs the benchmarks in turn, writes one JSON file and from it the table.

With --only the table is left as it is, for some of its figures would be missing.

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
FENCE = ("<!-- figures: written by benchmarks/readme.py -->", "<!-- end of figures -->")
PARTS = ("offline", "startup", "scheduler", "install", "tests")


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
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
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
    if "tests" in args.only:
        results["tests"] = run("fresh_clone.py")
    path = HERE / "results" / f"{results['machine']['date']}-{results['machine']['commit']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    if set(args.only) == set(PARTS):
        write_table(results, path)


def write_table(results: dict, source: Path) -> None:
    """Put the figures between the README's fences."""
    readme = HERE.parent / "README.md"
    text = readme.read_text()
    head, rest = text.split(FENCE[0])
    tail = rest.split(FENCE[1])[1]
    readme.write_text(f"{head}{FENCE[0]}\n{table(results, source)}\n{FENCE[1]}{tail}")


def table(results: dict, source: Path) -> str:
    """The README's table in Markdown, with the conditions it was measured under."""
    where = results["machine"]
    bf16 = "with" if where["bf16_instructions"] else "without"
    lines = [
        f"Measured on {where['cores']} cores ({where['cpu']}, {bf16} bfloat16 instructions), torch {where['torch']}, "
        f"on {where['date']} at commit {where['commit']}; medians, all rounds in",
        f"[{source.name}](benchmarks/results/{source.name}). The machine is shared, so ratios count.",
        "",
        "| figure | pagoda | vLLM (CPU) 0.32 | ratio | asked for |",
        "|---|---|---|---|---|",
    ]
    names = {
        "throughput_64x128_128": "SmolLM2 bf16, 64 requests of 128 in / 128 out, offline, output tokens/s",
        "single_stream_128_128": "one stream, 128 in / 128 out, tokens/s",
    }
    for case, name in names.items():
        found = results["offline"][case]
        theirs = found.get("vllm", {}).get("median", "not measured")
        ratio = found.get("ratio", {}).get("median", "")
        lines.append(f"| {name} | {found['pagoda']['median']} | {theirs} | {ratio} | >= 1.5 |")
    scheduler, install, tests = results["scheduler"], results["install"], results["tests"]
    lines += [
        f"| `pagoda serve`, from command to first streamed token | {results['startup']['median']} s | | | <= 8 s |",
        f"| schedule + update per decode step, 256 running, no model | {scheduler['sum_ms']} ms | | | <= 1.0 ms |",
        f"| base install, no extras | {install['base_install_mb']} MB | | | <= 150 MB |",
        f"| `make test` in a fresh clone ({tests['passed']} tests) | {tests['seconds'] / 60:.1f} min | | | <= 20 min |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
