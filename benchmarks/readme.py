"""Regenerates the figures of the README: runs the benchmarks in turn, keeps what they print, and writes the table.

A row is of the newest file that has it. What vLLM is measured beside depends on the processor: one with bfloat16
instructions and one without have rows of their own. --table measures nothing and writes the table alone.

usage: python readme.py --model MODEL.gguf [--peer-model FOLDER --peer ENGINE[=PYTHON[,MODEL]] ...] [--only NAME ...]
       python readme.py --table
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from pagoda.server.bench.report.machine import machine

HERE = Path(__file__).resolve().parent
FENCE = ("<!-- figures: written by benchmarks/readme.py -->", "<!-- end of figures -->")
PARTS = ("offline", "startup", "scheduler", "install", "tests")


def run(script: str, *args: str) -> dict:
    """The JSON object that a benchmark prints as its last line."""
    done = subprocess.run([sys.executable, str(HERE / script), *args], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def described() -> dict:
    """What the figures depend on."""
    commit = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    today, known = datetime.date.today().isoformat(), {"commit": commit.stdout.strip(), "torch": version("torch")}
    return {"date": today, **known, **machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--model")
    asked.add_argument("--table", action="store_true")
    parser.add_argument("--peer", nargs="*", default=[], help="engines of cpu/offline.py")
    parser.add_argument("--peer-model", help="what all engines of cpu/offline.py read; default: --model")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    if not args.table:
        measure(args)
    readme = HERE.parent / "README.md"
    readme.write_text(with_table(readme.read_text()))


def measure(args: argparse.Namespace) -> None:
    """Run the benchmarks and keep what they print."""
    results: dict = {"machine": described()}
    if "offline" in args.only:
        results["offline"] = run("cpu/offline.py", "--model", args.peer_model or args.model, "--peer", *args.peer)
    if "startup" in args.only:
        results["startup"] = run("server/startup.py", "--model", args.model)
    if "scheduler" in args.only:
        results["scheduler"] = run("cpu/scheduler_cost.py")
    if "install" in args.only:
        results["install"] = run("install_size.py")
    if "tests" in args.only:
        results["tests"] = run("fresh_clone.py")
    path = HERE / "results" / f"{results['machine']['date']}-{results['machine']['commit']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def with_table(text: str) -> str:
    """The README's text with the figures of today's files between its fences."""
    head, rest = text.split(FENCE[0])
    tail = rest.split(FENCE[1])[1]
    return f"{head}{FENCE[0]}\n{table(results_by_age())}\n{FENCE[1]}{tail}"


def results_by_age() -> dict[str, dict]:
    """File name -> what `measure` kept in it, the newest first."""
    found = {path.name: json.loads(path.read_text()) for path in (HERE / "results").glob("*.json")}
    mine = {name: result for name, result in found.items() if isinstance(result, dict) and _is_ours(result)}
    return dict(sorted(mine.items(), key=lambda item: (item[1]["machine"]["date"], item[0]), reverse=True))


def _is_ours(result: dict) -> bool:
    return "bf16_instructions" in result.get("machine", {}) and any(part in result for part in PARTS)


def table(results: dict[str, dict]) -> str:
    """The README's table in Markdown, with the conditions it was measured under. `results`: the newest first."""
    used: dict[str, dict] = {}
    rows: list[str] = []
    beside = {name: result for name, result in results.items() if "offline" in result}
    kinds = [kind for kind in (False, True) if kind in map(has_bf16, beside.values())]
    for kind in kinds:
        name, result = next(item for item in beside.items() if has_bf16(item[1]) == kind)
        used[name] = result
        rows += offline_rows(result)
    for part, row in ROWS.items():
        name, result = next(((n, r) for n, r in results.items() if part in r), (None, None))
        if name is not None:
            used[name] = result
            rows.append(f"| {row(result[part])} | {processor(result)} |")
    missing = "" if len(kinds) == 2 else MISSING[kinds[0]]
    return "\n".join([*map(source_line, used.items()), "", f"{PATHS}{missing}", "", *HEAD, *rows])


def source_line(item: tuple[str, dict]) -> str:
    """Where and when a file was measured."""
    name, where = item[0], item[1]["machine"]
    kind = f"A processor **{processor(item[1])} bfloat16 instructions**"
    return (
        f"- {kind}: {where['cpu'].strip()}, {where['cores']} cores,\n"
        f"  torch {where['torch']}, {where['date']}, commit {where['commit']}; [all rounds](benchmarks/results/{name})."
    )


def has_bf16(result: dict) -> bool:
    """Whether the processor has bfloat16 instructions."""
    return result["machine"]["bf16_instructions"]


def processor(result: dict) -> str:
    """The same as a word."""
    return "with" if has_bf16(result) else "without"


def offline_rows(result: dict) -> list[str]:
    """Rows beside the other engines, at equal weight bits."""
    rows = []
    for case in (case for case in CASES if case in result["offline"]):
        found = result["offline"][case]
        peers = [with_ratio(found, name) for name in ENGINES]
        asked = ">= 1.5" if case in ASKED else ""
        cells = [CASES[case], found["pagoda"]["median"], *peers, asked, processor(result)]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def with_ratio(case: dict, name: str) -> str:
    """An engine's tokens per second and pagoda's ratio to it, or that it was not measured."""
    if name not in case:
        return "not measured"
    ratios = case.get("ratios", {}).get(name) or case.get("ratio", {})
    return f"{case[name]['median']} (x {ratios.get('median', '')})"


PATHS = (
    "Medians; the machines are shared, so ratios count. bfloat16 models take another path on each kind of processor: "
    "with the\ninstructions (AVX512-BF16, AMX) products are bfloat16's own, without them pagoda computes in float32."
)
MISSING = {
    False: " A processor\nwith them is not in this table yet: expect about vLLM's speed there, not the ratios below.",
    True: " A processor\nwithout them is not in this table yet.",
}
HEAD = (
    "| figure | pagoda | vLLM (CPU) 0.32 (pagoda is) | transformers 5 (pagoda is) | llama.cpp (pagoda is) "
    "| asked for, beside vLLM | bfloat16 instructions |",
    "|---|---|---|---|---|---|---|",
)
CASES = {
    "throughput_64x128_128": "SmolLM2 bf16, 64 requests of 128 in / 128 out, offline, output tokens/s",
    "single_stream_128_128": "one stream, 128 in / 128 out, tokens/s",
}
ASKED = tuple(CASES)
ENGINES = ("vllm", "transformers", "llama.cpp")
ROWS = {
    "startup": lambda it: f"`pagoda serve`, from command to first streamed token | {it['median']} s | | | | <= 8 s",
    "scheduler": lambda it: (
        f"schedule + update per decode step, 256 running, no model | {it['sum_ms']} ms | | | | <= 1.0 ms"
    ),
    "install": lambda it: f"base install, no extras | {it['base_install_mb']} MB | | | | <= 150 MB",
    "tests": lambda it: (
        f"`make test` in a fresh clone ({it['passed']} tests) | {it['seconds'] / 60:.1f} min | | | | <= 20 min"
    ),
}


if __name__ == "__main__":
    main()
