"""Everything that a GPU has to show, part by part, each in a process of its own; called by gpu.sh.

usage: python gpu.py [--output FILE.json] [--model MODEL.gguf] [--part NAME ...] [--requests N --input N --output-len N]

Writes the JSON after every part, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = ("elementwise", "decode_attention", "prefill_attention", "sampling", "gemm", "sleep")
PARTS = ("roofline", *KERNELS, "parity", "decode", "prefill", "throughput", "transformers")
SECONDS = 540
"""A part that takes longer has failed."""


def command(part: str, args: argparse.Namespace) -> list[str]:
    """What runs a part."""
    load = ["--requests", str(args.requests), "--input", str(args.input), "--output", str(args.output_len)]
    if part == "roofline":
        code = "import json, torch, gpu_measure; print(json.dumps(gpu_measure.rooflines(torch.device('cuda'))))"
        return ["-c", code]
    if part in KERNELS:
        code = f"import json, torch, gpu_{part}; print(json.dumps(gpu_{part}.measure(torch.device('cuda'))))"
        return ["-c", code]
    if part == "parity":
        return ["gpu_parity.py", *(["--model", args.model] if args.model else [])]
    if part == "transformers":
        return ["gpu_transformers.py", *load]
    return ["gpu_engine.py", part, *(load if part == "throughput" else [])]


@cache
def environment() -> dict[str, str]:
    """Where `import pagoda` finds this checkout, installed or not."""
    folder = Path(tempfile.mkdtemp())
    (folder / "pagoda").symlink_to(HERE.parent)
    given = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *([given] if given else [])])}


def run(part: str, args: argparse.Namespace) -> dict:
    """The JSON object that a part prints last, or what went wrong."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *command(part, args)],
            cwd=HERE,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {SECONDS} s"}
    if done.returncode:
        return {"error": done.stderr[-4000:]}
    found: dict = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"part_seconds": round(time.perf_counter() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", help="the small real model, for token parity")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=1024)
    args = parser.parse_args()
    machine = subprocess.run(
        [sys.executable, "-c", "import json, gpu_measure; print(json.dumps(gpu_measure.machine()))"],
        cwd=HERE,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    results: dict = {"machine": json.loads(machine.stdout)}
    if results["machine"]["gpu"] is None:
        print("gpu.py: no GPU is here; nothing was measured", file=sys.stderr)
        return 2
    target = args.output or HERE / "results" / f"gpu-{results['machine']['date']}-{results['machine']['commit']}.json"
    for part in args.part or PARTS:
        results[part] = run(part, args)
        target.write_text(json.dumps(results, indent=1) + "\n")
        print(part, json.dumps(results[part])[:2000], flush=True)
    return int(any("error" in results[part] for part in args.part or PARTS))


if __name__ == "__main__":
    sys.exit(main())
