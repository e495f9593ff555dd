"""Write the table of docs/guides/tpu.md from the output of roofline.py.

usage: python benchmarks/tpu/table.py [RESULTS.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "tpu-roofline.json"
PAGE = ROOT / "docs" / "guides" / "tpu.md"
FENCE = ("<!-- roofline: written by benchmarks/tpu/table.py -->", "<!-- end of roofline -->")
TITLES = {
    "8b-v6e": "Llama-3-8B shapes on one v6e",
    "8b-v5p": "Llama-3-8B shapes on one v5p (two cores)",
    "8b-v7x": "Llama-3-8B shapes on one device of a v7x (one of the chip's two)",
    "8b-v5e-4": "Llama-3-8B shapes on four v5e, per device",
    "70b-v6e-8": "Llama-3-70B shapes on eight v6e, per device",
}
COLUMNS = (
    "program",
    "XLA, kilocycles",
    "kernel, kilocycles",
    "links, us",
    "GB",
    "TFLOP",
    "time, us",
    "roofline, us",
    "share",
    "of",
)


def main() -> None:
    record = json.loads(Path(sys.argv[1]).read_text() if sys.argv[1:] else RESULTS.read_text())
    PAGE.write_text(with_table(PAGE.read_text(), record))


def with_table(page: str, record: dict[str, Any]) -> str:
    """Return the page with the record's tables between the fences."""
    head, tail = page.split(FENCE[0])
    return f"{head}{FENCE[0]}\n{tables(record)}\n{FENCE[1]}{tail.split(FENCE[1])[1]}"


def tables(record: dict[str, Any]) -> str:
    """Return a Markdown table per case, with the versions that made it."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [f"{versions}; decode at {record['context']} tokens of context, prompts of {record['prompt']}."]
    for name, rows in record["cases"].items():
        lines = [
            f"**{TITLES[name]}**",
            "",
            f"| {' | '.join(COLUMNS)} |",
            "|---" * len(COLUMNS) + "|",
            *map(line, rows),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def line(row: dict[str, Any]) -> str:
    """Return one program's row."""
    cells = (
        row["program"].rsplit(",", 1)[0],
        f"{row['xla_cycles'] / 1000:.0f}",
        f"{row['kernel_cycles'] / 1000:.0f}",
        f"{row['exchange_seconds'] * 1e6:.0f}",
        f"{row['bytes'] / 1e9:.2f}",
        f"{row['flops'] / 1e12:.3f}",
        f"{row['seconds'] * 1e6:.0f}",
        f"{row['roofline_seconds'] * 1e6:.0f}",
        f"{row['share']:.0%}",
        row["bound_by"],
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
